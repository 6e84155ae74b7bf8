"""Works off the backlog of a paused topic at a limited rate: ``toc topic resume --rate``.

The limit holds for tasks that were due before the topic was resumed; later ones of a slot wait behind them.
Each worker takes a share in proportion to the topic's slots that it owns, so all together keep the rate
without coordination. Once the first score of a slot is later than the resume, its backlog is gone, and the
slot is served normally. Used by the poller's thread alone.
"""

from __future__ import annotations

from toc.model.clock import Clock
from toc.model.topic import Slot, Topic
from toc.worker.slots import OwnedSlot

PACE_MS = 20
"""How often entries are taken: each time from the one slot that holds the oldest."""
MAX_WAIT_MS = 1000
BURST_SECONDS = 0.1
"""Capacity that was not used is kept for at most this long."""


class ResumeRate:
    """How much of each backlog may be taken now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.topics: dict[str, Backlog] = {}
        """The topics that were resumed at a rate."""

    def admit(
        self, topic: Topic, members: list[OwnedSlot], room: int, owned: int
    ) -> tuple[list[OwnedSlot], int, list[OwnedSlot], int]:
        """The due slots to take from, their entry limit in all, the slots that wait, and for how many ms.

        ``owned`` is how many slots of the topic this worker owns.
        """
        backlog = self.topics.get(topic.name)
        if backlog is None or backlog.resumed_at != topic.resumed_at:
            backlog = self.topics[topic.name] = Backlog(topic.resumed_at, self._clock.monotonic())
        limited = [member for member in members if member.slot not in backlog.through]
        if not limited:
            return members, room, [], 0
        rate = topic.resume_rate * owned / topic.slot_amount
        tokens = backlog.refill(rate, self._clock.monotonic())
        free = [member for member in members if member.slot in backlog.through]
        if tokens < 1:
            return free, room, limited, min(max(PACE_MS, round((1 - tokens) / rate * 1000)), MAX_WAIT_MS)
        first = min(limited, key=lambda member: backlog.oldest.get(member.slot, 0.0))
        waiting = [member for member in limited if member is not first]
        return [first, *free], min(room, int(tokens)), waiting, PACE_MS

    def took(self, slot: Slot, count: int, next_due: float | None) -> None:
        """Record that ``count`` entries were taken from the slot, and when its next one is due (ms)."""
        backlog = self.topics[slot.topic]
        if slot not in backlog.through:
            backlog.tokens -= count
            if next_due is None or next_due >= backlog.resumed_at:
                backlog.through.add(slot)
            else:
                backlog.oldest[slot] = next_due


class Backlog:
    """What a topic may still take of what was due before it was resumed, at ``resumed_at`` (ms)."""

    def __init__(self, resumed_at: int, now: float) -> None:
        self.resumed_at = resumed_at
        self.through: set[Slot] = set()
        """Slots that hold no backlog any more."""
        self.oldest: dict[Slot, float] = {}
        self.tokens = 0.0
        self._filled_at = now

    def refill(self, rate: float, now: float) -> float:
        """Return how many may be taken now, at ``rate`` tasks a second."""
        self.tokens = min(self.tokens + (now - self._filled_at) * rate, max(1.0, rate * BURST_SECONDS))
        self._filled_at = now
        return self.tokens
