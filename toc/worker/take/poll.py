"""Poll: from due StoreQueue entries to checked entries in the dispatcher.

The poller learns from its agenda when a slot is due next and sleeps exactly until then. One call per node
then takes the due entries of its slots (prepare), one query per database server reads the rows, and the rows
decide what runs. It never asks Redis whether something is due: wake-up messages, or the slow peek of the
reclaimer, report entries that became due earlier.

It waits for a server that was quick 10 ms at most. Otherwise it sleeps until something is due or an answer
has come: while one server is slow, it serves the others.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from toc.failpoint import failpoint
from toc.index.calls import IndexBroken, ReplyLost
from toc.index.takes import Takes
from toc.loop import Loop, Reactor
from toc.model.errors import IndexUnavailable
from toc.model.lateness import Cause
from toc.observe.log import get_logger
from toc.observe.metrics import STEP
from toc.worker.check import Checker
from toc.worker.entry import Entry
from toc.worker.slots import NEVER
from toc.worker.take.adopt import Adopter
from toc.worker.take.agenda import Agenda
from toc.worker.take.early import EarlyEntries
from toc.worker.take.feedback import Inbox
from toc.worker.tools import Tools

log = get_logger(__name__)

IDLE_SECONDS = 60.0
LONG_SLEEP_SECONDS = 0.004
STIR_SECONDS = 0.0003
"""How long before the due time a long sleep ends and a short one begins. A core in deep sleep takes 0.1 to
0.2 ms to wake up, and its caches are cold."""
RETRY_MS = 500
"""Pause before a slot is tried again whose node failed."""


@dataclass(kw_only=True, eq=False)
class Poller:
    """The loop that takes tasks. It alone prepares. Other threads report slots and due times to its inbox."""

    takes: Takes
    tools: Tools
    agenda: Agenda
    checker: Checker
    adopter: Adopter
    early: EarlyEntries
    inbox: Inbox
    reactor: Reactor

    def __post_init__(self) -> None:
        self._between = threading.Lock()
        self._seconds = STEP.of("prepare")
        self.loop = Loop("poll", self.run_once, self.reactor)

    @property
    def settled(self) -> bool:
        """Whether no prepare is under way: what was taken is held."""
        return not self._between.locked() and not self.takes.under_way

    def await_round(self) -> None:
        """Return when the current round has ended."""
        with self._between:
            pass
        self.loop.wake()

    # --- one round

    def run_once(self) -> float:
        """Hear what has been answered, and take the due entries that can start. Returns the seconds until the
        next are due."""
        with self._between:
            self.reactor.hear()
            self._accept()
            now = self.tools.clock.now_ms()
            if early := self.early.release(now):
                self.checker.start(early)
            self.agenda.hear(self.inbox.take_due())
            if not self.tools.book.leaving and (requests := self.agenda.choose(now)):
                self.takes.begin(requests)
                self._accept()
            answer_at = min(self.checker.run_once(), self.takes.give_up())
            return min(self._until_next(), max(answer_at - time.monotonic(), 0.0))

    def _until_next(self) -> float:
        if self.takes.answered or not self.inbox.empty:
            return 0.0
        due = NEVER if self.tools.book.leaving else self.agenda.next_due()
        due = min(due, self.early.next_due())
        # Computed from the exact clock: the sleep ends when the due millisecond begins, or just after.
        wait = due / 1000 - self.tools.clock.time()
        if wait > LONG_SLEEP_SECONDS:
            wait -= STIR_SECONDS
        return min(max(wait, 0.0), IDLE_SECONDS)

    # --- take

    def _accept(self) -> None:
        """Hold the entries that were taken, and have their rows read."""
        taken: list[Entry] = []
        failures: list[IndexUnavailable] = []
        answers = self.takes.answers()
        if not answers:
            return
        now, at = self.tools.clock.now_ms(), self.tools.clock.monotonic()
        seconds = 0.0
        for request, result, began in answers:
            owned = self.tools.book.owned.get(request.slot)
            if not isinstance(result, IndexUnavailable):
                seconds = time.monotonic() - began
                self.tools.late.slow(Cause.REDIS, request.slot, seconds, "taking it")
                taken += self.adopter.hold(request.slot, result.entries, result.redis_now_ms, at - seconds)
                if owned is not None:
                    self.agenda.note_prepared(owned, result, now)
                continue
            if isinstance(result, ReplyLost):
                self.adopter.reply_lost(request.slot, request.claim)
            if not isinstance(result, IndexBroken):  # the watch reports these, once
                failures.append(result)
                since = now - round((time.monotonic() - began) * 1000)
                self.tools.late.note(Cause.REDIS, request.slot, since, now + RETRY_MS, str(result))
            if owned is not None:
                self.agenda.look(owned, now + RETRY_MS)
        if failures:
            log.warning("prepare_failed", slots=len(failures), error=str(failures[0]))
        if taken:
            failpoint("poll.taken")
            self.checker.put(self.adopter.ours(taken))
        if seconds:
            self._seconds.observe_one(seconds)
