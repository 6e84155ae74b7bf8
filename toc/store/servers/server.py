"""One server of the task table, and how statements reach it.

At run time toc sends lists of statements, each list to one server in one round trip: ``MySqlServer`` joins
them into one multi-statement query, ``SqliteServer`` loops over them. Numbers are part of the SQL (formatted
by ``:d``, which accepts nothing else); texts are parameters that the driver escapes. There is no statement
per task where one per table suffices.
"""

from __future__ import annotations

import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, TypedDict

from sqlalchemy import Dialect

from toc.model.errors import InvalidInput, StoreUnavailable
from toc.sockets import none_left
from toc.store.servers.pool import UNUSED_SECONDS, Pool, PooledConnection

Param = str | bytes | None
"""Types of a parameter; all other values are numbers and part of the SQL."""

REPEATS = 5
"""Most sends of a batch that the server keeps rolling back (deadlock, lock wait, read-only)."""
LOST_FAST_SECONDS = 1.0
"""Seconds. If a connection breaks later than this, the server hangs: do not wait a second time."""
IDLE_SECONDS = 2.0
"""A connection that was idle for longer (no loop of a worker pauses so long) must answer a ping before it is
used: a proxy in between may have forgotten it, and what is sent over it then vanishes."""
PING_SECONDS = 1.0
"""Longest wait for that answer."""
FRESH_SECONDS = 0.05
"""A connection used within these seconds is not checked before reuse, unless one has just broken: each check
is a moment in which other threads take the interpreter."""


class Statement(NamedTuple):
    """SQL with ``%s`` for each parameter, and no other ``%``."""

    sql: str
    params: Sequence[Param] = ()


ALIVE = Statement("SELECT 1")
"""Asks whether a server answers."""


class Result(NamedTuple):
    """The result of one statement: the rows of a SELECT, or the number of rows that a write matched."""

    rows: Sequence[Any]
    matched: int


class Transient(StoreUnavailable):
    """The server refused or rolled back the batch for now; it may be sent again."""


class ReadOnly(Transient):
    """The server takes no writes now. After a switchover, its address may lead to another one by now."""


class Locked(Transient):
    """Another transaction has locked a row or a table: the batch timed out waiting and was rolled back."""


class Denied(StoreUnavailable):
    """The server, or the system of a file, does not let us in: only an operator can help."""


class Refused(StoreUnavailable):
    """The server answered that it cannot do this: a table is damaged or full, or not ours to use. It serves
    others."""


class Lost(StoreUnavailable):
    """The connection broke after the batch was sent: its outcome is unknown."""


class PoolExhausted(StoreUnavailable):
    """All connections of this process are lent. That says nothing about the server."""


class Duplicate(Exception):
    """A unique key refused the batch, which was rolled back."""


class Options(TypedDict, total=False):
    """Options of the connections to a server. Timeouts are seconds; ``pool_size`` bounds how many connections
    a process has."""

    connect_timeout: float
    read_timeout: float
    write_timeout: float
    pool_size: int


