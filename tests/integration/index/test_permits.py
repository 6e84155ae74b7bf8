"""permits.lua: one limit shared by the processes that ask, and by those that send to one target."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from harness.patience import until

from benchmarks.local import RedisServer
from toc.index.messages import PermitRequest, Permits
from toc.index.queues import Queues
from toc.webhooks.limiter import Capacity, Full, Limiter

LIFE_MS = 60_000


def ask(queues: Queues, holder: str, wanted: int, held: int = 0, **more: float) -> Permits:
    given = {"life_ms": LIFE_MS, "limit": 10, **more}
    request = PermitRequest(holder, held=held, wanted=wanted, **given)  # type: ignore[arg-type]
    answer = queues.permits({"shop": request})["shop"]
    assert isinstance(answer, Permits), answer
    return answer


def test_a_limit_is_never_exceeded_and_everybody_gets_a_share(queues: Queues) -> None:
    assert ask(queues, "a", 100).granted == 10
    assert ask(queues, "b", 100) == Permits(0, 0, 0, 2), "nothing is free"
    assert ask(queues, "a", 100, held=7).granted == 5, "no more are to begin"
    assert ask(queues, "b", 100).granted == 3, "what others use still counts"
    assert ask(queues, "a", 100, held=2).granted == 5
    assert ask(queues, "b", 100, held=3).granted == 5
    assert ask(queues, "c", 1).granted == 0
    assert ask(queues, "a", 0).granted == 0
    assert ask(queues, "c", 1).granted == 1
    assert ask(queues, "b", 100, held=5).granted == 9


def test_what_a_dead_process_had_comes_back(queues: Queues) -> None:
    assert ask(queues, "a", 10, life_ms=2000).granted == 10
    assert ask(queues, "b", 10).granted == 0
    assert until(lambda: ask(queues, "b", 10).granted == 10, 10)


def test_a_rate_is_shared(queues: Queues) -> None:
    first = ask(queues, "a", 1, rate=0.01, burst=3.0, asked=2)
    assert (first.begin, first.pause_ms) == (2, 0)
    second = ask(queues, "b", 1, rate=0.01, burst=3.0, asked=5)
    assert second.begin == 1
    assert 0 < second.pause_ms <= 100_000
    assert ask(queues, "a", 1, rate=0.01, burst=3.0, asked=5).begin == 0


def test_what_others_have_written_there_does_no_harm(queues: Queues, server: RedisServer) -> None:
    server.call("SET", "permits_{webhook_shop}", "rubbish\na b c d e\n. x y\nz 1 1 x")
    assert ask(queues, "a", 10, rate=1.0, burst=1.0, asked=1) == Permits(10, 1, 1000, 1)


def test_a_clock_of_redis_that_is_set_back_keeps_no_shares(queues: Queues, server: RedisServer) -> None:
    """What was written when it was ahead."""
    ahead = round(time.time() * 1000) + 3_600_000
    server.call("SET", "permits_{webhook_shop}", f"dead 10 10 {ahead}\n. 0 {ahead}")
    now = ask(queues, "a", 10, life_ms=200, rate=1.0, burst=1.0, asked=1)
    assert (now.granted, now.begin) == (0, 0), "as if all of it had been written now"
    assert until(lambda: ask(queues, "a", 10, life_ms=200).granted == 10, 10)


@pytest.fixture
def two(queues: Queues) -> Callable[..., None]:
    """Runs a test with the limiters of two processes."""

    def run(test: Callable[[Limiter, Limiter], Awaitable[None]], of_a_host: int = 2) -> None:
        async def whole() -> None:
            limiters = [Limiter(queues.permits, holder, lambda: of_a_host) for holder in ("a", "b")]
            try:
                await test(*limiters)
            finally:
                for limiter in limiters:
                    limiter._threads.close()

        asyncio.run(whole())

    return run


@pytest.mark.parametrize("of_a_host", [1, 2])
@pytest.mark.parametrize("limit", [2, 4, 50])
def test_a_process_that_has_sent_leaves_places_to_one_that_comes_later(
    two: Callable[..., None], limit: int, of_a_host: int
) -> None:
    async def test(first: Limiter, second: Limiter) -> None:
        one = first.of("shop", limit, None)
        await first.enter(one)
        first.leave(one, 0.01)
        await second.enter(second.of("shop", limit, None))

    two(test, of_a_host)


def test_after_a_burst_a_process_leaves_places_to_others_though_it_goes_on(two: Callable[..., None]) -> None:
    async def test(first: Limiter, second: Limiter) -> None:
        one = first.of("shop", 10, None)
        await asyncio.gather(*(first.enter(one) for _ in range(10)))
        assert one.granted == 10
        for _ in range(9):
            first.leave(one, 0.01)
        await second.enter(second.of("shop", 10, None))

    two(test)


async def _send(limiter: Limiter, capacity: Capacity, seconds: float) -> bool:
    """Stand for one try: False if it was postponed."""
    try:
        await limiter.enter(capacity)
    except Full:
        return False
    await asyncio.sleep(seconds)
    limiter.leave(capacity, 0.01)
    return True


async def test_what_one_process_no_longer_uses_another_one_has_in_a_moment(queues: Queues) -> None:
    """A burst in one, then a burst in the other: nobody is put off for a target that can take all."""
    first, second = (Limiter(queues.permits, name, lambda: 2) for name in ("first", "second"))
    try:
        capacity, other = first.of("shop", 100, None), second.of("shop", 100, None)
        assert all(await asyncio.gather(*(_send(first, capacity, 0.01) for _ in range(150))))
        assert capacity.granted > 50
        assert all(await asyncio.gather(*(_send(second, other, 0.01) for _ in range(150))))
    finally:
        first._threads.close()
        second._threads.close()
