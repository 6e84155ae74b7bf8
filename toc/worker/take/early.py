"""Entries that are due by Redis's clock but not yet by this machine's clock wait here."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable
from itertools import count

from toc.model.topic import Slot
from toc.worker.entry import Entry
from toc.worker.slots import NEVER


class EarlyEntries:
    """Checked entries, by the time at which they may start. Thread-safe; ``wake`` wakes the poller."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Entry]] = []
        """A heap. The number breaks ties: an id may wait twice, and entries have no order."""
        self._numbers = count()

    def put(self, entries: Iterable[Entry]) -> None:
        """Keep entries until they are due by this machine's clock."""
        with self._lock:
            for entry in entries:
                heapq.heappush(self._waiting, (entry.row.next_time, next(self._numbers), entry))
        self._wake()

    def release(self, now: int) -> list[Entry]:
        """Remove and return the entries that are due by now (ms)."""
        ready: list[Entry] = []
        if not self._waiting:  # the usual case, for which no lock is needed
            return ready
        with self._lock:
            while self._waiting and self._waiting[0][0] <= now:
                ready.append(heapq.heappop(self._waiting)[2])
        return ready

    def next_due(self) -> int:
        """When the first entry may start (ms), or NEVER."""
        if not self._waiting:
            return NEVER
        with self._lock:
            return self._waiting[0][0] if self._waiting else NEVER

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the waiting entries of these slots (None: all)."""
        with self._lock:
            taken, kept = [], []
            for item in self._waiting:
                if slots is None or item[2].slot in slots:
                    taken.append(item[2])
                else:
                    kept.append(item)
            heapq.heapify(kept)
            self._waiting = kept  # in one step: the poller looks without the lock whether it is empty
        return taken
