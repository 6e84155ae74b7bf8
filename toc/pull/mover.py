"""The mover: tells the index where entries belong, on a thread of its own, so that no consumer waits for it.

A consumer is told of a task first; only then its entry moves from the PrepareQueue to the end of its ttr, and
what the answers to leases mean for the index follows. All that comes while Redis is asked goes with the next
calls. An entry whose task was acked before its move is dropped at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.pull import PullRow
from toc.model.task import TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import beyond_horizon, entry_score
from toc.pull.batch_thread import BatchThread
from toc.pull.entry import NO_FENCE, Entry
from toc.pull.in_transit import EndedLease, InTransit

TOGETHER = 50
"""Most steps that are made at once."""


class Moves:
    """Moves of prepared entries, by slot."""

    def __init__(self) -> None:
        self.commits: dict[Slot, list[tuple[int, float]]] = {}
        self.backs: dict[Slot, list[tuple[int, float, float]]] = {}
        self.buries: dict[Slot, list[tuple[int, float, int]]] = {}

    def drop(self, entry: Entry) -> None:
        """Its task has ended, or waits in its row alone."""
        if entry.fence != NO_FENCE:
            self.commits.setdefault(entry.slot, []).append((entry.job_id, entry.fence))

    def back(self, entry: Entry, row: PullRow, due: int, now: int) -> None:
        """Its task is due at ``due`` (ms)."""
        if beyond_horizon(entry.topic, due, now):
            self.drop(entry)
        elif entry.fence != NO_FENCE:
            score = entry_score(entry.topic, due, row.attempts)
            self.backs.setdefault(entry.slot, []).append((entry.job_id, entry.fence, score))

    def bury(self, entry: Entry, died: int) -> None:
        """Its task is dead since ``died`` (ms)."""
        if entry.fence != NO_FENCE:
            self.buries.setdefault(entry.slot, []).append((entry.job_id, entry.fence, died))

    def add(self, other: Moves, processed: set[int]) -> None:
        """Take over others; of what was ``processed`` meanwhile the entry is dropped."""
        for slot, commits in other.commits.items():
            self.commits.setdefault(slot, []).extend(commits)
        for slot, backs in other.backs.items():
            if processed:
                drops = [(job_id, fence) for job_id, fence, _ in backs if job_id in processed]
                if drops:
                    self.commits.setdefault(slot, []).extend(drops)
                    backs = [back for back in backs if back[0] not in processed]
            if backs:
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


class Step(NamedTuple):
    """What follows for the index from one batch: moves, the ids whose hand-out ends with them, and leases
    that have ended whose entries are not in transit."""

    moves: Moves | None
    job_ids: Sequence[int]
    ends: Sequence[EndedLease]


class Mover:
    """Makes the steps in order. Thread-safe."""

    def __init__(self, queues: Queues, catalog: TopicCatalog, clock: Clock) -> None:
        self._queues = queues
        self._catalog = catalog
        self._clock = clock
        self.in_transit = InTransit()
        self._thread = BatchThread("pull-index", self._run, TOGETHER)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Make what was asked for, and end. Who finds an entry that was not moved moves it by its row."""
        self._thread.stop(seconds)

    def handed_out(self, moves: Moves, job_ids: Sequence[int], ends: Sequence[EndedLease]) -> None:
        """Have the entries of a batch moved. ``ends`` are those of its leases that have ended with it."""
        self._thread.put([Step(moves, job_ids, ends)])

    def ended(self, ends: Iterable[EndedLease]) -> None:
        """Tell the index how leases ended, but of no entry before it has moved."""
        if free := self.in_transit.hold(ends):
            self._thread.put([Step(None, (), free)])

    def _run(self, steps: list[Step]) -> None:
        moves, ends = Moves(), list[EndedLease]()
        job_ids = [job_id for step in steps for job_id in step.job_ids]
        # Ask only about entries that this batch moves. A task that was found by its row, and not by
        # a prepared entry, is not among them: its entry is forgotten where it is.
        processed = self.in_transit.take_processed(
            job_id
            for step in steps
            if step.moves is not None
            for backs in step.moves.backs.values()
            for job_id, _, _ in backs
        )
        for step in steps:
            if step.moves is not None:
                moves.add(step.moves, processed)
            ends += step.ends
        moves.make(self._queues)
        self._index([*self.in_transit.end(job_ids), *ends])

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
