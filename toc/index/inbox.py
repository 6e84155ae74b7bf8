"""Where tasks may be due, as told to those that take them."""

import threading
from collections.abc import Callable

from toc.model.topic import Slot


class Inbox:
    """Collects slots in which entries may be due, for the one that takes them, whom ``wake`` wakes.
    Thread-safe."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._due: dict[Slot, int] = {}

    def look_at(self, slot: Slot, due_ms: int) -> None:
        """Tell that the slot may hold an entry due at ``due_ms``."""
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
