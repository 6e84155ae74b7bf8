"""A system whose client is asynchronous: each call is awaited on an event loop of another thread."""

import asyncio
import copy
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from contract.system import Contract

from toc import AsyncTimeoutCenter, TimeoutCenter


class Looped:
    """An AsyncTimeoutCenter with the methods of a TimeoutCenter. Each returns once the index knows."""

    def __init__(self, center: AsyncTimeoutCenter, loop: asyncio.AbstractEventLoop) -> None:
        self._center, self._loop = center, loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._center, name, None)
        if not inspect.iscoroutinefunction(method):
            return getattr(self._center.sync, name)

        async def call(*args: Any, **more: Any) -> Any:
            found = await method(*args, **more)
            for batcher in self._center._batchers.values():
                while not all(one.idle for one in batcher._submits):
                    await asyncio.sleep(0.001)
            return found

        return lambda *args, **more: asyncio.run_coroutine_threadsafe(
            call(*args, **more), self._loop
        ).result()


@contextmanager
def looped(system: Contract) -> Iterator[Contract]:
    """The same system, used by an AsyncTimeoutCenter."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    center = AsyncTimeoutCenter(system.settings)
    one = copy.copy(system)
    one.center = cast(TimeoutCenter, Looped(center, loop))
    try:
        yield one
    finally:
        asyncio.run_coroutine_threadsafe(center.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