class DatabaseServer(ABC):
    """A server, its databases, and a pool of connections to it. Thread-safe."""

    def __init__(self, name: str, databases: Sequence[int], pool: Pool) -> None:
        self.name = name
        """host:port, or the path of a SQLite file: for messages, never a password."""
        self.databases = databases
        self._pool = pool

    def run(
        self, statements: Sequence[Statement], *, transaction: bool = False, again: bool = True,
        patient: bool = False, outwait: bool = True,
    ) -> list[Result]:  # fmt: skip
        """Run the statements in order, in one round trip; in one transaction if ``transaction``.

        ``again``: running them twice is harmless (reads, guarded updates), so after a broken connection they
        are sent once more on a new one. A batch that the server rolled back is always sent again, a few
        times, unless ``outwait`` is False and it had waited for a lock: the caller then continues with other
        tables. ``patient``: no caller is waiting, so the answers may be read all at once, a little after the
        first one arrives. Raises StoreUnavailable (Locked; Refused; Lost, if the outcome is unknown),
        SchemaBehind, Duplicate.
        """
        if not statements:
            return []
        for attempt in range(REPEATS):
            started = time.monotonic()
            try:
                trust_fresh = again and attempt == 0
                return self._send(statements, transaction, trust_fresh, patient)
            except Transient as exc:
                if attempt == REPEATS - 1 or (isinstance(exc, Locked) and not outwait):
                    raise
            except UnicodeEncodeError:
                raise InvalidInput("a text has a lone surrogate, which UTF-8 cannot encode") from None
            except Lost:
                if not again or attempt or time.monotonic() - started > LOST_FAST_SECONDS:
                    raise
            pause(attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close_unused(self) -> None:
        """Close the connections that nobody has used for a minute."""
        self._pool.close(UNUSED_SECONDS)

    def answers(self, seconds: float) -> bool:
        """Whether an idle connection, however long it was, answers within ``seconds``. If not, close it."""
        link = self._pool.take_idle()
        if link is None or not self._is_usable(link, trust_fresh=True, seconds=seconds):
            return False
        self._pool.give(link)
        return True

    def open_one(self) -> None:
        """Have a connection that ``begin`` can use, unless all are lent. Raises as ``run``."""
        with contextlib.suppress(PoolExhausted):
            self._pool.give(self._checkout(trust_fresh=True, wait=False))

    def begin(self, statements: Sequence[Statement], trust_fresh: bool = True) -> PooledConnection | None:
        """Send statements, in no transaction, without waiting for the answers, which ``results`` reads.

        Returns None without a connection that was used lately: to open one, or to ask an old one whether it
        still is, takes as long as the server likes. Unless ``trust_fresh``, one that the server has closed is
        passed over, however lately it was used. Raises what ``run`` raises.
        """
        while (link := self._pool.take_idle(IDLE_SECONDS)) is not None:  # older ones may keep it waiting
            if self._is_usable(link, trust_fresh):
                try:
                    link.connection.ask(statements)
                except BaseException as exc:
                    self._break_off(link, exc)
                return link
        return None

    def results(self, link: PooledConnection) -> list[Result]:
        """Read the answers to what ``begin`` has sent, waiting as long as the timeouts allow. Call it once.
        Raises as ``run``."""
        try:
            results = link.connection.answers()
        except BaseException as exc:
            self._break_off(link, exc)
        self._pool.give(link)
        return results

    def abandon(self, link: PooledConnection) -> None:
        """Give up the answers to what ``begin`` has sent, and the connection."""
        self._pool.drop(link)

    def ask_apart(self, seconds: float) -> None:
        """Ask the server over a new connection of its own; each step may take ``seconds``.

        It tests the server independently of the connections of the pool.
        """
        connection = None
        try:
            with contextlib.closing(self._connect_within(seconds)) as connection:
                connection.execute([ALIVE], transaction=False, patient=False)
        except Exception as exc:
            self._fail(exc, sent=connection is not None)

    def left_by_switchover(self) -> bool:
        """Whether the server that the connections lead to takes no writes. If so, all are opened anew.

        After a switchover behind one address the old primary may live on and keep its connections. What only
        reads, such as the row check, would get old rows from it and no error.
        """
        if not self.read_only:
            return False
        ((value,),) = self.run([Statement(self.read_only)])[0].rows
        if str(value) in ("0", "OFF"):
            return False
        self._pool.renew()
        return True

    def clock(self) -> float:
        """Return its clock minus this machine's, in seconds, as exactly as one round trip can tell."""
        self.now_ms()  # so that the next has a connection that is open
        before = time.time()
        return self.now_ms() / 1000 - (before + time.time()) / 2

    def now_ms(self) -> int:
        """Return the time (ms) by its clock."""
        ((milliseconds,),) = self.run([Statement(f"SELECT {self.milliseconds(self.from_now(0))}")])[0].rows
        return int(milliseconds)

    def close(self) -> None:
        """Close all connections, those that are in use once they are not. The server stays usable; it
        connects again."""
        self._pool.renew()

    def _send(
        self, statements: Sequence[Statement], transaction: bool, trust_fresh: bool, patient: bool
    ) -> list[Result]:
        # If an exception from outside interrupts this, no reference to the connection is left, so it is
        # closed.
        link = self._checkout(trust_fresh)
        try:
            results = link.connection.execute(statements, transaction, patient)
        except BaseException as exc:
            self._break_off(link, exc, over=not transaction)
        self._pool.give(link)
        return results

    def _break_off(self, link: PooledConnection, exc: BaseException, *, over: bool = False) -> NoReturn:
        """Raise the named error for a broken exchange, and give up its connection.

        The connection of a duplicate, which is frequent, or of what was refused is kept, unless a transaction
        is open that is not ``over``.
        """
        error = self.translate(exc, sent=True) if isinstance(exc, Exception) else exc
        if isinstance(error, ReadOnly):
            self._pool.renew()
        if isinstance(error, (Duplicate, Refused)) and over:
            self._pool.give(link)
        else:
            self._pool.drop(link)  # half-read results or an open transaction must not reach the next user
        try:
            _raise(error, exc)
        finally:
            del error, exc  # as in _raise

    def _checkout(self, trust_fresh: bool, *, wait: bool = True) -> PooledConnection:
        while True:
            try:
                link = self._pool.take(wait=wait)
            except Exception as exc:
                self._fail(exc, sent=False)
            if link is None:
                raise PoolExhausted(f"{self.name}: all connections of this process are busy")
            if self._is_usable(link, trust_fresh):
                return link

    def _fail(self, exc: Exception, *, sent: bool) -> NoReturn:
        """Raise the named error for a connection that failed. ``sent``: after a statement was sent."""
        if not sent and none_left():  # not the server's fault: existing connections stay usable
            raise Transient(f"{self.name}: this process has no file descriptor left") from exc
        _raise(self.translate(exc, sent=sent), exc)

    def _is_usable(self, link: PooledConnection, trust_fresh: bool, seconds: float = PING_SECONDS) -> bool:
        """Whether a connection is usable, by a ping of ``seconds`` if it was idle; otherwise drop it."""
        if link.used is None or (trust_fresh and link.idle < FRESH_SECONDS):
            return True
        # Before anything is sent, so that "not sent" and "unknown" are kept apart.
        if link.connection.answered(0.0):  # a server says nothing on an idle connection: it has hung up
            self._pool.drop(link)
        elif link.idle < IDLE_SECONDS or self._answers_ping(link, seconds):
            return True
        else:
            self._pool.drop(link)
            self._pool.close()  # the others were idle for even longer
        return False

    def _answers_ping(self, link: PooledConnection, seconds: float) -> bool:
        try:
            link.connection.ask([ALIVE])
            if link.connection.answered(seconds):
                link.connection.answers()
                return True
        except Exception as exc:
            if self.translate(exc, sent=True) is exc:
                raise
        return False

    @abstractmethod
    def _connect_within(self, seconds: float) -> Any:
        """Open a connection; no step waits longer than ``seconds``."""

    @abstractmethod
    def translate(self, exc: Exception, *, sent: bool) -> Exception:
        """Translate a driver's error to a named one. ``sent``: it came after a statement was sent."""

    @abstractmethod
    def identity(self, query: Any) -> tuple[Any, ...] | None:
        """Return a unique identity of this server; ``query(sql)`` returns the first row. None if unknown."""

    # --- differences between the dialects --------------------------------------------------------------

    @abstractmethod
    def instant(self, milliseconds: int) -> str:
        """Return an instant (ms) as a literal."""

    @abstractmethod
    def from_now(self, milliseconds: int) -> str:
        """Return an expression for the instant this many ms after now, by the server's clock."""

    @abstractmethod
    def appended(self, column: str, text: str, most: int) -> str:
        """Return an expression for the last ``most`` characters of the column's text (NULL counts as empty)
        plus ``text``."""

    @abstractmethod
    def joined(self, parts: Sequence[str], by: str = ",") -> str:
        """Return an expression that joins numbers and texts, none of them NULL, by a separator."""

    @abstractmethod
    def by_whole_keys(self, name: str, where: str, *, wait: bool = True) -> str:
        """Return the FROM clause of the task table ``name`` for equality on whole keys of its unique index.

        It waits for rows that are being inserted under such a key (or is refused as Locked, unless ``wait``),
        and locks no other row.
        """

    @abstractmethod
    def or_lock(self, insert: str) -> str:
        """Return an INSERT that, where its key exists, locks that row instead, and no other."""

    @abstractmethod
    def union(self, selects: Iterable[str]) -> str:
        """Return a UNION ALL of selects that may have their own ORDER BY and LIMIT."""

    table: Callable[[str, str], str]
    """The name in SQL of a table, given its database and its own name."""
    after: Callable[[str, int], str]
    """An expression for the instant this many ms after that of a column."""
    whole: Callable[[str, int], str]
    """An expression for another one divided by a number, rounded down."""
    milliseconds: Callable[[str], str]
    """An expression that reads an instant as integer milliseconds."""
    text: Callable[[str], str]
    """An expression that reads a binary column as text."""
    by_primary_key: Callable[[str], str]
    """A task table, for an UPDATE that must lock only rows of a list of job_ids."""
    dialect: Dialect
    """How SQLAlchemy Core writes SQL for it."""
    greatest: str
    for_update: str
    skip_locked: str
    """As ``for_update``, but leaves out rows that others have locked."""
    read_only: str
    """A query that tells whether the server takes no writes; empty if that cannot be."""


def _raise(error: BaseException, exc: BaseException) -> NoReturn:
    """Raise the named error of a driver's error ``exc``; they are one if it has none."""
    try:
        if error is exc:
            raise exc
        raise error from exc
    finally:
        del error, exc  # this frame is part of their tracebacks: a cycle would keep what they hold


def pause(attempt: int, *, contended: bool = False) -> None:
    """Sleep before a retry, longer each time, with jitter.

    ``contended``: others change the same rows, and one of them has succeeded. The sleep is then at most
    64 ms.
    """
    least, most = (0.0, 0.002) if contended else (0.005, 0.02)
    factor = 2 ** (min(attempt, 5) if contended else attempt)
    time.sleep(random.uniform(least, most) * factor)  # noqa: S311 - spreads load, guards nothing
