"""Moves of index entries, and the marks on rows that must be written before: they tell a cancel
that a try may have begun."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from toc.model.errors import IndexUnavailable
from toc.model.scores import due_ms
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Slot
from toc.model.verdict import Place, belongs, beyond_horizon
from toc.observe.log import get_logger
from toc.observe.metrics import STEP
from toc.store.servers.shards import Trouble
from toc.store.store import Store
from toc.store.tasks.batch import Guard
from toc.worker.entry import NO_FENCE, NO_LEASE, Entry
from toc.worker.tools import Tools

log = get_logger(__name__)


class Move(NamedTuple):
    """Where an entry goes from the PrepareQueue. ``score`` is that of the StoreQueue, if it goes there."""

    entry: Entry
    to: Place
    score: float = 0.0


def move_by_row(entry: Entry, row: TryRow | None) -> Move:
    """Choose the move by the row alone, as the row check does."""
    place = belongs(row)
    if row is not None and place is Place.STORE_QUEUE:
        entry.row = row
        return Move(entry, place, entry.row_score())
    return Move(entry, place)


class EntryMover:
    """Makes moves in Redis. Thread-safe."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._seconds = STEP.of("commit")

    def make(self, moves: Sequence[Move]) -> list[Move]:
        """Apply the transitions under their fencing tokens. Returns those whose node did not answer.

        The move of an entry whose id was taken again is obsolete.
        """
        if not moves:
            return []
        began = self._tools.clock.monotonic()
        leased = []
        for move in moves:
            entry = move.entry
            if move.to is not Place.STORE_QUEUE:
                entry.lease = NO_LEASE  # the row has ended, or is gone
            elif entry.lease.possible and self._tools.inflight.get(entry.job_id) is entry:
                leased.append(entry)
        if leased:  # while they are held: later, the lease could be one that was taken anew
            self._release(leased)
        going = self._tools.inflight.depart(move.entry for move in moves)
        try:
            departed = set(going)
            self._bury_unprepared(move for move in moves if move.entry.fence == NO_FENCE)
            return self._send([move for move in moves if move.entry in departed])
        finally:
            self._tools.inflight.arrived(going)
            self._seconds.observe([self._tools.clock.monotonic() - began])

    def _send(self, moves: Iterable[Move]) -> list[Move]:
        now, queues = self._tools.clock.now_ms(), self._tools.queues
        commit: defaultdict[Slot, list[Move]] = defaultdict(list)
        back: defaultdict[Slot, list[Move]] = defaultdict(list)
        bury: defaultdict[Slot, list[Move]] = defaultdict(list)
        for move in moves:
            slot = move.entry.slot
            if move.to is Place.DEAD_QUEUE:
                bury[slot].append(move)
            elif move.to is Place.NOWHERE or beyond_horizon(move.entry.topic, due_ms(move.score), now):
                commit[slot].append(move)  # or it waits in its row alone; the sweep brings it back in time
            else:
                back[slot].append(move)
        return [
            *_unsent(queues.commit, commit, lambda move: (move.entry.job_id, move.entry.fence)),
            *_unsent(queues.rollback, back, lambda move: (move.entry.job_id, move.entry.fence, move.score)),
            *_unsent(queues.bury, bury, lambda move: (move.entry.job_id, move.entry.fence, now)),
        ]

    def _bury_unprepared(self, moves: Iterable[Move]) -> None:
        """Bury the dead of those that ran without an entry: alone, or by their rows. What does not answer is
        left to the sweep."""
        dead: defaultdict[Slot, list[tuple[int, int]]] = defaultdict(list)
        for move in moves:
            if move.to is Place.DEAD_QUEUE:
                dead[move.entry.slot].append((move.entry.job_id, self._tools.clock.now_ms()))
        if dead:
            self._tools.queues.restore_dead(dead)

    def _release(self, entries: list[Entry]) -> None:
        """Give up the leases of entries that go back. Where that fails, the LeaseKeeper tries again."""
        failed = self._tools.store.leases.release([entry.job_id for entry in entries])
        tell_unwritten(failed)
        for entry in entries:
            # The next holder asks again.  [rule: lease-released]
            entry.lease = NO_LEASE._replace(possible=entry.job_id in failed)


def tell_unwritten(errors: Mapping[int, Trouble]) -> None:
    """Log that the rows of these tries could not be written, if there are any."""
    if errors:
        log.warning("rows_not_written", tries=len(errors), error=str(next(iter(errors.values()))))


def tell_crashed(guards: Mapping[int, Guard]) -> None:
    """Log which tries ended with their worker, ten at most, if there are any."""
    if crashed := [job_id for job_id, guard in guards.items() if guard is Guard.APPLIED]:
        log.warning("tries_crashed", tries=len(crashed), job_ids=crashed[:10])


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
    by_slot: Mapping[Slot, list[Move]],
    words: Callable[[Move], tuple[float, ...]],
) -> list[Move]:
    """Make a transition of entries, each with its words. Returns the moves whose node did not answer."""
    if not by_slot:
        return []
    results = transition({slot: list(map(words, some)) for slot, some in by_slot.items()})
    return [
        move for slot, some in by_slot.items() if isinstance(results[slot], IndexUnavailable) for move in some
    ]
