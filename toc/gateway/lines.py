"""Lines: calls that wait for the threads of one pool. No sender has all of them, nor all places before them.

Without that, one token with 70 slow searches would keep everybody else's waiting, or have them refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from toc.model.errors import Busy

THREADS = 4
"""Calls of a line that are made at once."""
MAX_CALLS = 68
"""Most calls of a line, made or waiting. One sender may have as many as are still free."""


class Line:
    """One line. For one event loop."""

    def __init__(self, name: str, most: int = MAX_CALLS, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, f"toc-{name}")
        self._most = most
        self._of_one = max(1, threads - 1)
        self._free = asyncio.Semaphore(threads)
        self._own: dict[str, asyncio.Semaphore] = {}
        """By sender: all threads but one."""
        self._calls: Counter[str] = Counter()

    async def run(self, sender: str, do: Callable[[], Any]) -> Any:
        """Run it on a thread, once one is free for this sender. Raises Busy, and what it raises."""
        if self._calls[sender] >= self._most - self._calls.total():
            raise Busy("too many requests wait for a server; try again in a moment")
        self._calls[sender] += 1
        held: list[asyncio.Semaphore] = []
        refused = False

        def ended(_: object = None) -> None:
            for places in held:
                places.release()
            self._calls[sender] -= 1
            if not self._calls[sender]:
                del self._calls[sender], self._own[sender]

        def run() -> Any:
            if refused:  # no thread could be started, but the call is in the pool's queue
                raise Busy("nobody waits for it")
            return do()

        own = self._own.setdefault(sender, asyncio.Semaphore(self._of_one))
        try:
            for places in (own, self._free):
                await places.acquire()
                held.append(places)
            work = asyncio.get_running_loop().run_in_executor(self._pool, run)
        except BaseException as exc:
            refused = True
            ended()
            if isinstance(exc, RuntimeError):  # can't start new thread
                raise Busy("this process can start no further thread; try again in a moment") from exc
            raise
        work.add_done_callback(ended)  # the thread is busy until then, also if the client leaves
        return await asyncio.shield(work)

    def close(self) -> None:
        """End the threads once their present work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)
