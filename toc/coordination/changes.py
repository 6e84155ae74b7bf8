"""What has changed in ZooKeeper since it was last read, as kazoo's threads report it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Dirty(NamedTuple):
    """What must be read again. ``everything``: all of it, as watches may have been lost."""

    everything: bool
    directories: set[str]
    topics: set[str]
    workers: set[str]


class Changes:
    """Flags that kazoo's threads set. ``signal`` makes the daemon's thread act on them."""

    def __init__(self, signal: Callable[[], None]) -> None:
        self._signal = signal
        self._lock = threading.Lock()
        self._everything = False
        self._directories: set[str] = set()
        self._topics: set[str] = set()
        self._workers: set[str] = set()

    # --- kazoo's threads

    def connection(self) -> None:
        """The connection was lost or made. Watches end with a connection."""
        with self._lock:
            self._everything = True
        self._signal()

    def directory(self, name: str, event: object) -> None:  # noqa: ARG002 - what kazoo gives
        """Nodes in a directory were made or deleted."""
        with self._lock:
            self._directories.add(name)
        self._signal()

    def topic(self, event: Any) -> None:
        """The assignment of a topic has changed."""
        self._node(self._topics, event)

    def worker(self, event: Any) -> None:
        """What a worker tells of itself has changed."""
        self._node(self._workers, event)

    def _node(self, changed: set[str], event: Any) -> None:
        if event.path:  # else the connection was lost, and everything is read again
            with self._lock:
                changed.add(event.path.rpartition("/")[2])
            self._signal()

    # --- the daemon's thread

    def read_everything(self) -> None:
        """Have everything read again, as after an interruption."""
        self._everything = True

    def take(self) -> Dirty:
        """Return what must be read again, and forget it."""
        with self._lock:
            dirty = Dirty(self._everything, self._directories, self._topics.copy(), self._workers.copy())
            self._everything, self._directories = False, set()
            self._topics.clear()
            self._workers.clear()
        return dirty
