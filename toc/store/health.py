"""Health of a server of the task table: whether it answers at all, and which of its tables are locked.

Who finds out that a server is away, or that somebody has locked a table of it (LOCK TABLES, a long ALTER),
marks it here, so that nobody else waits for the same thing: calls that go by the marks are told at once, and
go on with other servers and tables. A thread asks what is marked until it answers again; it lives no longer.

    away      the server does not answer, refuses, or has lost its connections
    locked    a table that cannot be read, nor written
    frozen    a table that can be read and not written
"""

# ruff: noqa: S608 - SQL is made of our own names and of numbers (toc.store.server)

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from toc.errors import SchemaBehind, StoreUnavailable
from toc.log import get_logger
from toc.store.server import Exchange, Locked, Server, Statement

log = get_logger(__name__)

P = TypeVar("P")

PATIENCE_SECONDS = 0.05
"""How long tasks of other servers wait for an answer of this one. It answers within a few milliseconds, and
nothing that could run may be late by a tenth of a second."""
AGAIN_SECONDS = 0.25
"""How often what is marked is asked whether it is well again."""

_ALIVE = Statement("SELECT 1")


class Ail(Enum):
    """What keeps a server from answering."""

    AWAY = "away"
    LOCKED = "locked"
    """It waits for a lock that somebody else has."""
    SLOW = "slow"
    """It works."""


class Health:
    """The marks of one server. ``names`` are the SQL names of all tables, by number. Thread-safe."""

    def __init__(self, server: Server, names: Sequence[str]) -> None:
        self._server = server
        self._names = names
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.away: StoreUnavailable | None = None
        """Why the server does not answer; None while it does."""
        self._away_since = 0.0
        self._marks: dict[tuple[int, bool], StoreUnavailable] = {}
        """(table, whether it is writing that fails) -> why."""
        self._probes: dict[tuple[int, bool], Exchange] = {}
        """Probes of these that have yet to be answered."""
        self._questions: list[Exchange] = []
        """What the server was asked when it was found to be away, and may answer yet."""
        self.owing = 0
        """How many exchanges the server has not answered in time and may answer yet."""

    @property
    def troubled(self) -> bool:
        """Whether anything is marked."""
        return self.away is not None or bool(self._marks) or self.owing > 0

    def sort_out(
        self, tables: Mapping[int, P], *, writes: bool
    ) -> tuple[Mapping[int, P], dict[int, StoreUnavailable]]:
        """The tables that can be asked, and why each of the others cannot."""
        away = self.away
        if away is not None:
            return {}, dict.fromkeys(tables, away)
        failed: dict[int, StoreUnavailable] = {}
        for table in tables:
            error = self._marks.get((table, False)) or (self._marks.get((table, True)) if writes else None)
            if error is not None:
                failed[table] = error
        return {table: part for table, part in tables.items() if table not in failed}, failed

    def owes(self, more: int) -> None:
        """So many exchanges more, or fewer, are late."""
        with self._lock:
            self.owing += more

    def mark_away(self, error: StoreUnavailable, question: Exchange | None = None) -> None:
        """The server failed in a way that will not be over at once; it may yet answer a question."""
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

    def examine(self, exchange: Exchange | None) -> Ail:
        """Why an exchange is not answered in time, or no connection is free. Marks a server that is away."""
        try:
            question = self._server.begin([self._server.connections()])
            if question is None or not question.answered(PATIENCE_SECONDS):
                error = StoreUnavailable(f"{self._server.name}: no answer within {PATIENCE_SECONDS:g} s")
                self.mark_away(error, question)
                return Ail.AWAY
            rows = question.results()[0].rows
        except StoreUnavailable as exc:
            self.mark_away(exc)
            return Ail.AWAY
        if exchange is not None and self._server.waits_for_lock(exchange, rows):
            return Ail.LOCKED
        return Ail.SLOW

    def find_locked(self, tables: Iterable[int], *, writes: bool) -> None:
        """Mark those of the tables that are locked; the server answers."""
        for table in tables:
            if (table, writes) in self._marks or (table, False) in self._marks:
                continue
            try:
                probe = self._server.begin([self._probe(table, writes=writes)])
                if probe is None:
                    return  # so many wait already; who needs the rest finds out for itself
                if probe.answered(PATIENCE_SECONDS / 2):
                    probe.results()
                    continue
            except Locked:
                probe = None
            except StoreUnavailable as exc:
                self.mark_away(exc)
                return
            self._mark_locked(table, probe, writes=writes)

    def close(self) -> None:
        """Ask no more."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        self._closed.clear()

    def after_fork(self) -> None:
        """In a child: nothing is known, and no thread asks."""
        self._lock = threading.Lock()
        self._thread, self._closed = None, threading.Event()
        self.away, self.owing = None, 0
        self._marks, self._probes, self._questions = {}, {}, []

    # --- until it is well again

    def _mark_locked(self, table: int, probe: Exchange | None, *, writes: bool) -> None:
        error = Locked(f"{self._server.name}: table {self._names[table]} is locked by somebody else")
        with self._lock:
            if (table, writes) not in self._marks:
                log.warning("table_locked", table=self._names[table], writes_only=writes)
            self._marks[table, writes] = error
            if probe is not None:
                self._probes[table, writes] = probe
            self._look_after()

    def _look_after(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._attend, name="toc-store-health", daemon=True)
            self._thread.start()

    def _attend(self) -> None:
        while not self._closed.wait(AGAIN_SECONDS):
            if self.away is not None:
                self._ask_server()
            for table, writes in list(self._marks):
                if self.away is None and not self._closed.is_set():
                    self._ask_table(table, writes=writes)
            with self._lock:
                if self.away is None and not self._marks:
                    self._thread = None
                    return

    def _ask_server(self) -> None:
        with self._lock:
            questions, self._questions = self._questions, []
        try:
            for question in questions:
                question.results()
            if not questions:
                self._server.run([_ALIVE])
        except StoreUnavailable as exc:
            self.away = exc
            return
        seconds = round(time.monotonic() - self._away_since, 1)
        self.away = None
        log.info("database_back", server=self._server.name, seconds=seconds)

    def _ask_table(self, table: int, *, writes: bool) -> None:
        probe = self._probes.pop((table, writes), None)
        try:
            if probe is not None:
                probe.results()
            else:
                self._server.run([self._probe(table, writes=writes)], outwait=False)
        except Locked:
            return
        except SchemaBehind:
            pass  # whoever asks for the table is told so
        except StoreUnavailable as exc:
            self.mark_away(exc)
            return
        with self._lock:
            del self._marks[table, writes]
        log.info("table_unlocked", table=self._names[table])

    def _probe(self, table: int, *, writes: bool) -> Statement:
        name = self._names[table]  # no task has the id 0
        if writes:
            return Statement(f"UPDATE {name} SET version=version WHERE job_id=0")
        return Statement(f"SELECT job_id FROM {name} WHERE job_id=0")


def drain(exchange: Exchange) -> None:
    """Read an answer that nobody needs, so that its connection can be used again."""
    with contextlib.suppress(StoreUnavailable, SchemaBehind):
        exchange.results()
