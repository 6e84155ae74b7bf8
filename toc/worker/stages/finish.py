"""Finish: write the outcome of tries to rows, then move their index entries.

Each flush takes all tries of one database server that ended since the last one. It writes the rows of
successes in one transaction and those of failures in another, then moves their entries. The row always comes
first: a crash in between leaves an entry that the next row check corrects. Each database server has its own
thread, so its tries wait for no other server.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from toc.failpoint import failpoint
from toc.index.queues import Queues
from toc.loop import Loop
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable
from toc.model.raised import EXPIRED, Raised
from toc.model.scores import due_ms
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Slot
from toc.model.verdict import (
    Failure,
    Place,
    after_failure,
    belongs,
    beyond_horizon,
    entry_score,
    is_undecided,
)
from toc.observe.log import get_logger
from toc.observe.metrics import EXPIRED_TASKS, LATENESS, RUNTIME, TRIES, StepTimer
from toc.store.batch import Finish, Guard
from toc.store.put_plan import TRIED_BEFORE
from toc.store.shards import Answers, Trouble
from toc.store.store import Store
from toc.worker.stages.entry import Entry, Inflight
from toc.worker.stages.feedback import Pressure
from toc.worker.stages.waiting_notes import PutAway

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
"""Batches of moves that wait for a flush. More are made at once by the threads that ask for them, which take
nothing meanwhile: a flush lasts as long as its server hangs."""
MOST_UNMOVED = 2000
"""Entries whose move has failed, above which nothing is taken of the slots in which they are: their node
is slow or away."""
MAX_UNWRITTEN = 5000
"""Ended tries not yet written, above which nothing is taken. Bounds memory, and what runs twice after a
crash, when MySQL is slow or refuses writes."""

EndedTry = tuple[Entry, Raised | None]
"""A try that has ended: None for success, else what the handler raised. Or EXPIRED: no try was started."""


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
        scores = dict(self.rollback)
        back = inflight.depart(scores)
        return Moves(
            inflight.depart(self.commit),
            [(entry, scores[entry]) for entry in back],
            inflight.depart(self.bury),
        )

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


class Failures(NamedTuple):
    """Row changes, by job_id, of tries that failed at ``now`` (ms): a retry, or death."""

    now: int
    retries: dict[int, Failure]
    deaths: dict[int, Failure]


@dataclass(kw_only=True, eq=False)
class Finisher:
    """Takes ended tries and returned entries from all threads. Each database server has its own Flusher."""

    store: Store
    queues: Queues
    inflight: Inflight
    clock: Clock
    pressure: Pressure

    def __post_init__(self) -> None:
        self.away = PutAway()
        """Postponed entries, for the waiting notes."""
        self.flushers = [
            Flusher(f"finish-{number}", self.store, self.queues, self.inflight, self.clock, self.pressure)
            for number in range(len(self.store.tables_of_server()))
        ]

    @property
    def loops(self) -> list[Loop]:
        """The loop of each Flusher."""
        return [flusher.loop for flusher in self.flushers]

    def _of(self, entry: Entry) -> Flusher:
        if len(self.flushers) == 1:
            return self.flushers[0]
        return self.flushers[self.store.server_of(entry.job_id)]

    def ended(self, entry: Entry, error: Raised | None) -> None:
        """Record that a try ended. None: success. Only the caller that settled the entry calls this."""
        entry.ended = self.clock.monotonic()
        self._of(entry).ended(entry, error)

    def expire(self, entries: Iterable[Entry]) -> None:
        """End tasks that have expired: no try of them runs here, and none starts."""
        for entry in entries:
            if self.inflight.settle(entry):
                self.ended(entry, EXPIRED)

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Return entries that did not run to the StoreQueue, at their row's time. Charges no try."""
        self._roll_back((entry, entry.row_score()) for entry in entries)

    def give_back_running(self, entries: Iterable[Entry]) -> None:
        """Return entries whose handlers run and will be stopped, and mark their rows. Charges no try."""
        for entry in entries:
            self._of(entry).move(Moves(rollback=[(entry, entry.row_score())], stopped=[entry.job_id]))

    def give_back_unread(self, entries: Iterable[Entry]) -> None:
        """Return entries whose row could not be read. Charges no try."""
        self._roll_back((entry, entry.unread_score()) for entry in entries)

    def give_back_until(self, times: Iterable[tuple[Entry, int]]) -> None:
        """Return entries until these instants (ms), such as the end of another worker's lease."""
        self._roll_back((entry, entry.row_score(at)) for entry, at in times)

    def _roll_back(self, pairs: Iterable[tuple[Entry, float]], *, now: bool = False) -> None:
        """Return entries at these scores: with the next flush, unless many wait for it; or ``now``, on the
        caller's thread."""
        by_flusher: dict[Flusher, list[tuple[Entry, float]]] = {}
        for entry, score in pairs:
            by_flusher.setdefault(self._of(entry), []).append((entry, score))
        for flusher, some in by_flusher.items():
            (flusher.move_now if now else flusher.move_soon)(Moves(rollback=some))

    def put_away(self, times: Iterable[tuple[Entry, int]]) -> None:
        """Return entries until these instants (ms), because their rows cannot be read or written now.

        Runs on the caller's thread, so the caller takes nothing meanwhile: the server's own thread may hang,
        and postponed entries must not pile up. They have not started and have no lease, so no row is written.
        """
        pairs = []
        for entry, at in times:
            self.away.add(entry.slot, entry.due, at)
            score = entry.row_score(at) if entry.checked else entry.unread_score(at)  # [rule: put-away]
            pairs.append((entry, score))
        self._roll_back(pairs, now=True)

    def settle_by_row(self, entries: Iterable[tuple[Entry, TryRow | None]]) -> None:
        """Move entries whose row says that they must not run."""
        by_flusher: dict[Flusher, Moves] = {}
        for entry, row in entries:
            by_flusher.setdefault(self._of(entry), Moves()).by_row(entry, row)
        for flusher, moves in by_flusher.items():
            flusher.move_soon(moves)

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

    def unmoved(self) -> Collection[Slot]:
        """The slots in which moves have failed, if more than MOST_UNMOVED have: nothing is taken of them."""
        failed: Counter[Slot] = Counter()
        for flusher in self.flushers:
            failed.update(flusher.unmoved)
        return failed if failed.total() > MOST_UNMOVED else ()

    @property
    def idle(self) -> bool:
        """Whether everything handed in has been written."""
        return not self.inflight.moving and all(flusher.idle for flusher in self.flushers)

    def stop(self, seconds: float) -> None:
        """Let the current flushes end, for at most this many seconds in all."""
        until = self.clock.monotonic() + seconds
        for flusher in self.flushers:
            flusher.loop.stop(0)
        for flusher in self.flushers:
            flusher.loop.stop(max(until - self.clock.monotonic(), 0))


