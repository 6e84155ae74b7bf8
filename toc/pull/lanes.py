"""Threads of the pull room: one that takes, and a lane for each server of the task table and kind of work."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from toc.observe.log import close_log, get_logger

log = get_logger(__name__)

T = TypeVar("T")

Failed = Callable[[str, BaseException], None]

STUCK_SECONDS = 0.25
"""A lane whose batch takes longer is not waited for: its server hangs."""
EXIT_THREAD_DIED = 70


def end_process(name: str, error: BaseException) -> None:
    """End the process after an internal thread died: it would look healthy and hand nothing out."""
    try:
        log.critical("thread_died", thread=name, exc_info=error)
        close_log(0.5)
    finally:
        os._exit(EXIT_THREAD_DIED)


class Wake:
    """Ends the sleep of a thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._woken = False

    def __call__(self) -> None:
        """End the sleep, or the next one. Cheap if it is awake already."""
        if not self._woken:
            self._woken = True
            self._calls.put(None)

    def clear(self) -> None:
        """Forget earlier calls."""
        while not self._calls.empty():
            self._calls.get_nowait()
        self._woken = False

    def sleep(self, seconds: float) -> None:
        """Sleep until woken, at most ``seconds``."""
        with contextlib.suppress(Empty):
            self._calls.get(timeout=seconds)


class Loop:
    """Calls ``run_once`` again and again; it returns the seconds to sleep, unless ``wake`` is called."""

    def __init__(self, name: str, run_once: Callable[[], float], failed: Failed) -> None:
        self.wake = Wake()
        self._run_once = run_once
        self._stopped = False
        self._thread = guarded(name, self._run, failed)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Let the current call end, and wait for that."""
        self._stopped = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stopped:
            self.wake.clear()  # before the work: a call during it ends the next sleep
            seconds = self._run_once()
            if seconds > 0 and not self._stopped:
                self.wake.sleep(seconds)


class Lane(Generic[T]):
    """A thread that handles what was put, everything at once."""

    def __init__(self, name: str, handle: Callable[[list[T]], None], failed: Failed, most: int) -> None:
        self._handle = handle
        self._most = most
        self._items: SimpleQueue[list[T] | None] = SimpleQueue()
        self._rest: list[T] = []
        """What was too much for one batch."""
        self._put = self._begun = 0
        self._closing = threading.Lock()
        self._closed = False
        self._since = 0.0
        self._thread = guarded(name, self._run, failed)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, items: list[T]) -> bool:
        """Have these handled. False: nobody will, as the lane has been stopped."""
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


def guarded(name: str, target: Callable[[], None], failed: Failed) -> threading.Thread:
    """A daemon thread whose error is passed on, and by default ends the process."""

    def run() -> None:
        try:
            target()
        except BaseException as exc:
            failed(name, exc)

    return threading.Thread(target=run, name=f"toc-{name}", daemon=True)
