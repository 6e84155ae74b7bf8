"""The room of each target: how many requests may be in flight, how many per second, and its breaker.

A task that finds no room waits here for a moment at most, or while its target answers other requests quickly.
Then it is postponed: it goes back to its row. So it takes no place from tasks of other targets, and its wait
uses up no try. ``elsewhere`` says how many tasks wait for targets. The process takes few of the others ahead:
in a burst most tasks stay in Redis until there is room, and are not postponed at all.

The limits and the breaker hold over all processes. A process asks Redis for a share of what a target allows
(``permits.lua``), and keeps it while it sends. It needs no further call for a request, unless the target has
a rate. A process that ends gives its share back. The same calls share the state of the breaker among the
processes. While Redis is away, each process has an equal part (the limit divided by the number of processes,
at least 1) and its own breaker.

Everything here runs on the event loop, except the calls to Redis, which have their own thread.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field

from toc.index.messages import PermitRequest, Permits
from toc.model.errors import IndexUnavailable
from toc.observe.log import get_logger
from toc.webhooks.breaker import Breaker, BreakerState

log = get_logger(__name__)

PATIENCE_SECONDS = 0.25
"""Longest wait for room in memory, unless the target answers others meanwhile, or has room that this process
is about to get: its part is yet to come from Redis, or from a process that does not use it."""
MOST_PATIENCE_SECONDS = 2.0
"""Longest wait then."""
MOVES_SECONDS = 0.1
"""After this time without an answer, who waits for a target waits for it, and not for this process."""
LOOK_SECONDS = 0.02
"""How often it is looked at how late the event loop is, while requests are in flight."""
LIFE_SECONDS = 6.0
"""For how long a share is granted. One that died leaves its share to others after this time."""
LIFE_MS = int(LIFE_SECONDS * 1000)
GIVE_UP_SECONDS = 1.0
"""How long a process that ends waits for Redis to take its shares back."""
RENEW_SECONDS = 1.5
IDLE_SECONDS = 5.0
"""After this time without a request a process gives its share up."""
FORGET_SECONDS = 600.0
"""After this time without a task a target's room, with its breaker, is forgotten."""
AGAIN_SECONDS = 0.05
"""Pause before more is asked for than was granted."""
SLACK = 8
"""What a process asks for at least, so that a burst finds room."""
FIRST_GUESS_SECONDS = 0.05
"""How long a request takes, until one has ended."""
LEAST_WAIT_SECONDS = 0.25
MOST_WAIT_SECONDS = 30.0
MOST_LOOKS = 100.0
"""How many postponed tasks of one target come back in a second, in one process, when very many wait."""
MOST_QUEUED = 500
FIRST_QUEUED = 64
"""How many may wait for a target that has never answered here, beyond those that it may have in flight."""
BURST_SECONDS = 0.1
"""A target with a rate may get this many seconds' worth of requests at one instant."""

Asked = Mapping[str, PermitRequest]
Answers = Mapping[str, Permits | IndexUnavailable]
Ask = Callable[[Asked], Answers]


class Full(Exception):
    """There is no room for ``seconds``. ``reason``: ``breaker``, ``rate`` or ``concurrency``."""

    def __init__(self, seconds: float, reason: str) -> None:
        super().__init__(reason)
        self.seconds = seconds
        self.reason = reason


@dataclass(eq=False, slots=True)
class Waiter:
    """Who waits for a place: whether it got one, when it is looked at, and until when it waits at most."""

    admitted: asyncio.Future[bool]
    look_at: float
    until: float


