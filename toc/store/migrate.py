"""Runs alembic on every shard: ``toc db upgrade``.

MySQL has no transactions over DDL, so a migration may stop between any two tables. Its steps can be repeated,
and its revision is written last: running the upgrade again resumes it. A lock on each server prevents two
upgrades at once; the connection that runs the DDL holds it, so the lock ends with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

from toc.model.errors import ConfigError, StoreUnavailable
from toc.store.check import ShardStatus, check_server
from toc.store.schema import IDENTITY_TABLE
from toc.store.servers import sqlite
from toc.store.servers.mysql import NO_RIGHT, connector, error_code, server_name
from toc.store.servers.server import DatabaseServer, Locked, Statement
from toc.store.servers.shards import Layout, Shards

TABLE_SECONDS = 5
"""How long a change of a table waits for transactions that use it. All others wait for it meanwhile."""
LOCK_SECONDS = 600
"""Seconds an upgrade waits for another one on the same server."""

Progress = Callable[[str, str, str, int, int, float], None]
"""Called with server, database, revision, tables done, tables in all, seconds so far (for this database)."""


class Migrator:
    """Creates and changes the schema of all shards. Arguments as of Store. Raises ConfigError.

    Its methods raise StoreUnavailable. Not thread-safe, because alembic is not.
    """

    def __init__(
        self, urls: Sequence[str], *, databases: int, tables: int, prefix: str = "toc_",
        connect_timeout: float = 3.0, read_timeout: float = 10.0, write_timeout: float = 10.0,
    ) -> None:  # fmt: skip
        self._layout = Layout(urls, databases, tables, prefix)
        self._timeouts = connect_timeout, read_timeout, write_timeout

    def upgrade(self, progress: Progress = lambda *_: None, *, new: bool = False) -> list[ShardStatus]:
        """Bring every database to the newest revision; creates missing databases. Leaves those as they are,
        and returns them, that a later version than this has upgraded.

        Raises ConfigError, before any change, if existing tables were made for other numbers of databases or
        tables, or before the first version, or, unless ``new``, if a database is gone that was there.
        """
        known = {None, *(one.revision for one in ScriptDirectory(str(directory())).walk_revisions())}
        statuses = self.check()
        for status in statuses:
            if status.revision and status.revision not in known and status.revision < status.head:
                why = "made before the first version: use an empty database, or another TOC_DATABASE_PREFIX"
                raise ConfigError(f"{status}: {why}")
            if status.misfit:
                raise ConfigError(f"{status}: {status.remedy}")
        gone = [status for status in statuses if status.absent]
        if gone and not new and (gone[0] is not statuses[-len(gone)] or self._used(statuses)):
            raise ConfigError(
                f"{gone[0]}, though others of this cluster have theirs: is this the right server? Restore "
                "what is lost, or run `toc db upgrade --new`, which makes it anew and empty"
            )
        for url, server in zip(self._layout.urls, self._shards().servers, strict=True):
            for database in server.databases:
                if statuses[database].revision in known:
                    self._upgrade_one(url, server, database, progress)
        return [status for status in statuses if status.revision not in known]

    def check(self) -> list[ShardStatus]:
        """Return the schema of every database, in order."""
        with closing(self._shards()) as shards:
            return [status for server in shards.servers for status in check_server(shards, server)]

    def _used(self, statuses: Sequence[ShardStatus]) -> bool:
        """Whether a program has used these tables: an interrupted first upgrade is no loss."""
        if statuses[0].revision is None:
            return False
        with closing(self._shards()) as shards:
            row = Statement(f"SELECT identity FROM {shards.first[IDENTITY_TABLE]}")
            return bool(shards.topic_server.run([row])[0].rows)

    def _shards(self) -> Shards:
        connect, read, write = self._timeouts
        return Shards(
            self._layout, connect_timeout=connect, read_timeout=read, write_timeout=write, pool_size=1
        )

    def _upgrade_one(self, url: URL, server: DatabaseServer, database: int, progress: Progress) -> None:
        name = self._layout.database_name(database)
        with _translated(server):
            if not self._layout.sqlite:
                self._create_database(url, name)
            with self._connection(url, name) as connection:
                command.upgrade(self._config(connection, server, database, progress), "head")

    def _config(
        self, connection: Connection, server: DatabaseServer, database: int, progress: Progress
    ) -> Config:
        tables, name = self._layout.tables_of(database), self._layout.database_name(database)
        started = time.monotonic()

        def migrated(revision: str, done: int) -> None:
            progress(server.name, name, revision, done, len(tables), time.monotonic() - started)

        config = Config()
        config.set_main_option("script_location", str(directory()).replace("%", "%%"))
        config.attributes.update(
            connection=connection,
            tables=tables,
            execute=lambda statements: _execute(connection, statements),
            migrated=migrated,
        )
        return config

    def _create_database(self, url: URL, name: str) -> None:
        create = f"CREATE DATABASE IF NOT EXISTS {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        with closing(connector(url, *self._timeouts)()) as connection:
            connection.batch([create])

    @contextmanager
    def _connection(self, url: URL, name: str) -> Iterator[Connection]:
        """Open a connection in autocommit mode that holds the lock of its server."""
        if self._layout.sqlite:
            opened: Callable[[], Any] = sqlite.connector(url, LOCK_SECONDS)
            take, give = "BEGIN IMMEDIATE", "COMMIT"  # all of SQLite's DDL is one transaction
        else:
            # No read timeout: changing a big table is slow.
            connect, _, write = self._timeouts
            opened = connector(url, connect, None, write, database=name, lock_timeout=TABLE_SECONDS)
            take, give = f"SELECT GET_LOCK('toc.migrate', {LOCK_SECONDS})", "DO RELEASE_LOCK('toc.migrate')"
            url = url.set(database=name)
        engine = create_engine(
            url, creator=lambda: opened().driver, poolclass=NullPool, isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            result = connection.exec_driver_sql(take)
            if not self._layout.sqlite:
                if result.scalar() != 1:
                    what = "another upgrade is running; wait until it has ended"
                    raise StoreUnavailable(f"{server_name(url)}: {what}")
                connection.exec_driver_sql("SET default_storage_engine=InnoDB")  # of alembic's own table
            yield connection
            connection.exec_driver_sql(give)


def directory() -> Path:
    """Return the directory of the migrations: in the package when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def _execute(connection: Connection, statements: Sequence[str]) -> None:
    """Run DDL, in one round trip if the server allows it."""
    if not statements:  # an interrupted upgrade has run them already
        return
    if connection.dialect.name == "sqlite":
        for statement in statements:
            for part in statement.split(";"):
                connection.exec_driver_sql(part)
        return
    cursor: Any = connection.connection.cursor()
    cursor.execute(";".join(statements))
    while cursor.nextset():
        pass
    cursor.close()


@contextmanager
def _translated(server: DatabaseServer) -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        cause = exc.orig if isinstance(exc, DBAPIError) and isinstance(exc.orig, Exception) else exc
        error = server.translate(cause, sent=True)
        if error is exc:
            raise
        if error_code(cause) in NO_RIGHT:
            error = type(error)(f"{error}: run it as the account that may create tables")
        elif isinstance(error, Locked):
            error = Locked(f"{error}: a transaction uses a table; end it, and run this again: it goes on")
        raise error from exc
