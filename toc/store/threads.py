"""Threads for what is done beside the caller.

As ``concurrent.futures``, whose locks are Python's: there an exception that a signal handler raises in the
caller, between two steps of taking such a lock, leaves it locked, and the threads stand still for ever. Here
work and outcomes are handed over by queues written in C.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")

_Work = tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]


class Threads:
    """At most ``size`` threads, started when they are needed. Thread-safe; a child of a fork has its own."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle: deque[None] = deque()
        self._threads: list[threading.Thread] = []

    def begin(self, do: Callable[[], R]) -> Callable[[], R]:
        """Call ``do`` on a thread. Returns what waits for that, and returns or raises what it did."""
        if self._pid != os.getpid():
            self._start_anew()
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        try:
            self._idle.pop()
        except IndexError:
            if len(self._threads) < self._size:
                thread = threading.Thread(
                    target=_serve, args=[self._work, self._idle], name=self._name, daemon=True
                )
                thread.start()
                self._threads.append(thread)
        self._work.put((do, outcome))

        def result() -> R:
            value, error = outcome.get()
            try:
                if error is not None:
                    raise error
                found: R = value
                return found
            finally:
                del error  # this frame is part of its traceback: a cycle would keep what that holds

        return result

    def all(self, work: Iterable[Callable[[], R]]) -> list[R]:
        """Call each on a thread; their results in order. The first error is raised when all have ended."""
        ends = [self.begin(do) for do in work]
        results: list[R] = []
        errors: list[Exception] = []
        for end in ends:
            try:
                results.append(end())
            except Exception as exc:
                errors.append(exc)
        try:
            if errors:
                raise errors[0]
            return results
        finally:
            errors.clear()  # as in begin

    def close(self) -> None:
        """End the threads when they have done what was begun. May be called twice; it can be used again."""
        threads, work = self._threads, self._work
        if self._pid == os.getpid():
            self._start_anew()
            work.put(None)
            for thread in threads:
                thread.join()

    def __del__(self) -> None:
        self._work.put(None)


def _serve(work: SimpleQueue[_Work | None], idle: deque[None]) -> None:
    while (item := work.get()) is not None:
        do, outcome = item
        value, error = None, None
        try:
            value = do()
        except BaseException as exc:
            error = exc
        idle.append(None)
        outcome.put((value, error))
        del item, do, outcome, value, error  # what they hold must not wait for the next
    work.put(None)  # for the others
