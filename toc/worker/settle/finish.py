"""Finish: takes ended tries, and entries that go back, from all threads; writes rows, then moves entries.

Each database server has a Flusher with its own thread, so its tries wait for no other server. A flush takes
all of its tries that ended since the last one. It writes the rows of successes, of retries and of deaths, in
a transaction each, then moves their entries. The row always comes first: a crash in between leaves an entry
that the next row check corrects.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toc.failpoint import failpoint
from toc.loop import Loop
from toc.model.lateness import Cause, LateStart
from toc.model.raised import EXPIRED, Raised
from toc.model.task import TaskStatus, TryRow
from toc.model.verdict import Failure, Place, after_failure, entry_score, is_undecided
from toc.observe.log import get_logger
from toc.observe.metrics import EXPIRED_TASKS, LATENESS, RUNTIME, STEP, TRIES
from toc.store.servers.shards import Answers
from toc.store.tasks.batch import Finish, Guard
from toc.store.tasks.history import Late
from toc.store.tasks.plan import TRIED_BEFORE
from toc.worker.entry import NO_LEASE, Entry
from toc.worker.settle.moves import EntryMover, Move, mark_begun, move_by_row, tell_unwritten
from toc.worker.tools import Tools

log = get_logger(__name__)

MAX_UNWRITTEN = 5000
"""Ended tries of one database server that are not yet written, above which no task of that server starts.
Nothing at all is taken while a server that does not fail is that far behind, or all fail and one is. Bounds
memory, and what runs twice after a crash, when MySQL is slow or refuses writes."""
AGAIN_MS = 5000
"""By this long after the end of its pause, a postponed entry was surely taken again, and postponed
again if necessary."""
IDLE_SECONDS = 3600.0
RETRY_SECONDS = 0.5
"""Pause before rows or entries are written again after their server failed."""
GATHER_SECONDS = 0.006
"""Least time between two flushes. Tries that end within it are written together: the statements of a flush
cost several times what their rows cost, and no caller waits for a finish."""
GATHER_BUSY_SECONDS = 0.025
"""Least time between two flushes while more is due than can start at once: late tasks come first."""
FLUSH_LIMIT = 2000
"""Most tries that one flush writes."""
SLOW_ROWS = 1000
"""Outcomes a second. A flush that writes fewer may hold up tasks."""

EndedTry = tuple[Entry, Raised | None]
"""A try that has ended: None for success, else what the handler raised. Or EXPIRED: no try was started."""
MOVED_ON = (Finish.RESCHEDULED, Finish.DEAD)
"""The row of a try that succeeded is not as it was read, and says where the entry goes."""


@dataclass(eq=False)
class Flusher:
    """The loop that writes the tries of one database server, by number, and moves their entries."""

    server: int
    tools: Tools
    mover: EntryMover

    def __post_init__(self) -> None:
        self._ended: deque[EndedTry] = deque()
        self._unwritten: list[EndedTry] = []
        """Tries to be written again after a pause: the server failed, or another worker has a lease."""
        self._again_at = 0.0
        self.failing = False
        """Whether the server failed to write tries of its last batch."""
        self._moves: deque[Move] = deque()
        self._outcomes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """(topic, outcome) -> tries of the current flush."""
        self._seconds = STEP.of("finish")
        self._lock = threading.Lock()
        self._under_way = 0
        """How many flushes, and moves on other threads, are under way."""
        self._begun = 0
        """How many of these have begun so far."""
        self._flushed_at = 0.0
        self.loop = Loop(f"finish-{self.server}", self.run_once)

    def ended(self, entry: Entry, error: Raised | None) -> None:
        """Record that a try ended."""
        self._ended.append((entry, error))
        self.loop.wake()

    def move_soon(self, moves: Sequence[Move]) -> None:
        """Make these moves with the next flush."""
        self._moves += moves
        self.loop.wake()

    def move_now(self, moves: Sequence[Move]) -> None:
        """Make these moves on the caller's thread. Those that fail are made with the next flush."""
        self._begin()
        try:
            if failed := self.mover.make(moves):
                self.move_soon(failed)
        finally:
            self._end()

    @property
    def backlog(self) -> int:
        """How many tries have ended and are not written yet."""
        return len(self._ended) + len(self._unwritten)

    @property
    def idle(self) -> bool:
        """Whether everything handed in has been written."""
        # What is under way has left the queues, and may come back to them. So nothing may be under way before
        # they are looked at, nor begin meanwhile.
        begun = self._begun
        waits = self._under_way or self._ended or self._unwritten or self._moves
        return not waits and self._begun == begun

    def _begin(self) -> None:
        with self._lock:
            self._begun += 1
            self._under_way += 1

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1

    def run_once(self) -> float:
        """Flush what was handed in. Returns the seconds until the next call."""
        self._begin()
        try:
            gather = GATHER_BUSY_SECONDS if self.tools.backlogged else GATHER_SECONDS
            if (wait := self._flushed_at + gather - self.tools.clock.monotonic()) > 0:
                time.sleep(wait)
            self._flushed_at = self.tools.clock.monotonic()
            batch = [self._ended.popleft() for _ in range(min(len(self._ended), FLUSH_LIMIT))]
            again = self._flushed_at >= self._again_at
            if again:
                batch = self._unwritten[:FLUSH_LIMIT] + batch
                self._unwritten = self._unwritten[FLUSH_LIMIT:]
            moves = [self._moves.popleft() for _ in range(len(self._moves))]
            failed = self.mover.make(moves)  # before the rows: these need no MySQL, which may hang
            if batch:
                # Guards make it safe to write the rest again. Its entries stay held, with heartbeats.
                moves, unwritten = self._write(batch)  # moves only after this  [rule: row-first]
                failpoint("finish.rows-written")
                if unwritten:
                    self._unwritten += unwritten
                    if again:  # those that fail meanwhile do not put off the others
                        self._again_at = self.tools.clock.monotonic() + RETRY_SECONDS
                failed += self.mover.make(moves)
            self._moves += failed
            if self._ended or self._moves:
                return RETRY_SECONDS if failed else 0.0
            return RETRY_SECONDS if self._unwritten else IDLE_SECONDS
        finally:
            self._end()

    # --- rows

    def _write(self, batch: Sequence[EndedTry]) -> tuple[list[Move], list[EndedTry]]:
        """Write the outcome of tries. Returns the moves that follow, and the tries that could not be written.

        Tries are counted in the metrics only once they are written.
        """
        self._outcomes.clear()
        began, now = self.tools.clock.monotonic(), self.tools.clock.now_ms()
        done = [entry for entry, error in batch if error is None]
        failed = [(entry, error) for entry, error in batch if error is not None]
        ends = {entry.job_id: after_failure(entry.row, entry.topic, error, now) for entry, error in failed}
        late = self.tools.late.of(batch, self.server)
        lines = {job_id: one.line() for job_id, one in late.items() if one.spans}
        tries = [(entry.job_id, entry.row.version) for entry in done]
        sent = {e.job_id: (e.row.attempts + 1, e.delivered) for e in done if e.delivered is not None}
        cases = self.tools.store.finish(tries, sent, lines) if tries else Answers[Finish]()
        guards = self._write_failures(ends.values(), lines)
        overtaken = [entry for entry in done if cases.get(entry.job_id) in MOVED_ON]
        refused = [e for e, _ in failed if guards.get(e.job_id) is Guard.LOST and e.started]
        rows, waiting = self._read_again(overtaken, refused)
        trouble = cases.unanswered | guards.unanswered | rows.unanswered
        tell_unwritten(trouble)
        self.failing = bool(trouble)
        later = {*trouble, *waiting}
        unwritten = [pair for pair in batch if pair[0].job_id in later] if later else []
        written = [pair for pair in batch if pair[0].job_id not in later] if later else batch
        # Before entries get the rows that were read again.
        self._measure([entry for entry, error in written if error is None or error.until is None])
        by_topic: defaultdict[str, list[tuple[int, LateStart]]] = defaultdict(list)
        for entry, _ in written if late else ():
            if entry.job_id in late:
                by_topic[entry.topic.name].append((entry.job_id, late[entry.job_id]))
        for topic, starts in by_topic.items():
            self.tools.late.count(topic, starts)
        moves = []
        for entry, error in written:
            job_id = entry.job_id
            if error is None:
                moves.append(self._succeeded(entry, cases[job_id], rows))
            elif guards[job_id] is Guard.APPLIED:
                moves.append(self._failed(entry, error, ends[job_id], now))
            else:
                moves.append(self._overtaken(entry, rows.get(job_id), now))
        took = self.tools.clock.monotonic() - began
        if took > len(batch) / SLOW_ROWS:
            self.tools.late.slow(Cause.DATABASE, self.server, took, "writing results")
        self._seconds.observe([took])
        for labels, count in self._outcomes.items():
            TRIES.of(*labels).add(count)
        return moves, unwritten

    def _write_failures(self, ends: Iterable[Failure], late: Late) -> Answers[Guard]:
        guards = Answers[Guard]()
        store = self.tools.store
        for dead, write in ((False, store.fail), (True, store.die)):  # [rule: dead-first]
            if changes := [end for end in ends if end.dead is dead]:
                found = write(changes, late)
                guards = Answers(guards | found, guards.unanswered | found.unanswered)
        return guards

    def _read_again(
        self, overtaken: list[Entry], refused: list[Entry]
    ) -> tuple[Answers[TryRow], Collection[int]]:
        """Read the rows of successes and failures that were not written, and mark them as begun.

        Returns the rows, and the ids of failures that wait to be written again: they were refused
        only because another worker has a lease, which may end without a try. They wait no longer
        than prepare_timeout, so that a process can leave.
        """
        if not overtaken and not refused:
            return Answers(), ()
        rows = self.tools.store.read_tries([entry.job_id for entry in overtaken + refused])
        now = self.tools.clock.monotonic()
        waiting = {
            entry.job_id
            for entry in refused
            if is_undecided(entry.row, rows.get(entry.job_id))
            and now - entry.ended <= entry.topic.prepare_timeout
        }
        begun = [row for row in rows.values() if row.job_id not in waiting]
        moved = [row.job_id for row in begun if row.status == TaskStatus.PENDING]
        rows.unanswered |= mark_begun(self.tools.store, begun, moved, TRIED_BEFORE)
        return rows, waiting

    def _measure(self, entries: Iterable[Entry]) -> None:
        """Measure how late tries started, and how long they ran."""
        by_topic: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.started:  # not set if a suspect's last run ended unseen
                by_topic[entry.topic.name].append(entry)
        wall = self.tools.clock.time() - self.tools.clock.monotonic()
        for topic, some in by_topic.items():
            LATENESS.of(topic).observe([entry.started + wall - entry.row.next_time / 1000 for entry in some])
            RUNTIME.of(topic).observe([entry.ended - entry.started for entry in some])

    def _succeeded(self, entry: Entry, case: Finish, rows: Mapping[int, TryRow]) -> Move:
        """Count a try that succeeded. ``rows`` are those that another party has changed."""
        outcome = "duplicate" if case is Finish.ALREADY else "overtaken"
        self._outcomes[entry.topic.name, "processed" if case is Finish.DONE else outcome] += 1
        return move_by_row(entry, rows.get(entry.job_id)) if case in MOVED_ON else Move(entry, Place.NOWHERE)

    def _overtaken(self, entry: Entry, row: TryRow | None, now: int) -> Move:
        """Count a try that failed, and of which nothing was written: its ``row`` has changed."""
        if not entry.started:
            # Its row is checked again, by Redis's clock: this host's may be ahead of the database's.
            return Move(entry, Place.STORE_QUEUE, entry.row_score(now + int(1000 * RETRY_SECONDS)))
        self._outcomes[entry.topic.name, "overtaken"] += 1
        return move_by_row(entry, row)

    def _failed(self, entry: Entry, error: Raised, failure: Failure, now: int) -> Move:
        """Count and log a try that failed at ``now`` (ms)."""
        topic = entry.topic.name
        if failure.dead and failure.expired:
            EXPIRED_TASKS.of(topic).add()
            log.info("task_expired", job_id=entry.job_id, topic=topic, started=failure.started)
        if error.expired:
            if failure.started:
                self.tools.died(entry.job_id, "it has expired")
            return Move(entry, Place.DEAD_QUEUE if failure.started else Place.NOWHERE)
        if failure.dead:
            self._outcomes[topic, "dead"] += 1
            log.warning("task_dead", attempts=failure.new_attempts, **_about(entry, error))
            self.tools.died(entry.job_id, error.text)
            return Move(entry, Place.DEAD_QUEUE)
        self._note_retry(entry, error, failure, now)
        entry.lease = NO_LEASE  # the row has none any more
        score = entry_score(entry.topic, failure.next_time, failure.new_attempts)
        return Move(entry, Place.STORE_QUEUE, score)

    def _note_retry(self, entry: Entry, error: Raised, failure: Failure, now: int) -> None:
        """Count and log a try after which another one follows."""
        about, wait = _about(entry, error), (failure.next_time - now) / 1000
        if error.until is not None:
            self._outcomes[entry.topic.name, "postponed"] += 1
            if error.misfit:
                log.warning("payload_not_read", fields=error.misfit, again_in_seconds=wait, **about)
            else:
                log.debug("try_postponed", reason=error.text, **about)
        elif error.disturbed:
            self._outcomes[entry.topic.name, "crashed"] += 1
            log.warning("try_disturbed", reason=error.text, crashes=failure.new_crashes, **about)
        else:
            self._outcomes[entry.topic.name, "failed"] += 1
            log.info("try_failed", attempts=failure.new_attempts, again_in_seconds=wait, **about)


