"""What one process may send to one target, and what it sends: requests in flight, a rate, and the breaker."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

from toc.webhooks.breaker import Breaker

PATIENCE_SECONDS = 0.25
"""Longest wait in memory, unless the target answers others meanwhile, or has capacity that this process is
about to get: its part is yet to come from Redis, or from a process that does not use it."""
MOVES_SECONDS = 0.1
"""After this time without an answer, a waiting task counts as waiting for its target, not for this
process."""
FIRST_GUESS_SECONDS = 0.05
"""How long a request is assumed to take, until one has ended."""
MIN_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 30.0
MAX_LOOKS = 100.0
"""How many postponed tasks of one target come back in a second, in one process, when many wait."""
MAX_QUEUED = 500
FIRST_QUEUED = 64
"""How many may wait for a target that has never answered here, beyond those that it may have in flight."""
BURST_SECONDS = 0.1
"""A target with a rate may get this many seconds' worth of requests at one instant."""


class Full(Exception):
    """Nothing is free for ``seconds``. ``reason``: ``breaker``, ``rate`` or ``concurrency``."""

    def __init__(self, seconds: float, reason: str) -> None:
        super().__init__(reason)
        self.seconds = seconds
        self.reason = reason


@dataclass(eq=False, slots=True)
class Waiter:
    """A task that waits for a place: whether it got one, when that is checked, and until when it waits."""

    admitted: asyncio.Future[bool]
    look_at: float
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
    met: bool = False
    """Whether Redis granted all of them."""
    ask_at: float = 0.0
    """Before this time Redis is not asked for more, unless it granted all that was asked for and that is in
    use."""
    asks_later: bool = False
    """Whether a timer is set to ask again."""
    queue: deque[Waiter] = field(default_factory=deque)
    looks: bool = False
    """Whether a timer is set to check the waiting tasks."""
    seconds: float = FIRST_GUESS_SECONDS
    """Moving average of how long a request takes."""
    used: float = 0.0
    """When a task last asked for a place."""
    answered: bool = False
    """Whether any request to it was answered."""
    moved: float = 0.0
    """When a request was last answered, or the first of those in flight began."""
    last_return_at: float = 0.0
    """When the task that was postponed last comes back: the next one comes after it."""

    @property
    def scarce(self) -> bool:
        """Whether there is less than one place for each process. Then none is kept unused."""
        return self.limit < self.holders

    def lacks(self, now: float) -> bool:
        """Whether this process has less than its part of the limit, so that its tasks wait for places of
        other processes, or for Redis, and not for the target."""
        return not self.scarce and (now >= self.granted_until or self.granted < self.limit // self.holders)

    @property
    def share(self) -> int:
        """How many requests may soon be in flight here: this many are asked for as soon as tasks wait."""
        return max(self.granted, self.limit // self.holders, 1)

    def longest(self, now: float, lag: float) -> int:
        """How many tasks may wait here: as many as probably go within PATIENCE_SECONDS.

        At least one may: Redis is asked for the probe, or for requests at a rate, only for a task that waits.
        """
        most = MAX_QUEUED if self.answered else FIRST_QUEUED
        if not self.granted:
            return min(most + self.limit, MAX_QUEUED)
        often = self.share / self.pace(now, lag)
        if self.rate:
            often = min(often, self.rate / self.holders)
        return max(min(int(often * PATIENCE_SECONDS), most), 1)

    def pace(self, now: float, lag: float) -> float:
        """Estimated seconds that a request takes, also while none ends.

        ``lag``: how late the event loop is, in seconds. Answers that have come may not have been read.
        """
        return max(self.seconds, now - self.moved - 2 * lag) if self.in_flight else self.seconds

    def moves(self, now: float) -> bool:
        """Whether waiting tasks will be sent in a moment."""
        return now - self.moved < MOVES_SECONDS and not self.breaker.blocked(now)

    @property
    def burst(self) -> float:
        """How many requests may begin at one instant, if there is a rate; else 0."""
        return max(self.rate * BURST_SECONDS, 1.0) if self.rate else 0.0

    def postponed_for(self, now: float, closed: float, step: float, waiting: int) -> float:
        """Return for how many seconds a task is postponed: at least ``closed``, and ``step`` after the last.

        ``waiting``: how many tasks wait for the target.
        """
        most = max(MAX_WAIT_SECONDS, waiting / MAX_LOOKS, closed + 1.0)
        self.last_return_at = max(self.last_return_at, now + closed, now + MIN_WAIT_SECONDS) + step
        wait = self.last_return_at - now
        if wait <= most:
            return wait
        self.last_return_at = now + most
        return random.uniform(max(closed, most / 2), most)  # noqa: S311 - spreads load, guards nothing
