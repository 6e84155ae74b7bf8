"""permits.lua: one limit shared by the processes that ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from harness.patience import until

from benchmarks.local import RedisServer
from toc.index.messages import PermitRequest, Permits
from toc.index.queues import Queues
from toc.webhooks import limiter as limiter_module
from toc.webhooks.limiter import Limiter

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
    assert ask(queues, "a", 10, life_ms=200).granted == 10
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


def test_the_latest_era_of_a_breaker_holds_and_its_probe_goes_to_one(queues: Queues) -> None:
    def state(holder: str, **told: int) -> tuple[int, int, int, int]:
        return ask(queues, holder, 1, **told)[4:]

    assert state("a") == (0, 0, 0, 0)
    era, opened, left, probe = state("a", era=1, opened=1, left_ms=60_000)
    assert (era, opened, probe) == (1, 1, 0)
    assert 0 < left <= 60_000
    assert state("b", probe=1)[:2] == (1, 1), "b learns of it"
    assert state("b", era=1, opened=5, probe=1)[1] == 1, "who tells of an era first is right"
    assert state("a", era=2, opened=2, left_ms=0) == (2, 2, 0, 0)
    assert state("b", era=2, opened=2, probe=1) == (2, 2, 0, 1)
    assert state("a", era=2, opened=2, probe=1) == (2, 2, 0, 2), "b has it"
    assert state("b", era=2, opened=2, probe=1) == (2, 2, 0, 1), "as long as b asks on"
    assert state("b", era=2, opened=2, probe=0) == (2, 2, 0, 0), "b gives it back"
    assert state("a", era=2, opened=2, probe=1, life_ms=200) == (2, 2, 0, 1)
    assert until(lambda: state("b", era=2, opened=2, probe=1)[3] == 1, 10), "a has died"
    assert state("b", era=3) == (3, 0, 0, 0), "it is closed"
    assert state("a", era=2, opened=2, probe=1) == (3, 0, 0, 0)


def test_a_breaker_outlives_what_redis_has_lost(queues: Queues, server: RedisServer) -> None:
    assert ask(queues, "a", 1, era=4, opened=2, left_ms=0).era == 4
    server.call("FLUSHALL")
    assert ask(queues, "b", 1).era == 0
    assert ask(queues, "a", 1, era=4, opened=2, left_ms=0)[4:6] == (4, 2)
    assert ask(queues, "b", 1)[4:6] == (4, 2)


def test_a_clock_of_redis_that_is_set_back_keeps_neither_shares_nor_a_breaker(
    queues: Queues, server: RedisServer
) -> None:
    """What was written when it was ahead."""
    ahead = round(time.time() * 1000) + 3_600_000
    lines = [f"dead 10 10 {ahead}", f". 0 {ahead}", f"! 3 1 {ahead} dead {ahead}"]
    server.call("SET", "permits_{webhook_shop}", "\n".join(lines))
    now = ask(queues, "a", 10, life_ms=200, era=3, opened=1, probe=1, rate=1.0, burst=1.0, asked=1)
    assert (now.granted, now.begin) == (0, 0), "as if all of it had been written now"
    assert 0 < now.left_ms <= 60_000
    assert until(lambda: ask(queues, "a", 10, life_ms=200, era=3, opened=1, probe=1).granted == 10, 10)
    server.call("SET", "permits_{webhook_shop}", f"! 3 1 0 dead {ahead}")
    assert ask(queues, "a", 10, life_ms=200, era=3, opened=1, probe=1).probe == 2
    assert until(lambda: ask(queues, "a", 10, life_ms=200, era=3, opened=1, probe=1).probe == 1, 10)


@pytest.fixture
def two(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test with the limiters of two processes, neither of which renews its shares."""
    monkeypatch.setattr(limiter_module, "RENEW_SECONDS", 3600.0)
    monkeypatch.setattr(limiter_module, "LIFE_SECONDS", 7200.0)

    def run(test: Callable[[Limiter, Limiter], Awaitable[None]], of_a_host: int = 2) -> None:
        async def whole() -> None:
            limiters = [Limiter(queues.permits, holder, lambda: of_a_host) for holder in ("a", "b")]
            try:
                await test(*limiters)
            finally:
                for limiter in limiters:
                    limiter.close()

        asyncio.run(whole())

    return run


@pytest.mark.parametrize("of_a_host", [1, 2])
@pytest.mark.parametrize("limit", [2, 4, 50])
def test_a_process_that_has_sent_leaves_places_to_one_that_comes_later(
    two: Callable[..., None], limit: int, of_a_host: int
) -> None:
    async def test(first: Limiter, second: Limiter) -> None:
        one = first.of("shop", limit, None)
        await first.enter(one, 0)
        first.leave(one, 0.001)
        await second.enter(second.of("shop", limit, None), 0)

    two(test, of_a_host)


def test_after_a_burst_a_process_leaves_places_to_others_although_it_goes_on_sending(
    two: Callable[..., None],
) -> None:
    async def test(first: Limiter, second: Limiter) -> None:
        one = first.of("shop", 10, None)
        await asyncio.gather(*(first.enter(one, 0) for _ in range(10)))
        assert one.granted == 10
        one.ask_at = 0.0  # it has not asked for a while
        for _ in range(9):
            first.leave(one, 0.001)
        await second.enter(second.of("shop", 10, None), 0)

    two(test)
