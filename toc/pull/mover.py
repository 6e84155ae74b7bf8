"""The mover: tells the index where entries belong, on a thread of its own, so that no consumer waits for it.

What a hand-out means for its entry is put here before its consumer is told, so what the answer means comes
after it. All that comes while Redis is asked goes with the next calls.

An ack by another gateway, or a cancel, may overtake a move. Then the entry stays until ttr would have ended;
then its row, which has ended, drops it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from toc.loop import watched_thread
from toc.model.pull import PullLease, PullRow
from toc.model.task import TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import beyond_horizon, entry_score
from toc.pull.handed_out import NO_FENCE, Candidate
from toc.sdk.client import TimeoutCenter

T = TypeVar("T")

STUCK_SECONDS = 0.25
"""A thread whose batch takes longer is not waited for: its server hangs."""
TOGETHER = 5000
"""Most moves that are made at once."""
TRANSITIONS = "rollback", "commit", "bury", "add", "restore_dead", "forget"
"""Of Queues, in the order in which a batch makes them: what was taken first, then what its answers mean."""


class BatchThread(Generic[T]):
    """A thread that handles what was put while it was busy, everything at once.

    There is one for each server of the task table and kind of work, so a server that hangs holds up nothing
    else.
    """

    def __init__(self, name: str, handle: Callable[[list[T]], None], most: int) -> None:
        self._handle = handle
        self._most = most
        self._items: SimpleQueue[list[T] | None] = SimpleQueue()
        self._rest: list[T] = []
        """What was too much for one batch."""
        self._put = self._begun = 0
        self._closing = threading.Lock()
        self._closed = False
        self._since = 0.0
        self._thread = watched_thread(name, self._run, lambda: self._closed)
        self.start = self._thread.start

    def put(self, items: list[T]) -> None:
        """Have these handled, unless the thread has been stopped."""
        with self._closing:
            if items and not self._closed:
                self._put += len(items)
                self._items.put(items)

    @property
    def busy(self) -> bool:
        """Whether it handles something, or is about to."""
        return self._put > self._begun or self._since > 0

    @property
    def stuck(self) -> bool:
        """Whether its server takes too long to answer."""
        since = self._since
        return since > 0 and time.monotonic() - since > STUCK_SECONDS

    def stop(self, seconds: float) -> None:
        """Handle what was put before, and end. May be called twice, or never started."""
        with self._closing:
            self._closed = True
            self._items.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while batch := self._next():
            self._begun += len(batch)
            self._since = time.monotonic()
            self._handle(batch)
            self._since = 0.0

    def _next(self) -> list[T]:
        """Return the next batch; none after all that was put before the end."""
        batch = self._rest or list(self._items.get() or ())
        with contextlib.suppress(Empty):
            while batch and len(batch) < self._most:
                more = self._items.get_nowait()
                if more is None:
                    self._items.put(None)
                    break
                batch += more
        self._rest = batch[self._most :]
        return batch[: self._most]


class EndedLease(NamedTuple):
    """A lease that has ended, and its row as it is then; None if its task is processed."""

    lease: PullLease
    row: PullRow | None


class Moves(list[tuple[str, Slot, Any]]):
    """Moves of entries: a transition, the slot, and what the transition takes of an entry."""

    def drop(self, entry: Candidate) -> None:
        """The task of a prepared entry has ended, or waits in its row alone."""
        if entry.fence != NO_FENCE:
            self.append(("commit", entry.slot, (entry.job_id, entry.fence)))

    def back(self, entry: Candidate, row: PullRow, due: int, now: int) -> None:
        """Its task is due at ``due`` (ms)."""
        if beyond_horizon(entry.topic, due, now):
            self.drop(entry)
        elif entry.fence != NO_FENCE:
            score = entry_score(entry.topic, due, row.attempts)
            self.append(("rollback", entry.slot, (entry.job_id, entry.fence, score)))

    def bury(self, entry: Candidate, died: int) -> None:
        """Its task is dead since ``died`` (ms)."""
        if entry.fence != NO_FENCE:
            self.append(("bury", entry.slot, (entry.job_id, entry.fence, died)))


class Mover:
    """Makes the moves in order. Thread-safe."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._queues, self._catalog, self._clock = center.queues, center.catalog, center.clock
        self._thread = BatchThread[tuple[str, Slot, Any]]("pull-index", self._run, TOGETHER)
        self.start = self._thread.start
        self.stop = self._thread.stop
        """Make what was asked for, and end. Who finds an entry that was not moved moves it by its row."""
        self.move = self._thread.put
        """Have moves made. If one fails, the next that finds the entry gives it back and reads its row."""

    def ended(self, ends: Iterable[EndedLease]) -> None:
        """Tell the index how leases ended."""
        moves, now = Moves(), self._clock.now_ms()
        for lease, row in ends:
            topic = self._catalog.known_type(lease.biz_type)
            if topic is None:
                continue
            slot = Slot(topic.name, lease.slot)
            if row is None:  # what stays is dropped when it comes due: its row has ended
                moves.append(("forget", slot, lease.job_id))
            elif row.status == TaskStatus.DEAD:
                moves.append(("restore_dead", slot, (row.job_id, row.next_time)))
            elif not beyond_horizon(topic, row.next_time, now):
                moves.append(("add", slot, (row.job_id, entry_score(topic, row.next_time, row.attempts))))
        self.move(moves)

    def _run(self, moves: list[tuple[str, Slot, Any]]) -> None:
        found: dict[str, dict[Slot, list[Any]]] = {}
        for transition, slot, entry in moves:
            found.setdefault(transition, {}).setdefault(slot, []).append(entry)
        for transition in TRANSITIONS:
            if transition in found:
                getattr(self._queues, transition)(found[transition])
