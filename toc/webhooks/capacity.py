"""What one process may send to one target, and what it sends: requests in flight, a rate, and the breaker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from toc.webhooks.breaker import Breaker

PATIENCE_SECONDS = 0.25
"""Longest wait in memory for a target that has requests of this process and answers none."""
MAX_PATIENCE_SECONDS = 2.0
"""Longest wait in memory otherwise."""
MOVES_SECONDS = 0.1
"""After this time without an answer, a waiting task counts as waiting for its target, not for this
process."""
MAX_QUEUED = 500
"""How many tasks may wait for a target that answers."""
FIRST_QUEUED = 64
"""How many may wait for another target, beyond those that it may have in flight."""
FIRST_GUESS_SECONDS = 0.05
"""How long a request is assumed to take, until one has ended."""
BURST_SECONDS = 0.1
"""A target with a rate may get this many seconds' worth of requests at one instant."""


class Full(Exception):
    """Nothing is free for ``seconds``, or longer. ``reason``: ``breaker``, ``rate`` or ``concurrency``.

    ``each``: seconds after which one more task can be sent, about, as long as others wait.
    """

    def __init__(self, seconds: float, reason: str, each: float) -> None:
        super().__init__(reason)
        self.seconds = seconds
        self.reason = reason
        self.each = each


@dataclass(eq=False, slots=True)
class Waiter:
    """A task that waits for a place ``since`` then, ``until`` then at most: whether it got one."""

    admitted: asyncio.Future[bool]
    since: float
    until: float


@dataclass(eq=False, slots=True)
class Capacity:
    """What this process may send to one target, and what it sends. Times are those of the event loop."""

    name: str
    limit: int
    rate: float
    """Requests a second; 0: no limit."""
    breaker: Breaker = field(default_factory=Breaker)
    in_flight: int = 0
    """Requests in flight."""
    granted: int = 0
    """Places that Redis lets this process use; while Redis is away, its part of the limit."""
    granted_until: float = 0.0
    """Until when Redis lets it."""
    tokens: float = 0.0
    """Requests that may begin, if there is a rate."""
    away: bool = False
    """Whether the Redis node that shares its limits is away."""
    refilled: float = 0.0
    """When tokens were last made here, while Redis is away."""
    holders: int = 1
    """Processes that send to the target, by the last answer of Redis."""
    wanted: int = 0
    """How many places it asked for last."""
    ask_at: float = 0.0
    """Before this time Redis is not asked for more."""
    renew_at: float = 0.0
    """When its share is asked for again in any case."""
    queue: list[Waiter] = field(default_factory=list)
    used: float = 0.0
    """When a task last asked for a place."""
    moved: float = float("-inf")
    """When a request was last answered, or the first of those in flight began."""
    seconds: float = FIRST_GUESS_SECONDS
    """Moving average of how long a request takes."""

    def moves(self, now: float) -> bool:
        """Whether waiting tasks will be sent in a moment."""
        return now - self.moved < MOVES_SECONDS and not self.breaker.blocked(now)

    def longest(self, now: float) -> int:
        """How many tasks may wait here."""
        return MAX_QUEUED if self.moves(now) else min(FIRST_QUEUED + self.limit, MAX_QUEUED)

    @property
    def burst(self) -> float:
        """How many requests may begin at one instant, if there is a rate; else 0."""
        return max(self.rate * BURST_SECONDS, 1.0) if self.rate else 0.0

    def full(self, now: float) -> Full:
        """Return why nothing is free."""
        pace = max(self.seconds, now - self.moved) if self.in_flight else self.seconds
        each = pace / max(self.granted, self.limit // self.holders, 1)
        if (closed := self.breaker.blocked(now)) > 0:
            return Full(closed, "breaker", each)
        if self.rate and self.in_flight < self.granted:
            return Full(0.0, "rate", self.holders / self.rate)
        return Full(0.0, "concurrency", each)

    def end_waits(self, now: float) -> None:
        """End the waits that have been long enough."""
        patience = PATIENCE_SECONDS if self.in_flight and not self.moves(now) else MAX_PATIENCE_SECONDS
        for waiter in self.queue:
            if now >= min(waiter.since + patience, waiter.until) and not waiter.admitted.done():
                waiter.admitted.set_result(False)
        self.queue = [waiter for waiter in self.queue if not waiter.admitted.done()]
