"""Limits the requests to each target: how many may be in flight, how many per second, and its breaker.

A task for which none is free waits for a moment at most, or while its target answers other requests quickly.
Then it is postponed: it goes back to its row. So it takes no place from tasks of other targets, and its wait
uses up no try. ``waiting_remotely`` says how many tasks wait for targets. Beyond these the process takes few
tasks ahead: in a burst most tasks stay in Redis until they can be sent, and are not postponed at all.

The limits and the breaker hold over all processes. A process asks Redis for a share of what a target allows
(``permits.lua``), and keeps it while it sends. It needs no further call for a request, unless the target has
a rate. A process that ends gives its share back. The same calls share the state of the breaker among the
processes. While Redis is away, each process has an equal part (the limit divided by the number of processes
that sent to the target before, or of those of its host if these are more; at least 1) and its own breaker.

A task is

    sent at once     if no task waits before it, and share, rate and breaker allow it
    postponed        if the breaker is open, or if as many tasks wait already as probably go within
                     PATIENCE_SECONDS
    made to wait     otherwise: PATIENCE_SECONDS, and longer while its target answers others, or while this
                     process has less than its part of the limit; MAX_PATIENCE_SECONDS at most

Redis is asked while tasks wait, when places above the share come free, and when the breaker changes;
AGAIN_SECONDS apart, or at once for more places if it had all that were wanted. A share in use is renewed each
RENEW_SECONDS. Redis grants the breaker's probe, and requests at a rate, only for a task that waits: so one
task may always wait.

Everything here runs on the event loop, except the calls to Redis, which have their own thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from toc.index.messages import PermitRequest, Permits
from toc.model.errors import IndexUnavailable
from toc.observe.log import get_logger
from toc.webhooks.breaker import BreakerState
from toc.webhooks.capacity import BURST_SECONDS, MOVES_SECONDS, PATIENCE_SECONDS, Capacity, Full, Waiter

log = get_logger(__name__)

MAX_PATIENCE_SECONDS = 2.0
"""Longest wait in memory if the target answers others meanwhile, or has capacity that this process is about
to get: see PATIENCE_SECONDS."""
LOOK_SECONDS = 0.02
"""How often the lateness of the event loop is measured, while requests are in flight."""
LIFE_SECONDS = 6.0
"""For how long a share is granted. After this time the share of a process that died goes to others."""
LIFE_MS = int(LIFE_SECONDS * 1000)
GIVE_UP_SECONDS = 1.0
"""How long a process that ends waits for Redis to take its shares back."""
RENEW_SECONDS = 1.5
IDLE_SECONDS = 5.0
"""After this time without a request a process gives its share up."""
FORGET_SECONDS = 600.0
"""After this time without a task a target's capacity, with its breaker, is forgotten."""
AGAIN_SECONDS = 0.05
"""Pause before more is asked for than was granted."""
SLACK = 8
"""The least that a process asks for, so that a burst need not wait for more. It never asks for so much that
nothing is left for another process, which would have to wait until the next renewal."""

PermitRequests = Mapping[str, PermitRequest]
PermitReplies = Mapping[str, Permits | IndexUnavailable]
RequestPermits = Callable[[PermitRequests], PermitReplies]


