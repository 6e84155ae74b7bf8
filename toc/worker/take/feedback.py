"""What the stages tell those before them: which entries are not due yet by this machine's clock, for which
topics there is room again."""

import threading
from collections.abc import Callable, Iterable, Sequence

from toc.model.topic import Slot
from toc.worker.entry import Entry
from toc.worker.slots import NEVER


class EarlyEntries:
    """Checked entries that are due by Redis's clock but not yet by this machine's clock, by the time at which
    they may start. Thread-safe; ``wake`` wakes the poller."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: list[Entry] = []
        """Few: those whose time is within the skew of the clocks. Replaced, never changed in place."""

    def put(self, entries: Iterable[Entry]) -> None:
        """Keep entries until they are due by this machine's clock."""
        with self._lock:
            self._waiting = [*self._waiting, *entries]
        self._wake()

    def release(self, now: int) -> list[Entry]:
        """Remove and return the entries that are due by now (ms)."""
        # Usually there are none, for which no lock is needed.
        return self._take(lambda entry: entry.row.next_time <= now) if self._waiting else []

    def next_due(self) -> int:
        """When the first entry may start (ms), or NEVER."""
        waiting = self._waiting
        return min([entry.row.next_time for entry in waiting]) if waiting else NEVER

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the waiting entries of these slots (None: all)."""
        return self._take(lambda entry: slots is None or entry.slot in slots)

    def _take(self, which: Callable[[Entry], bool]) -> list[Entry]:
        with self._lock:
            taken = [entry for entry in self._waiting if which(entry)]
            self._waiting = [entry for entry in self._waiting if not which(entry)]
        return taken


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
