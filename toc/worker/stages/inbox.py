"""What other threads tell the poller, and what it tells them: where tasks may be due, where entries were let
go; and whether the process keeps up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from toc.model.scores import split
from toc.model.topic import Slot
from toc.worker.stages.entry import NO_FENCE, Entry


class Inbox:
    """Thread-safe; ``wake`` wakes the poller."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._due: dict[Slot | None, int] = {}
        self._let_go: set[tuple[Slot, int]] = set()

    def look_at(self, slot: Slot | None, due_ms: int) -> None:
        """Tell the poller that the slot (None: any slot) may hold an entry due at ``due_ms``."""
        with self._lock:
            known = self._due.get(slot)
            if known is None or due_ms < known:
                self._due[slot] = due_ms
        self._wake()

    def look_for(self, entries: Iterable[Entry]) -> None:
        """Report entries let go before they started, which may still be prepared under our claim."""
        with self._lock:
            self._let_go.update((e.slot, split(e.fence).claim) for e in entries if e.fence != NO_FENCE)
        self._wake()

    @property
    def empty(self) -> bool:
        """Whether nothing has arrived since it was last emptied."""
        return not self._due and not self._let_go

    @property
    def let_go(self) -> bool:
        """Whether entries that were let go must be looked for."""
        return bool(self._let_go)

    def take_due(self) -> dict[Slot | None, int]:
        """The instants (ms) at which slots (None: every slot) may hold due entries, since the last call."""
        with self._lock:
            due, self._due = self._due, {}
        return due

    def take_let_go(self) -> set[tuple[Slot, int]]:
        """The slots and claim numbers under which let-go entries may exist, since the last call."""
        with self._lock:
            let_go, self._let_go = self._let_go, set()
        return let_go


class Pressure:
    """Back-pressure: whether this process keeps up. Any thread may read it."""

    crowded = False
    """Whether more is due than can start at once. The poller sets it. The finisher then gathers more before
    it writes, and the sweep rests longer."""
