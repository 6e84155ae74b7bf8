"""Threads for work in parallel to the caller.

``concurrent.futures`` has locks in Python: an exception that a signal handler raises in the caller, between
two steps of taking such a lock, leaves it locked, and the threads hang forever. Here work and results pass
through queues written in C.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from toc.model.errors import Busy
from toc.model.fork import in_each_process

R = TypeVar("R")

_Work = tuple[Callable[[], Any], SimpleQueue[tuple[Any, BaseException | None]]]


class Threads:
    """At most ``size`` threads, started on demand. Thread-safe; a forked child has its own."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        in_each_process(self._start_anew)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()
        """Work is begun either before a close, and done, or after it. A lock written in C."""
        self._start_empty()

    def _start_empty(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle: deque[None] = deque()
        self._threads: list[threading.Thread] = []

    def begin(self, do: Callable[[], R]) -> Callable[[], R]:
        """Call ``do`` on a thread. Returns a function that waits and returns or raises its outcome. Raises
        Busy if no thread can be started, as from Python 3.12 on once the main program has ended."""
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        with self._lock:
            try:
                self._idle.pop()
            except IndexError:
                self._start_one()
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

    def _start_one(self) -> None:
        """Start another thread unless there are enough."""
        if len(self._threads) == self._size:
            return
        thread = threading.Thread(target=_serve, args=[self._work, self._idle], name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the system allows no more: the present ones do the work
            if not self._threads:
                raise Busy(
                    f"this process can start no further thread ({exc}); try again in a moment"
                ) from exc
        else:
            self._threads.append(thread)

    def soon(self, do: Callable[[], R]) -> Future[R]:
        """Call ``do`` on a thread unless what is returned is cancelled before. For callers that no signal
        handler interrupts: a Future has locks in Python."""
        future: Future[R] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except BaseException as exc:
                    future.set_exception(exc)

        self.begin(run)
        return future

    def run_detached(self, do: Callable[[], object]) -> None:
        """Call ``do`` on a thread. Nobody waits for its result.

        An error of ``do`` goes to ``threading.excepthook``, like an error that ends a thread.
        """

        def run() -> None:
            try:
                do()
            except BaseException as exc:
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(exc), exc, exc.__traceback__, thread)))

        self.begin(run)

    def all(self, work: Iterable[Callable[[], R]]) -> list[R]:
        """Call each on a thread and return the results in order. Raises the first error after all have
        ended."""
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

    def close(self, *, wait: bool = True) -> None:
        """End the threads after the work begun, and ``wait`` for that. May be called twice; the object stays
        usable."""
        with self._lock:
            threads, work = self._threads, self._work
            self._start_empty()
            work.put(None)
        for thread in threads if wait else ():
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
        del item, do, outcome, value, error  # their objects must not live until the next work item
    work.put(None)  # for the others
