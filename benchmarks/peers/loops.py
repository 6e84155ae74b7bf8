"""Base of peers with an asynchronous client: one event loop submits."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from benchmarks.peer import Peer

AT_ONCE = 200
"""Concurrent submits, for clients without batches."""


class AsyncPeer(Peer):
    """A peer whose submit is a coroutine."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()

    @abstractmethod
    async def store(self, number: int, due: int) -> None:
        """Store one task."""

    def submit(self, number: int, due: int) -> None:
        self.runner.run(self.store(number, due))

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        self.runner.run(_at_once(self.store, numbers, dues))

    def close(self) -> None:
        self.runner.close()


async def _at_once(
    store: Callable[[int, int], Awaitable[None]], numbers: Sequence[int], dues: Sequence[int]
) -> None:
    pairs = zip(numbers, dues, strict=True)

    async def some() -> None:
        for number, due in pairs:
            await store(number, due)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