@dataclass(eq=False)
class Flusher:
    """The loop that writes the tries of one database server and moves their entries."""

    name: str
    store: Store
    queues: Queues
    inflight: Inflight
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
        self._outcomes: Counter[tuple[str, str]] = Counter()
        """(topic, outcome) -> tries of the current flush."""
        self._finish_step = StepTimer("finish")
        self._commit_step = StepTimer("commit")
        self._busy = False
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
        """Make these moves with the next flush. If many wait for it, now, on the caller's thread; but not if
        leases must be given up before, which the caller would wait for. Those are few."""
        leased = any(entry.may_be_leased for entry, _ in moves.rollback)
        (self.move if leased or len(self._moves) < MOST_QUEUED else self.move_now)(moves)

    def move_now(self, moves: Moves) -> None:
        """Make these moves on the caller's thread. Those that fail are made with the next flush."""
        failed = self._move(moves)
        if failed:
            self.move(failed)

    @property
    def backlog(self) -> int:
        """How many tries have ended and are not written yet."""
        return len(self._ended) + len(self._unwritten)

    @property
    def idle(self) -> bool:
        """Whether everything handed in has been written."""
        return not (self._ended or self._unwritten or self._moves or self._busy)

    def run_once(self) -> float:
        """Flush what was handed in. Returns the seconds until the next call."""
        self._busy = True
        try:
            gather = GATHER_BUSY_SECONDS if self.pressure.crowded else GATHER_SECONDS
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
            failed = self._move(moves)  # before the rows: these need no MySQL, which may hang
            moves = Moves()
            if batch:
                # Guards make it safe to write the rest again. Its entries stay held, with heartbeats.
                unwritten = self._write(batch, moves)  # moves only after this  [rule: row-first]
                failpoint("finish.rows-written")
                if unwritten:
                    self._unwritten += unwritten
                    self._again_at = self.clock.monotonic() + RETRY_SECONDS
            failed.add(self._move(moves))
            if failed or self.unmoved:
                self.unmoved = failed.by_slot()
            if failed:
                self._moves.appendleft(failed)
                pause = RETRY_SECONDS
            if self._ended or self._moves:
                return pause
            return RETRY_SECONDS if self._unwritten else IDLE_SECONDS
        finally:
            self._busy = False

    # --- rows

    def _write(self, batch: list[EndedTry], moves: Moves) -> list[EndedTry]:
        """Write the outcome of tries and add the moves that follow. Returns those that could not be written.

        They are counted once they are written.
        """
        self._outcomes.clear()
        began = self.clock.monotonic()
        done = [entry for entry, error in batch if error is None]
        failed = [(entry, error) for entry, error in batch if error is not None]
        sent = {e.job_id: (e.row.attempts + 1, e.delivered) for e in done if e.delivered is not None}
        cases = self.store.finish([(e.job_id, e.row.version) for e in done], sent) if done else Answers()
        failures = self._failures(failed)
        guards = Answers[Guard]()
        if failures.retries:
            guards = self.store.fail(list(failures.retries.values()))
        if failures.deaths:
            died = self.store.die(list(failures.deaths.values()))  # [rule: dead-first]
            guards = Answers(guards | died, guards.unanswered | died.unanswered)
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
        self._finish_step.took(self.clock.monotonic() - began, len(batch))
        for topic, (late, ran) in measured.items():
            LATENESS.of(topic).observe(late)
            RUNTIME.of(topic).observe(ran)
        for labels, count in self._outcomes.items():
            TRIES.of(*labels).add(count)
        return unwritten

    def _read_again(
        self, overtaken: list[Entry], refused: list[Entry]
    ) -> tuple[Answers[TryRow], Collection[int]]:
        """Read the rows of successes and failures that were not written, and mark them as begun.

        Returns the rows, and the ids of failures that wait: nothing but another worker's lease stood against
        them, and it may end without a try. Not for longer than prepare_timeout, so that a process can leave.
        """
        if not overtaken and not refused:
            return Answers(), ()
        rows = self.store.read_tries([entry.job_id for entry in overtaken + refused])
        now = self.clock.monotonic()
        waiting = [
            entry.job_id
            for entry in refused
            if is_undecided(entry.row, rows.get(entry.job_id))
            and now - entry.ended <= entry.topic.prepare_timeout
        ]
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
        for topic, count in Counter(entry.topic.name for entry in written).items():
            self._outcomes[topic, "processed"] += count
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
        expired: Counter[str] = Counter()
        for entry, error in failed:
            # Log the class alone: an error's text may hold parts of a payload.
            about = {"job_id": entry.job_id, "topic": entry.topic.name, "error": error.name}
            death = failures.deaths.get(entry.job_id)
            applied = guards[entry.job_id] is Guard.APPLIED
            if death is not None and death.expired and applied:
                expired[entry.topic.name] += 1
                log.info("task_expired", job_id=entry.job_id, topic=entry.topic.name, started=death.started)
            if error.expired:
                if not applied:
                    # The row is checked again, after a while if it is this host's clock that is ahead.
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
                log.warning("task_dead", attempts=death.new_attempts, **about)
                moves.bury.append(entry)
            else:
                entry.leased, entry.may_be_leased = 0.0, False  # the row has no lease any more
                failure = failures.retries[entry.job_id]
                if error.until is not None:
                    self._outcomes[entry.topic.name, "postponed"] += 1
                    log.debug("try_postponed", reason=error.text, **about)
                elif error.disturbed:
                    self._outcomes[entry.topic.name, "crashed"] += 1
                    log.warning("try_disturbed", reason=error.text, crashes=failure.new_crashes, **about)
                else:
                    self._outcomes[entry.topic.name, "failed"] += 1
                    wait = (failure.next_time - failures.now) / 1000
                    log.info("try_failed", attempts=failure.new_attempts, again_in_seconds=wait, **about)
                score = entry_score(entry.topic, failure.next_time, failure.new_attempts)
                moves.rollback.append((entry, score))
        for topic, count in expired.items():
            EXPIRED_TASKS.of(topic).add(count)

    # --- index

    def _move(self, moves: Moves) -> Moves:
        """Apply the transitions under their fencing tokens. Returns those whose node did not answer."""
        count = len(moves.commit) + len(moves.rollback) + len(moves.bury)
        if not count:
            return moves
        began = self.clock.monotonic()
        if moves.stopped:
            # Before the lease and the entry go: until then a cancel goes by these.  [rule: mark-tried]
            # Where that fails, the tasks run again all the same: that must not wait.
            tell_unwritten(self.store.mark_begun(moves.stopped, "its worker stopped before it had ended"))
        for entry in chain(moves.commit, moves.bury):
            entry.may_be_leased = False  # the row has ended, or is gone
        # While they are held here: the lease that is given up must not be one that was taken again.
        self._release([e for e, _ in moves.rollback if e.may_be_leased and self.inflight.get(e.job_id) is e])
        going = moves.departing(self.inflight)
        gone = [*going.commit, *(entry for entry, _ in going.rollback), *going.bury]
        try:
            return self._send(going)
        finally:
            self.inflight.arrived(gone)
            self._commit_step.took(self.clock.monotonic() - began, count)

    def _send(self, moves: Moves) -> Moves:
        now = self.clock.now_ms()
        beyond = [e for e, score in moves.rollback if beyond_horizon(e.topic, due_ms(score), now)]
        if beyond:  # it waits in its row alone; the sweep brings it back in time
            moves.commit += beyond
            moves.rollback = [(e, score) for e, score in moves.rollback if e not in beyond]
        scores = dict(moves.rollback)
        queues = self.queues
        commit = _sent(queues.commit, moves.commit, lambda e: (e.job_id, e.fence))
        back = _sent(queues.rollback, scores, lambda e: (e.job_id, e.fence, scores[e]))
        bury = _sent(queues.bury, moves.bury, lambda e: (e.job_id, e.fence, now))
        return Moves(commit, [(entry, scores[entry]) for entry in back], bury)

    def _release(self, entries: list[Entry]) -> None:
        """Give up the leases of entries that go back. Where that fails, the LeaseKeeper tries again."""
        if not entries:
            return
        failed = self.store.leases.release([entry.job_id for entry in entries])
        tell_unwritten(failed)
        for entry in entries:
            entry.leased = entry.lease_at = 0.0  # the next holder asks again  [rule: lease-released]
            entry.may_be_leased = entry.job_id in failed


def tell_unwritten(errors: Mapping[int, Trouble]) -> None:
    """Log that the rows of these tries could not be written, if there are any."""
    if errors:
        log.warning("rows_not_written", tries=len(errors), error=str(next(iter(errors.values()))))


def mark_begun(
    store: Store, rows: Iterable[TryRow], moved: Collection[int], error: str
) -> dict[int, Trouble]:
    """Mark the cancelled ones of these rows as tried, and those with an id in ``moved`` as begun.

    For a concurrent or later cancel. It looks for the PrepareQueue entry to learn whether a try may have
    begun, and without one reads the row again: so a row is marked before its entry moves and no failure is
    written.

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


def _sent(
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