class Limiter:
    """Lets the requests of one process go, each within the capacity of its target.

    ``holder`` is the name of the process in Redis, ``members`` how many processes its host has.
    """

    def __init__(self, ask: RequestPermits, holder: str, members: Callable[[], int]) -> None:
        self._ask_redis = ask
        self._holder = holder
        self._members = members
        self._capacities: dict[str, Capacity] = {}
        self._queued: set[Capacity] = set()
        """Capacities for which tasks wait."""
        self._in_flight = 0
        """Requests in flight, over all targets."""
        self._now = 0.0
        """When a task last came or went (loop time). It stands still while the event loop is held up."""
        self._lag = 0.0
        """Moving average of how late the event loop is, in seconds. A request that is slow because this
        process is busy says nothing about its target, and postponing tasks would make the process busier."""
        self._measure_at = 0.0
        """When that is measured next; 0: nothing is in flight."""
        self._asking: dict[str, Capacity] = {}
        """Capacities of which a share will be asked for."""
        self._asked: Mapping[str, Capacity] = {}
        """Capacities of which a share is being asked for by a call under way."""
        self._ticking = False
        self._left = False
        """Whether its shares were given up for good."""
        self._away = False
        """Whether it was logged that Redis is away."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="toc-permits")

    def of(self, name: str, limit: int, rate: float | None) -> Capacity:
        """Return the capacity of a target, with its present limits."""
        capacity = self._capacities.get(name)
        if capacity is None:
            capacity = self._capacities[name] = Capacity(name, limit, rate or 0.0)
        capacity.limit, capacity.rate = limit, rate or 0.0
        return capacity

    def waiting_remotely(self) -> int:
        """How many tasks wait for targets, and not for this process. Thread-safe."""
        now = self._now
        return self._in_flight + sum(len(one.queue) for one in list(self._queued) if not one.moves(now))

    async def enter(self, capacity: Capacity, waiting: int, patience: float = MAX_PATIENCE_SECONDS) -> None:
        """Take a place, for which ``leave`` must be called. Raises Full.

        ``waiting``: how many wait. ``patience``: how long this one may at most, in seconds.
        """
        loop = asyncio.get_running_loop()
        now = self._now = capacity.used = loop.time()
        self._tick(loop)
        if (closed := capacity.breaker.blocked(now)) > 0:
            raise Full(capacity.postponed_for(now, closed, 0.002, waiting), "breaker")
        if not capacity.queue and self._take(capacity, now):
            return
        if len(capacity.queue) >= capacity.longest(now, self._late(now)):
            raise self._full(capacity, now, waiting)
        future: asyncio.Future[bool] = loop.create_future()
        most = min(patience, MAX_PATIENCE_SECONDS)
        waiter = Waiter(future, now + min(PATIENCE_SECONDS, most), now + most)
        capacity.queue.append(waiter)
        self._queued.add(capacity)
        self._want(capacity, now)
        if not capacity.looks:
            capacity.looks = True
            loop.call_at(waiter.look_at, self._check_waiting, capacity)
        try:
            admitted = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.judge(capacity, capacity.breaker.era, well=None)  # it may have been the probe
                self.leave(capacity)
            raise
        if not admitted:
            if waiter in capacity.queue:
                capacity.queue.remove(waiter)
            if not capacity.queue:
                self._queued.discard(capacity)
            raise self._full(capacity, loop.time(), waiting)

    def judge(self, capacity: Capacity, era: int, *, well: bool | None) -> bool:
        """Tell the breaker whether the target was ``well`` at a request that began in ``era``; None: the
        request was broken off. Returns whether this has opened the breaker."""
        breaker, opened = capacity.breaker, False
        if well is None:
            changed = breaker.given_up(era)
        elif well:
            changed = breaker.succeeded()
        else:
            changed = opened = breaker.failed(asyncio.get_running_loop().time(), era)
        if changed:
            self._request_share(capacity)  # the other processes learn of it
        return opened

    def leave(self, capacity: Capacity, seconds: float | None = None) -> None:
        """Give a place back. ``seconds``: how long the request took, if it ended."""
        more_than_its_share = capacity.in_flight > capacity.granted
        capacity.in_flight -= 1
        self._in_flight -= 1
        now = self._now = asyncio.get_running_loop().time()
        if seconds is not None:
            capacity.answered, capacity.moved = True, now
            capacity.seconds += (max(seconds - 2 * self._lag, 0.0005) - capacity.seconds) * 0.1
        if more_than_its_share or (capacity.scarce and not capacity.in_flight):
            self._want(capacity, now)  # others may have the place
        if capacity.queue:
            self._admit(capacity)
        elif capacity.in_flight < capacity.granted // 2:
            # Places are free: a task that is postponed now need not come back after earlier ones.
            capacity.last_return_at = 0.0
            idle = not capacity.in_flight and capacity.granted > 4 * SLACK
            if (idle or capacity.granted > self._spare(capacity)) and now >= capacity.ask_at:
                self._request_share(capacity)  # a burst is over: others need not wait for the renewal

    def give_up(self) -> None:
        """Leave its shares to other processes, and ask for nothing more. Blocks; any thread may call this."""
        self._left = True
        shares = {
            one.name: PermitRequest(self._holder, one.limit, one.in_flight, 0, LIFE_MS, one.rate, one.burst)
            for one in list(self._capacities.values())
            if one.name in self._asked or one.granted  # in the order opposite to that of _answered
        }
        if shares:
            call = self._executor.submit(self._ask_redis, shares)  # after what is being asked
            with suppress(FutureTimeout):
                call.result(GIVE_UP_SECONDS)

    def close(self) -> None:
        """End the thread that asks Redis."""
        self._executor.shutdown(wait=False)

    def open_breakers(self) -> Mapping[str, bool]:
        """By name, whether the breaker of each target is open."""
        return {name: capacity.breaker.state != "closed" for name, capacity in self._capacities.items()}

    # --- places

    def _late(self, now: float) -> float:
        """How late the event loop is, in seconds."""
        return max(self._lag, now - self._measure_at) if self._measure_at else 0.0

    def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._lag += (max(now - self._measure_at, 0.0) - self._lag) * 0.2
        if self._in_flight:
            self._measure_at = now + LOOK_SECONDS
            loop.call_at(self._measure_at, self._measure_lag)
        else:
            self._lag = self._measure_at = 0.0

    def _take(self, capacity: Capacity, now: float) -> bool:
        if now >= capacity.granted_until:
            if not capacity.away:
                return False
            self._share(capacity, now)
        if capacity.in_flight >= min(capacity.granted, capacity.limit):
            return False
        if capacity.rate and capacity.tokens < 1:
            return False
        if not capacity.breaker.begin(now, alone=capacity.away):
            return False
        if capacity.rate:
            capacity.tokens -= 1
        if not capacity.in_flight:
            capacity.moved = now
        capacity.in_flight += 1
        self._in_flight += 1
        if not self._measure_at:
            self._measure_at = now + LOOK_SECONDS
            asyncio.get_running_loop().call_at(self._measure_at, self._measure_lag)
        return True

    def _admit(self, capacity: Capacity) -> None:
        """Let those in who wait, as far as places are free."""
        now = asyncio.get_running_loop().time()
        while capacity.queue:
            if capacity.queue[0].admitted.done():
                capacity.queue.popleft()
            elif self._take(capacity, now):
                capacity.queue.popleft().admitted.set_result(True)
            else:
                self._want(capacity, now)
                return
        self._queued.discard(capacity)

    def _check_waiting(self, capacity: Capacity) -> None:
        """End the waits that have been long enough, unless who waits will go in a moment, or the event loop
        was held up. One timer for all who wait: one for each would cost more than the rest of their wait."""
        capacity.looks = False
        loop = asyncio.get_running_loop()
        now = self._now = loop.time()
        moves = capacity.moves(now - 2 * self._late(now)) or (capacity.lacks(now) and not capacity.away)
        following = 0.0
        for waiter in capacity.queue:
            if waiter.admitted.done():
                continue
            if waiter.look_at <= now:
                if now >= waiter.until or not (moves or now - waiter.look_at > MOVES_SECONDS / 2):
                    waiter.admitted.set_result(False)
                    continue
                waiter.look_at = now + PATIENCE_SECONDS
            following = min(following or waiter.look_at, waiter.look_at)
        if following:
            capacity.looks = True
            loop.call_at(max(following, now + LOOK_SECONDS), self._check_waiting, capacity)

    def _full(self, capacity: Capacity, now: float, waiting: int) -> Full:
        self._want(capacity, now)
        if (closed := capacity.breaker.blocked(now)) > 0:  # meanwhile
            return Full(capacity.postponed_for(now, closed, 0.002, waiting), "breaker")
        if capacity.rate and capacity.in_flight < capacity.granted:
            return Full(capacity.postponed_for(now, 0.0, capacity.holders / capacity.rate, waiting), "rate")
        step = capacity.pace(now, self._late(now)) / capacity.share
        return Full(capacity.postponed_for(now, 0.0, step, waiting), "concurrency")

    # --- shares

    def _parts(self, capacity: Capacity) -> int:
        """Among how many processes the limits are divided, as far as is known here."""
        return max(self._members(), capacity.holders, 1)

    def _spare(self, capacity: Capacity) -> int:
        """How many places this process may have that it does not use: one more process has as many left."""
        return max(capacity.limit // (self._parts(capacity) + 1), 1)

    def _share(self, capacity: Capacity, now: float) -> None:
        """Take this process's part of the limits, as Redis is away."""
        parts = self._parts(capacity)
        capacity.granted = max(capacity.limit // parts, 1)
        if capacity.rate:
            rate = capacity.rate / parts
            since = min(now - capacity.refilled, 60.0) if capacity.refilled else 0.0
            capacity.tokens = min(capacity.tokens + since * rate, max(rate * BURST_SECONDS, 1.0))
            capacity.refilled = now

    def _want(self, capacity: Capacity, now: float) -> None:
        """Ask for a share of the target's limits, or for the probe, not too often."""
        if (
            capacity.granted >= capacity.limit
            and now < capacity.granted_until
            and not capacity.rate
            and not capacity.breaker.wants(now)
        ):
            return  # it has all
        more = capacity.met and capacity.in_flight >= capacity.granted < capacity.limit
        wait = capacity.ask_at - now
        if wait > 0 and not more:
            if not capacity.asks_later:
                capacity.asks_later = True
                asyncio.get_running_loop().call_later(min(wait, AGAIN_SECONDS), self._again, capacity)
            return
        self._request_share(capacity)

    def _again(self, capacity: Capacity) -> None:
        capacity.asks_later = False
        if capacity.queue:
            self._admit(capacity)  # while Redis is away, time alone frees places where there is a rate
        else:
            self._want(capacity, asyncio.get_running_loop().time())

    def _request_share(self, capacity: Capacity) -> None:
        capacity.ask_at = asyncio.get_running_loop().time() + AGAIN_SECONDS
        self._asking[capacity.name] = capacity
        self._send()

    def _send(self) -> None:
        if self._asked or not self._asking:
            return
        now = asyncio.get_running_loop().time()
        capacities, self._asking = self._asking, {}
        self._asked = capacities  # before the call, for give_up
        asked = {name: self._request(capacity, now) for name, capacity in capacities.items()}
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._ask_unless_left, asked)
        call.add_done_callback(lambda done: self._answered(capacities, done))

    def _ask_unless_left(self, asked: PermitRequests) -> PermitReplies:
        return {} if self._left else self._ask_redis(asked)

    def _request(self, capacity: Capacity, now: float) -> PermitRequest:
        using = capacity.in_flight + len(capacity.queue)
        # Where places are scarce, a process without one keeps asking: its postponed tasks will be back.
        unused = capacity.scarce and capacity.granted > 0
        idle = not using and (unused or now - capacity.used > IDLE_SECONDS)
        spare = self._spare(capacity)
        # A process that already uses more than ``spare`` asks for a quarter more than it uses.
        # Otherwise it would have to ask again for nearly every place.
        ahead = min(max(2 * using, SLACK), max(spare, min(using + using // 4, capacity.limit - spare)))
        capacity.wanted = 0 if idle else min(max(using, ahead), capacity.limit)
        return PermitRequest(
            self._holder,
            capacity.limit,
            capacity.in_flight,
            capacity.wanted,
            LIFE_MS,
            capacity.rate,
            capacity.burst,
            max(len(capacity.queue) - int(capacity.tokens), 0) if capacity.rate else 0,
            *capacity.breaker.state_to_share(now, waiting=bool(capacity.queue)),
        )

    def _answered(
        self,
        capacities: Mapping[str, Capacity],
        done: asyncio.Future[PermitReplies],
    ) -> None:
        now = asyncio.get_running_loop().time()
        if done.cancelled() or self._left:
            self._asked = {}
            return
        answers = done.result()  # raises nothing: the calls answer with errors
        for name, capacity in capacities.items():
            answer = answers[name]
            capacity.away = isinstance(answer, IndexUnavailable)
            if isinstance(answer, IndexUnavailable):
                self._log_away(answer)
                capacity.met = False
                capacity.ask_at = now + RENEW_SECONDS
            else:
                more = answer.granted > capacity.granted or answer.begin > 0  # there may be more yet
                capacity.granted, capacity.met = answer.granted, answer.granted >= capacity.wanted
                capacity.granted_until = now + LIFE_SECONDS - RENEW_SECONDS if answer.granted else 0.0
                capacity.holders = answer.holders
                state = BreakerState(answer.era, answer.opened, answer.left_ms, answer.probe)
                capacity.breaker.learn(now, state)
                capacity.refilled = 0.0
                capacity.tokens = min(capacity.tokens + answer.begin, max(len(capacity.queue), 1))
                pause = answer.pause_ms / 1000 if capacity.rate and capacity.queue else 0.0
                capacity.ask_at = now if more else now + max(AGAIN_SECONDS, pause)
            self._admit(capacity)
            if capacity.breaker.give_back():
                self._request_share(capacity)
        if self._away and not any(capacity.away for capacity in self._capacities.values()):
            self._away = False
            log.info("webhook_limits_shared")
        self._asked = {}  # only now, for give_up
        self._send()

    def _log_away(self, error: IndexUnavailable) -> None:
        if not self._away:
            self._away = True
            log.warning("webhook_limits_alone", error=str(error), parts=max(self._members(), 1))

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._ticking:
            self._ticking = True
            loop.call_later(RENEW_SECONDS, self._renew)

    def _renew(self) -> None:
        """Renew what is in use, and give up what is not."""
        now = asyncio.get_running_loop().time()
        self._ticking = False
        for capacity in list(self._capacities.values()):
            if capacity.in_flight or capacity.queue or capacity.granted:
                self._asking[capacity.name] = capacity
            elif now - capacity.used > FORGET_SECONDS:
                del self._capacities[capacity.name]
        self._send()
        if self._capacities:
            self._tick(asyncio.get_running_loop())
