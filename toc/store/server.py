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
from typing import Any, NamedTuple, NoReturn

from toc.model.errors import StoreUnavailable
from toc.sockets import none_left
from toc.store.pool import Busy, Pool, PooledConnection

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


class Locked(Transient):
    """Somebody else holds a row or a whole table: the batch waited for it in vain and was rolled back."""


class Lost(StoreUnavailable):
    """The connection broke after the batch was sent: nobody knows whether it took effect."""


class Crowded(StoreUnavailable):
    """All connections of this process are lent. That says nothing of the server."""


class Duplicate(Exception):
    """A unique key refused the batch, which was rolled back."""


class DatabaseServer(ABC):
    """A server, the databases that it holds, and a pool of connections to it. Thread-safe."""

    def __init__(self, name: str, databases: Sequence[int], pool: Pool) -> None:
        self.name = name
        """host:port, or the path of a SQLite file: for messages, never a password."""
        self.databases = databases
        self.first_answer: float | None = None
        """Within how many seconds its newest connection had the first answer; None: nobody measures it."""
        self._pool = pool
        self._inherited: list[Pool] = []

    def run(
        self,
        statements: Sequence[Statement],
        *,
        transaction: bool = False,
        again: bool = True,
        patient: bool = False,
        outwait: bool = True,
    ) -> list[Result]:
        """Run the statements in order, in one round trip; in one transaction if ``transaction``.

        ``again`` says that running them twice does no harm (reads, guarded updates): then a broken connection
        is replaced and they are sent once more. What the server rolled back is sent again in any case, a few
        times; unless ``outwait`` is False and it had waited for a lock: then the caller has other tables
        to go on with. ``patient``: nobody waits for the answers, so they may be read all at once, a little
        later than the first of them is there. Raises StoreUnavailable (Locked; Lost, if it is not known
        whether they took effect), SchemaBehind, Duplicate.
        """
        if not statements:
            return []
        for attempt in range(TRIES):
            started = time.monotonic()
            try:
                fresh_stands = again and attempt == 0
                return self._send(statements, transaction, fresh_stands, patient)
            except Transient as exc:
                if attempt == TRIES - 1 or (isinstance(exc, Locked) and not outwait):
                    raise
            except Lost:
                if not again or attempt or time.monotonic() - started > LOST_FAST_SECONDS:
                    raise
            pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def begin(self, statements: Sequence[Statement]) -> Exchange | None:
        """Send statements that only read, and do not wait for the answers.

        None if no connection stands idle: then ``run`` would have to open one, which takes as long as the
        server likes. Raises what ``run`` raises.
        """
        while (link := self._pool.take_idle()) is not None:
            if self._stands(link, fresh_stands=True):
                try:
                    self._ask(link, statements)
                except BaseException as exc:
                    self._break_off(link, exc)
                return Exchange(self, link)
        return None

    def ask_apart(self, statement: Statement, seconds: float) -> Result:
        """Ask over a new connection of its own, each step of which may take so many seconds.

        For who wants to know how the server is whatever becomes of the connections of the pool.
        """
        connection, sent = None, False
        try:
            connection = self._connect_within(seconds)
            sent = True
            return self._execute(connection, [statement], transaction=False, patient=False)[0]
        except Exception as exc:
            error = self.translate(exc, sent=sent)
            try:
                raise error from (None if error is exc else exc)
            finally:
                del error  # see _break_off
        finally:
            if connection is not None:
                connection.close()

    def after_fork(self) -> None:
        """In a child: leave the parent's connections alone (not even closing them) and open own ones."""
        self._inherited.append(self._pool)
        self._pool = self._pool.recreate()

    def close(self) -> None:
        """Close the idle connections. The server can still be used; it connects again."""
        self._pool.close()

    def _send(
        self, statements: Sequence[Statement], transaction: bool, fresh_stands: bool, patient: bool
    ) -> list[Result]:
        # Left at any point by an exception from outside, the connection is with nobody, and so is closed.
        link = self._checkout(fresh_stands)
        try:
            results = self._execute(link.driver, statements, transaction, patient)
        except BaseException as exc:
            self._break_off(link, exc, over=not transaction)
        self._pool.give(link)
        return results

    def _break_off(self, link: PooledConnection, exc: BaseException, *, over: bool = False) -> NoReturn:
        """Raise the named error for what broke an exchange off, whose connection is given up.

        A duplicate is everyday life, and its connection is kept where nothing was begun that is not ``over``.
        """
        error = self.translate(exc, sent=True) if isinstance(exc, Exception) else exc
        if isinstance(error, Duplicate) and over:
            self._pool.give(link)
        else:
            self._pool.drop(link)  # half-read results or an open transaction must not reach the next user
        try:
            if error is exc:
                raise exc
            raise error from exc
        finally:
            del error, exc  # this frame is part of their tracebacks: a cycle would keep what they hold

    def _checkout(self, fresh_stands: bool) -> PooledConnection:
        while True:
            try:
                link = self._pool.take()
            except Busy as exc:
                raise Crowded(f"{self.name}: all connections of this process are busy") from exc
            except Exception as exc:
                if none_left():  # not the server's trouble: those who have a connection go on
                    raise Transient(f"{self.name}: this process has no file descriptor left") from exc
                error = self.translate(exc, sent=False)
                try:
                    if error is exc:
                        raise
                    raise error from exc
                finally:
                    del error  # see _break_off
            if self._stands(link, fresh_stands):
                return link

    def _stands(self, link: PooledConnection, fresh_stands: bool) -> bool:
        """Whether a connection stands, as far as can be seen; else it is given up."""
        fresh = link.used is None or (fresh_stands and time.monotonic() - link.used < FRESH_SECONDS)
        if fresh or not self._hung_up(link.driver):
            return True
        self._pool.drop(link)
        return False

    @abstractmethod
    def _connect_within(self, seconds: float) -> Any:
        """A connection of the driver's, no step of which waits for longer."""

    @abstractmethod
    def _ask(self, link: PooledConnection, statements: Sequence[Statement]) -> None:
        """Send statements whose answers ``_answers`` reads."""

    @abstractmethod
    def _answered(self, link: PooledConnection, seconds: float) -> bool:
        """Wait so long at most for the first answer; whether it is there."""

    @abstractmethod
    def _answers(self, link: PooledConnection) -> list[Result]:
        """Read the answers to what ``_ask`` has sent."""

    @abstractmethod
    def _execute(
        self,
        connection: Any,
        statements: Sequence[Statement],
        transaction: bool,
        patient: bool,
    ) -> list[Result]:
        """Run the statements on this connection; on an error roll back as well as still possible."""

    @abstractmethod
    def _hung_up(self, connection: Any) -> bool:
        """Whether the server has closed this idle connection (restart, wait_timeout)."""

    @abstractmethod
    def translate(self, exc: Exception, *, sent: bool) -> Exception:
        """The named error for a driver's error. ``sent``: it came after a statement was sent."""

    @abstractmethod
    def connections(self) -> Statement:
        """What to ask to know what the server does with this account's connections."""

    @abstractmethod
    def waits_for_lock(self, exchange: Exchange, rows: Sequence[Any]) -> bool:
        """Whether the answer to ``connections`` says that an exchange waits for a lock."""

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
    def by_whole_keys(self, name: str, where: str) -> str:
        """The task table ``name`` where whole keys of its unique index are equal to some: what follows FROM.

        Rows that are being inserted under such a key are waited for, and no other row is locked.
        """

    @abstractmethod
    def union(self, selects: Iterable[str]) -> str:
        """UNION ALL of selects that may have their own ORDER BY and LIMIT."""

    @abstractmethod
    def first_due(self, table: int, name: str, status: int, start: str, end: str) -> str:
        """A SELECT of the number ``table``, if rows of a status have their next_time in [start, end)."""

    greatest: str
    for_update: str


class Exchange:
    """Statements that a server was sent, whose answers are not read yet. One thread at a time may use it."""

    def __init__(self, server: DatabaseServer, link: PooledConnection) -> None:
        self._server = server
        self._link = link
        self.driver: Any = link.driver

    def answered(self, seconds: float) -> bool:
        """Wait so long at most; whether the answers have begun to come."""
        return self._server._answered(self._link, seconds)

    def abandon(self) -> None:
        """Give up the answers, and the connection with them."""
        self._server._pool.drop(self._link)

    def results(self) -> list[Result]:
        """The answers, waited for as long as the time-outs allow. To be called once. Raises as ``run``."""
        try:
            results = self._server._answers(self._link)
        except BaseException as exc:
            self._server._break_off(self._link, exc)
        self._server._pool.give(self._link)
        return results


def pause(attempt: int) -> None:
    """Wait a little before sending again, longer each time and never in step with others."""
    time.sleep(random.uniform(0.005, 0.02) * 2**attempt)  # noqa: S311 - spreads load, guards nothing
