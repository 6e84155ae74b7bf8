"""Health of a server of the task table: whether it answers, and which of its tables it cannot use.

The first caller to find a server out of reach marks it as away, so that no other caller waits for it. Tables
that are locked (LOCK TABLES, a long ALTER), damaged or missing are set aside. Calls that obey the marks fail
at once for these and continue with other servers and tables. A thread asks what is marked until it answers
again, and then ends.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.fork import in_each_process
from toc.observe.log import get_logger
from toc.store.servers import server as db
from toc.store.servers.server import ALIVE, DatabaseServer, Statement

log = get_logger(__name__)

P = TypeVar("P")

Trouble = StoreUnavailable | SchemaBehind
"""Why a part of the task table did not answer."""
OF_TABLES = (db.Locked, db.Refused, SchemaBehind)
"""Trouble of some tables or rows only: their server answers."""
REACHED = (db.Transient, db.PoolExhausted, db.Refused)
"""Errors that do not say that a server is out of reach."""

PATIENCE_SECONDS = 0.05
"""Least seconds that an answer may take before the server counts as away."""
PATIENCE_TIMES = 4
"""An answer may take this multiple of the usual time, if that is longer, before the server counts as away."""
MAX_PATIENCE_SECONDS = 2.0
"""Upper bound of that time, and its value while the usual time of the only server is unknown."""
UNKNOWN_SECONDS = 0.5
"""Its value while that of one of several is unknown: tasks of the others may wait meanwhile."""
ALONE_SECONDS = 0.5
"""Least seconds to wait for an answer before the only server counts as away. This can be longer
than PATIENCE_SECONDS, because no task of another server waits. A machine that halts for a moment
must not make the only server count as away, because all tasks would then have to wait."""
APART_SECONDS = 0.2
"""How long to wait for a late answer if no connection is idle. After that a new connection is
opened to learn the state of the server; each step of opening it may take as long, or longer. No
other caller waits meanwhile."""
AGAIN_SECONDS = 0.25
"""Seconds between questions to what is marked."""
MAX_LOCKED = 3
"""Once so many tables are found locked one after the other, each after a wait, the others of a call count as
locked too, as under a lock of all, until the thread has asked them."""
LOCKED_SECONDS = 5.0
"""For so long after rows were found locked, it is asked which are before others are written: a batch with one
of them would wait for its lock."""
JOIN_SECONDS = 2.0
"""Most seconds that ``close`` waits for a question under way."""


class Health:
    """The marks of one server. ``names`` are the SQL names of all tables, by number. Thread-safe; a forked
    child begins without marks.

    ``alone``: there is no other server.
    """

    def __init__(self, server: DatabaseServer, names: Sequence[str], *, alone: bool = False) -> None:
        self._server = server
        self._alone = alone
        self._names = names
        in_each_process(self._start_anew)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self.away: StoreUnavailable | None = None
        """Why the server does not answer; None while it does."""
        self._away_since = 0.0
        self._aside: dict[int, Trouble] = {}
        """Tables that are set aside, and why."""
        self._average: float | None = None
        """Moving average of answer times, in seconds."""
        self.locked_until = float("-inf")
        """Until when (monotonic) it is asked which rows are locked: some were a moment ago."""

    def answered(self, seconds: float) -> None:
        """Record how many seconds an answer took."""
        seconds = min(seconds, MAX_PATIENCE_SECONDS)
        average = self._average
        self._average = seconds if average is None else average + (seconds - average) / 4

    def learn(self, seconds: float) -> None:
        """Record how many seconds an answer took, whatever was asked, if none is known: it may make patience
        shorter."""
        if self._average is None:
            self.answered(min(seconds, UNKNOWN_SECONDS / PATIENCE_TIMES))

    @property
    def patience(self) -> float:
        """Seconds an answer may take before the server counts as away."""
        if self._average is None:
            return MAX_PATIENCE_SECONDS if self._alone else UNKNOWN_SECONDS
        return min(max(PATIENCE_SECONDS, PATIENCE_TIMES * self._average), MAX_PATIENCE_SECONDS)

    @property
    def troubled(self) -> bool:
        """Whether anything is marked."""
        return self.away is not None or bool(self._aside)

    def sort_out(self, tables: Mapping[int, P]) -> tuple[Mapping[int, P], dict[int, Trouble]]:
        """Split tables into those that can be asked and those that cannot, with the reason."""
        away = self.away
        if away is not None:
            return {}, dict.fromkeys(tables, away)
        failed = {table: error for table in tables if (error := self._aside.get(table)) is not None}
        return {table: part for table, part in tables.items() if table not in failed}, failed

    def note(self, error: BaseException | None) -> None:
        """Mark the server as away if this error says that it is: so no other caller waits for it.

        One whose answer was lost is asked: what it was doing may only have been long.
        """
        if isinstance(error, db.Lost):
            if self.away is None:
                self.examine(lambda _seconds: False)
        elif isinstance(error, StoreUnavailable) and not isinstance(error, REACHED):
            self.mark_away(error)

    def mark_away(self, error: StoreUnavailable) -> None:
        """Mark the server as away after a lasting failure."""
        with self._lock:
            if self._closed.is_set() or not self._watch():
                return
            if self.away is None:
                self._away_since = time.monotonic()
                log.warning("database_away", error=str(error))
            self.away = error

    def back(self) -> None:
        """Take the mark away: the server has answered."""
        with self._lock:
            if self.away is None:
                return
            self.away = None
        seconds = time.monotonic() - self._away_since
        log.info("database_back", server=self._server.name, seconds=round(seconds, 1))

    def examine(self, answered: Callable[[float], bool]) -> bool:
        """Find out whether a server is away whose answer is late, or to which no connection is free. If so,
        mark it.

        ``answered(seconds)`` waits and returns whether the answer has come: then the server is not away.
        """
        patience = max(self.patience, ALONE_SECONDS) if self._alone else self.patience
        began = time.monotonic()
        error = StoreUnavailable(f"{self._server.name}: no answer within {patience:g} s")
        try:
            question = self._server.begin([ALIVE], trust_fresh=False)
            if question is None:  # all connections are lent or old, or none is open yet: its state is unknown
                if not (answered(APART_SECONDS) or self._server.answers(patience)):
                    self._server.ask_apart(max(patience, APART_SECONDS))
                return False
            if question.connection.answered(patience):
                self._server.results(question)
                self.answered(time.monotonic() - began)
                return False
            self._server.abandon(question)
        except StoreUnavailable as exc:
            error = exc
        if answered(0.0):
            return False
        if not isinstance(error, REACHED):
            self.mark_away(error)
        return self.away is not None

    def set_aside(self, tables: Iterable[int]) -> None:
        """Set aside those of these tables that are locked, damaged or missing, on a server that answers."""
        error, locked = None, 0
        try:
            for table in [table for table in tables if table not in self._aside]:
                if locked < MAX_LOCKED:
                    error = self._fault(table)
                    locked = locked + 1 if isinstance(error, db.Locked) else 0
                with self._lock:
                    if error is not None and self._watch():
                        log.warning("table_set_aside", table=self._names[table], error=str(error))
                        self._aside[table] = error
        except StoreUnavailable as exc:
            self.note(exc)

    def _fault(self, table: int) -> Trouble | None:
        """Return why a table cannot be used. Raises StoreUnavailable if it could not be asked."""
        # It touches no row: no task has the id 0.
        write = Statement(f"UPDATE {self._names[table]} SET version=version WHERE job_id=0")
        try:
            self._server.run([write], outwait=False)
        except OF_TABLES as exc:
            return exc
        return None

    def close(self) -> None:
        """Stop asking."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)
        with self._lock:
            self._closed = threading.Event()  # a thread that is still at work keeps the one that is set
            self.away, self._aside = None, {}  # without the thread that asks nothing would take them away

    # --- the thread that asks what is marked

    def _watch(self) -> bool:
        """Have the thread ask. Returns whether there is one: without it nothing would take a mark away."""
        if self._thread is None:
            watch = partial(self._attend, self._closed)
            thread = threading.Thread(target=watch, name="toc-store-health", daemon=True)
            with suppress(RuntimeError):  # the system allows no more
                thread.start()
                self._thread = thread
        return self._thread is not None

    def _attend(self, closed: threading.Event) -> None:
        while not closed.wait(AGAIN_SECONDS):
            if self.away is not None:
                self._ask_server(closed)
            elif self._aside:
                self._ask_tables(closed)
            with self._lock:
                if not closed.is_set() and self.away is None and not self._aside:
                    self._thread = None
                    return

    def _ask_server(self, closed: threading.Event) -> None:
        try:
            began = time.monotonic()
            alive = self._server.begin([ALIVE])
            if alive is None:
                self._server.ask_apart(MAX_PATIENCE_SECONDS)
                if not closed.is_set():
                    self._server.open_one()  # this may take longer than ``examine`` waits
            else:
                self._server.results(alive)
                self.answered(time.monotonic() - began)
        except StoreUnavailable as exc:
            with self._lock:
                if not closed.is_set():  # nothing would take the mark away again
                    self.away = exc
            return
        if not closed.is_set():
            self.back()

    def _ask_tables(self, closed: threading.Event) -> None:
        aside = self._aside
        for table in list(aside):
            try:
                fault = self._fault(table)
            except StoreUnavailable as exc:
                if not closed.is_set():
                    self.note(exc)
                return
            if closed.is_set():
                return
            if fault is None:
                del aside[table]
                log.info("table_back", table=self._names[table])
