"""The entries that a worker holds: taken and not yet given up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from toc.model.handler import Handler
from toc.model.raised import Delivered
from toc.model.scores import unread_score
from toc.model.task import TryRow
from toc.model.topic import Slot, Topic
from toc.model.verdict import entry_score

NO_FENCE = -1.0
"""The fencing token of an entry that was taken without Redis: no PrepareQueue entry exists for it."""
UNLEASED_SECONDS = 1.0
"""How long after it was taken an entry may start without a lease. Workers without Redis wait longer than that
before they take it."""


@dataclass(eq=False, slots=True)
class Entry:
    """A task that this worker holds, from prepare until its entry has left the PrepareQueue.

    ``fence`` is the fencing token: this worker may move the entry only while its PrepareQueue score carries
    it. ``taken`` is Redis's time of the prepare in milliseconds; ``checked`` says that the row was read.
    Monotonic times: ``held`` is from before the take, ``kept`` the last heartbeat, ``started`` and ``ended``
    those of the handler (0 and unset before), ``leased`` until when this worker surely has a lease on the
    row, ``lease_at`` when to ask for a longer one (0: it has not asked yet). ``may_be_leased``: it has one,
    or has asked and does not know the answer. ``delivered`` is what the receiver of a webhook answered, if it
    succeeded. ``waits``: it is held and has not started, as Inflight counts it.
    """

    job_id: int
    slot: Slot
    fence: float
    topic: Topic
    handler: Handler
    taken: int
    held: float
    kept: float = field(init=False)
    started: float = 0.0
    ended: float = field(init=False)
    settled: bool = False
    lost: bool = False
    row: TryRow = field(init=False)
    """Set by the row check, before any other stage sees the entry."""
    checked: bool = False
    leased: float = 0.0
    lease_at: float = 0.0
    may_be_leased: bool = False
    delivered: Delivered | None = None
    waits: bool = False

    def __post_init__(self) -> None:
        self.kept = self.held

    def timed_out(self, now: float) -> bool:
        """Whether others may have timed the entry out: no heartbeat succeeded within prepare_timeout."""
        return self.fence != NO_FENCE and now - self.kept > self.topic.prepare_timeout

    @property
    def due(self) -> int:
        """When the task was due, in milliseconds. Until its row is read: when it was taken."""
        return self.row.next_time if self.checked else self.taken

    def row_score(self, at: int | None = None) -> float:
        """The StoreQueue score by the row: its next time (or ``at``, in ms) and its remaining tries."""
        due = self.row.next_time if at is None else at
        return entry_score(self.topic, due, self.row.attempts)

    def unread_score(self, at: int | None = None) -> float:
        """The StoreQueue score if the row could not be read: due at once or ``at`` (ms), tries as fenced."""
        return unread_score(self.fence, self.taken if at is None else at, self.topic.retries)


class Held(Enum):
    """What became of an entry that was just taken."""

    NEW = "new"
    """It is held. Its row must be checked."""
    RUNNING = "running"
    """A try of the id runs here or has yet to be written. It continues under the new fencing token."""
    MOVING = "moving"
    """The previous try is being moved, and its move could hit this entry. It is adopted later instead."""


class Inflight:
    """All entries of one worker process, by job_id. A worker never starts an id that it holds."""

    def __init__(self) -> None:
        self.shared_until = float("-inf")
        """Until when (monotonic) other workers may own our slots too. If either side has lost Redis, the
        index cannot arbitrate. So nothing starts here without a lease, and nothing is taken without Redis."""
        self._entries: dict[int, Entry] = {}
        self._refused: list[Entry] = []
        """Entries that were refused a start and may have a lease."""
        self._moving: dict[int, float] = {}
        """Fencing tokens of the entries that are being moved out of the PrepareQueue."""
        self._waiting: Counter[str] = Counter()
        """By topic, how many of the entries have not started."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, job_id: int) -> Entry | None:
        """The entry held under this id."""
        return self._entries.get(job_id)

    def waiting(self, topic: str) -> int:
        """How many entries of the topic are held and have not started, wherever they are in the process."""
        return self._waiting[topic]

    def _waits(self, entry: Entry) -> None:
        """Count an entry that is held from now on. Call under the lock."""
        entry.waits = True
        self._waiting[entry.topic.name] += 1

    def _stop_counting(self, entry: Entry) -> None:
        """Stop counting an entry that has started, or is no longer held. Call under the lock."""
        if entry.waits:
            entry.waits = False
            self._waiting[entry.topic.name] -= 1

    def hold(self, entry: Entry) -> Held:
        """Hold an entry that was just taken.

        If the id is already held and has not started, the new entry replaces the older one. Its row may have
        changed since, so it is checked again, and ``start`` refuses the older entry.
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
                entry.may_be_leased = older.may_be_leased
                self._stop_counting(older)
            self._entries[entry.job_id] = entry
            self._waits(entry)
            return Held.NEW

    def hold_if_free(self, entry: Entry) -> bool:
        """Hold an entry that is about to be taken without Redis, unless its id is held or being moved."""
        with self._lock:
            if entry.job_id in self._entries or entry.job_id in self._moving:
                return False
            self._entries[entry.job_id] = entry
            self._waits(entry)
            return True

    def start(self, entry: Entry, now: float) -> bool:
        """Note that the try starts. False: another worker may have the entry by now, and it is let go.

        That is so if no heartbeat succeeded in time: this process was paused, or Redis out of reach. Also if
        the entry was taken too long ago and has no lease: a worker that has lost Redis may have it. (The age
        of the row check proves nothing: the slot may have moved before.) And nothing starts without a lease
        while others may own the slot too.

        An entry that may have a lease stays held until the lease is given up: ``refuse`` returns it.
        """
        with self._lock:
            if self._entries.get(entry.job_id) is not entry:
                return False
            ours = entry.fence != NO_FENCE and now >= self.shared_until  # [rule: alone-or-leased]
            fresh = ours and now - entry.held <= UNLEASED_SECONDS  # [rule: fresh-or-leased]
            late = entry.lost or entry.timed_out(now)
            if late or not (fresh or now < entry.leased):  # [rule: last-look]
                if entry.may_be_leased:
                    entry.lost = True
                    self._refused.append(entry)
                else:
                    del self._entries[entry.job_id]
                    self._stop_counting(entry)
                return False
            entry.started = now
            self._stop_counting(entry)
            return True

    def refuse(self, entries: Iterable[Entry], now: float) -> list[Entry]:
        """Return the entries that will not start: of ``entries``, and of those that ``start``
        refused. Each is returned once.

        They stay held: the caller must give up their leases first.
        """
        with self._lock:
            late = [e for e in entries if not e.started and (e.lost or e.timed_out(now))]
            refused = [e for e in dict.fromkeys(self._refused + late) if not e.settled]
            self._refused.clear()
            for entry in refused:
                entry.lost = entry.settled = True  # [rule: lease-given-up]
            return refused

    def drop(self, entries: Iterable[Entry]) -> None:
        """Stop holding entries that have not started and are no longer in the PrepareQueue."""
        with self._lock:
            for entry in entries:
                if self._entries.get(entry.job_id) is entry:
                    del self._entries[entry.job_id]
                    self._stop_counting(entry)

    def depart(self, entries: Iterable[Entry]) -> list[Entry]:
        """Release entries whose move begins. Returns those that have something to move.

        Entries whose id was taken again, or that were taken without Redis, have nothing to move. Entries are
        released before the move, because a rolled back entry may be taken again before the call returns.
        Until ``arrived`` the same id is not held under the same fencing token.
        """
        going: list[Entry] = []
        with self._lock:
            for entry in entries:
                held = self._entries.get(entry.job_id)
                if held is entry:
                    del self._entries[entry.job_id]
                elif held is not None:
                    continue
                self._stop_counting(entry)
                if entry.fence != NO_FENCE:
                    self._moving[entry.job_id] = entry.fence
                    going.append(entry)
        return going

    def arrived(self, gone: Iterable[Entry]) -> None:
        """Note that the moves of these entries have ended, successfully or not."""
        with self._lock:
            for entry in gone:
                if self._moving.get(entry.job_id) == entry.fence:
                    del self._moving[entry.job_id]

    @property
    def moving(self) -> bool:
        """Whether a move is under way."""
        return bool(self._moving)

    def settle(self, entry: Entry) -> bool:
        """True for the one caller that may report the outcome of this try."""
        with self._lock:
            if entry.settled:
                return False
            entry.settled = True
            self._stop_counting(entry)
            return True

    def snapshot(self) -> list[Entry]:
        """The entries held now."""
        return list(self._entries.values())
