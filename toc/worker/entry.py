"""What a worker holds: the entries that it has taken and not yet given up."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from toc.handler import Handler
from toc.queue.scores import store_score
from toc.task import TryRow
from toc.topic import Slot, Topic


class Entry:
    """One PrepareQueue entry in this worker's hands, from prepare until it left the PrepareQueue.

    ``fence`` is what its PrepareQueue score must still carry for this worker to move it. ``kept`` is the
    monotonic time of the last keep-alive, ``started`` that of the handler's start (0: not yet), ``taken``
    Redis's time of the prepare in milliseconds.
    """

    __slots__ = (
        "fence",
        "handler",
        "job_id",
        "kept",
        "lost",
        "row",
        "settled",
        "slot",
        "started",
        "taken",
        "topic",
    )

    row: TryRow
    """Set by the row check, before anybody else sees the entry."""

    def __init__(
        self, job_id: int, slot: Slot, fence: float, topic: Topic, handler: Handler, taken: int, now: float
    ) -> None:
        self.job_id = job_id
        self.slot = slot
        self.fence = fence
        self.topic = topic
        self.handler = handler
        self.taken = taken
        self.kept = now
        self.started = 0.0
        self.settled = False
        self.lost = False

    def row_score(self, at: int | None = None) -> float:
        """The StoreQueue score that the row asks for: its next time (or ``at``), its tries left."""
        row = self.row
        return store_score(
            row.next_time if at is None else at, self.topic.remaining(row.attempts), row.attempts
        )

    def unread_score(self) -> float:
        """The same when the row could not be read: due at once, with the tries left of the fence."""
        remaining = int(self.fence)
        return store_score(self.taken, remaining, self.topic.retries - remaining)


class Inflight:
    """All entries of one worker process, by job_id. A worker never starts an id that it holds."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, job_id: int) -> Entry | None:
        """The entry that is held under this id."""
        return self._entries.get(job_id)

    def add(self, entry: Entry) -> None:
        """Hold an entry."""
        self._entries[entry.job_id] = entry

    def discard(self, entries: Iterable[Entry]) -> None:
        """Let entries go: they have left the PrepareQueue, or others care for them."""
        for entry in entries:
            if self._entries.get(entry.job_id) is entry:
                del self._entries[entry.job_id]

    def settle(self, entry: Entry) -> bool:
        """True for the one caller that may report how this try ended."""
        with self._lock:
            if entry.settled:
                return False
            entry.settled = True
            return True

    def snapshot(self) -> list[Entry]:
        """The entries held now."""
        return list(self._entries.values())
