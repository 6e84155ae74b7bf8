"""One server of the task table, and how statements reach it.

Everything that toc does at run time is a list of statements, sent to one server in one round trip:
``MySqlServer`` joins them into one multi-statement query, ``SqliteServer`` loops over them. Numbers stand in
the SQL (formatted by ``:d``, which lets nothing else pass), texts are parameters that the driver escapes.
There is no statement per task where one per table will do.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

from toc.errors import StoreUnavailable

Param = str | bytes | None
"""What may be a parameter; everything else is a number and stands in the SQL."""

TRIES = 5
"""How often a batch is sent at most while the server rolls it back (deadlock, lock wait, read-only)."""
LOST_FAST_SECONDS = 1.0
"""Seconds. A connection that broke later than this was waiting for a server that hangs: no second wait."""


FRESH_SECONDS = 0.05
"""A connection that was in use so short a time ago is not asked whether it still stands, unless one has
just broken: each question is a moment in which other threads take the interpreter."""


class Statement(NamedTuple):
    """SQL with ``%s`` where the parameters go. SQL with no parameters may hold no ``%``."""

    sql: str
    params: Sequence[Param] = ()


class Result(NamedTuple):
    """What one statement gave: the rows of a SELECT; the rows that the WHERE of a write matched."""

    rows: Sequence[Any]
    matched: int


class Transient(StoreUnavailable):
    """The server refused or rolled back the batch for now; it may be sent again."""


class Lost(StoreUnavailable):
    """The connection broke after the batch was sent: nobody knows whether it took effect."""


class Duplicate(Exception):
    """A unique key refused the batch, which was rolled back."""


class Server(ABC):
    """A server, the databases that it holds, and a pool of connections to it. Thread-safe."""

    def __init__(self, name: str, databases: Sequence[int], pool: QueuePool) -> None:
        self.name = name
        """host:port, or the path of a SQLite file: for messages, never a password."""
        self.databases = databases
        self._pool = pool
        self._inherited: list[QueuePool] = []

    def run(
        self,
        statements: Sequence[Statement],
        *,
        transaction: bool = False,
        again: bool = True,
        patient: bool = False,
    ) -> list[Result]:
        """Run the statements in order, in one round trip; in one transaction if ``transaction``.

        ``again`` says that running them twice does no harm (reads, guarded updates): then a broken connection
        is replaced and they are sent once more. What the server rolled back is sent again in any case, a few
        times. ``patient``: nobody waits for the answers, so they may be read all at once, a little later than
        the first of them is there. Raises StoreUnavailable (Lost, if it is not known whether they took
        effect), SchemaBehind, Duplicate.
        """
        if not statements:
            return []
        for attempt in range(TRIES):
            started = time.monotonic()
            try:
                fresh_stands = again and attempt == 0
                return self._send(statements, transaction, fresh_stands, patient)
            except Transient:
                if attempt == TRIES - 1:
                    raise
            except Lost:
                if not again or attempt or time.monotonic() - started > LOST_FAST_SECONDS:
                    raise
            pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def after_fork(self) -> None:
        """In a child: leave the parent's connections alone (not even closing them) and open own ones."""
        self._inherited.append(self._pool)
        self._pool = self._pool.recreate()

    def close(self) -> None:
        """Close the idle connections. The server can still be used; it connects again."""
        self._pool.dispose()

    def _send(
        self, statements: Sequence[Statement], transaction: bool, fresh_stands: bool, patient: bool
    ) -> list[Result]:
        connection = self._checkout(fresh_stands)
        try:
            results = self._execute(connection, statements, transaction, patient)
        except BaseException as exc:
            error = self.translate(exc, sent=True) if isinstance(exc, Exception) else exc
            if isinstance(error, Duplicate) and connection.is_valid:
                connection.close()  # back to the pool: this error is everyday life, and it was rolled back
            elif connection.is_valid:
                # Half-read results or an open transaction must not reach the next user.
                connection.invalidate()
            if error is exc:
                raise
            raise error from exc
        connection.info["used"] = time.monotonic()
        connection.close()
        return results

    def _checkout(self, fresh_stands: bool) -> PoolProxiedConnection:
        while True:
            try:
                connection = self._pool.connect()
            except PoolTimeout as exc:
                raise StoreUnavailable(f"{self.name}: all connections of this process are busy") from exc
            except Exception as exc:
                raise self.translate(exc, sent=False) from exc
            used = connection.info.get("used")
            fresh = used is None or (fresh_stands and time.monotonic() - used < FRESH_SECONDS)
            if fresh or not self._hung_up(connection):
                return connection
            connection.invalidate()

    @abstractmethod
    def _execute(
        self,
        connection: PoolProxiedConnection,
        statements: Sequence[Statement],
        transaction: bool,
        patient: bool,
    ) -> list[Result]:
        """Run the statements on this connection; on an error roll back as well as still possible."""

    @abstractmethod
    def _hung_up(self, connection: PoolProxiedConnection) -> bool:
        """Whether the server has closed this idle connection (restart, wait_timeout)."""

    @abstractmethod
    def translate(self, exc: Exception, *, sent: bool) -> Exception:
        """The named error for a driver's error. ``sent``: it came after a statement was sent."""

    @abstractmethod
    def identity(self, query: Any) -> tuple[Any, ...] | None:
        """What tells this server from any other; ``query(sql)`` returns the first row. None: cannot tell."""

    # --- where the dialects differ ---------------------------------------------------------------------

    @abstractmethod
    def table(self, database: str, name: str) -> str:
        """The name of a table in SQL."""

    @abstractmethod
    def instant(self, milliseconds: int) -> str:
        """An instant as a literal."""

    @abstractmethod
    def from_now(self, milliseconds: int) -> str:
        """An expression for the instant so many milliseconds after now, by the clock of this server."""

    @abstractmethod
    def milliseconds(self, column: str) -> str:
        """An expression that reads an instant as integer milliseconds."""

    @abstractmethod
    def text(self, column: str) -> str:
        """An expression that reads a binary column as text."""

    @abstractmethod
    def appended(self, column: str, text: str, most: int) -> str:
        """An expression for the column's text, none if it is NULL, with ``text`` after it: its last ``most``
        characters."""

    @abstractmethod
    def joined(self, parts: Sequence[str]) -> str:
        """An expression that joins numbers and texts, none of them NULL, with commas."""

    @abstractmethod
    def union(self, selects: Iterable[str]) -> str:
        """UNION ALL of selects that may have their own ORDER BY and LIMIT."""

    @abstractmethod
    def first_due(self, table: int, name: str, status: int, start: str, end: str) -> str:
        """A SELECT of the number ``table``, if rows of a status have their next_time in [start, end)."""

    greatest: str
    for_update: str


def pause(attempt: int) -> None:
    """Wait a little before sending again, longer each time and never in step with others."""
    time.sleep(random.uniform(0.005, 0.02) * 2**attempt)  # noqa: S311 - spreads load, guards nothing
