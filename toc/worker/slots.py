"""The slots that a worker consumes, with its claim numbers."""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil

from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger

log = get_logger(__name__)

NEVER = 2**62
"""The due time of a slot in which nothing is known to be due."""


@dataclass(eq=False, slots=True)
class OwnedSlot:
    """A slot that this worker owns."""

    slot: Slot
    claim: int
    """The number that its PrepareQueue entries carry."""
    others: dict[int, str]
    """The numbers that other workers hold or held."""
    due: int = NEVER
    """When its first entry is due, as far as known (ms)."""
    look: int = NEVER
    """When the poller looks at it next (ms, this machine's clock)."""
    left: int = 0
    """How many due entries the last prepare left there."""
    buried: int = 0
    """The size of its DeadQueue at the last peek."""
    empty_since: float | None = None
    """Since when peeks have found nothing prepared there (monotonic); None if the last one did."""


class SlotTurns:
    """Slots in turn: a part of them every ``pace`` seconds, ``least`` or more, so that each has its turn once
    in a period."""

    def __init__(self, pace: float, least: int = 0) -> None:
        self._pace, self._least = pace, least
        self._left: deque[Slot] = deque()
        """Those that have not had their turn in this round."""
        self._began = float("-inf")

    def part(self, slots: Collection[Slot], now: float, period: float, *, at_once: bool) -> list[Slot]:
        """Return the next ones; ``at_once``: all of them, which begins a new round."""
        if at_once:
            self._left.clear()
        if not self._left and (at_once or now - self._began >= period):
            self._began = now
            self._left.extend(slots)
        count = len(slots) if at_once else max(self._least, ceil(len(slots) * self._pace / period))
        part = [self._left.popleft() for _ in range(min(count, len(self._left)))]
        return [slot for slot in part if slot in slots]


class SlotBook:
    """The slots that this worker was told to consume, and those that it has claimed. Thread-safe."""

    def __init__(self, queues: Queues, worker_id: str) -> None:
        self._queues = queues
        self.worker_id = worker_id
        self._lock = threading.Lock()
        self.wanted: dict[Slot, float] = {}
        """What we were told to consume, and since when (monotonic). Replaced, never changed in place."""
        self.handed: frozenset[Slot] = frozenset()
        """Those of them that a former owner had not released when they were to be ours."""
        self.owned: dict[Slot, OwnedSlot] = {}
        """Replaced, never changed in place: readers may iterate over it."""
        self.dead: frozenset[str] = frozenset()
        """Workers known to be dead: entries with their numbers are not running."""
        self.alive: frozenset[str] = frozenset()
        """Workers known to be alive: they keep their numbers."""
        self.leaving = False
        """Whether this worker takes nothing more."""

    def leave(self) -> None:
        """Take nothing more. What was taken and is not decided yet is left to the slots' next owners."""
        self.leaving = True

    def want(self, slots: Iterable[Slot], now: float = 0.0, handed: Iterable[Slot] = ()) -> None:
        """Claim these slots from now on; ``handed`` had to be released first. ``now`` is monotonic."""
        new = dict.fromkeys(slots, now)
        with self._lock:
            self.handed = self.handed.difference(new).union(handed)
            self.wanted = new | self.wanted

    def give_up(self, slots: Iterable[Slot]) -> set[Slot]:
        """Forget slots. Returns those that were claimed."""
        gone = set(slots)
        with self._lock:
            self.wanted = {slot: since for slot, since in self.wanted.items() if slot not in gone}
            dropped = self.owned.keys() & gone
            self.owned = {slot: owned for slot, owned in self.owned.items() if slot not in gone}
        return dropped

    def buried(self) -> dict[Slot, int]:
        """The size of each slot's DeadQueue at its last peek."""
        return {slot: owned.buried for slot, owned in self.owned.items()}

    @property
    def incomplete(self) -> bool:
        """Whether some wanted slot has no claim yet. Without an index there are none to draw."""
        return self._queues.present and len(self.wanted) > len(self.owned)

    def claim_missing(self) -> list[OwnedSlot]:
        """Draw claim numbers for wanted slots that have none. Returns the slots that are now owned."""
        missing = [slot for slot in self.wanted if slot not in self.owned]
        if not missing:
            return []
        fresh: list[OwnedSlot] = []
        failures: list[IndexUnavailable] = []
        for slot, result in self._queues.claim(missing, self.worker_id).items():
            if isinstance(result, IndexUnavailable):
                failures.append(result)
            else:
                fresh.append(OwnedSlot(slot, result.number, dict(result.others)))
        if failures:
            log.warning("slots_not_claimed", slots=len(failures), error=str(failures[0]))
        with self._lock:
            fresh = [owned for owned in fresh if owned.slot in self.wanted]
            self.owned = self.owned | {owned.slot: owned for owned in fresh}
        return fresh

    def renew(self, slots: Iterable[Slot]) -> None:
        """Claim these slots again, as the index may have lost their numbers."""
        for slot, result in self._queues.claim(slots, self.worker_id).items():
            one = self.owned.get(slot)
            if one is not None and not isinstance(result, IndexUnavailable):
                one.claim, one.others, one.empty_since = result.number, dict(result.others), None
