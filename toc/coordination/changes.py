"""What has changed in ZooKeeper since it was last read, as kazoo's threads report it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from toc.coordination.session import CHANGED, DELETED

_VERIFY = 3.0
"""Seconds between two checks that our nodes still exist."""
_VERIFY_SOON = 0.1
"""Seconds from the deletion of a node to the next check. If a whole tree is being deleted, this
lets the deletion finish first."""


class Dirty(NamedTuple):
    """What must be read again. ``everything``: all directories and topics, as watches may have been lost."""

    everything: bool
    directories: set[str]
    topics: set[str]


class Changes:
    """Flags that kazoo's threads set. ``signal`` makes the daemon's thread act on them."""

    def __init__(self, signal: Callable[[], None]) -> None:
        self._signal = signal
        self._lock = threading.Lock()
        self._everything = False
        self._directories: set[str] = set()
        self._topics: set[str] = set()
        self._verify_at = 0.0
        """When to check our nodes (monotonic)."""

    # --- kazoo's threads

    def connection(self) -> None:
        """The connection was lost or made. Watches end with a connection."""
        with self._lock:
            self._everything = True
            self._verify_at = 0.0
        self._signal()

    def directory(self, name: str, event: Any) -> None:
        """Nodes in a directory were made or deleted."""
        with self._lock:
            self._directories.add(name)
        if event.type == DELETED:
            self._verify_soon()
        self._signal()

    def member(self, event: Any) -> None:
        """The node of a worker of ours has changed."""
        if event.type in (DELETED, CHANGED):
            self._verify_soon()
            self._signal()

    def topic(self, event: Any) -> None:
        """The assignment of a topic has changed."""
        if event.path:  # else the connection was lost, and everything is read again
            with self._lock:
                self._topics.add(event.path.rpartition("/")[2])
            self._signal()

    def _verify_soon(self) -> None:
        with self._lock:
            self._verify_at = min(self._verify_at, time.monotonic() + _VERIFY_SOON)

    # --- the daemon's thread

    def read_everything(self) -> None:
        """Have everything read again, as after an interruption."""
        self._everything = True

    def take(self) -> Dirty:
        """Return what must be read again, and forget it."""
        with self._lock:
            dirty = Dirty(self._everything, self._directories, self._topics)
            self._everything, self._directories, self._topics = False, set(), set()
        return dirty

    @property
    def verify_in(self) -> float:
        """The seconds until our nodes must be checked."""
        return max(self._verify_at - time.monotonic(), 0.0)

    def verified(self) -> None:
        """Record that our nodes were just made or checked."""
        self._verify_at = time.monotonic() + _VERIFY
