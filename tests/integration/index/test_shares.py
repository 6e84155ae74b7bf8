"""Several processes that send to one target, with the limits that they share in Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from toc.index.queues import Queues
from toc.webhooks.capacity import Capacity, Full
from toc.webhooks.handlers import MIN_WAIT_SECONDS
from toc.webhooks.limiter import Limiter


async def _send(limiter: Limiter, capacity: Capacity, seconds: float) -> bool:
    """Stand for one try: False if it was postponed."""
    try:
        await limiter.enter(capacity)
    except Full:
        return False
    await asyncio.sleep(seconds)
    limiter.leave(capacity, 0.01)
    return True


async def _busy(limiter: Limiter, capacity: Capacity, sent: Counter[str], name: str) -> None:
    while True:
        done = await _send(limiter, capacity, 0.05)
        sent[name] += done
        await asyncio.sleep(0 if done else MIN_WAIT_SECONDS)


@pytest.mark.parametrize(("limit", "tasks"), [(1, 8), (4, 20)])
def test_a_process_that_is_always_busy_does_not_keep_a_limit_from_the_others(
    queues: Queues, limit: int, tasks: int
) -> None:
    sent: Counter[str] = Counter()

    async def whole() -> None:
        names = ["first", "second", "third"]
        processes = [Limiter(queues.permits, name, lambda: len(names)) for name in names]
        busy = []
        for name, limiter in zip(names, processes, strict=True):
            capacity = limiter.of("shop", limit, None)
            busy += [asyncio.ensure_future(_busy(limiter, capacity, sent, name)) for _ in range(tasks)]
            await asyncio.sleep(0.5)
        try:
            async with asyncio.timeout(120):
                while any(sent[name] < 15 for name in names):
                    await asyncio.sleep(0.05)
        finally:
            for one in busy:
                one.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
            for limiter in processes:
                limiter.close()

    with suppress(TimeoutError):
        asyncio.run(whole())
    assert all(sent[name] >= 15 for name in ("first", "second", "third")), sent


def test_what_one_process_no_longer_uses_another_one_has_in_a_moment(queues: Queues) -> None:
    """A burst in one, then a burst in the other: nobody is put off for a target that can take all."""

    async def whole() -> None:
        first, second = (Limiter(queues.permits, name, lambda: 2) for name in ("first", "second"))
        try:
            capacity, other = first.of("shop", 100, None), second.of("shop", 100, None)
            assert all(await asyncio.gather(*(_send(first, capacity, 0.01) for _ in range(150))))
            assert capacity.granted > 50
            assert all(await asyncio.gather(*(_send(second, other, 0.01) for _ in range(150))))
        finally:
            first.close()
            second.close()

    asyncio.run(whole())
