"""What the stages tell those before them: where tasks may be due, for which topics there is room again, and
whether the process keeps up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from toc.model.topic import Slot


class Inbox:
    """Collects, for the poller, the slots in which entries may be due. Thread-safe; ``wake`` wakes
    the poller."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._due: dict[Slot, int] = {}

    def look_at(self, slot: Slot, due_ms: int) -> None:
        """Tell the poller that the slot may hold an entry due at ``due_ms``."""
        with self._lock:
            known = self._due.get(slot)
            if known is None or due_ms < known:
                self._due[slot] = due_ms
        self._wake()

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived since it was last emptied."""
        return not self._due

    def take_due(self) -> dict[Slot, int]:
        """The instants (ms) at which slots may hold due entries, since the last call."""
        if not self._due:
            return {}
        with self._lock:
            due, self._due = self._due, {}
        return due


class WantedRoom:
    """The topics of which more would be taken if there were room. Thread-safe.

    ``room`` tells how many entries of a topic may be taken; those in ``wake`` are woken once there is room
    for one of the topics.
    """

    def __init__(self, room: Callable[[str], int], wake: Sequence[Callable[[], None]]) -> None:
        self._room = room
        self._wake = wake
        self._lock = threading.Lock()
        self._topics: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._topics)

    def add(self, topic: str) -> None:
        """Ask for room for a topic."""
        with self._lock:
            self._topics.add(topic)
        self.look()

    def look(self) -> None:
        """Wake the callers if there is room for one of the topics, and then forget the topics."""
        with self._lock:
            found = any(self._room(topic) > 0 for topic in self._topics)
            if found:
                self._topics.clear()
        if found:
            for wake in self._wake:
                wake()


class Pressure:
    """Back-pressure: whether this process keeps up. Any thread may read it."""

    backlogged = False
    """Whether more is due than can start at once. The poller sets it. The finisher then gathers more before
    it writes, and the sweep rests longer."""
