"""How fast the backlog of a topic is taken that was paused: ``toc topic resume --rate``."""

import threading
from collections.abc import Iterable

from toc.model.clock import Clock
from toc.model.topic import Slot, Topic

PACE_MS = 20
"""How often tasks of a backlog are taken, the oldest first."""
BURST_SECONDS = 0.1
"""Capacity that was not used is kept for at most this long."""


class ResumeRate:
    """How much of the backlog of each topic may be taken now that was paused: ``toc topic resume --rate``.
    Thread-safe.

    The limit holds for tasks that were due before the topic was resumed; later ones of a slot wait behind
    them. Each worker takes a share in proportion to the topic's slots that it owns, so all together keep the
    rate without coordination.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens: dict[str, tuple[int, float, float]] = {}
        """By topic: when it was resumed (ms), how many tasks may be taken, and as of when (monotonic)."""

    def tokens(self, topic: Topic, slots: Iterable[Slot]) -> int:
        """Return how many may be taken now by who owns these slots, also of other topics."""
        owned = sum(slot.topic == topic.name for slot in slots)
        now, rate = self._clock.monotonic(), topic.resume_rate * owned / topic.slot_amount
        with self._lock:
            resumed_at, tokens, filled_at = self._tokens.get(topic.name, (0, 0.0, now))
            if resumed_at != topic.resumed_at:
                tokens, filled_at = 0.0, now
            tokens = min(tokens + (now - filled_at) * rate, max(1.0, rate * BURST_SECONDS))
            self._tokens[topic.name] = topic.resumed_at, tokens, now
        return int(tokens)

    def took(self, topic: Topic, count: int) -> None:
        """Record that so many were taken."""
        with self._lock:
            resumed_at, tokens, filled_at = self._tokens[topic.name]
            self._tokens[topic.name] = resumed_at, tokens - count, filled_at