def _about(entry: Entry, error: Raised) -> dict[str, Any]:
    """Return what log lines tell about a failed try. Only the error's class and place: its text may hold a
    payload."""
    at = {"at": error.at} if error.at else {}
    return {"job_id": entry.job_id, "topic": entry.topic.name, "error": error.name, **at}


@dataclass(eq=False)
class Finisher:
    """Takes ended tries and returned entries from all threads. Each database server has its own Flusher."""

    tools: Tools

    def __post_init__(self) -> None:
        self._away: dict[str, tuple[int, int]] = {}
        """Topic -> since when the first of its postponed tasks has been due, and when this is over unless
        another one is postponed (ms)."""
        mover = EntryMover(self.tools)
        servers = range(len(self.tools.store.tables_of_server()))
        self.flushers = [Flusher(number, self.tools, mover) for number in servers]
        self.loops = [flusher.loop for flusher in self.flushers]

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
        """Return entries until these instants (ms), such as the end of another worker's lease.

        The sweep brings back sooner what is due by its row: a wait that must last is written to the row.
        """
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
            since, _ = self._away.get(entry.topic.name, (entry.due, 0))
            self._away[entry.topic.name] = min(since, entry.due), at + AGAIN_MS
            score = entry.row_score(at) if entry.checked else entry.unread_score(at)  # [rule: put-away]
            moves.append(_back(entry, score))
        self._move(moves, now=True)

    def away_since(self, now_ms: int) -> dict[str, int]:
        """When the first of each topic's postponed tasks was due (ms)."""
        self._away = {topic: times for topic, times in list(self._away.items()) if times[1] > now_ms}
        return {topic: since for topic, (since, _) in list(self._away.items())}

    def _move(self, moves: Iterable[Move], *, now: bool = False) -> None:
        """Make these moves with the next flush; or ``now``, on the caller's thread."""
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


def _back(entry: Entry, score: float) -> Move:
    return Move(entry, Place.STORE_QUEUE, score)
