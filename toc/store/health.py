"""Health of a server of the task table: whether it answers, and which of its tables fail.

The first caller to find a server out of reach, or a table that is locked (LOCK TABLES, a long ALTER) or that
the server refuses to use (its file is damaged or lost), marks it here, so that no other caller waits for it:
calls that obey the marks fail at once for it and continue with other servers and tables. A thread probes
marked ones until they answer again, and then ends.

    away      the server does not answer, refuses, or has lost its connections
    failing   a table that cannot be read, nor written
    frozen    a table that can be read and not written
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.observe.log import get_logger
from toc.store.server import DatabaseServer, Exchange, Locked, PoolExhausted, Refused, Statement, Transient

log = get_logger(__name__)

P = TypeVar("P")

PATIENCE_SECONDS = 0.05
"""Seconds that tasks of other servers wait for this server's answer. It usually answers within a few
milliseconds, and no task that could run may be late by a tenth of a second."""
SLOW_SECONDS = PATIENCE_SECONDS / 2
"""Tasks of other servers do not wait at all for a server that usually takes longer than this."""
PATIENCE_TIMES = 4
"""An answer may take this multiple of the usual time, if that is longer, before the server counts as away."""
MOST_PATIENCE_SECONDS = 2.0
"""Upper bound of that time, and its value while the usual time is unknown."""
ALONE_SECONDS = 0.5
"""Least seconds to wait for an answer before the only server counts as away. This can be longer
than PATIENCE_SECONDS, because no task of another server waits. A machine that halts for a moment
must not make the only server count as away, because all tasks would then have to wait."""
APART_SECONDS = 0.2
"""How long to wait for a late answer if no connection is idle. After that a new connection is
opened to learn the state of the server; each step of opening it may take as long, or longer. No
other caller waits meanwhile."""
AGAIN_SECONDS = 0.25
"""Seconds between probes of what is marked."""
JOIN_SECONDS = 2.0
"""Most seconds that ``close`` waits for a probe under way."""
MOST_PROBED = 16
"""Most tables that are probed at a time, in turn."""

_ALIVE = Statement("SELECT 1")


class LateCause(Enum):
    """What keeps a server from answering."""

    AWAY = "away"
    LOCKED = "locked"
    """It waits for a lock held by another transaction."""
    SLOW = "slow"
    """It works slowly."""


class Health:
    """The marks of one server. ``names`` are the SQL names of all tables, by number. Thread-safe.

    ``alone``: there is no other server.
    """

    def __init__(self, server: DatabaseServer, names: Sequence[str], *, alone: bool = False) -> None:
        self._server = server
        self._alone = alone
        self._names = names
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.away: StoreUnavailable | None = None
        """Why the server does not answer; None while it does."""
        self._away_since = 0.0
        self._marks: dict[tuple[int, bool], StoreUnavailable] = {}
        """(table, whether only writing fails) -> why."""
        self._probes: dict[tuple[int, bool], Exchange] = {}
        """Probes of these marks that are not answered yet."""
        self._questions: list[Exchange] = []
        """Requests sent before the server was marked as away, which it may still answer."""
        self.owing = 0
        """Number of exchanges not answered in time that the server may still answer."""
        self._owing_since = 0.0
        self._average: float | None = None
        """Moving average of answer times, in seconds."""
        self._tell_back: list[Callable[[], None]] = []

    def when_back(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` whenever the server, or a table of it, answers again. It runs on the thread that
        probes, and must return at once."""
        self._tell_back.append(tell)

    def answered(self, seconds: float) -> None:
        """Record how many seconds an answer took."""
        seconds = min(seconds, MOST_PATIENCE_SECONDS)
        usual = self._usual
        self._average = seconds if usual is None else usual + (seconds - usual) / 4

    @property
    def _usual(self) -> float | None:
        """Usual seconds per answer; None before the first answer."""
        return self._server.first_answer if self._average is None else self._average

    @property
    def slow(self) -> bool:
        """Whether the server usually answers too slowly for other tasks to wait: it is far away."""
        usual = self._usual
        return usual is not None and usual > SLOW_SECONDS

    @property
    def patience(self) -> float:
        """Seconds an answer may take before the server counts as away."""
        if self._usual is None:
            return MOST_PATIENCE_SECONDS
        return min(max(PATIENCE_SECONDS, PATIENCE_TIMES * self._usual), MOST_PATIENCE_SECONDS)

    @property
    def troubled(self) -> bool:
        """Whether anything is marked."""
        return self.away is not None or bool(self._marks) or self.owing > 0

    def sort_out(
        self, tables: Mapping[int, P], *, writes: bool
    ) -> tuple[Mapping[int, P], dict[int, StoreUnavailable]]:
        """Split tables into those that can be asked and those that cannot, with the reason."""
        away = self.away
        if away is not None:
            return {}, dict.fromkeys(tables, away)
        failed: dict[int, StoreUnavailable] = {}
        for table in tables:
            error = self._marks.get((table, False)) or (self._marks.get((table, True)) if writes else None)
            if error is not None:
                failed[table] = error
        return {table: part for table, part in tables.items() if table not in failed}, failed

    def owes(self, more: int, since: float = 0.0) -> None:
        """Add to the number of late exchanges, begun at ``since`` (monotonic seconds); negative subtracts."""
        with self._lock:
            self.owing += more
            if more > 0:
                self._owing_since = since

    @property
    def owing_seconds(self) -> float:
        """Seconds until all late exchanges are answered, at the usual speed."""
        return max((self._usual or 0.0) - (time.monotonic() - self._owing_since), 0.0)

    def mark_away(self, error: StoreUnavailable, question: Exchange | None = None) -> None:
        """Mark the server as away after a lasting failure; it may still answer ``question``."""
        with self._lock:
            if self._closed.is_set():
                return
            if question is not None:
                self._questions.append(question)
            if self.away is None:
                self._away_since = time.monotonic()
                log.warning("database_away", error=str(error))
            self.away = error
            self._look_after()

    def examine(self, exchange: Exchange | None, answered: Callable[[float], bool]) -> LateCause:
        """Find out why an exchange is late, or why no connection is free. Marks a server that is away.

        ``answered(seconds)`` waits and returns whether the answer has come: then the server is not away.
        """
        patience = max(self.patience, ALONE_SECONDS) if self._alone else self.patience
        began = time.monotonic()
        try:
            question = self._server.begin([self._server.connections()])
            if question is None:  # all connections are lent, or none is open yet: its state is unknown
                if answered(APART_SECONDS):
                    return LateCause.SLOW
                seconds = max(patience, APART_SECONDS)
                rows = self._server.ask_apart(self._server.connections(), seconds).rows
            elif question.answered(patience):
                rows = question.results()[0].rows
                self.answered(time.monotonic() - began)
            elif answered(0.0):
                question.abandon()
                return LateCause.SLOW
            else:
                error = StoreUnavailable(f"{self._server.name}: no answer within {patience:g} s")
                self.mark_away(error, question)
                return LateCause.AWAY
        except StoreUnavailable as exc:
            if answered(0.0):
                return LateCause.SLOW
            self.mark_away(exc)
            return LateCause.AWAY
        if exchange is not None and self._server.waits_for_lock(exchange, rows):
            return LateCause.LOCKED
        return LateCause.SLOW

    def find_failing(self, tables: Iterable[int], *, writes: bool) -> None:
        """Mark those tables that are locked or refused, on a server that answers."""
        for table in tables:
            if (table, writes) in self._marks or (table, False) in self._marks:
                continue
            try:
                probe = self._server.begin([self._probe(table, writes=writes)])
                if probe is None:
                    return  # enough callers wait already; later ones find out for themselves
                if probe.answered(self.patience / 2):
                    probe.results()
                    continue
            except Locked:
                probe = None
            except SchemaBehind:
                continue  # callers of the table get the reason
            except Refused as exc:
                log.warning("table_refused", table=self._names[table], writes_only=writes, error=str(exc))
                self._mark(table, exc, None, writes=writes)
                continue
            except (Transient, PoolExhausted):
                return  # this says nothing about the server: later callers find out for themselves
            except StoreUnavailable as exc:
                self.mark_away(exc)
                return
            log.warning("table_locked", table=self._names[table], writes_only=writes)
            locked = Locked(f"{self._server.name}: table {self._names[table]} is locked by another session")
            self._mark(table, locked, probe, writes=writes)

    def close(self) -> None:
        """Stop probing."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
        with self._lock:
            self._closed = threading.Event()  # a thread that is still at work keeps the one that is set
            self._forget()

    def after_fork(self) -> None:
        """In a forked child: forget all marks; no thread probes."""
        self._lock = threading.RLock()
        self._thread, self._closed = None, threading.Event()
        self.owing, self._average = 0, None
        self._tell_back = []
        self._forget()

    def _forget(self) -> None:
        """Remove all marks: without the thread that probes nothing would."""
        self.away = None
        self._marks, self._probes, self._questions = {}, {}, []

    # --- the thread that probes

    def _mark(self, table: int, error: StoreUnavailable, probe: Exchange | None, *, writes: bool) -> None:
        with self._lock:
            self._marks[table, writes] = error
            if probe is not None:
                self._probes[table, writes] = probe
            self._look_after()

    def _look_after(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._attend, args=[self._closed], name="toc-store-health", daemon=True
            )
            self._thread.start()

    def _attend(self, closed: threading.Event) -> None:
        while not closed.wait(AGAIN_SECONDS):
            if self.away is not None:
                self._ask_server(closed)
            for table, writes in list(self._marks)[:MOST_PROBED]:
                if self.away is None and not closed.is_set():
                    self._ask_table(table, closed, writes=writes)
            with self._lock:
                if not closed.is_set() and self.away is None and not self._marks:
                    self._thread = None
                    return

    def _ask_server(self, closed: threading.Event) -> None:
        with self._lock:
            questions, self._questions = self._questions, []
        try:
            for question in questions:
                question.results()
            began = time.monotonic()
            alive = self._server.begin([_ALIVE])
            if alive is None:
                self._server.ask_apart(_ALIVE, MOST_PATIENCE_SECONDS)
            else:
                alive.results()
                self.answered(time.monotonic() - began)
        except StoreUnavailable as exc:
            with self._lock:
                if not closed.is_set():  # nothing would take the mark away again
                    self.away = exc
            return
        seconds = round(time.monotonic() - self._away_since, 1)
        with self._lock:
            if closed.is_set():
                return
            self.away = None
        log.info("database_back", server=self._server.name, seconds=seconds)
        self._back()

    def _back(self) -> None:
        for tell in self._tell_back:
            tell()

    def _ask_table(self, table: int, closed: threading.Event, *, writes: bool) -> None:
        probe = self._probes.pop((table, writes), None)
        try:
            if probe is not None:
                probe.results()
            else:
                self._server.run([self._probe(table, writes=writes)], outwait=False)
        except (Transient, Refused, PoolExhausted):  # still locked or refused, or it could not be asked
            with self._lock:
                if not closed.is_set():
                    self._marks[table, writes] = self._marks.pop((table, writes))  # others have their turn
            return
        except SchemaBehind:
            pass  # callers of the table get the reason
        except StoreUnavailable as exc:
            if not closed.is_set():
                self.mark_away(exc)
            return
        with self._lock:
            if closed.is_set():
                return
            error = self._marks.pop((table, writes))
        if isinstance(error, Locked):
            log.info("table_unlocked", table=self._names[table])
        else:
            log.info("table_answers", table=self._names[table])
        self._back()

    def _probe(self, table: int, *, writes: bool) -> Statement:
        name = self._names[table]  # no task has the id 0
        if writes:
            return Statement(f"UPDATE {name} SET version=version WHERE job_id=0")
        return Statement(f"SELECT job_id FROM {name} WHERE job_id=0")
