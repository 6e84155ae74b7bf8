"""Moves of index entries, and the marks on rows that must be written before: they tell a cancel
that a try may have begun."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from toc.index.queues import Queues
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable
from toc.model.scores import due_ms
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Slot
from toc.model.verdict import Place, belongs, beyond_horizon
from toc.observe.log import get_logger
from toc.observe.metrics import StepTimer
from toc.store.shards import Trouble
from toc.store.store import Store
from toc.worker.stages.entry import NO_LEASE, Entry, Inflight

log = get_logger(__name__)


@dataclass(slots=True)
class Moves:
    """Index transitions that follow from the current rows."""

    commit: list[Entry] = field(default_factory=list)
    rollback: list[tuple[Entry, float]] = field(default_factory=list)
    bury: list[Entry] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    """job_ids among the rollbacks whose handlers were running. Their rows are marked as begun."""

    def add(self, more: Moves) -> None:
        """Add the moves of another instance."""
        self.stopped += more.stopped
        self.commit += more.commit
        self.rollback += more.rollback
        self.bury += more.bury

    def __bool__(self) -> bool:
        return bool(self.commit or self.rollback or self.bury)

    def by_slot(self) -> Counter[Slot]:
        """How many entries of each slot move."""
        entries = chain(self.commit, (entry for entry, _ in self.rollback), self.bury)
        return Counter(entry.slot for entry in entries)

    def departing(self, inflight: Inflight) -> Moves:
        """The moves that may begin. The move of an entry whose id was taken again is obsolete."""
        going = Moves()
        if self.commit:
            going.commit = inflight.depart(self.commit)
        if self.rollback:
            scores = dict(self.rollback)
            going.rollback = [(entry, scores[entry]) for entry in inflight.depart(scores)]
        if self.bury:
            going.bury = inflight.depart(self.bury)
        return going

    def by_row(self, entry: Entry, row: TryRow | None) -> None:
        """Choose the move by the row alone, as the row check does."""
        place = belongs(row)
        if row is None or place is Place.NOWHERE:
            self.commit.append(entry)
        elif place is Place.DEAD_QUEUE:
            self.bury.append(entry)
        else:
            entry.row = row
            self.rollback.append((entry, entry.row_score()))


class EntryMover:
    """Makes moves in Redis. Thread-safe."""

    def __init__(self, store: Store, queues: Queues, inflight: Inflight, clock: Clock) -> None:
        self._store = store
        self._queues = queues
        self._inflight = inflight
        self._clock = clock
        self._step = StepTimer("commit")

    def make(self, moves: Moves) -> Moves:
        """Apply the transitions under their fencing tokens. Returns those whose node did not answer."""
        if not moves:
            return moves
        count = len(moves.commit) + len(moves.rollback) + len(moves.bury)
        began = self._clock.monotonic()
        if moves.stopped:
            # Mark the rows first: a cancel learns from the lease and the entry that a try has
            # begun, and from the mark once both are gone. If that fails, the tasks are put back
            # nevertheless: their next run must not wait.  [rule: mark-tried]
            tell_unwritten(self._store.mark_begun(moves.stopped, "its worker stopped before it had ended"))
        for entry in chain(moves.commit, moves.bury):
            entry.lease = NO_LEASE  # the row has ended, or is gone
        # Release leases while their entries are held: later, the lease could be one that was taken
        # anew.
        leased = [entry for entry, _ in moves.rollback if entry.lease.possible]
        self._release([entry for entry in leased if self._inflight.get(entry.job_id) is entry])
        going = moves.departing(self._inflight)
        gone = [*going.commit, *(entry for entry, _ in going.rollback), *going.bury]
        try:
            return self._send(going)
        finally:
            self._inflight.arrived(gone)
            self._step.took(self._clock.monotonic() - began, count)

    def _send(self, moves: Moves) -> Moves:
        now = self._clock.now_ms()
        scores = dict(moves.rollback)
        for entry, score in moves.rollback:
            if beyond_horizon(entry.topic, due_ms(score), now):
                moves.commit.append(entry)  # it waits in its row alone; the sweep brings it back in time
                del scores[entry]
        queues = self._queues
        commit = _unsent(queues.commit, moves.commit, lambda e: (e.job_id, e.fence))
        back = _unsent(queues.rollback, scores, lambda e: (e.job_id, e.fence, scores[e]))
        bury = _unsent(queues.bury, moves.bury, lambda e: (e.job_id, e.fence, now))
        return Moves(commit, [(entry, scores[entry]) for entry in back], bury)

    def _release(self, entries: list[Entry]) -> None:
        """Give up the leases of entries that go back. Where that fails, the LeaseKeeper tries again."""
        if not entries:
            return
        failed = self._store.leases.release([entry.job_id for entry in entries])
        tell_unwritten(failed)
        for entry in entries:
            # The next holder asks again.  [rule: lease-released]
            entry.lease = NO_LEASE._replace(possible=entry.job_id in failed)


def tell_unwritten(errors: Mapping[int, Trouble]) -> None:
    """Log that the rows of these tries could not be written, if there are any."""
    if errors:
        log.warning("rows_not_written", tries=len(errors), error=str(next(iter(errors.values()))))


def mark_begun(
    store: Store, rows: Iterable[TryRow], moved: Collection[int], error: str
) -> dict[int, Trouble]:
    """Mark the cancelled ones of these rows as tried, and those with an id in ``moved`` as begun.

    The marks tell a concurrent or later cancel that a try may have begun. The cancel looks for the
    PrepareQueue entry, and if there is none, reads the row again. So if no failure is written to a
    row, the row must be marked before its entry moves.

    ``moved`` are pending tasks with a new deadline. ``error`` becomes their last_error if they have none.
    Returns the ids that could not be marked, with the reason: their entries stay.
    """
    # [rule: mark-tried]
    failed: dict[int, Trouble] = {}
    if cancelled := [row.job_id for row in rows if row.status == TaskStatus.CANCELLED]:
        failed |= store.mark_tried(cancelled)
    if moved:
        failed |= store.mark_begun(moved, error)
    return failed


def _unsent(
    transition: Callable[[dict[Slot, list[Any]]], Mapping[Slot, object]],
    entries: Collection[Entry],
    words: Callable[[Entry], tuple[float, ...]],
) -> list[Entry]:
    """Make a transition of entries, each with its words. Returns those whose node did not answer."""
    if not entries:
        return []
    by_slot: defaultdict[Slot, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_slot[entry.slot].append(entry)
    results = transition({slot: list(map(words, some)) for slot, some in by_slot.items()})
    return [
        entry
        for slot, some in by_slot.items()
        if isinstance(results[slot], IndexUnavailable)
        for entry in some
    ]
