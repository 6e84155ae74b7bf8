"""The mover: tells the index where entries belong, on a thread of its own, so that no consumer waits for it.

What a hand-out means for its entry is put here before its consumer is told, so what the answer means comes
after it. All that comes while Redis is asked goes with the next calls.

An ack by another gateway, or a cancel, may overtake a move. Then the entry stays until ttr would have ended;
then its row, which has ended, drops it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.pull import PullLease, PullRow
from toc.model.task import TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import beyond_horizon, entry_score
from toc.pull.batch_thread import BatchThread
from toc.pull.candidate import NO_FENCE, Candidate

TOGETHER = 50
"""Most steps that are made at once."""


class EndedLease(NamedTuple):
    """A lease that has ended, and its row as it is then; None if its task is processed."""

    lease: PullLease
    row: PullRow | None


class Moves:
    """Moves of prepared entries, by slot."""

    def __init__(self) -> None:
        self.commits: dict[Slot, list[tuple[int, float]]] = {}
        self.backs: dict[Slot, list[tuple[int, float, float]]] = {}
        self.buries: dict[Slot, list[tuple[int, float, int]]] = {}

    def __bool__(self) -> bool:
        return bool(self.commits or self.backs or self.buries)

    def drop(self, entry: Candidate) -> None:
        """Its task has ended, or waits in its row alone."""
        if entry.fence != NO_FENCE:
            self.commits.setdefault(entry.slot, []).append((entry.job_id, entry.fence))

    def back(self, entry: Candidate, row: PullRow, due: int, now: int) -> None:
        """Its task is due at ``due`` (ms)."""
        if beyond_horizon(entry.topic, due, now):
            self.drop(entry)
        elif entry.fence != NO_FENCE:
            score = entry_score(entry.topic, due, row.attempts)
            self.backs.setdefault(entry.slot, []).append((entry.job_id, entry.fence, score))

    def bury(self, entry: Candidate, died: int) -> None:
        """Its task is dead since ``died`` (ms)."""
        if entry.fence != NO_FENCE:
            self.buries.setdefault(entry.slot, []).append((entry.job_id, entry.fence, died))

    def add(self, other: Moves) -> None:
        """Take over others."""
        for slot, commits in other.commits.items():
            self.commits.setdefault(slot, []).extend(commits)
        for slot, backs in other.backs.items():
            self.backs.setdefault(slot, []).extend(backs)
        for slot, buries in other.buries.items():
            self.buries.setdefault(slot, []).extend(buries)

    def make(self, queues: Queues) -> None:
        """Make them. If a move fails, the next that finds the entry gives it back and reads its row again."""
        if self.backs:
            queues.rollback(self.backs)
        if self.commits:
            queues.commit(self.commits)
        if self.buries:
            queues.bury(self.buries)


class Mover:
    """Makes the steps in order. Thread-safe."""

    def __init__(self, queues: Queues, catalog: TopicCatalog, clock: Clock) -> None:
        self._queues = queues
        self._catalog = catalog
        self._clock = clock
        self._thread = BatchThread[Moves | list[EndedLease]]("pull-index", self._run, TOGETHER)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Make what was asked for, and end. Who finds an entry that was not moved moves it by its row."""
        self._thread.stop(seconds)

    def move(self, moves: Moves) -> None:
        """Have these moves made."""
        if moves:
            self._thread.put([moves])

    def ended(self, ends: Iterable[EndedLease]) -> None:
        """Tell the index how leases ended."""
        if some := list(ends):
            self._thread.put([some])

    def _run(self, steps: list[Moves | list[EndedLease]]) -> None:
        moves = Moves()
        ends: list[EndedLease] = []
        for step in steps:
            if isinstance(step, Moves):
                moves.add(step)
            else:
                ends += step
        moves.make(self._queues)
        self._index(ends)

    def _index(self, ends: Iterable[EndedLease]) -> None:
        entries: dict[Slot, list[tuple[int, float]]] = {}
        dead: dict[Slot, list[tuple[int, int]]] = {}
        gone: dict[Slot, list[int]] = {}
        slots: dict[tuple[int, int], Slot] = {}
        for lease, row in ends:
            topic = self._catalog.known_type(lease.biz_type)
            if topic is None:
                continue
            slot = slots.get((lease.biz_type, lease.slot))
            if slot is None:
                slot = slots[lease.biz_type, lease.slot] = Slot(topic.name, lease.slot)
            if row is None:
                gone.setdefault(slot, []).append(lease.job_id)
            elif row.status == TaskStatus.DEAD:
                dead.setdefault(slot, []).append((row.job_id, row.next_time))
            elif not beyond_horizon(topic, row.next_time, self._clock.now_ms()):
                score = entry_score(topic, row.next_time, row.attempts)
                entries.setdefault(slot, []).append((row.job_id, score))
        if entries:
            self._queues.add(entries)
        if dead:
            self._queues.restore_dead(dead)
        if gone:
            self._queues.forget(gone)  # what stays is dropped when it comes due: its row has ended
