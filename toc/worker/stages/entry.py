"""What a worker holds: the entries that it has taken and not yet given up."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import Enum

from toc.model.handler import Handler
from toc.model.scores import store_score
from toc.model.task import TryRow
from toc.model.topic import Slot, Topic
from toc.model.verdict import entry_score

NO_FENCE = -1.0
"""The fence of an entry that was taken without Redis: nothing stands in a PrepareQueue for it."""
UNLEASED_SECONDS = 1.0
"""How long after it was taken an entry may start without a lease; who takes tasks without Redis waits
longer than that."""


class Entry:
    """A task in this worker's hands, from prepare until its entry left the PrepareQueue.

    ``fence`` is what its PrepareQueue score must still carry for this worker to move it. ``held`` is the
    monotonic time from before it was taken, ``kept`` that of the last keep-alive, ``started`` that of the
    handler's start (0: not yet), ``ended`` that of its end (not before it), ``taken`` Redis's time of the
    prepare in milliseconds. ``checked`` says that its row was read, ``leased`` is the monotonic time until
    which this worker surely has a lease on it, ``lease_at`` that from which it should ask for a longer one
    (0: it has not asked yet).
    """

    __slots__ = (
        "checked",
        "ended",
        "fence",
        "handler",
        "held",
        "job_id",
        "kept",
        "lease_at",
        "leased",
        "lost",
        "row",
        "settled",
        "slot",
        "started",
        "taken",
        "topic",
    )

    ended: float
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
        self.held = now
        self.kept = now
        self.started = 0.0
        self.settled = False
        self.lost = False
        self.checked = False
        self.leased = 0.0
        self.lease_at = 0.0

    def timed_out(self, now: float) -> bool:
        """Whether others may have found by now that it fell silent: nobody here has kept it alive in time."""
        return self.fence != NO_FENCE and now - self.kept > self.topic.prepare_timeout

    @property
    def due(self) -> int:
        """When it was due, in milliseconds; until its row was read, when it was taken."""
        return self.row.next_time if self.checked else self.taken

    def row_score(self, at: int | None = None) -> float:
        """The StoreQueue score that the row asks for: its next time (or ``at``), its tries left."""
        due = self.row.next_time if at is None else at
        return entry_score(self.topic, due, self.row.attempts)

    def unread_score(self, at: int | None = None) -> float:
        """The same when the row could not be read: due at once, or ``at``; tries left as in the fence."""
        remaining = max(int(self.fence), 1)
        return store_score(self.taken if at is None else at, remaining, self.topic.retries - remaining)


class Held(Enum):
    """What became of an entry that was taken just now."""

    NEW = "new"
    """It is held; its row is to be checked."""
    RUNNING = "running"
    """A try of the id runs here, or has ended and is not written yet: it goes on under the new fence."""
    MOVING = "moving"
    """A move of the try before it is under way and may hit this one: it is not held, but adopted later."""


class Inflight:
    """All entries of one worker process, by job_id. A worker never starts an id that it holds."""

    def __init__(self) -> None:
        self.shared_until = float("-inf")
        """Until when (monotonic) others may have our slots too. They may have lost Redis, or we: it does not
        say who has what. So nothing starts here without a lease, and nothing is taken without Redis."""
        self._entries: dict[int, Entry] = {}
        self._refused: list[Entry] = []
        """What was not started and has a lease, perhaps."""
        self._moving: dict[int, float] = {}
        """Fences of the entries that are being moved out of the PrepareQueue just now."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, job_id: int) -> Entry | None:
        """The entry that is held under this id."""
        return self._entries.get(job_id)

    def hold(self, entry: Entry) -> Held:
        """Hold an entry that was taken just now.

        An id that is held already and has not started is held anew: its row may have changed since it was
        checked, so it is checked again, and ``start`` refuses the older entry.
        """
        with self._lock:
            if self._moving.get(entry.job_id) == entry.fence:
                return Held.MOVING  # [rule: one-way]
            older = self._entries.get(entry.job_id)
            if older is not None and older.started:
                older.fence, older.kept, older.lost = entry.fence, entry.kept, False
                return Held.RUNNING  # [rule: held-once]
            if older is not None:
                entry.leased, entry.lease_at = older.leased, older.lease_at
            self._entries[entry.job_id] = entry
            return Held.NEW

    def hold_if_free(self, entry: Entry) -> bool:
        """Hold an entry that is about to be taken without Redis, unless its id is held or on the move."""
        with self._lock:
            if entry.job_id in self._entries or entry.job_id in self._moving:
                return False
            self._entries[entry.job_id] = entry
            return True

    def start(self, entry: Entry, now: float) -> bool:
        """Note that the try starts; False, and it is let go, when others may have the entry by now.

        That is so when nobody here has kept it alive in time: this process was paused, or Redis out of reach.
        And when it was taken too long ago, unless it has a lease: who has lost Redis may have it. (How long
        ago its row was checked says nothing: the slot may have gone to another worker before.) Nor does
        anything start without a lease while others may have the slot too.

        What has a lease stays held until that is given up: ``refuse`` finds it.
        """
        with self._lock:
            if self._entries.get(entry.job_id) is not entry:
                return False
            ours = entry.fence != NO_FENCE and now >= self.shared_until  # [rule: alone-or-leased]
            fresh = ours and now - entry.held <= UNLEASED_SECONDS  # [rule: fresh-or-leased]
            late = entry.lost or entry.timed_out(now)
            if late or not (fresh or now < entry.leased):  # [rule: last-look]
                if entry.leased:
                    entry.lost = True
                    self._refused.append(entry)
                else:
                    del self._entries[entry.job_id]
                return False
            entry.started = now
            return True

    def refuse(self, entries: Iterable[Entry], now: float) -> list[Entry]:
        """What will not start any more of these, and what was refused that; each is returned once.

        They are held still: who has a lease gives it up first.
        """
        with self._lock:
            late = [e for e in entries if not e.started and (e.lost or e.timed_out(now))]
            refused = [e for e in dict.fromkeys(self._refused + late) if not e.settled]
            self._refused.clear()
            for entry in refused:
                entry.lost = entry.settled = True  # [rule: lease-given-up]
            return refused

    def drop(self, entries: Iterable[Entry]) -> None:
        """Hold these no longer: they have not started, and stand in the PrepareQueue no more."""
        with self._lock:
            for entry in entries:
                if self._entries.get(entry.job_id) is entry:
                    del self._entries[entry.job_id]

    def depart(self, entries: Iterable[Entry]) -> list[Entry]:
        """Let entries go whose move begins; returns those that have something to move.

        Not those whose id was taken anew, nor those that were taken without Redis. They go before the move,
        because a rolled back entry may be taken again before its call returns; and until ``arrived`` the same
        id is not held under the same fence.
        """
        going: list[Entry] = []
        with self._lock:
            for entry in entries:
                if self._entries.get(entry.job_id) not in (None, entry):
                    continue
                self._entries.pop(entry.job_id, None)
                if entry.fence != NO_FENCE:
                    self._moving[entry.job_id] = entry.fence
                    going.append(entry)
        return going

    def arrived(self, gone: Iterable[Entry]) -> None:
        """The moves of these have ended, well or not."""
        with self._lock:
            for entry in gone:
                if self._moving.get(entry.job_id) == entry.fence:
                    del self._moving[entry.job_id]

    @property
    def moving(self) -> bool:
        """Whether a move is under way."""
        return bool(self._moving)

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
