"""Limits the requests to each target: how many may be in flight, how many per second, and its breaker.

A task for which none is free waits for a moment at most, or while its target answers other requests quickly.
Then it is postponed: it goes back to its row. So it takes no place from tasks of other targets, and its wait
uses up no try. ``waiting_remotely`` says how many tasks wait for targets. Beyond these the process takes few
tasks ahead: in a burst most tasks stay in Redis until they can be sent, and are not postponed at all.

The limits hold over all processes. A process asks Redis for a share of what a target allows
(``permits.lua``), and keeps it while it sends. It needs no further call for a request, unless the target has
a rate. What a process had that has ended, lapses. While Redis is away, each process has an equal part: the
limit divided by the number of processes that sent to the target before, or of those of its host if these are
more; at least 1. The breaker is each process's own.

Redis is asked while tasks wait, AGAIN_SECONDS apart, or at once if it granted all that was wanted. A share in
use is renewed each RENEW_SECONDS; what is used no more goes to others then.

Everything here runs on the event loop, except the calls to Redis, which have their own thread.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from toc.index.messages import PermitRequest, Permits
from toc.model.errors import IndexUnavailable
from toc.observe.log import get_logger
from toc.store.servers.threads import Threads
from toc.webhooks.breaker import Breaker

log = get_logger(__name__)

LIFE_SECONDS = 3.0
"""For how long a share is granted. After this time that of a process that has ended goes to others."""
RENEW_SECONDS = 0.25
IDLE_SECONDS = 5.0
"""After this time without a request a process gives its share up."""
FORGET_SECONDS = 600.0
"""After this time without a task a target's capacity, with its breaker, is forgotten."""
AGAIN_SECONDS = 0.05
"""Pause before more is asked for than was granted."""
SLACK = 8
"""How many places a process asks for beyond twice those in use, so that it need not ask for each. But what it
does not use leaves some for another process, which would have to wait until the next renewal."""

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


PermitRequests = Mapping[str, PermitRequest]
PermitReplies = Mapping[str, Permits | IndexUnavailable]
RequestPermits = Callable[[PermitRequests], PermitReplies]


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


