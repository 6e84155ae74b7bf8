"""The capacity of a target in one process: shares, waits, what happens while Redis is away."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from toc.index.messages import PermitRequest, Permits
from toc.model.errors import IndexUnavailable
from toc.webhooks.limiter import FAILURES, Capacity, Full, Limiter

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
            found[name] = Permits(granted, begin, 1000 if request.rate else 0, 1)
        return found


def run(redis: Redis, test: Callable[[Limiter], Awaitable[T]], members: int = 4) -> T:
    async def whole() -> T:
        limiter = Limiter(redis, "me", lambda: members)
        try:
            return await test(limiter)
        finally:
            limiter.close()

    return asyncio.run(whole())


async def entered(limiter: Limiter, capacity: Capacity, count: int) -> tuple[int, list[Full]]:
    """How many of so many that come at once get in, and what the others are told."""
    got = await asyncio.gather(*(limiter.enter(capacity) for _ in range(count)), return_exceptions=True)
    refused = [one for one in got if isinstance(one, Full)]
    assert all(one is None or isinstance(one, Full) for one in got), got
    return got.count(None), refused


def test_a_cancelled_wait_keeps_no_place() -> None:
    async def test(limiter: Limiter) -> None:
        capacity = limiter.of("shop", 1, None)
        await limiter.enter(capacity)
        waiting = asyncio.ensure_future(limiter.enter(capacity))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        limiter.leave(capacity, 0.01)
        assert capacity.in_flight == 0
        await limiter.enter(capacity)

    run(Redis(), test)


@pytest.mark.parametrize(("limit", "members", "expected"), [(8, 4, 2), (3, 4, 1), (100, 1, 100)])
def test_while_redis_is_away_each_process_has_its_part(limit: int, members: int, expected: int) -> None:
    async def test(limiter: Limiter) -> int:
        return (await entered(limiter, limiter.of("shop", limit, None), 120))[0]

    assert run(Redis(away=True), test, members) == expected


def test_of_two_redis_nodes_one_that_is_away_matters_to_its_targets_only() -> None:
    class TwoNodes(Redis):
        """One node is away. Others have all that the target of the other node allows."""

        def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
            answers = super().__call__(asked)
            return {
                name: IndexUnavailable("away") if name == "lost" else answer
                for name, answer in answers.items()
            }

    async def test(limiter: Limiter) -> None:
        lost, full = limiter.of("lost", 8, None), limiter.of("full", 8, None)
        for _ in range(3):
            gone = await asyncio.gather(entered(limiter, full, 1), entered(limiter, lost, 1))
            assert [inside for inside, _ in gone] == [0, 1]
            limiter.leave(lost, 0.01)

    with capture_logs() as lines:
        run(TwoNodes(0), test)
    told = [line["event"] for line in lines]
    assert told == ["webhook_limits_alone"], "once, and not whenever the other node answers"


def test_a_rate_is_kept_while_redis_is_away() -> None:
    async def test(limiter: Limiter) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        inside, _ = await entered(limiter, limiter.of("shop", 1000, 40.0), 100)
        assert 1 <= inside <= 3 + 10 * (loop.time() - began)  # a quarter of 40 a second

    run(Redis(away=True), test)


def test_a_probe_that_is_cancelled_before_it_begins_leaves_the_probe_to_another_one() -> None:
    async def test(limiter: Limiter) -> None:
        capacity = limiter.of("shop", 1, None)
        await limiter.enter(capacity)
        for _ in range(FAILURES):
            capacity.breaker.judge(asyncio.get_running_loop().time(), capacity.breaker.era, well=False)
        capacity.breaker._until = 0.0
        waiting = asyncio.ensure_future(limiter.enter(capacity))
        await asyncio.sleep(0)
        limiter.leave(capacity, 0.01)  # admits it
        waiting.cancel()  # before it could go on
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await limiter.enter(capacity)
        assert capacity.in_flight == 1

    run(Redis(), test)


def test_who_waits_for_a_silent_target_waits_elsewhere_and_keeps_no_process_from_taking() -> None:
    async def test(limiter: Limiter) -> None:
        capacity = limiter.of("shop", 2, None)
        first = [asyncio.ensure_future(limiter.enter(capacity)) for _ in range(10)]
        while capacity.in_flight < 2:
            await asyncio.sleep(0)
        assert limiter.waiting_remotely() == 2, "the others will go in a moment, as far as is known"
        await asyncio.wait(first)
        assert limiter.waiting_remotely() == 2
        assert sum(isinstance(one.exception(), Full) for one in first) == 8
        waiting = asyncio.ensure_future(limiter.enter(capacity))
        await asyncio.sleep(0)
        assert limiter.waiting_remotely() == 3
        limiter.leave(capacity, 0.01)
        await waiting
        assert limiter.waiting_remotely() == 2

    run(Redis(), test)


def test_a_process_that_ends_gives_its_shares_back_and_asks_for_no_more() -> None:
    redis = Redis()

    async def test(limiter: Limiter) -> None:
        capacity, other = limiter.of("shop", 3, None), limiter.of("other", 5, 7.0)
        await entered(limiter, capacity, 3)
        limiter.leave(capacity, 0.01)
        limiter.give_up()
        (given,) = [asked for asked in redis.asked if asked["shop"].wanted == 0]
        assert given["shop"].held == 2, "requests that are under way keep their places"
        assert "other" not in given, "it has no share of it"
        before = len(redis.asked)
        with pytest.raises(Full):
            await limiter.enter(other)
        assert len(redis.asked) == before

    run(redis, test)


def test_a_share_that_is_granted_at_the_instant_at_which_a_process_ends_is_given_back_too() -> None:
    class Granted(dict[str, Permits | IndexUnavailable]):
        def __getitem__(self, name: str) -> Permits | IndexUnavailable:
            limiters[0].give_up()  # another thread's, in the middle of taking the answer
            return super().__getitem__(name)

    class Late(Redis):
        def __call__(self, asked: Mapping[str, PermitRequest]) -> Answers:
            return Granted(super().__call__(asked))

    limiters, redis = list[Limiter](), Late()

    async def test(limiter: Limiter) -> None:
        limiters.append(limiter)
        await limiter.enter(limiter.of("shop", 3, None))
        assert [asked["shop"].wanted for asked in redis.asked] == [1, 0]

    run(redis, test)
