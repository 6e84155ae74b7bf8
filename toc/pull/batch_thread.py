"""A thread that handles in batches what others put.

There is one for each server of the task table and kind of work, so a server that hangs holds up nothing else.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from toc.loop import watched_thread

T = TypeVar("T")

STUCK_SECONDS = 0.25
"""A thread whose batch takes longer is not waited for: its server hangs."""


class BatchThread(Generic[T]):
    """A thread that handles what was put while it was busy, everything at once."""

    def __init__(self, name: str, handle: Callable[[list[T]], None], most: int) -> None:
        self._handle = handle
        self._most = most
        self._items: SimpleQueue[list[T] | None] = SimpleQueue()
        self._rest: list[T] = []
        """What was too much for one batch."""
        self._put = self._begun = 0
        self._closing = threading.Lock()
        self._closed = False
        self._since = 0.0
        self._thread = watched_thread(name, self._run, lambda: self._closed)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, items: list[T]) -> bool:
        """Have these handled. False: nobody will, as the thread has been stopped."""
        with self._closing:
            if items and not self._closed:
                self._put += len(items)
                self._items.put(items)
            return not self._closed

    @property
    def waiting(self) -> int:
        """How many items wait for the thread."""
        return self._put - self._begun

    @property
    def busy(self) -> bool:
        """Whether it handles something, or is about to."""
        return self.waiting > 0 or self._since > 0

    @property
    def stuck(self) -> bool:
        """Whether its server takes too long to answer."""
        since = self._since
        return since > 0 and time.monotonic() - since > STUCK_SECONDS

    def stop(self, seconds: float) -> None:
        """Handle what was put before, and end. May be called twice, or never started."""
        with self._closing:
            self._closed = True
            self._items.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while batch := self._next():
            self._begun += len(batch)
            self._since = time.monotonic()
            self._handle(batch)
            self._since = 0.0

    def _next(self) -> list[T]:
        """Return the next batch; none after all that was put before the end."""
        batch = self._rest or list(self._items.get() or ())
        with contextlib.suppress(Empty):
            while batch and len(batch) < self._most:
                more = self._items.get_nowait()
                if more is None:
                    self._items.put(None)
                    break
                batch += more
        self._rest = batch[self._most :]
        return batch[: self._most]
