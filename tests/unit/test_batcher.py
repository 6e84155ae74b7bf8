"""Group commit for asyncio: whose turn it is."""

import asyncio
from collections.abc import Sequence

from toc.model.errors import Busy
from toc.sdk.batcher import MAX_TOGETHER, ServerBatcher, Settle

SINGLES = MAX_TOGETHER + 100
MANY = 30


def test_single_calls_that_never_stop_do_not_keep_the_items_of_a_large_one_waiting() -> None:
    """More wait than a batch takes, and each asks again at once: in each batch the large call has a turn."""
    batches: list[int] = []

    def send(items: Sequence[str], settle: Settle) -> None:
        batches.append(sum(one == "large" for one in items))
        settle(items)

    async def run() -> None:
        one = ServerBatcher[str, str](lambda: None, "test", send, lambda _: Busy("late"), str)
        over = asyncio.Event()

        async def single() -> None:
            while not over.is_set():
                await one.ask("single", 1)

        singles = [asyncio.create_task(single()) for _ in range(SINGLES)]
        await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*one.line_up([("large", 1)] * MANY)), 60)
        over.set()
        await asyncio.gather(*singles)
        await one.close()

    asyncio.run(run())
    first = next(number for number, large in enumerate(batches) if large)
    last = max(number for number, large in enumerate(batches) if large)
    assert all(batches[first : last + 1]), batches
