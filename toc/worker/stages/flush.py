"""Flush: write the outcome of tries to rows, then move their index entries.

Each flush takes all tries of one database server that ended since the last one. It writes the rows of
successes, of retries and of deaths, in a transaction each, then moves their entries. The row always comes
first: a crash in between leaves an entry that the next row check corrects.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toc.failpoint import failpoint
from toc.loop import Loop
from toc.model.clock import Clock
from toc.model.raised import Raised
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Slot
from toc.model.verdict import Failure, after_failure, entry_score, is_undecided
from toc.observe.log import get_logger
from toc.observe.metrics import EXPIRED_TASKS, LATENESS, RUNTIME, TRIES, StepTimer
from toc.store.batch import Finish, Guard
from toc.store.plan import TRIED_BEFORE
from toc.store.shards import Answers
from toc.store.store import Store
from toc.worker.stages.entry import NO_LEASE, Entry
from toc.worker.stages.feedback import Pressure
from toc.worker.stages.moves import EntryMover, Moves, mark_begun, tell_unwritten

log = get_logger(__name__)

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
MOST_QUEUED = 8
"""Most batches of moves that wait for a flush. Threads that ask for more make the moves themselves
and take nothing meanwhile, because a flush may hang as long as its server does."""

EndedTry = tuple[Entry, Raised | None]
"""A try that has ended: None for success, else what the handler raised. Or EXPIRED: no try was started."""


class Failures(NamedTuple):
    """Row changes, by job_id, of tries that failed at ``now`` (ms): a retry, or death."""

    now: int
    retries: dict[int, Failure]
    deaths: dict[int, Failure]


@dataclass(eq=False)
class Flusher:
    """The loop that writes the tries of one database server and moves their entries."""

    name: str
    store: Store
    mover: EntryMover
    clock: Clock
    pressure: Pressure

    def __post_init__(self) -> None:
        self._ended: deque[EndedTry] = deque()
        self._unwritten: list[EndedTry] = []
        """Tries to be written again after a pause: the server failed, or another worker has a lease."""
        self._again_at = 0.0
        self.failing = False
        """Whether the server failed to write tries of its last batch."""
        self._moves: deque[Moves] = deque()
        self.unmoved: Counter[Slot] = Counter()
        """By slot, how many moves failed in the last flush. Replaced as a whole."""
        self._outcomes: defaultdict[tuple[str, str], int] = defaultdict(int)
        """(topic, outcome) -> tries of the current flush."""
        self._step = StepTimer("finish")
        self._lock = threading.Lock()
        self._under_way = 0
        """How many flushes, and moves on other threads, are under way."""
        self._begun = 0
        """How many of these have begun so far."""
        self._flushed_at = 0.0
        self.loop = Loop(self.name, self.run_once)

    def ended(self, entry: Entry, error: Raised | None) -> None:
        """Record that a try ended."""
        self._ended.append((entry, error))
        self.loop.wake()

    def move(self, moves: Moves) -> None:
        """Make these moves with the next flush."""
        self._moves.append(moves)
        self.loop.wake()

    def move_soon(self, moves: Moves) -> None:
        """Make these moves with the next flush, or at once, on the caller's thread, if many wait
        for the flush.

        Moves for which leases must be given up first always wait for the flush, because the caller
        would wait for the database. They are few.
        """
        leased = any(entry.lease.possible for entry, _ in moves.rollback)
        (self.move if leased or len(self._moves) < MOST_QUEUED else self.move_now)(moves)

    def move_now(self, moves: Moves) -> None:
        """Make these moves on the caller's thread. Those that fail are made with the next flush."""
        self._begin()
        try:
            failed = self.mover.make(moves)
            if failed:
                self.move(failed)
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
            gather = GATHER_BUSY_SECONDS if self.pressure.backlogged else GATHER_SECONDS
            self.loop.pause(self._flushed_at + gather - self.clock.monotonic())
            self._flushed_at = self.clock.monotonic()
            batch = [self._ended.popleft() for _ in range(min(len(self._ended), FLUSH_LIMIT))]
            if self._unwritten and self._flushed_at >= self._again_at:
                batch = self._unwritten[:FLUSH_LIMIT] + batch
                self._unwritten = self._unwritten[FLUSH_LIMIT:]
            moves = self._moves.popleft() if self._moves else Moves()
            while self._moves:
                moves.add(self._moves.popleft())
            pause = 0.0
            failed = self.mover.make(moves)  # before the rows: these need no MySQL, which may hang
            moves = Moves()
            if batch:
                # Guards make it safe to write the rest again. Its entries stay held, with heartbeats.
                unwritten = self._write(batch, moves)  # moves only after this  [rule: row-first]
                failpoint("finish.rows-written")
                if unwritten:
                    self._unwritten += unwritten
                    self._again_at = self.clock.monotonic() + RETRY_SECONDS
            failed.add(self.mover.make(moves))
            if failed or self.unmoved:
                self.unmoved = failed.by_slot()
            if failed:
                self._moves.appendleft(failed)
                pause = RETRY_SECONDS
            if self._ended or self._moves:
                return pause
            return RETRY_SECONDS if self._unwritten else IDLE_SECONDS
        finally:
            self._end()

    # --- rows

    def _write(self, batch: list[EndedTry], moves: Moves) -> list[EndedTry]:
        """Write the outcome of tries and add the moves that follow. Returns those that could not be written.

        Tries are counted in the metrics only once they are written.
        """
        self._outcomes.clear()
        began = self.clock.monotonic()
        done = [entry for entry, error in batch if error is None]
        failed = [(entry, error) for entry, error in batch if error is not None]
        cases = self._write_successes(done)
        failures = self._failures(failed)
        guards = self._write_failures(failures)
        moved = {job_id for job_id, case in cases.items() if case in (Finish.RESCHEDULED, Finish.DEAD)}
        overtaken = [entry for entry in done if entry.job_id in moved] if moved else []
        refused = [e for e, error in failed if guards.get(e.job_id) is Guard.LOST and not error.expired]
        rows, waiting = self._read_again(overtaken, refused)
        trouble = cases.unanswered | guards.unanswered | rows.unanswered
        tell_unwritten(trouble)
        self.failing = bool(trouble)
        unwritten: list[EndedTry] = []
        if trouble or waiting:
            missing = {*trouble, *waiting}
            unwritten = [pair for pair in batch if pair[0].job_id in missing]
            batch = [pair for pair in batch if pair[0].job_id not in missing]
            done = [entry for entry in done if entry.job_id not in missing]
            failed = [pair for pair in failed if pair[0].job_id not in missing]
        tried = [entry for entry, error in batch if error is None or error.until is None]
        measured = self._measured(tried)  # before entries get the rows that were read again
        self._settle_successes(done, cases, rows, moves)
        self._settle_failures(failed, failures, guards, rows, moves)
        self._step.took(self.clock.monotonic() - began, len(batch))
        for topic, (late, ran) in measured.items():
            LATENESS.of(topic).observe(late)
            RUNTIME.of(topic).observe(ran)
        for labels, count in self._outcomes.items():
            TRIES.of(*labels).add(count)
        return unwritten

    def _write_successes(self, done: Sequence[Entry]) -> Answers[Finish]:
        tries = [(entry.job_id, entry.row.version) for entry in done]
        sent = {e.job_id: (e.row.attempts + 1, e.delivered) for e in done if e.delivered is not None}
        return self.store.finish(tries, sent) if tries else Answers()

    def _write_failures(self, failures: Failures) -> Answers[Guard]:
        guards = Answers[Guard]()
        if failures.retries:
            guards = self.store.fail(list(failures.retries.values()))
        if failures.deaths:
            died = self.store.die(list(failures.deaths.values()))  # [rule: dead-first]
            guards = Answers(guards | died, guards.unanswered | died.unanswered)
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
        rows = self.store.read_tries([entry.job_id for entry in overtaken + refused])
        now = self.clock.monotonic()
        waiting = {
            entry.job_id
            for entry in refused
            if is_undecided(entry.row, rows.get(entry.job_id))
            and now - entry.ended <= entry.topic.prepare_timeout
        }
        begun = [row for row in rows.values() if row.job_id not in waiting]
        moved = [row.job_id for row in begun if row.status == TaskStatus.PENDING]
        rows.unanswered |= mark_begun(self.store, begun, moved, TRIED_BEFORE)
        return rows, waiting

    def _measured(self, entries: Iterable[Entry]) -> dict[str, tuple[list[float], list[float]]]:
        """By topic: how late tries started, how long they ran (seconds). Before rows are read again."""
        by_topic: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.started:  # not set if a suspect's last run ended unseen
                by_topic[entry.topic.name].append(entry)
        wall = self.clock.time() - self.clock.monotonic()
        return {
            topic: (
                [entry.started + wall - entry.row.next_time / 1000 for entry in some],
                [entry.ended - entry.started for entry in some],
            )
            for topic, some in by_topic.items()
        }

    def _settle_successes(
        self,
        done: list[Entry],
        cases: Mapping[int, Finish],
        rows: Mapping[int, TryRow],
        moves: Moves,
    ) -> None:
        """Add the moves of tries that succeeded. ``rows`` are those that another party has changed."""
        written = [entry for entry in done if cases[entry.job_id] is Finish.DONE]
        moves.commit += written
        for entry in written:
            self._outcomes[entry.topic.name, "processed"] += 1
        if len(written) == len(done):
            return
        for entry in done:
            case = cases[entry.job_id]
            if case is Finish.DONE:
                continue
            outcome = "duplicate" if case is Finish.ALREADY else "overtaken"
            self._outcomes[entry.topic.name, outcome] += 1
            if case in (Finish.RESCHEDULED, Finish.DEAD):
                moves.by_row(entry, rows.get(entry.job_id))
            else:
                moves.commit.append(entry)

    def _failures(self, failed: Iterable[tuple[Entry, Raised]]) -> Failures:
        """The row changes of tries that failed."""
        now = self.clock.now_ms()
        failures = Failures(now, {}, {})
        for entry, error in failed:
            failure, dead = after_failure(entry.row, entry.topic, error, now)
            (failures.deaths if dead else failures.retries)[entry.job_id] = failure
        return failures

    def _settle_failures(
        self,
        failed: list[tuple[Entry, Raised]],
        failures: Failures,
        guards: Mapping[int, Guard],
        rows: Mapping[int, TryRow],
        moves: Moves,
    ) -> None:
        """Add the moves of tries that failed. ``rows`` are those that another party has changed."""
        for entry, error in failed:
            death = failures.deaths.get(entry.job_id)
            applied = guards[entry.job_id] is Guard.APPLIED
            if applied and death is not None and death.expired:
                EXPIRED_TASKS.of(entry.topic.name).add()
                log.info("task_expired", job_id=entry.job_id, topic=entry.topic.name, started=death.started)
            if error.expired:
                if not applied:
                    # The row is checked again once Redis's clock has reached this host's, which may
                    # be ahead.
                    moves.rollback.append((entry, entry.row_score(failures.now)))
                elif death is not None and death.started:
                    moves.bury.append(entry)
                else:
                    moves.commit.append(entry)
            elif not applied:
                self._outcomes[entry.topic.name, "overtaken"] += 1
                moves.by_row(entry, rows.get(entry.job_id))
            elif death is not None:
                self._outcomes[entry.topic.name, "dead"] += 1
                log.warning("task_dead", attempts=death.new_attempts, **_about(entry, error))
                moves.bury.append(entry)
            else:
                failure = failures.retries[entry.job_id]
                self._note_retry(entry, error, failure, failures.now)
                entry.lease = NO_LEASE  # the row has none any more
                score = entry_score(entry.topic, failure.next_time, failure.new_attempts)
                moves.rollback.append((entry, score))

    def _note_retry(self, entry: Entry, error: Raised, failure: Failure, now: int) -> None:
        """Count and log a try after which another one follows."""
        about = _about(entry, error)
        if error.until is not None:
            self._outcomes[entry.topic.name, "postponed"] += 1
            log.debug("try_postponed", reason=error.text, **about)
        elif error.disturbed:
            self._outcomes[entry.topic.name, "crashed"] += 1
            log.warning("try_disturbed", reason=error.text, crashes=failure.new_crashes, **about)
        else:
            self._outcomes[entry.topic.name, "failed"] += 1
            wait = (failure.next_time - now) / 1000
            log.info("try_failed", attempts=failure.new_attempts, again_in_seconds=wait, **about)


def _about(entry: Entry, error: Raised) -> dict[str, Any]:
    """Return what log lines tell about a failed try. Only the error's class and place: its text may hold a
    payload."""
    at = {"at": error.at} if error.at else {}
    return {"job_id": entry.job_id, "topic": entry.topic.name, "error": error.name, **at}