class Limiter:
    """Lets the requests of one process go, each within the capacity of its target.

    ``holder`` is the name of the process in Redis, ``members`` returns how many there are.
    """

    def __init__(self, ask: RequestPermits, holder: str, members: Callable[[], int]) -> None:
        self._ask_redis = ask
        self._holder = holder
        self._members = members
        self._capacities: OrderedDict[str, Capacity] = OrderedDict()
        """The longest unused first. There may be very many: each host of tasks' own URLs has one."""
        self._active: set[Capacity] = set()
        """Those that have a share, requests, or tasks that wait."""
        self._now = 0.0
        """When a task last came or went (loop time)."""
        self._timer: asyncio.Handle | None = None
        """Calls ``_turn`` at ``_turn_at``. (uvloop's handle does not tell when, if that is now.)"""
        self._turn_at = 0.0
        self._asking = False
        """Whether Redis is being asked."""
        self._away = False
        """Whether it was logged that Redis is away."""
        self._threads = Threads(1, "toc-permits")

    def of(self, name: str, limit: int, rate: float | None) -> Capacity:
        """Return the capacity of a target, with its present limits."""
        capacity = self._capacities.get(name)
        if capacity is None:
            capacity = self._capacities[name] = Capacity(name, limit, rate or 0.0)
        else:
            self._capacities.move_to_end(name)
        capacity.limit, capacity.rate = limit, rate or 0.0
        return capacity

    def waiting_remotely(self) -> int:
        """How many tasks wait for targets, and not for this process. Thread-safe."""
        now, active = self._now, list(self._active)
        return sum(one.in_flight + (0 if one.moves(now) else len(one.queue)) for one in active)

    async def enter(self, capacity: Capacity, patience: float = MAX_PATIENCE_SECONDS) -> None:
        """Take a place, for which ``leave`` must be called. Raises Full.

        ``patience``: how long the task may wait at most, in seconds.
        """
        loop = asyncio.get_running_loop()
        now = capacity.used = self._now = loop.time()
        self._active.add(capacity)
        if capacity.breaker.blocked(now) > 0:
            raise capacity.full(now)
        if not capacity.queue and self._take(capacity, now):
            return
        if len(capacity.queue) >= capacity.longest(now):
            raise capacity.full(now)
        waiter = Waiter(loop.create_future(), now, now + patience)
        capacity.queue.append(waiter)
        self._plan(now)  # after all that come at once
        try:
            admitted = await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.result():
                capacity.breaker.given_up(capacity.breaker.era)  # it may have been the probe
                self.leave(capacity)
            raise
        if not admitted:
            raise capacity.full(loop.time())

    def leave(self, capacity: Capacity, seconds: float | None = None) -> None:
        """Give a place back. ``seconds``: how long the request took, if it was not broken off."""
        capacity.in_flight -= 1
        now = self._now = asyncio.get_running_loop().time()
        if seconds is not None:
            capacity.seconds += (seconds - capacity.seconds) * 0.1
            capacity.moved = now
        if capacity.queue:
            self._admit(capacity, now)

    # --- places

    def _take(self, capacity: Capacity, now: float) -> bool:
        if capacity.away and capacity.granted:
            self._share(capacity, now)
        elif now >= capacity.granted_until:
            return False
        if capacity.in_flight >= min(capacity.granted, capacity.limit):
            return False
        if (capacity.rate and capacity.tokens < 1) or not capacity.breaker.begin(now):
            return False
        if capacity.rate:
            capacity.tokens -= 1
        if not capacity.in_flight:
            capacity.moved = now
        capacity.in_flight += 1
        return True

    def _admit(self, capacity: Capacity, now: float) -> None:
        """Let those in who wait, as far as places are free."""
        for number, waiter in enumerate(capacity.queue):
            if waiter.admitted.done():
                continue
            if not self._take(capacity, now):
                del capacity.queue[:number]
                return
            waiter.admitted.set_result(True)
        capacity.queue.clear()

    def _turn(self) -> None:
        """Ask Redis for what is needed; end waits that have been long enough."""
        self._timer = None
        now = self._now = asyncio.get_running_loop().time()
        for capacity in self._active:
            self._admit(capacity, now)  # while Redis is away, time alone frees places where there is a rate
            capacity.end_waits(now)
        if not self._asking:
            self._request_shares(now)
        self._active = {one for one in self._active if one.granted or one.in_flight or one.queue}
        while self._capacities:
            oldest = next(iter(self._capacities.values()))
            if now - oldest.used <= FORGET_SECONDS or oldest in self._active:
                break
            del self._capacities[oldest.name]
        if any(one.in_flight or one.queue for one in self._active):
            self._plan(now + AGAIN_SECONDS)
        elif self._active:
            self._plan(now + RENEW_SECONDS)

    def _plan(self, at: float) -> None:
        if self._timer is not None:
            if self._turn_at <= at:
                return
            self._timer.cancel()
        self._turn_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._turn)

    # --- shares

    def _parts(self, capacity: Capacity) -> int:
        """Among how many processes the limits are divided, as far as is known here."""
        return max(self._members(), capacity.holders, 1)

    def _share(self, capacity: Capacity, now: float) -> None:
        """Take this process's part of the limits, as Redis is away."""
        parts = self._parts(capacity)
        capacity.granted = max(capacity.limit // parts, 1)
        if capacity.rate:
            rate = capacity.rate / parts
            since = min(now - capacity.refilled, 60.0) if capacity.refilled else 0.0
            capacity.tokens = min(capacity.tokens + since * rate, max(rate * BURST_SECONDS, 1.0))
            capacity.refilled = now

    def _request_shares(self, now: float) -> None:
        """Ask for shares: for tasks that wait, or to renew them."""
        asked = [
            one
            for one in self._active
            if (one.queue and one.ask_at <= now and (one.granted < one.limit or one.rate))
            or (one.renew_at <= now and (one.queue or one.granted or one.in_flight))
        ]
        if not asked:
            return
        life, requests = int(LIFE_SECONDS * 1000), dict[str, PermitRequest]()
        for one in asked:
            using = one.in_flight + len(one.queue)
            idle = not using and now - one.used > IDLE_SECONDS
            spare = max(one.limit // (self._parts(one) + 1), 1)  # one more process finds as many
            ahead = min(2 * using + SLACK, max(spare, min(using + using // 4, one.limit - spare)))
            one.wanted = 0 if idle else min(max(using, ahead), one.limit)
            begin = max(len(one.queue) - int(one.tokens), 0) if one.rate else 0
            own = one.limit, one.in_flight, one.wanted, life, one.rate, one.burst, begin
            requests[one.name] = PermitRequest(self._holder, *own)
        self._asking = True
        call = self._threads.soon(lambda: self._ask_redis(requests))
        asyncio.wrap_future(call).add_done_callback(lambda done: self._answered(asked, done))

    def _answered(self, asked: Iterable[Capacity], done: asyncio.Future[PermitReplies]) -> None:
        self._asking = False
        if done.cancelled():
            return
        now = asyncio.get_running_loop().time()
        answers = done.result()  # raises nothing: the calls answer with errors
        self._active.update(asked)
        for one in asked:
            answer = answers[one.name]
            one.renew_at = one.ask_at = now + RENEW_SECONDS
            one.away = isinstance(answer, IndexUnavailable)
            if isinstance(answer, IndexUnavailable):
                if not self._away:
                    self._away = True
                    log.warning("webhook_limits_alone", error=str(answer), parts=max(self._members(), 1))
                one.granted = 0  # at rest it is let go, and asks first when it comes again
                if one.wanted or one.in_flight or one.queue:
                    self._share(one, now)
            else:
                more = answer.granted > one.granted or answer.begin > 0  # there may be more yet
                one.granted, one.holders, one.refilled = answer.granted, answer.holders, 0.0
                one.granted_until = now + LIFE_SECONDS - 1.0 if answer.granted else 0.0
                one.tokens = min(one.tokens + answer.begin, max(len(one.queue), 1))
                one.ask_at = now if more else now + max(AGAIN_SECONDS, answer.pause_ms / 1000)
            self._admit(one, now)
        if self._away and not any(one.away for one in self._active):
            self._away = False
            log.info("webhook_limits_shared")
        waiting = [one.ask_at for one in self._active if one.queue]
        self._plan(max(min(waiting, default=now + RENEW_SECONDS), now))
