"""When the slots of a topic are next due, as far as a process knows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from toc.model.topic import Slot

NEVER = 2**62
UNKNOWN = 0
"""The due time of a slot that was not asked yet."""


class DueTimes:
    """The slots of one topic, and when each is next due (ms)."""

    def __init__(self) -> None:
        self.due: dict[Slot, int] = {}
        self.left: dict[Slot, int] = {}
        """How many more due entries a slot had when some were taken."""
        self._heap: list[tuple[int, Slot]] = []
        self.wanted_at = 0.0
        """When a pull last wanted tasks of the topic (monotonic)."""

    def note(self, slot: Slot, due: int) -> None:
        """Note that the slot is to be looked at by ``due`` (ms). An earlier time stays."""
        if due < self.due.get(slot, -1):
            self.due[slot] = due
            heapq.heappush(self._heap, (due, slot))

    def set_slots(self, slots: Sequence[Slot]) -> bool:
        """Replace the known slots by these. Returns whether they differ from the former ones."""
        if self.due.keys() == set(slots):
            return False
        for slot in set(slots) - self.due.keys():
            self.due[slot] = NEVER
            self.note(slot, UNKNOWN)
        self.due = {slot: self.due[slot] for slot in slots}
        return True

    def next_due(self) -> int | None:
        """When the first is due; None if no due time is known."""
        while self._heap:
            due, slot = self._heap[0]
            if self.due.get(slot) == due:
                return due
            heapq.heappop(self._heap)
        return None

    def take_due(self, now: int, most: int) -> list[tuple[int, Slot]]:
        """Return the slots that are due, each with its due time; ``most`` at most, the longest due first.

        A returned slot does not count as due again until ``note`` is called for it.
        """
        found: list[tuple[int, Slot]] = []
        while len(found) < most and (due := self.next_due()) is not None and due <= now:
            _, slot = heapq.heappop(self._heap)
            self.due[slot] = NEVER
            found.append((due, slot))
        return found
