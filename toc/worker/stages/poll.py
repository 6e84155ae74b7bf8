"""Poll: from due StoreQueue entries to checked entries in the dispatcher.

The poller learns from its agenda when a slot is due next and sleeps exactly until then. One round trip per
node then takes the due entries of all slots (prepare), one round trip per server reads the rows, and the rows
decide what runs. It never asks Redis whether something is due: wake-up messages, or the slow peek of the
reclaimer, report entries that became due earlier.

With several Redis nodes, it does not wait for a slow one: late answers are handled in a later round.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from toc.failpoint import failpoint
from toc.index.calls import BySlot, IndexBroken, ReplyLost
from toc.index.connections import IndexSlow
from toc.index.messages import Prepared, PrepareRequest
from toc.index.queues import Queues
from toc.loop import Loop, Wake
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.observe.metrics import StepTimer
from toc.worker.slots import NEVER, OwnedSlot
from toc.worker.stages.adopt import Adopter
from toc.worker.stages.agenda import Agenda
from toc.worker.stages.check import Checker
from toc.worker.stages.early import EarlyEntries
from toc.worker.stages.entry import Entry
from toc.worker.stages.feedback import Inbox, Pressure

log = get_logger(__name__)

IDLE_SECONDS = 60.0
LONG_SLEEP_SECONDS = 0.004
STIR_SECONDS = 0.0003
"""How long before the due time a long sleep ends and a short one begins. A core in deep sleep takes 0.1 to
0.2 ms to wake up, and its caches are cold."""
RETRY_MS = 500
"""Pause before a slot is tried again whose node failed."""
SLOW_MS = 20
"""Pause before a slot is tried again whose node has not answered yet."""
PATIENCE_SECONDS = 0.03
"""How long a round waits for one Redis node while tasks of others may be due."""


@dataclass(kw_only=True, eq=False)
class Poller:
    """The loop that takes tasks. It alone prepares. Other threads report slots and due times to its inbox."""

    queues: Queues
    clock: Clock
    agenda: Agenda
    checker: Checker
    adopter: Adopter
    early: EarlyEntries
    inbox: Inbox
    pressure: Pressure
    wake: Wake

    def __post_init__(self) -> None:
        self._queues = self.queues.within(PATIENCE_SECONDS)
        self._lock = threading.Lock()
        self._late: list[tuple[_Asked, BySlot[Prepared], float]] = []
        """Answers that came after their round, with the seconds they took."""
        self._awaited = 0
        """How many slots have yet to be answered."""
        self._taking = True
        self._between = threading.Lock()
        self._prepare_step = StepTimer("prepare")
        self.loop = Loop("poll", self.run_once, self.wake)

    @property
    def settled(self) -> bool:
        """Whether no prepare is under way: what was taken is held."""
        return not self._between.locked() and not self._awaited

    def pause_taking(self) -> None:
        """Take nothing more. Returns when the current round has ended."""
        self._taking = False
        self.adopter.pause_taking()
        self.checker.leave()
        with self._between:
            pass
        self.loop.wake()

    # --- one round

    def run_once(self) -> float:
        """Take the due entries that can start. Returns the seconds until the next are due."""
        with self._between:
            now = self.clock.now_ms()
            self.agenda.hear(self.inbox.take_due())
            self.checker.start(self.early.release(now))
            self._hear_late()
            self.checker.check_again()
            if not self._taking:
                return self._until_next(now)
            requests = self.agenda.choose(now)
            if requests and not self._take(requests) and self.pressure.backlogged:
                # Nothing was started that could make room later: begin the next round at once.
                return 0.0
            return self._until_next(self.clock.now_ms())

    def _until_next(self, now: int) -> float:
        if self._late or not self.inbox.empty:
            return 0.0
        due = self.agenda.next_due() if self._taking else NEVER
        due = min(due, self.checker.next_again(), self.early.next_due())
        if due <= now:
            return 0.0
        # Computed from the exact clock, because ``now`` was rounded down: the sleep ends when the
        # due millisecond begins, or just after.
        wait = due / 1000 - self.clock.time()
        if wait > LONG_SLEEP_SECONDS:
            wait -= STIR_SECONDS
        return min(max(wait, 0.0), IDLE_SECONDS)

    # --- take

    def _take(self, requests: list[tuple[OwnedSlot, PrepareRequest]]) -> int:
        """Prepare, check, dispatch. Returns how many entries were taken."""
        before = self.clock.monotonic()
        asked = _Asked(before, {owned.slot: owned for owned, _ in requests})
        results = self._queues.prepare(
            [request for _, request in requests], lambda answers: self._answered_late(asked, answers)
        )
        if late := len(asked.slots) - len(results):  # a slot may have been asked for twice
            with self._lock:
                self._awaited += late
        prepared = self.clock.monotonic() - before
        taken = self._accept(asked, results)
        if taken:
            failpoint("poll.taken")
            self.checker.check_taken(taken)
        self._prepare_step.took(prepared, len(taken))  # after due entries were dispatched
        return len(taken)

    def _accept(self, asked: _Asked, results: Mapping[Slot, Prepared | IndexUnavailable]) -> list[Entry]:
        """Hold the entries that were taken. Returns those to check."""
        taken: list[Entry] = []
        failures: list[IndexUnavailable] = []
        now = self.clock.now_ms()
        for slot, result in results.items():
            owned = asked.slots[slot]
            if isinstance(result, IndexUnavailable):
                if isinstance(result, IndexSlow):
                    self.agenda.look(owned, now + SLOW_MS)
                    continue
                if not isinstance(result, IndexBroken):  # the watch reports these, once
                    failures.append(result)
                self.agenda.look(owned, now + RETRY_MS)
                if isinstance(result, ReplyLost):
                    self.adopter.reply_lost(slot, owned.claim)
                continue
            taken += self.adopter.hold(slot, result.entries, result.redis_now_ms, asked.at)
            self.agenda.note_prepared(owned, result, now)
        if failures:
            log.warning("prepare_failed", slots=len(failures), error=str(failures[0]))
        return taken

    def _answered_late(self, asked: _Asked, answers: BySlot[Prepared]) -> None:
        """Queue the late answer, or failure, of a node."""
        seconds = self.clock.monotonic() - asked.at
        with self._lock:
            self._late.append((asked, answers, seconds))
        self.loop.wake()

    def _hear_late(self) -> None:
        """Accept the late answers of nodes."""
        if not self._late:
            return
        with self._lock:
            late, self._late = self._late, []
        for asked, answers, seconds in late:
            taken = self._accept(asked, answers)
            self.adopter.take_over(taken)
            self._prepare_step.took(seconds, len(taken))
            with self._lock:
                self._awaited -= len(answers)  # only now: its entries are held, or on their way back


class _Asked(NamedTuple):
    """A prepare that was sent: ``at`` is the monotonic time from before it, ``slots`` the slots asked for."""

    at: float
    slots: dict[Slot, OwnedSlot]
