"""What has changed in ZooKeeper since it was last read, as kazoo's threads report it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Changes:
    """What kazoo's threads note. ``signal`` makes the daemon's thread act on it."""

    def __init__(self, signal: Callable[[], None]) -> None:
        self._signal = signal
        self._lock = threading.Lock()
        self._everything = False
        """Whether all must be read again, as watches may have been lost."""
        self._paths: set[str] = set()

    # --- kazoo's threads

    def connection(self) -> None:
        """The connection was lost or made. Watches end with a connection."""
        with self._lock:
            self._everything = True
        self._signal()

    def watch(self, event: Any) -> None:
        """A node has changed, or nodes in a directory were made or deleted."""
        if event.path:  # else the connection was lost, and everything is read again
            with self._lock:
                self._paths.add(event.path)
            self._signal()

    # --- the daemon's thread

    def read_everything(self) -> None:
        """Have everything read again, as after an interruption."""
        self._everything = True

    def take(self) -> tuple[bool, set[str]]:
        """Return whether everything must be read again, and the paths that have changed; and forget that."""
        with self._lock:
            taken = self._everything, self._paths
            self._everything, self._paths = False, set()
        return taken
