"""SQLite, the embedded default: one file, the same statements, run one by one.

Several processes use the file at once. WAL lets readers continue while one writes; writers take the lock at
BEGIN IMMEDIATE, so that none fails half-way, and wait for each other up to the read timeout.
``synchronous=FULL`` syncs the log at each commit: an acknowledged task survives a power cut, at the price of
a sync per submit.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.engine import URL

from toc.model.errors import ConfigError, SchemaBehind, StoreUnavailable
from toc.store.servers import server as db
from toc.store.servers.pool import Pool
from toc.store.servers.server import DatabaseServer, Duplicate, Result, Statement, Transient


def path_of(url: URL) -> Path:
    """The file of a sqlite:/// URL. Raises ConfigError for a database in memory, which no other process could
    see."""
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise ConfigError(f"{url.render_as_string()} is not a file; expected sqlite:///path/to/file.db")
    return Path(url.database)


def connector(url: URL, busy_timeout: float) -> Callable[[], SqliteConnection]:
    """Return a function that opens connections in autocommit mode. They wait ``busy_timeout`` s for locks."""
    path = path_of(url)

    def connect() -> SqliteConnection:
        driver = sqlite3.connect(path, timeout=busy_timeout, isolation_level=None, check_same_thread=False)
        try:
            driver.execute("PRAGMA journal_mode=WAL").fetchall()
            driver.execute("PRAGMA synchronous=FULL")
        except BaseException:
            driver.close()
            raise
        return SqliteConnection(driver, busy_timeout)

    return connect


class SqliteConnection:
    """A connection to the file. ``driver`` is the driver's."""

    def __init__(self, driver: sqlite3.Connection, busy_timeout: float) -> None:
        self.driver = driver
        self._busy_timeout = busy_timeout
        self._results: list[Result] | None = None

    def execute(self, statements: Sequence[Statement], transaction: bool, patient: bool) -> list[Result]:  # noqa: ARG002
        """Run the statements, in a transaction if they write."""
        if not transaction and all(sql.startswith("SELECT") for sql, _ in statements):
            return self._loop(statements)
        try:
            self._begin()
            results = self._loop(statements)
            self.driver.commit()
        except sqlite3.Error:
            self.driver.rollback()
            raise
        return results

    def ask(self, statements: Sequence[Statement]) -> None:
        """Run statements: there is no server to wait for."""
        self._results = self._loop(statements)

    def answered(self, seconds: float) -> bool:  # noqa: ARG002
        """Whether statements were asked."""
        return self._results is not None

    def descriptor(self) -> None:
        """Return nothing: a local file is not waited for."""

    def answers(self) -> list[Result]:
        """Return the results of what was asked."""
        results, self._results = self._results or [], None
        return results

    def close(self) -> None:
        """Close it."""
        self.driver.close()

    def _begin(self) -> None:
        # SQLite itself would poll for the lock after 1, 2, 5, 10, ... 100 ms: others overtake it, and tasks
        # are late. Here all who wait poll every millisecond.
        deadline = time.monotonic() + self._busy_timeout
        self.driver.execute("PRAGMA busy_timeout = 0")
        while True:
            try:
                self.driver.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as exc:
                if "locked" not in str(exc) or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.0005, 0.0015))  # noqa: S311 - spreads load, guards nothing
            else:
                break
        self.driver.execute(f"PRAGMA busy_timeout = {round(self._busy_timeout * 1000)}")

    def _loop(self, statements: Sequence[Statement]) -> list[Result]:
        cursor = self.driver.cursor()
        results = []
        for sql, params in statements:
            cursor.execute(sql.replace("%s", "?"), params)
            results.append(Result(cursor.fetchall(), cursor.rowcount))
        cursor.close()
        return results


class SqliteServer(DatabaseServer):
    """One SQLite file that holds all tables."""

    table = "{1}".format  # one file is one database
    after = "{}+{:d}".format
    whole = "({})/{:d}".format
    milliseconds = "{}".format  # as they are stored
    text = "CAST({} AS TEXT)".format
    by_primary_key = "{}".format  # nothing locks rows
    dialect = sqlite_dialect.dialect(paramstyle="format")
    greatest = "MAX"
    for_update = ""
    skip_locked = ""
    read_only = ""

    def __init__(self, url: URL, *, read_timeout: float = 10.0, pool_size: int = 8, **_others: float) -> None:
        self._url = url
        super().__init__(str(path_of(url)), [0], Pool(connector(url, read_timeout), pool_size, read_timeout))

    def _connect_within(self, seconds: float) -> SqliteConnection:
        return connector(self._url, seconds)()

    def translate(self, exc: Exception, *, sent: bool) -> Exception:  # noqa: ARG002 - nothing is sent
        """The named error for an error of sqlite3."""
        if not isinstance(exc, sqlite3.Error):
            return exc
        if isinstance(exc, sqlite3.IntegrityError):
            return Duplicate(f"{self.name}: duplicate key")
        text = str(exc)
        if text.startswith(("no such table", "no such column", "table ")):
            return SchemaBehind(f"{self.name}: {text}: if this is the right file, run `toc db upgrade`")
        if "locked" in text:
            return Transient(f"{self.name}: {text}")
        return (db.Denied if "unable to open" in text else StoreUnavailable)(f"{self.name}: {text}")

    def identity(self, query: Callable[[str], Any]) -> tuple[Any, ...] | None:
        """The path of the file."""
        # A read: it must not wait for writers. A connection may have attached others, and a temporary one.
        row = query("SELECT seq, name, file FROM pragma_database_list WHERE name = 'main'")
        return (str(Path(row[2]).resolve()),) if row and row[2] else None

    def instant(self, milliseconds: int) -> str:
        """An instant in milliseconds, as stored."""
        return f"{milliseconds:d}"

    def from_now(self, milliseconds: int) -> str:
        """An instant after now as a number: all users of the file share this machine's clock."""
        return f"{time.time_ns() // 1_000_000 + milliseconds:d}"

    def appended(self, column: str, text: str, most: int) -> str:
        """An expression that appends a literal that needs no escaping and keeps the last ``most``
        characters."""
        return f"SUBSTR(COALESCE({column},'')||CAST(X'{text.encode().hex()}' AS TEXT),{-most:d})"

    def joined(self, parts: Sequence[str], by: str = ",") -> str:
        """A join with the operator ||; CONCAT_WS is too new."""
        return f"||'{by}'||".join(parts)

    def by_whole_keys(self, name: str, where: str, *, wait: bool = True) -> str:  # noqa: ARG002
        """A plain FROM: SQLite has one writer at a time, so no other insert is in progress."""
        return f"{name} WHERE {where}"

    def or_lock(self, insert: str) -> str:
        """An INSERT OR IGNORE: its transaction is the only one that writes."""
        return insert.replace("INSERT", "INSERT OR IGNORE", 1)

    def union(self, selects: Iterable[str]) -> str:
        """A UNION ALL of subqueries: only these may have their own ORDER BY and LIMIT."""
        return " UNION ALL ".join(f"SELECT * FROM ({select})" for select in selects)
