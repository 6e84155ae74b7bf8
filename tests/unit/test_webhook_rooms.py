"""The room of a target in one process: shares, waits, what happens while Redis is away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from toc.index.messages import PermitRequest, Permits
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable
from toc.model.target import NOTHING_ALLOWED
from toc.observe.board import own_board
from toc.webhooks.breaker import FAILURES
from toc.webhooks.handlers import Webhooks
from toc.webhooks.rooms import AGAIN_SECONDS, MOVES_SECONDS, PATIENCE_SECONDS, Full, Room, Rooms

T = TypeVar("T")
Answers = Mapping[str, Permits | IndexUnavailable]


class Redis:
    """Answers as permits.lua would for one process that gets at most ``most``; or is away."""

    def __init__(self, most: int = 100, *, away: bool = False, tokens: int = 0) -> None:
        self.most = most
        self.away = away
        self.tokens = tokens
        self.asked: list[Mapping[str, PermitRequest]] = []

    def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
        self.asked.append(asked)
        if self.away:
            return dict.fromkeys(asked, IndexUnavailable("away"))
        found = {}
        for name, request in asked.items():
            begin = min(request.asked, self.tokens)
            self.tokens -= begin
            granted = max(min(request.wanted, request.limit, self.most), request.held)
            breaker = (request.era, request.opened, request.left_ms, request.probe)
            found[name] = Permits(granted, begin, 1000 if request.rate else 0, 1, *breaker)
        return found


def run(redis: Redis, test: Callable[[Rooms], Awaitable[T]], members: int = 4) -> T:
    async def whole() -> T:
        rooms = Rooms(redis, "me", lambda: members)
        try:
            return await test(rooms)
        finally:
            rooms.close()

    return asyncio.run(whole())


async def entered(rooms: Rooms, room: Room, count: int) -> tuple[int, list[Full]]:
    """How many of so many that come at once get in, and what the others are told."""
    got = await asyncio.gather(*(rooms.enter(room, 0) for _ in range(count)), return_exceptions=True)
    refused = [one for one in got if isinstance(one, Full)]
    assert all(one is None or isinstance(one, Full) for one in got), got
    return got.count(None), refused


def test_no_more_are_let_in_than_the_target_allows_and_the_others_are_told_when_to_come_back() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 3, None)
        inside, refused = await entered(rooms, room, 20)
        assert inside == room.flying == 3
        assert {full.reason for full in refused} == {"concurrency"}
        waits = sorted(full.seconds for full in refused)
        assert waits[0] > 0
        assert waits[-1] > waits[0], "they do not come back all at once"
        rooms.leave(room, 0.01)
        await rooms.enter(room, 0)
        assert room.flying == 3

    run(Redis(), test)


def test_who_waits_gets_the_place_of_who_leaves() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 1, None)
        await rooms.enter(room, 0)
        waiting = asyncio.ensure_future(rooms.enter(room, 0))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        rooms.leave(room, 0.01)
        await waiting
        assert room.flying == 1

    run(Redis(), test)


def test_a_cancelled_wait_keeps_no_place() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 1, None)
        await rooms.enter(room, 0)
        waiting = asyncio.ensure_future(rooms.enter(room, 0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        rooms.leave(room, 0.01)
        assert room.flying == 0
        await rooms.enter(room, 0)

    run(Redis(), test)


@pytest.mark.parametrize(("limit", "members", "expected"), [(8, 4, 2), (3, 4, 1), (100, 1, 100)])
def test_while_redis_is_away_each_process_has_its_part_and_at_least_one(
    limit: int, members: int, expected: int
) -> None:
    async def test(rooms: Rooms) -> int:
        return (await entered(rooms, rooms.of("shop", limit, None), 120))[0]

    assert run(Redis(away=True), test, members) == expected


def test_a_rate_is_kept_while_redis_is_away() -> None:
    async def test(rooms: Rooms) -> int:
        return (await entered(rooms, rooms.of("shop", 1000, 40.0), 100))[0]

    assert 1 <= run(Redis(away=True), test) <= 5  # a quarter of 40 a second, for a quarter of a second


def test_with_a_rate_only_those_begin_that_may() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 100, 5.0)
        inside, refused = await entered(rooms, room, 10)
        assert inside == 2
        assert {full.reason for full in refused} == {"rate"}
        assert max(full.seconds for full in refused) > 1.0, "8 more at 5 a second"

    run(Redis(tokens=2), test)


def test_at_a_low_rate_redis_is_asked_for_each_task_too() -> None:
    redis = Redis(tokens=1)

    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 50, 2.0)
        for _ in range(3):
            await rooms.enter(room, 0)
            rooms.leave(room, 0.01)
            redis.tokens = 1

    run(redis, test)


def test_a_slow_target_of_few_places_gets_its_probe_too() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 3, None)
        for _ in range(FAILURES):
            await rooms.enter(room, 0)
            room.breaker.failed(asyncio.get_running_loop().time(), room.breaker.era)
            rooms.leave(room, 15.0)
        room.breaker._until = 0.0  # its time is over
        await rooms.enter(room, 0)
        assert room.breaker.state == "half-open"

    run(Redis(), test)


def test_an_open_breaker_lets_one_in_after_its_time() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 100, None)
        for _ in range(FAILURES):
            await rooms.enter(room, 0)
            room.breaker.failed(asyncio.get_running_loop().time(), room.breaker.era)
            rooms.leave(room, 0.01)
        with pytest.raises(Full, match="breaker") as full:
            await rooms.enter(room, 0)
        assert 1.5 < full.value.seconds < 2.5
        assert rooms.open_breakers() == {"shop": True}
        room.breaker._until = 0.0  # its time is over
        inside, refused = await entered(rooms, room, 5)
        assert (inside, {one.reason for one in refused}) == (1, {"breaker"})

    run(Redis(), test)


def test_a_breaker_of_a_target_that_gets_no_tasks_any_more_is_not_shown_as_open_for_ever() -> None:
    async def test() -> None:
        queues, nothing = cast(Any, SimpleNamespace(permits=Redis(away=True))), cast(Any, None)
        webhooks = Webhooks(
            targets=nothing, queues=queues, catalog=nothing, clock=Clock(), allow=NOTHING_ALLOWED,
            holder="me", members=lambda: 1,
        )  # fmt: skip

        def shown() -> list[float]:
            webhooks._show()
            found = own_board().read()
            return [found["toc_webhook_open_breakers", name][0] for name in ("forgotten", "well")]

        room = webhooks._rooms.of("forgotten", 3, None)
        webhooks._rooms.of("well", 3, None)
        for _ in range(FAILURES):
            room.breaker.failed(0.0, room.breaker.era)
        assert shown() == [1, 0]
        del webhooks._rooms._rooms["forgotten"]  # after ten minutes
        assert shown() == [0, 0]

    asyncio.run(test())


def test_a_probe_that_is_cancelled_before_it_begins_leaves_the_probe_to_another_one() -> None:
    redis = Redis()

    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 1, None)
        for _ in range(FAILURES):
            await rooms.enter(room, 0)
            room.breaker.failed(asyncio.get_running_loop().time(), room.breaker.era)
            rooms.leave(room, 0.01)
        room.breaker._until = 0.0
        redis.most = room.granted = 0
        waiting = asyncio.ensure_future(rooms.enter(room, 0))
        await asyncio.sleep(0.02)
        redis.most = room.granted = 1
        room.granted_until = float("inf")
        rooms._admit(room)
        waiting.cancel()  # before it could go on
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await rooms.enter(room, 0)
        assert room.flying == 1

    run(redis, test)


@pytest.mark.parametrize(("granted", "times"), [(100, 10), (0, 1)])
def test_while_a_target_is_busy_redis_is_asked_now_and_then_only(granted: int, times: int) -> None:
    redis = Redis(granted)

    async def one(rooms: Rooms, room: Room) -> None:
        for _ in range(times):
            with suppress(Full):
                await rooms.enter(room, 0)
                await asyncio.sleep(0.02)
                rooms.leave(room, 0.02)

    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 2, None)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(one(rooms, room) for _ in range(10)))
        passed = asyncio.get_running_loop().time() - began
        assert len(redis.asked) <= 2 + passed / AGAIN_SECONDS

    run(redis, test)


def test_a_process_asks_redis_once_for_many_requests() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 50, None)
        for _ in range(200):
            await rooms.enter(room, 0)
            rooms.leave(room, 0.001)

    redis = Redis()
    run(redis, test)
    assert len(redis.asked) <= 2


def test_who_waits_for_a_silent_target_waits_elsewhere_and_does_not_keep_this_process_from_taking_more() -> (
    None
):
    async def test(rooms: Rooms) -> None:
        loop = asyncio.get_running_loop()
        room = rooms.of("shop", 2, None)
        first = [asyncio.ensure_future(rooms.enter(room, 0)) for _ in range(10)]
        while room.flying < 2:
            await asyncio.sleep(0)
        assert rooms.elsewhere() == 2, "the others will go in a moment, as far as is known"
        await asyncio.wait(first)
        assert rooms.elsewhere() == 2
        assert sum(isinstance(one.exception(), Full) for one in first) == 8
        room.seconds = 0.001
        room.moved = loop.time() - MOVES_SECONDS  # it has not answered for this time
        assert room.longest(loop.time(), 0.0) < 2 / MOVES_SECONDS * PATIENCE_SECONDS
        waiting = asyncio.ensure_future(rooms.enter(room, 0))
        await asyncio.sleep(0)
        assert rooms.elsewhere() == 3
        rooms.leave(room, 0.001)
        await waiting
        assert rooms.elsewhere() == 2

    run(Redis(), test)


def test_who_waits_for_a_target_that_answers_is_not_put_off() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 1, None)
        await rooms.enter(room, 0)
        room.seconds = 0.01
        waiting = [asyncio.ensure_future(rooms.enter(room, 0)) for _ in range(20)]
        for one in waiting:  # together they take more than PATIENCE_SECONDS
            await asyncio.sleep(MOVES_SECONDS / 5)
            rooms.leave(room, 0.01)
            await one
        assert room.flying == 1

    run(Redis(), test)


async def answering(rooms: Rooms, room: Room, count: int) -> tuple[int, list[Full]]:
    """As ``entered``, where each that gets in is answered at once."""

    async def one() -> None:
        await rooms.enter(room, 0)
        await asyncio.sleep(0)
        rooms.leave(room, 0.01)

    got = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    return got.count(None), [full for full in got if isinstance(full, Full)]


def test_a_burst_is_not_put_off_because_the_share_is_small_until_redis_has_answered() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 256, None)
        await answering(rooms, room, 1)
        assert room.granted < 20
        assert await answering(rooms, room, 200) == (200, [])

    run(Redis(256), test)


def test_nobody_is_put_off_because_the_event_loop_was_held_up() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 4, None)
        room.seconds = 0.01
        await entered(rooms, room, 4)
        time.sleep(5 * MOVES_SECONDS)
        waiting = [asyncio.ensure_future(rooms.enter(room, 0)) for _ in range(40)]
        for one in waiting:
            await asyncio.sleep(0)
            rooms.leave(room, 0.01)
            await one

    run(Redis(), test)


def test_who_waits_for_redis_is_not_put_off_as_if_the_target_had_no_room() -> None:
    class Slow(Redis):
        def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
            assert late.wait(10)
            return super().__call__(asked)

    late = threading.Event()

    async def test(rooms: Rooms) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(3 * PATIENCE_SECONDS, late.set)
        assert await entered(rooms, rooms.of("shop", 20, None), 20) == (20, [])

    run(Slow(), test)


def test_who_was_put_off_for_long_holds_nobody_back_once_the_target_is_well() -> None:
    async def test(rooms: Rooms) -> None:
        room = rooms.of("shop", 4, None)
        await entered(rooms, room, 4)
        room.following = asyncio.get_running_loop().time() + 30.0
        for _ in range(4):
            rooms.leave(room, 0.01)
        _, refused = await entered(rooms, room, 100)
        assert refused
        assert max(full.seconds for full in refused) < 10.0

    run(Redis(), test)


def test_a_process_that_ends_gives_its_shares_back_and_asks_for_no_more() -> None:
    redis = Redis()

    async def test(rooms: Rooms) -> None:
        room, other = rooms.of("shop", 3, None), rooms.of("other", 5, 7.0)
        await entered(rooms, room, 3)
        rooms.leave(room, 0.01)
        rooms.give_up()
        (given,) = [asked for asked in redis.asked if asked["shop"].wanted == 0]
        assert given["shop"].held == 2, "requests that are under way keep their places"
        assert "other" not in given, "it has no share of it"
        before = len(redis.asked)
        with pytest.raises(Full):
            await rooms.enter(other, 0)
        assert len(redis.asked) == before

    run(redis, test)


def test_a_share_that_is_being_asked_for_as_a_process_ends_is_given_back_too() -> None:
    class Slow(Redis):
        def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
            answer = super().__call__(asked)
            asking.set()
            assert may_answer.wait(10)
            return answer

    asking, may_answer = threading.Event(), threading.Event()
    redis = Slow()

    async def test(rooms: Rooms) -> None:
        coming = asyncio.ensure_future(rooms.enter(rooms.of("shop", 3, None), 0))
        assert await asyncio.to_thread(asking.wait, 10)
        leaving = asyncio.get_running_loop().run_in_executor(None, rooms.give_up)
        may_answer.set()
        await leaving
        coming.cancel()
        assert [asked["shop"].wanted for asked in redis.asked] == [3, 0]

    run(redis, test)


def test_a_share_that_is_granted_at_the_instant_at_which_a_process_ends_is_given_back_too() -> None:
    class Granted(dict[str, Permits | IndexUnavailable]):
        def __getitem__(self, name: str) -> Permits | IndexUnavailable:
            rooms_of[0].give_up()  # another thread's, in the middle of taking the answer
            return super().__getitem__(name)

    class Late(Redis):
        def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
            return Granted(super().__call__(asked))

    rooms_of, redis = list[Rooms](), Late()

    async def test(rooms: Rooms) -> None:
        rooms_of.append(rooms)
        await rooms.enter(rooms.of("shop", 3, None), 0)
        assert [asked["shop"].wanted for asked in redis.asked] == [3, 0]

    run(redis, test)
