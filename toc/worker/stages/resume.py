"""A backlog that is worked off at a limited rate, after its topic was paused: ``toc topic resume --rate``.

The limit holds for tasks that were due before the topic was resumed. Each worker takes as much of it as it
owns of the topic's slots, so that all together keep to it and nobody has to ask anybody. A slot in which
nothing so old is left is served as ever. Used by the poller's thread alone.
"""

from __future__ import annotations

from toc.model.clock import Clock
from toc.model.topic import Slot, Topic
from toc.worker.slots import OwnedSlot

PACE_MS = 20
"""How often something is taken: from one slot each time, the one that holds the oldest."""
MAX_WAIT_MS = 1000
BURST_SECONDS = 0.1
"""What was not started so long ago is not made up for."""


class ResumeRate:
    """How much of each backlog may be taken now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.topics: dict[str, _Backlog] = {}
        """Those that were resumed at a rate."""

    def admit(
        self, topic: Topic, members: list[OwnedSlot], room: int, owned: int
    ) -> tuple[list[OwnedSlot], int, list[OwnedSlot], int]:
        """Of due slots those to take from, how many entries in all, those that wait, and for how many ms.

        ``owned`` is how many slots of the topic this worker owns.
        """
        backlog = self.topics.get(topic.name)
        if backlog is None or backlog.resumed_at != topic.resumed_at:
            backlog = self.topics[topic.name] = _Backlog(topic.resumed_at, self._clock.monotonic())
        limited = [member for member in members if member.slot not in backlog.through]
        if not limited:
            return members, room, [], 0
        rate = topic.resume_rate * owned / topic.consumed
        tokens = backlog.refill(rate, self._clock.monotonic())
        free = [member for member in members if member.slot in backlog.through]
        if tokens < 1:
            return free, room, limited, min(max(PACE_MS, round((1 - tokens) / rate * 1000)), MAX_WAIT_MS)
        first = min(limited, key=lambda member: backlog.oldest.get(member.slot, 0.0))
        waiting = [member for member in limited if member is not first]
        return [first, *free], min(room, int(tokens)), waiting, PACE_MS

    def took(self, slot: Slot, count: int, next_due: float | None) -> None:
        """What came of it: how many entries, and when the next one is due there."""
        backlog = self.topics[slot.topic]
        if slot not in backlog.through:
            backlog.tokens -= count
            if next_due is None or next_due >= backlog.resumed_at:
                backlog.through.add(slot)
            else:
                backlog.oldest[slot] = next_due


class _Backlog:
    def __init__(self, resumed_at: int, now: float) -> None:
        self.resumed_at = resumed_at
        self.through: set[Slot] = set()
        """Slots that hold nothing so old any more."""
        self.oldest: dict[Slot, float] = {}
        self.tokens = 0.0
        self._filled_at = now

    def refill(self, rate: float, now: float) -> float:
        self.tokens = min(self.tokens + (now - self._filled_at) * rate, max(1.0, rate * BURST_SECONDS))
        self._filled_at = now
        return self.tokens
