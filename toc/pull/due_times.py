"""When the slots of a pulled topic are next due."""

from collections.abc import Iterable

from toc.model.topic import Slot

NEVER = 2**62
UNKNOWN = 0
"""The due time of a slot that was not asked yet."""


class DueTimes:
    """The slots of one topic, and when each is next due (ms), as far as this process knows."""

    def __init__(self) -> None:
        self.due: dict[Slot, int] = {}
        self.wanted_at = 0.0
        """When a pull last wanted tasks of the topic (monotonic)."""

    def note(self, slot: Slot, due: int) -> None:
        """Note that the slot is to be looked at by ``due`` (ms). An earlier time stays."""
        if due < self.due.get(slot, -1):
            self.due[slot] = due

    def set_slots(self, slots: Iterable[Slot]) -> None:
        """Replace the known slots by these."""
        self.due = {slot: self.due.get(slot, UNKNOWN) for slot in slots}

    def next_due(self) -> int:
        """When the first is due; NEVER if no due time is known."""
        return min(self.due.values(), default=NEVER)

    def take_due(self, now: int, most: int) -> list[tuple[int, Slot]]:
        """Return the slots that are due, each with its due time; ``most`` at most, the longest due first.

        A returned slot does not count as due again until ``note`` is called for it.
        """
        found = sorted((due, slot) for slot, due in self.due.items() if due <= now)[:most]
        for _, slot in found:
            self.due[slot] = NEVER
        return found
