"""Finish: takes ended tries, and entries that go back, from all threads.

Each database server has a Flusher with its own thread, so its tries wait for no other server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toc.loop import Loop
from toc.model.raised import EXPIRED, Raised
from toc.model.task import TryRow
from toc.model.verdict import Place
from toc.worker.entry import Entry
from toc.worker.settle.flush import Flusher
from toc.worker.settle.moves import EntryMover, Move, move_by_row, tell_unwritten
from toc.worker.take.feedback import Pressure
from toc.worker.tools import Tools

MAX_UNWRITTEN = 5000
"""Ended tries of one database server that are not yet written, above which no task of that server starts.
Nothing at all is taken while a server that does not fail is that far behind, or all fail and one is. Bounds
memory, and what runs twice after a crash, when MySQL is slow or refuses writes."""
AGAIN_MS = 5000
"""By this long after the end of its pause, a postponed entry was surely taken again, and postponed
again if necessary."""


class PutAway:
    """Since when the first of each topic's postponed tasks has been due. Thread-safe."""

    def __init__(self) -> None:
        self._topics: dict[str, tuple[int, int]] = {}
        """topic -> when the first was due, and when this is over unless another one is added (ms)."""
        self._lock = threading.Lock()

    def add(self, topic: str, due: int, until: int) -> None:
        """Add a task that was due at ``due`` and comes again at ``until`` (both ms)."""
        with self._lock:
            since, _ = self._topics.get(topic, (due, 0))
            self._topics[topic] = min(since, due), until + AGAIN_MS

    def since(self, now_ms: int) -> dict[str, int]:
        """When the first of each topic's postponed tasks was due (ms)."""
        with self._lock:
            self._topics = {topic: times for topic, times in self._topics.items() if times[1] > now_ms}
            return {topic: since for topic, (since, _) in self._topics.items()}


@dataclass(eq=False)
class Finisher:
    """Takes ended tries and returned entries from all threads. Each database server has its own Flusher."""

    tools: Tools
    pressure: Pressure

    def __post_init__(self) -> None:
        self.away = PutAway()
        mover = EntryMover(self.tools)
        self.flushers = [
            Flusher(number, self.tools, mover, self.pressure)
            for number in range(len(self.tools.store.tables_of_server()))
        ]

    @property
    def loops(self) -> list[Loop]:
        """The loop of each Flusher."""
        return [flusher.loop for flusher in self.flushers]

    def _of(self, entry: Entry) -> Flusher:
        if len(self.flushers) == 1:
            return self.flushers[0]
        return self.flushers[self.tools.store.server_of(entry.job_id)]

    def ended(self, entry: Entry, error: Raised | None) -> None:
        """Record that a try ended. None: success. Only the caller that settled the entry calls this."""
        entry.ended = self.tools.clock.monotonic()
        self._of(entry).ended(entry, error)

    def expire(self, entries: Iterable[Entry]) -> None:
        """End tasks that have expired: no try of them runs here, and none starts."""
        for entry in entries:
            if self.tools.inflight.settle(entry):
                self.ended(entry, EXPIRED)

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Return entries that did not run to the StoreQueue, at their row's time. Charges no try."""
        self._move(_back(entry, entry.row_score()) for entry in entries)

    def give_back_running(self, entries: Sequence[Entry]) -> None:
        """Return entries whose handlers run and will be stopped, and mark their rows. Charges no try.

        The rows are marked first: a cancel learns from the lease and the entry that a try has begun, and from
        the mark once both are gone. If that fails, the tasks are put back nevertheless: their next run must
        not wait.
        """
        # [rule: mark-tried]
        begun = [entry.job_id for entry in entries]
        tell_unwritten(self.tools.store.mark_begun(begun, "its worker stopped before it had ended"))
        self.give_back(entries)

    def give_back_unread(self, entries: Iterable[Entry]) -> None:
        """Return entries whose row could not be read. Charges no try."""
        self._move(_back(entry, entry.unread_score()) for entry in entries)

    def give_back_until(self, times: Iterable[tuple[Entry, int]]) -> None:
        """Return entries until these instants (ms), such as the end of another worker's lease."""
        self._move(_back(entry, entry.row_score(at)) for entry, at in times)

    def settle_by_row(self, entries: Iterable[tuple[Entry, TryRow | None]]) -> None:
        """Move entries whose row says that they must not run."""
        self._move(move_by_row(entry, row) for entry, row in entries)

    def put_away(self, times: Iterable[tuple[Entry, int]]) -> None:
        """Return entries until these instants (ms), because their rows cannot be read or written now.

        Runs on the caller's thread, so the caller takes nothing meanwhile: the server's own thread may hang,
        and postponed entries must not pile up. They have not started and have no lease, so no row is written.
        """
        moves = []
        for entry, at in times:
            self.away.add(entry.topic.name, entry.due, at)
            score = entry.row_score(at) if entry.checked else entry.unread_score(at)  # [rule: put-away]
            moves.append(_back(entry, score))
        self._move(moves, now=True)

    def _move(self, moves: Iterable[Move], *, now: bool = False) -> None:
        """Make these moves with the next flush, unless many wait for it; or ``now``, on the caller's
        thread."""
        by_flusher: dict[Flusher, list[Move]] = {}
        for move in moves:
            by_flusher.setdefault(self._of(move.entry), []).append(move)
        for flusher, some in by_flusher.items():
            (flusher.move_now if now else flusher.move_soon)(some)

    def behind(self, entry: Entry) -> bool:
        """Whether this entry's server has too many unwritten tries for another one to start."""
        return self._of(entry).backlog > MAX_UNWRITTEN

    @property
    def unwritten(self) -> int:
        """How many tries have ended and are not written yet."""
        return sum(flusher.backlog for flusher in self.flushers)

    @property
    def backlog(self) -> int:
        """Most unwritten tries of any server. Servers that fail are ignored, unless all do."""
        well = [flusher.backlog for flusher in self.flushers if not flusher.failing]
        return max(well or [flusher.backlog for flusher in self.flushers])

    @property
    def idle(self) -> bool:
        """Whether everything handed in has been written."""
        return not self.tools.inflight.moving and all(flusher.idle for flusher in self.flushers)

    def stop(self, seconds: float) -> None:
        """Let the current flushes end, for at most this many seconds in all."""
        until = self.tools.clock.monotonic() + seconds
        for flusher in self.flushers:
            flusher.loop.stop(0)
        for flusher in self.flushers:
            flusher.loop.stop(max(until - self.tools.clock.monotonic(), 0))


def _back(entry: Entry, score: float) -> Move:
    return Move(entry, Place.STORE_QUEUE, score)
