"""Lines: calls that wait for the threads of one pool, in turns by who makes them.

Without turns, one token with 70 slow searches would keep everybody else's waiting, or have them refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from toc.model.errors import Busy

THREADS = 4
"""Calls of a line that are made at once."""
MAX_WAITING = 64
"""Most calls that wait for a thread of a line. One sender may have as many of these places as are free, so
that he never has all, and never the last thread."""


class Line:
    """One line. For one event loop."""

    def __init__(self, name: str, most: int = MAX_WAITING, threads: int = THREADS) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, f"toc-{name}")
        self._most = most
        self._waiting: dict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        """By sender, in the order of their turns."""
        self._at_work: Counter[str] = Counter()

    async def run(self, sender: str, do: Callable[[], Any]) -> Any:
        """Run it on a thread, once it is this sender's turn. Raises Busy, and what it raises."""
        free = self._most - sum(map(len, self._waiting.values()))
        if len(self._waiting.get(sender, ())) >= free:
            raise Busy("too many requests wait for a server; try again in a moment")
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.setdefault(sender, deque()).append((do, answer))
        self._next()
        return await answer

    def close(self) -> None:
        """End the threads once their present work is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        """Give free threads to those whose turn it is."""
        most = max(1, self._threads - 1)
        while self._at_work.total() < self._threads:
            sender = next((one for one in self._waiting if self._at_work[one] < most), None)
            if sender is None:
                return
            calls = self._waiting.pop(sender)
            do, answer = calls.popleft()
            if calls:
                self._waiting[sender] = calls  # behind the others
            if not answer.cancelled():  # its client has left
                self._begin(sender, do, answer)

    def _begin(self, sender: str, do: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        refused = False

        def run() -> Any:
            if refused:  # no thread could be started, but the call is in the pool's queue
                raise Busy("nobody waits for it")
            return do()

        try:
            work = self._loop.run_in_executor(self._pool, run)
        except RuntimeError:  # can't start new thread
            refused = True
            answer.set_exception(Busy("this process can start no further thread; try again in a moment"))
            return
        self._at_work[sender] += 1

        def ended(done: asyncio.Future[Any]) -> None:
            self._at_work[sender] -= 1
            if not self._at_work[sender]:
                del self._at_work[sender]
            error = None if done.cancelled() else done.exception()
            if not answer.done():
                if done.cancelled():
                    answer.cancel()
                elif error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(done.result())
            self._next()

        work.add_done_callback(ended)
