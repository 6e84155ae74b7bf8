"""What the stages tell those before them: where tasks may be due, which entries were let go, for which topics
there is room again, and whether the process keeps up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from toc.loop import Wake
from toc.model.topic import Slot
from toc.worker.entry import NO_FENCE, Entry


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


class LetGo:
    """Entries that were let go before they started, and may still be prepared under our claim.

    Thread-safe; ``wake`` wakes the adopter.
    """

    def __init__(self, wake: Wake) -> None:
        self.wake = wake
        self._lock = threading.Lock()
        self._entries: dict[Slot, dict[int, float]] = {}
        self._added: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()
        """``_added``: by topic, how many entries were added since the last ``take``. ``_taken``:
        how many the last ``take`` returned."""

    def add(self, entries: Iterable[Entry]) -> None:
        """Report entries that were let go."""
        with self._lock:
            for entry in entries:
                if entry.fence != NO_FENCE:
                    self._entries.setdefault(entry.slot, {})[entry.job_id] = entry.fence
                    self._added[entry.topic.name] += 1
        self.wake()

    def take(self) -> dict[Slot, dict[int, float]]:
        """Return the entries added since the last call: slot -> job_id -> fence."""
        with self._lock:
            entries, self._entries = self._entries, {}
            self._taken, self._added = self._added, Counter()
        return entries

    def taken_up(self) -> None:
        """Report that what ``take`` returned is held again, or is no longer ours."""
        self._taken = Counter()

    def waiting(self, topic: str) -> int:
        """How many entries of the topic were let go and are not held again yet."""
        return self._added.get(topic, 0) + self._taken.get(topic, 0)  # [] would call Counter.__missing__

    def __bool__(self) -> bool:
        return bool(self._entries)


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
