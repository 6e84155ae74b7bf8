"""Threads of tests: calls at once, and what goes on beside a block."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self


def at_once(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls, each on a thread of its own, and wait for all; raises what the first of them raised."""
    wanted = list(calls)
    with ThreadPoolExecutor(len(wanted)) as threads:
        list(threads.map(lambda call: call(), wanted))


@contextmanager
def beside(calls: Iterable[Callable[[threading.Event], object]]) -> Iterator[None]:
    """Calls go on, each on a thread of its own, until the block is left, which the event tells them."""
    over = threading.Event()
    threads = [threading.Thread(target=call, args=[over]) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Beside:
    """What ``_run`` does on a thread until the block is left, which ``_over`` tells it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=type(self).__name__.lower())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError
