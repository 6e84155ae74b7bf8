"""Which server holds which table: servers take blocks of databases, table = ... mod databases."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from toc.errors import ConfigError
from toc.sharding import MAX_TABLES, is_power_of_two, table_of_job
from toc.store.mysql import MySqlServer
from toc.store.schema import TOPIC_TABLE, task_table_name
from toc.store.server import Server
from toc.store.sqlite import SqliteServer

T = TypeVar("T")
R = TypeVar("R")

_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


class Layout:
    """How databases and tables are spread over servers, without connecting to any.

    With 8 databases on 2 URLs the first holds 0..3, the second 4..7. Raises ConfigError.
    """

    def __init__(self, urls: Sequence[str], databases: int, tables: int, prefix: str) -> None:
        self.urls = [_parse(url) for url in urls]
        self.databases = databases
        self.tables = tables
        self.prefix = prefix
        self.sqlite = any(url.get_backend_name() == "sqlite" for url in self.urls)
        if not self.urls:
            raise ConfigError("no database URL is given; expected mysql+pymysql://... or sqlite:///...")
        if self.sqlite and (len(self.urls) > 1 or databases != 1):
            raise ConfigError("SQLite is one file: give one sqlite:/// URL and databases = 1")
        if not is_power_of_two(databases) or not is_power_of_two(tables) or tables > MAX_TABLES:
            raise ConfigError(
                f"databases = {databases} and tables = {tables} must be powers of two up to {MAX_TABLES}"
            )
        if databases > tables or databases % len(self.urls):
            raise ConfigError(
                f"{databases} databases cannot be spread evenly over {len(self.urls)} servers "
                f"and {tables} tables"
            )
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"database prefix {prefix!r} must be letters, digits and _, a letter first")

    def databases_of(self, server: int) -> range:
        """The block of databases that a server holds."""
        block = self.databases // len(self.urls)
        return range(server * block, (server + 1) * block)

    def tables_of(self, database: int) -> range:
        """The task tables that a database holds."""
        return range(database, self.tables, self.databases)

    def database_name(self, database: int) -> str:
        """``toc_3`` for 3."""
        return f"{self.prefix}{database}"


class Shards:
    """The servers, and the way from a job_id to its server and table. Thread-safe and fork-safe."""

    def __init__(
        self,
        layout: Layout,
        *,
        connect_timeout: float,
        read_timeout: float,
        write_timeout: float,
        pool_size: int,
    ) -> None:
        self.layout = layout
        self.tables = layout.tables
        self.servers: list[Server] = []
        for number, url in enumerate(layout.urls):
            if layout.sqlite:
                self.servers.append(SqliteServer(url, busy_timeout=read_timeout, pool_size=pool_size))
            else:
                self.servers.append(
                    MySqlServer(
                        url,
                        layout.databases_of(number),
                        connect_timeout=connect_timeout,
                        read_timeout=read_timeout,
                        write_timeout=write_timeout,
                        pool_size=pool_size,
                    )
                )
        self.server_of: list[Server] = []
        """By table."""
        self.names: list[str] = []
        """The name of each table in SQL, by table."""
        block = layout.databases // len(self.servers)
        for table in range(layout.tables):
            database = table % layout.databases
            server = self.servers[database // block]
            self.server_of.append(server)
            self.names.append(server.table(layout.database_name(database), task_table_name(table)))
        self.topic_server = self.servers[0]
        self.topic_name = self.topic_server.table(layout.database_name(0), TOPIC_TABLE)
        self._threads = self._new_threads()
        _fork_safe(weakref.ref(self))

    def table_of(self, job_id: int) -> int:
        """The table that can hold this job_id."""
        return table_of_job(job_id, self.tables)

    def group(self, job_ids: Iterable[int]) -> dict[Server, dict[int, list[int]]]:
        """The ids by server and table, everything sorted: two batches then lock rows in one order."""
        by_table: dict[int, list[int]] = {}
        for job_id in sorted(set(job_ids)):
            by_table.setdefault(table_of_job(job_id, self.tables), []).append(job_id)
        return self.group_tables(by_table)

    def group_tables(self, by_table: Mapping[int, T]) -> dict[Server, dict[int, T]]:
        """What belongs to tables, by server and table, sorted by table."""
        grouped: dict[Server, dict[int, T]] = {}
        for table in sorted(by_table):
            grouped.setdefault(self.server_of[table], {})[table] = by_table[table]
        return grouped

    def each(self, work: Mapping[Server, T], do: Callable[[Server, T], R]) -> list[R]:
        """``do(server, its part)`` for each server, at the same time if there are several.

        The first error is raised when all are done.
        """
        if len(work) <= 1:
            return [do(server, part) for server, part in work.items()]
        futures = [self._threads.submit(do, server, part) for server, part in work.items()]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close idle connections and threads."""
        threads, self._threads = self._threads, self._new_threads()
        threads.shutdown()
        for server in self.servers:
            server.close()

    def after_fork(self) -> None:
        """In a child: leave the parent's connections and threads alone."""
        self._threads = self._new_threads()
        for server in self.servers:
            server.after_fork()

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(4 * len(self.servers), "toc-store")  # starts threads only when used


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # not chained: SQLAlchemy's own text quotes the URL with its password
        raise ConfigError(
            "a database URL cannot be parsed; expected mysql+pymysql://user:pw@host:3306"
        ) from None
    if "@" in (url.host or ""):  # the rest of a password, which is not to be looked up nor logged as a host
        raise ConfigError('a database URL has an "@" in its password: write it %40')
    if url.drivername not in ("mysql+pymysql", "mariadb+pymysql", "sqlite", "sqlite+pysqlite"):
        raise ConfigError(
            f"{url.drivername}:// is not a database that toc knows; "
            f"expected mysql+pymysql://user:pw@host:3306 or sqlite:///path/to/file.db"
        )
    return url


def _fork_safe(shards: weakref.ref[Shards]) -> None:
    def after_fork() -> None:
        alive = shards()
        if alive is not None:
            alive.after_fork()

    os.register_at_fork(after_in_child=after_fork)
