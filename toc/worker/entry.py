"""The entries that a worker holds: taken and not yet given up.

Each goes through states, and nothing but NEXT says how. ``Inflight`` makes all transitions, under one lock:

    waits ──start──▶ runs ──settle──▶ settled ──leave──▶ gone
      ├─────────────settle──────────────▲  ▲
      ├──refuse──▶ refused ────settle──────┘
      └──leave───▶ gone
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from toc.model.handler import Handler
from toc.model.lateness import Cause
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
LOST = float("-inf")
"""The time of the last heartbeat of an entry that others may have taken, or take from now on."""
UNREAD = TryRow(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None, "")
"""In place of a row that has yet to be read."""


Crowd = tuple[Cause, str]
"""What keeps the tasks of a topic from starting sooner, with the evidence."""
ROOM: Crowd = (Cause.BACKLOG, "")


class State(StrEnum):
    """How far an entry has got."""

    WAITS = "waits"
    """It has not started."""
    RUNS = "runs"
    """Its handler runs."""
    REFUSED = "refused"
    """It was refused a start, and is to be given back, after a lease that it may have."""
    SETTLED = "settled"
    """Its outcome is decided, and is being written: nobody else may report one."""
    GONE = "gone"
    """It is held no more, or never was."""


START: Mapping[State, State] = {State.WAITS: State.RUNS}  # [rule: last-look]
REFUSE: Mapping[State, State] = {State.WAITS: State.REFUSED}
SETTLE: Mapping[State, State] = {
    State.WAITS: State.SETTLED,
    State.RUNS: State.SETTLED,
    State.REFUSED: State.SETTLED,  # [rule: lease-given-up]
}
LEAVE: Mapping[State, State] = dict.fromkeys(State, State.GONE)
UNSTARTED = (State.WAITS, State.REFUSED)


class Lease(NamedTuple):
    """What this worker knows of its lease on a row (monotonic times). Replaced as a whole."""

    until: float
    """Until when it surely has one."""
    ask_at: float
    """When to ask for a longer one. 0: it has not asked yet."""
    possible: bool
    """It has one, or has asked and does not know the answer."""
    told: bool = False
    """The row says that it has started."""


NO_LEASE = Lease(0.0, 0.0, possible=False)


@dataclass(eq=False, slots=True)
class Entry:
    """A task that this worker holds, from prepare until its entry has left the PrepareQueue.

    ``fence`` is the fencing token: this worker may move the entry only while its PrepareQueue score carries
    it. ``taken`` is Redis's time of the prepare in milliseconds. Monotonic times: ``held`` is from before the
    take, ``kept`` the last heartbeat (at first ``held``) or LOST, ``started`` and ``ended`` those of the
    handler (0 before), ``read`` when its row was read (0: not yet). ``behind`` is how much this host's clock
    is behind that of Redis (ms), if that delays it; ``crowd`` what kept it from starting sooner, if nothing
    else did. ``delivered`` is what the receiver of a webhook answered, if it succeeded.
    """

    job_id: int
    slot: Slot
    fence: float
    topic: Topic
    handler: Handler
    taken: int
    held: float
    state: State = State.GONE
    kept: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    row: TryRow = UNREAD
    """As the last row check read it."""
    lease: Lease = NO_LEASE
    read: float = 0.0
    behind: int = 0
    crowd: Crowd = ROOM
    delivered: Delivered | None = None

    @property
    def checked(self) -> bool:
        """Whether its row was read."""
        return self.row is not UNREAD

    @property
    def fenced(self) -> bool:
        """Whether its PrepareQueue entry is ours, as far as we know."""
        return self.fence != NO_FENCE and self.kept != LOST

    def in_time(self, now: float) -> bool:
        """Whether no other worker may have timed the entry out: a heartbeat succeeded within
        prepare_timeout."""
        timed_out = self.fence != NO_FENCE and now - self.kept > self.topic.prepare_timeout
        return self.kept != LOST and not timed_out

    def overtime(self, now: float) -> float:
        """Return by how many seconds its handler has run longer than max_runtime."""
        return now - self.started - self.topic.max_runtime

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
        """Until when (monotonic) other workers may own our slots too."""
        self.sure_until = float("inf")
        """From when on they may."""
        self._entries: dict[int, Entry] = {}
        self._moving: dict[int, float] = {}
        """Fencing tokens of the entries that are being moved out of the PrepareQueue."""
        self._waiting: Counter[str] = Counter()
        """By topic, how many of the entries have not started."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def share(self, until: float) -> None:
        """Note that others may own our slots too, until then (monotonic)."""
        with self._lock:
            self.shared_until = max(self.shared_until, until)

    def shared(self, now: float) -> bool:
        """Whether other workers may own our slots too. If either side has lost Redis, the index cannot
        arbitrate. So nothing starts here without a lease, and nothing is taken without Redis."""
        return now < self.shared_until or now >= self.sure_until

    def get(self, job_id: int) -> Entry | None:
        """The entry held under this id."""
        return self._entries.get(job_id)

    def waiting(self, topic: str) -> int:
        """How many entries of the topic are held and have not started, wherever they are in the process."""
        return self._waiting[topic]

    def _go(self, entry: Entry, event: Mapping[State, State]) -> bool:
        """Make a transition, if the entry's state has it. Call under the lock."""
        state = event.get(entry.state)
        if state is None:
            return False
        if entry.state in UNSTARTED and state not in UNSTARTED:
            self._waiting[entry.topic.name] -= 1
        entry.state = state
        return True

    def _hold(self, entry: Entry) -> None:
        """Hold an entry from now on. Call under the lock."""
        self._entries[entry.job_id] = entry
        entry.state = State.WAITS
        self._waiting[entry.topic.name] += 1

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
                older.fence, older.kept = entry.fence, entry.kept
                return Held.RUNNING  # [rule: held-once]
            if older is not None:
                entry.lease = older.lease
                self._go(older, LEAVE)
            self._hold(entry)
            return Held.NEW

    def hold_if_free(self, entry: Entry) -> bool:
        """Hold an entry that is about to be taken without Redis, unless its id is held or being moved."""
        with self._lock:
            if entry.job_id in self._entries or entry.job_id in self._moving:
                return False
            self._hold(entry)
            return True

    def start(self, entry: Entry, now: float) -> bool:
        """Note that the try starts. False: another worker may have the entry by now, or it is held no more.

        That is so if no heartbeat succeeded in time: this process was paused, or Redis out of reach. Also if
        the entry was taken too long ago and has no lease: a worker that has lost Redis may have it. (The age
        of the row check proves nothing: the slot may have moved before.) And nothing starts without a lease
        while others may own the slot too.

        What was refused stays held until it is given back: ``refused`` returns it.
        """
        with self._lock:
            if self._entries.get(entry.job_id) is not entry:
                return False
            ours = entry.fence != NO_FENCE and not self.shared(now)  # [rule: alone-or-leased]
            fresh = ours and now - entry.held <= UNLEASED_SECONDS  # [rule: fresh-or-leased]
            if entry.in_time(now) and (fresh or now < entry.lease.until):  # [rule: last-look]
                if not self._go(entry, START):
                    return False
                entry.started = now
                return True
            if self._go(entry, REFUSE):
                entry.kept = LOST
            return False

    def refused(self, now: float) -> list[Entry]:
        """Return the entries that were refused a start, and those with a lease that would be. Each is
        returned once.

        They stay held: the caller must give up their leases first.
        """
        found: list[Entry] = []
        with self._lock:
            for entry in self._entries.values():
                late = entry.lease.possible and entry.checked and not entry.in_time(now)
                if entry.state is State.REFUSED or (late and entry.state is State.WAITS):
                    self._go(entry, SETTLE)
                    entry.kept = LOST
                    found.append(entry)
        return found

    def _drop(self, entry: Entry) -> None:
        """Stop holding an entry, if it is held. Call under the lock."""
        if self._entries.get(entry.job_id) is entry:
            del self._entries[entry.job_id]
            self._go(entry, LEAVE)

    def drop(self, entries: Iterable[Entry]) -> None:
        """Stop holding entries that have not started and are no longer in the PrepareQueue."""
        with self._lock:
            for entry in entries:
                self._drop(entry)

    def depart(self, entries: Iterable[Entry]) -> list[Entry]:
        """Release entries whose move begins. Returns those that have something to move.

        Entries whose id was taken again, or that were taken without Redis, have nothing to move. Entries are
        released before the move, because a rolled back entry may be taken again before the call returns.
        Until ``arrived`` the same id is not held under the same fencing token.
        """
        going: list[Entry] = []
        with self._lock:
            for entry in entries:
                self._drop(entry)
                if entry.job_id in self._entries:
                    continue
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

    def call(self, entry: Entry, now: float) -> bool:
        """Note that the handler of a started entry is called. False: its outcome is decided already."""
        with self._lock:
            if runs := entry.state is State.RUNS:
                entry.started = now
            return runs

    def settle(self, entry: Entry, started: float | None = None) -> bool:
        """True for the one caller that may report the outcome of this try, which ``started`` then if that is
        given."""
        with self._lock:
            return started in (None, entry.started) and self._go(entry, SETTLE)

    def snapshot(self) -> list[Entry]:
        """The entries held now."""
        return list(self._entries.values())