@dataclass(eq=False, slots=True)
class Room:
    """The room of one target in this process. Times are those of the event loop."""

    name: str
    limit: int
    rate: float
    """Requests a second; 0: no limit."""
    breaker: Breaker = field(default_factory=Breaker)
    flying: int = 0
    """Requests in flight."""
    granted: int = 0
    granted_until: float = 0.0
    tokens: float = 0.0
    """Requests that may begin, if there is a rate."""
    refilled: float = 0.0
    """When tokens were last made here, while Redis is away."""
    holders: int = 1
    """Processes that send to the target, as Redis has said last."""
    ask_at: float = 0.0
    asks_later: bool = False
    """Whether a timer is set, at which it is looked at again."""
    queue: deque[Waiter] = field(default_factory=deque)
    looks: bool = False
    """Whether a timer is set, at which those are looked at who wait."""
    seconds: float = FIRST_GUESS_SECONDS
    """Moving average of how long a request takes."""
    used: float = 0.0
    answered: bool = False
    """Whether it ever has."""
    moved: float = 0.0
    """When a request was answered last, or the first of those in flight has begun."""
    following: float = 0.0
    """When the task is to come back that was postponed last: the next one comes after it."""

    @property
    def scarce(self) -> bool:
        """Whether there is less than one place for each process: none is kept without need."""
        return self.limit < self.holders

    def lacks(self, now: float) -> bool:
        """Whether this process has less than its part of the limit, so that its tasks wait for others to make
        room, or for Redis to say so, and not for the target."""
        return not self.scarce and (now >= self.granted_until or self.granted < self.limit // self.holders)

    @property
    def share(self) -> int:
        """How many requests may be in flight here in a moment: it is asked for as soon as tasks wait."""
        return max(self.granted, self.limit // self.holders, 1)

    def longest(self, now: float, lag: float) -> int:
        """How many tasks may wait here: as many as probably go within PATIENCE_SECONDS.

        At least one may: only for who waits is Redis asked for the probe, or for requests that may begin.
        """
        most = MOST_QUEUED if self.answered else FIRST_QUEUED
        if not self.granted:
            return min(most + self.limit, MOST_QUEUED)
        often = self.share / self.pace(now, lag)
        if self.rate:
            often = min(often, self.rate / self.holders)
        return max(min(int(often * PATIENCE_SECONDS), most), 1)

    def pace(self, now: float, lag: float) -> float:
        """Seconds that a request takes, as far as can be told while none ends.

        ``lag``: how late the event loop is. Answers that are there may not have been read.
        """
        return max(self.seconds, now - self.moved - 2 * lag) if self.flying else self.seconds

    def moves(self, now: float) -> bool:
        """Whether who waits will go in a moment."""
        return now - self.moved < MOVES_SECONDS and not self.breaker.blocked(now)


class Rooms:
    """The rooms of one process. ``holder`` is its name in Redis, ``members`` how many processes there are."""

    def __init__(self, ask: Ask, holder: str, members: Callable[[], int]) -> None:
        self._ask_redis = ask
        self._holder = holder
        self._members = members
        self._rooms: dict[str, Room] = {}
        self._queued: set[Room] = set()
        """Rooms in which tasks wait."""
        self._flying = 0
        """Requests in flight, over all rooms."""
        self._now = 0.0
        """When a task came or went last. While the event loop is held up, no time passes for the rooms."""
        self._lag = 0.0
        """Moving average of how late the event loop is, in seconds: what a request takes because this process
        is busy says nothing of its target, and putting tasks off would keep it busier."""
        self._look_at = 0.0
        """When that is looked at next; 0: not while nothing is in flight."""
        self._asking: dict[str, Room] = {}
        """Rooms whose share is to be asked for."""
        self._asked: Mapping[str, Room] = {}
        """Rooms whose share is being asked for: a call of Redis is under way."""
        self._ticking = False
        self._left = False
        """Whether its shares were given up for good."""
        self._away = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="toc-permits")

    def of(self, name: str, limit: int, rate: float | None) -> Room:
        """Return the room of a target, with its present limits."""
        room = self._rooms.get(name)
        if room is None:
            room = self._rooms[name] = Room(name, limit, rate or 0.0)
        room.limit, room.rate = limit, rate or 0.0
        return room

    def elsewhere(self) -> int:
        """How many tasks wait for targets, and not for this process. Any thread may ask."""
        now = self._now
        return self._flying + sum(len(room.queue) for room in list(self._queued) if not room.moves(now))

    async def enter(self, room: Room, waiting: int) -> None:
        """Take a place, for which ``leave`` must be called. ``waiting``: how many wait. Raises Full."""
        loop = asyncio.get_running_loop()
        now = self._now = room.used = loop.time()
        self._tick(loop)
        if (closed := room.breaker.blocked(now)) > 0:
            raise Full(_later(room, now, closed, 0.002, waiting), "breaker")
        if not room.queue and self._take(room, now):
            return
        if len(room.queue) >= room.longest(now, self._late(now)):
            raise self._full(room, now, waiting)
        future: asyncio.Future[bool] = loop.create_future()
        waiter = Waiter(future, now + PATIENCE_SECONDS, now + MOST_PATIENCE_SECONDS)
        room.queue.append(waiter)
        self._queued.add(room)
        self._want(room, now)
        if not room.looks:
            room.looks = True
            loop.call_at(waiter.look_at, self._look_at_waiting, room)
        try:
            admitted = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.result():
                self.judge(room, room.breaker.era, well=None)  # it may have been the probe
                self.leave(room)
            raise
        if not admitted:
            if waiter in room.queue:
                room.queue.remove(waiter)
            if not room.queue:
                self._queued.discard(room)
            raise self._full(room, loop.time(), waiting)

    def judge(self, room: Room, era: int, *, well: bool | None) -> bool:
        """Tell the breaker of a request that began in ``era`` whether its target was ``well``; None: it was
        broken off. Returns whether this has opened the breaker."""
        breaker, opened = room.breaker, False
        if well is None:
            changed = breaker.given_up(era)
        elif well:
            changed = breaker.succeeded()
        else:
            changed = opened = breaker.failed(asyncio.get_running_loop().time(), era)
        if changed:
            self._ask(room)  # the other processes learn of it
        return opened

    def leave(self, room: Room, seconds: float | None = None) -> None:
        """Give a place back. ``seconds``: how long the request took, if there was an end of it."""
        more_than_its_share = room.flying > room.granted
        room.flying -= 1
        self._flying -= 1
        now = self._now = asyncio.get_running_loop().time()
        if seconds is not None:
            room.answered, room.moved = True, now
            room.seconds += (max(seconds - 2 * self._lag, 0.0005) - room.seconds) * 0.1
        if more_than_its_share or (room.scarce and not room.flying):
            self._want(room, now)  # others may have the place
        if room.queue:
            self._admit(room)
        elif room.flying < room.granted // 2:
            room.following = 0.0  # they were put off for longer than was needed
            if not room.flying and room.granted > 4 * SLACK and now >= room.ask_at:
                self._ask(room)  # a burst is over: others need not wait for the renewal to have its places

    def give_up(self) -> None:
        """Leave its shares to other processes, and ask for nothing more. Blocks; any thread may call this."""
        self._left = True
        shares = {
            room.name: PermitRequest(
                self._holder, room.limit, room.flying, 0, LIFE_MS, room.rate, _burst(room.rate)
            )
            for room in list(self._rooms.values())
            if room.name in self._asked or room.granted  # in the order opposite to that of _answered
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
        return {name: room.breaker.state != "closed" for name, room in self._rooms.items()}

    # --- places

    def _late(self, now: float) -> float:
        """How late the event loop is, in seconds."""
        return max(self._lag, now - self._look_at) if self._look_at else 0.0

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._lag += (max(now - self._look_at, 0.0) - self._lag) * 0.2
        if self._flying:
            self._look_at = now + LOOK_SECONDS
            loop.call_at(self._look_at, self._look)
        else:
            self._lag = self._look_at = 0.0

    def _take(self, room: Room, now: float) -> bool:
        if now >= room.granted_until:
            if not self._away:
                return False
            self._share(room, now)
        if room.flying >= min(room.granted, room.limit) or (room.rate and room.tokens < 1):
            return False
        if not room.breaker.begin(now, alone=self._away):
            return False
        if room.rate:
            room.tokens -= 1
        if not room.flying:
            room.moved = now
        room.flying += 1
        self._flying += 1
        if not self._look_at:
            self._look_at = now + LOOK_SECONDS
            asyncio.get_running_loop().call_at(self._look_at, self._look)
        return True

    def _admit(self, room: Room) -> None:
        """Let those in who wait, as far as there is room."""
        now = asyncio.get_running_loop().time()
        while room.queue:
            if room.queue[0].admitted.done():
                room.queue.popleft()
            elif self._take(room, now):
                room.queue.popleft().admitted.set_result(True)
            else:
                self._want(room, now)
                return
        self._queued.discard(room)

    def _look_at_waiting(self, room: Room) -> None:
        """End the waits that have been long enough, unless who waits will go in a moment, or the event loop
        was held up. One timer for all who wait: one for each would cost more than the rest of their wait."""
        room.looks = False
        loop = asyncio.get_running_loop()
        now = self._now = loop.time()
        moves = room.moves(now - 2 * self._late(now)) or (room.lacks(now) and not self._away)
        following = 0.0
        for waiter in room.queue:
            if waiter.admitted.done():
                continue
            if waiter.look_at <= now:
                if now >= waiter.until or not (moves or now - waiter.look_at > MOVES_SECONDS / 2):
                    waiter.admitted.set_result(False)
                    continue
                waiter.look_at = now + PATIENCE_SECONDS
            following = min(following or waiter.look_at, waiter.look_at)
        if following:
            room.looks = True
            loop.call_at(max(following, now + LOOK_SECONDS), self._look_at_waiting, room)

    def _full(self, room: Room, now: float, waiting: int) -> Full:
        self._want(room, now)
        if (closed := room.breaker.blocked(now)) > 0:  # meanwhile
            return Full(_later(room, now, closed, 0.002, waiting), "breaker")
        if room.rate and room.flying < room.granted:
            return Full(_later(room, now, 0.0, room.holders / room.rate, waiting), "rate")
        step = room.pace(now, self._late(now)) / room.share
        return Full(_later(room, now, 0.0, step, waiting), "concurrency")

    # --- shares

    def _share(self, room: Room, now: float) -> None:
        """Give the room its part of the limits, as Redis is away."""
        parts = max(self._members(), room.holders, 1)
        room.granted = max(room.limit // parts, 1)
        if room.rate:
            rate = room.rate / parts
            since = min(now - room.refilled, 60.0) if room.refilled else 0.0
            room.tokens = min(room.tokens + since * rate, max(rate * BURST_SECONDS, 1.0))
            room.refilled = now

    def _want(self, room: Room, now: float) -> None:
        """Ask for a share of the room's limits, or for the probe, not too often."""
        if (
            room.granted >= room.limit
            and now < room.granted_until
            and not room.rate
            and not room.breaker.wants(now)
        ):
            return  # it has all
        wait = room.ask_at - now
        if wait > 0:
            if not room.asks_later:
                room.asks_later = True
                asyncio.get_running_loop().call_later(min(wait, AGAIN_SECONDS), self._again, room)
            return
        self._ask(room)

    def _again(self, room: Room) -> None:
        room.asks_later = False
        if room.queue:
            self._admit(room)  # while Redis is away, time alone makes room where there is a rate
        else:
            self._want(room, asyncio.get_running_loop().time())

    def _ask(self, room: Room) -> None:
        room.ask_at = asyncio.get_running_loop().time() + AGAIN_SECONDS
        self._asking[room.name] = room
        self._send()

    def _send(self) -> None:
        if self._asked or not self._asking:
            return
        now = asyncio.get_running_loop().time()
        rooms, self._asking = self._asking, {}
        self._asked = rooms  # before the call, for give_up
        asked = {name: self._request(room, now) for name, room in rooms.items()}
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._ask_unless_left, asked)
        call.add_done_callback(lambda done: self._answered(rooms, done))

    def _ask_unless_left(self, asked: Asked) -> Answers:
        return {} if self._left else self._ask_redis(asked)

    def _request(self, room: Room, now: float) -> PermitRequest:
        using = room.flying + len(room.queue)
        # Where places are scarce, a process without one keeps asking: its postponed tasks will be back.
        unused = room.scarce and room.granted > 0
        idle = not using and (unused or now - room.used > IDLE_SECONDS)
        return PermitRequest(
            self._holder,
            room.limit,
            room.flying,
            0 if idle else min(max(2 * using, SLACK), room.limit),
            LIFE_MS,
            room.rate,
            _burst(room.rate),
            max(len(room.queue) - int(room.tokens), 0) if room.rate else 0,
            *room.breaker.told(now, waiting=bool(room.queue)),
        )

    def _answered(
        self,
        rooms: Mapping[str, Room],
        done: asyncio.Future[Answers],
    ) -> None:
        now = asyncio.get_running_loop().time()
        if done.cancelled() or self._left:
            self._asked = {}
            return
        answers = done.result()  # raises nothing: the calls answer with errors
        away = [answer for answer in answers.values() if isinstance(answer, IndexUnavailable)]
        if bool(away) != self._away:
            self._away = bool(away)
            if away:
                log.warning("webhook_limits_alone", error=str(away[0]), parts=max(self._members(), 1))
            else:
                log.info("webhook_limits_shared")
        for name, room in rooms.items():
            answer = answers[name]
            if isinstance(answer, IndexUnavailable):
                room.ask_at = now + RENEW_SECONDS
            else:
                more = answer.granted > room.granted or answer.begin > 0  # there may be more yet
                room.granted = answer.granted
                room.granted_until = now + LIFE_SECONDS - RENEW_SECONDS if answer.granted else 0.0
                room.holders = answer.holders
                room.breaker.learn(now, BreakerState(answer.era, answer.opened, answer.left_ms, answer.probe))
                room.refilled = 0.0
                room.tokens = min(room.tokens + answer.begin, max(len(room.queue), 1))
                pause = answer.pause_ms / 1000 if room.rate and room.queue else 0.0
                room.ask_at = now if more else now + max(AGAIN_SECONDS, pause)
            self._admit(room)
            if room.breaker.give_back():
                self._ask(room)
        self._asked = {}  # only now, for give_up
        self._send()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._ticking:
            self._ticking = True
            loop.call_later(RENEW_SECONDS, self._renew)

    def _renew(self) -> None:
        """Renew what is in use, and give up what is not."""
        now = asyncio.get_running_loop().time()
        self._ticking = False
        for room in list(self._rooms.values()):
            if room.flying or room.queue or room.granted:
                self._asking[room.name] = room
            elif now - room.used > FORGET_SECONDS:
                del self._rooms[room.name]
        self._send()
        if self._rooms:
            self._tick(asyncio.get_running_loop())


def _burst(rate: float) -> float:
    return max(rate * BURST_SECONDS, 1.0) if rate else 0.0


def _later(room: Room, now: float, closed: float, step: float, waiting: int) -> float:
    """Return for how many seconds a task is postponed: not before ``closed``, and ``step`` after the last."""
    most = max(MOST_WAIT_SECONDS, waiting / MOST_LOOKS, closed + 1.0)
    room.following = max(room.following, now + closed, now + LEAST_WAIT_SECONDS) + step
    wait = room.following - now
    if wait <= most:
        return wait
    room.following = now + most
    return random.uniform(max(closed, most / 2), most)  # noqa: S311 - spreads load, guards nothing
