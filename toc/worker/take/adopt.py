"""Adopt: finds PrepareQueue entries under our claim that this process does not hold, and checks
them.

These are entries that a prepare took whose reply was lost, or whose id was just being moved. Left alone they
would time out, which costs a try.

The loop has its own thread, because it waits for a node that is slow to answer, as a heartbeat does. A round
of the poller must not.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from toc.index.messages import ExpiredRequest
from toc.loop import Loop
from toc.model.errors import IndexUnavailable
from toc.model.scores import fence_of, split
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.worker.check import Checker
from toc.worker.entry import Entry, Held
from toc.worker.settle.finish import Finisher
from toc.worker.tools import Tools

log = get_logger(__name__)

IDLE_SECONDS = 60.0
RETRY_SECONDS = 0.2
"""Pause before a node is asked again that failed or was slow."""
NO_TIMEOUT = 10**9
"""Seconds. No entry is that old, so only those under the claim are listed."""
MOVING_SECONDS = 0.05
"""When to look for an entry that was not held because the previous try was still being moved."""
AFTER_LOST_SECONDS = (0.0, 1.0, 4.0)
"""When to look for entries of a lost prepare reply: at once, and again in case Redis served it late."""


@dataclass(eq=False)
class Adopter:
    """The loop that finds entries that are not held. The poller also uses ``hold`` and ``ours``."""

    tools: Tools
    finisher: Finisher
    checker: Checker

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._looks: list[tuple[float, Slot, int]] = []
        """(When (monotonic), slot, claim): where entries of ours may exist that are not held."""
        self.loop = Loop("adopt", self.run_once)

    @property
    def settled(self) -> bool:
        """Whether every entry that was found has been handled."""
        return not self.loop.at_work

    @property
    def sought(self) -> set[Slot]:
        """The slots in which entries of ours may exist that are not held."""
        with self._lock:
            return {slot for _, slot, _ in self._looks}

    def reply_lost(self, slot: Slot, claim: int) -> None:
        """Look for what a prepare of this slot has taken under this claim number."""
        for delay in AFTER_LOST_SECONDS:
            self._look_in(delay, slot, claim)

    def hold(self, slot: Slot, entries: Iterable[tuple[int, float]], taken: int, kept: float) -> list[Entry]:
        """Hold entries given as (job_id, fence), known to exist since ``kept``. Returns those to check."""
        topic = self.tools.catalog.known().get(slot.topic)
        if topic is None:  # removed meanwhile: they time out, and remain if it comes back
            return []
        handler = self.tools.handlers[topic.name]
        held: list[Entry] = []
        for job_id, fence in entries:
            entry = Entry(job_id, slot, fence, topic, handler, taken, held=kept, kept=kept)
            what = self.tools.inflight.hold(entry)
            if what is Held.NEW:
                held.append(entry)
            elif what is Held.MOVING:
                self._look_in(MOVING_SECONDS, slot, split(fence).claim)
            # RUNNING: timed out while this process was paused. It runs on under the new fencing token; its
            # late failure will find another (attempts, crashes) on the row.
        return held

    def ours(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return those to check of entries under our claim. Those in slots that we no longer own go back:
        otherwise they would time out, which costs a try."""
        owned = {} if self.tools.book.leaving else self.tools.book.owned
        if all(entry.slot in owned for entry in entries):
            return list(entries)
        self.finisher.give_back_unread(entry for entry in entries if entry.slot not in owned)
        return [entry for entry in entries if entry.slot in owned]

    def run_once(self) -> float:
        """Look for entries that are due to be sought. Returns the seconds until the next call."""
        now = self.tools.clock.monotonic()
        claims: dict[Slot, set[int]] = {}
        with self._lock:
            due = [look for look in self._looks if look[0] <= now]
            self._looks = [look for look in self._looks if look[0] > now]
        for _, slot, claim in due:
            claims.setdefault(slot, set()).add(claim)
        if claims:
            self._adopt(claims)
        with self._lock:
            first = min([at for at, *_ in self._looks], default=now + IDLE_SECONDS)
        return max(first - self.tools.clock.monotonic(), 0.0)

    def _look_in(self, seconds: float, slot: Slot, claim: int) -> None:
        with self._lock:
            self._looks.append((self.tools.clock.monotonic() + seconds, slot, claim))
        self.loop.wake()

    def _look_again(self, slot: Slot, claims: Mapping[Slot, set[int]]) -> None:
        for claim in claims[slot]:
            self._look_in(RETRY_SECONDS, slot, claim)

    def _adopt(self, claims: Mapping[Slot, set[int]]) -> None:
        """Hold the entries under these claim numbers that nobody holds and that are still prepared. Then
        check them or give them back.

        Each gets a heartbeat first, since it may be old.
        """
        now, kept, held_now = self.tools.clock.now_ms(), self.tools.clock.monotonic(), self.tools.inflight.get
        wanted = [ExpiredRequest(slot, NO_TIMEOUT, sorted(numbers)) for slot, numbers in claims.items()]
        held: dict[Slot, list[Entry]] = {}
        for slot, result in self.tools.queues.expired(wanted).items():
            if isinstance(result, IndexUnavailable):
                self._look_again(slot, claims)
                continue
            free = [(job_id, fence_of(score)) for job_id, score in result if held_now(job_id) is None]
            # Hold an entry before checking that it still exists, not after. If a prepare takes the
            # id meanwhile, the poller's entry replaces this one. If the entry is moved away
            # meanwhile, its token does not match.
            if entries := self.hold(slot, free, now, kept):
                held[slot] = entries
        asked = {slot: [(entry.job_id, entry.fence) for entry in some] for slot, some in held.items()}
        adopted: list[Entry] = []
        for slot, matched in self.tools.queues.extend(asked).items():  # [rule: adopted-alive]
            some = held[slot]
            if isinstance(matched, IndexUnavailable):
                self._look_again(slot, claims)
                matched = [False] * len(some)
            self.tools.inflight.drop(entry for entry, match in zip(some, matched, strict=True) if not match)
            adopted += [entry for entry, match in zip(some, matched, strict=True) if match]
        if adopted:
            log.info("entries_adopted", tasks=len(adopted))
            self.checker.check(self.ours(adopted))
