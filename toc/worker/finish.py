"""Finish: from how tries ended to rows and queues.

Takes all that has ended since the last flush, writes the rows (one transaction per server), then moves the
index entries. Row first, always: a crash in between leaves an entry that the next row check puts right.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from toc.catalog import TopicCatalog
from toc.clock import Clock
from toc.errors import IndexUnavailable, StoreUnavailable
from toc.failpoint import failpoint
from toc.log import get_logger
from toc.metrics import LATENESS, RUNTIME, TRIES, Step
from toc.queue.queues import Queues
from toc.queue.scores import store_score
from toc.store.batch import Failure, Finish, Guard
from toc.store.store import TRIED_BEFORE, Store
from toc.task import MAX_RETRY_SECONDS, Dead, Retry, TaskStatus, TryRow
from toc.topic import Slot, Topic
from toc.worker.entry import Entry, Inflight
from toc.worker.loop import Loop

log = get_logger(__name__)

IDLE_SECONDS = 3600.0
RETRY_SECONDS = 0.5
"""Pause before rows or entries are written again after their server failed."""
GATHER_SECONDS = 0.006
"""The least time from one flush to the next. What ends within it is written together: the statements of
a flush cost several times what their rows cost, and nobody waits for a finish."""
GATHER_BUSY_SECONDS = 0.025
"""The same while more is due than can be started at once: what is late already comes first."""
FLUSH_LIMIT = 2000
"""Most tries that one flush writes."""
MAX_ERROR_CHARS = 1000


class ProcessEnded(Dead):
    """The task ended the process in which it ran alone: it is dead, and its crashes stay on the row."""


@dataclass(slots=True)
class Moves:
    """Index transitions that follow from rows as they are now."""

    commit: list[Entry] = field(default_factory=list)
    rollback: list[tuple[Entry, float]] = field(default_factory=list)
    bury: list[Entry] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    """job_ids among those rolled back whose handlers were running: their rows are to say so."""

    def add(self, more: Moves) -> None:
        """Take in others."""
        self.stopped += more.stopped
        self.commit += more.commit
        self.rollback += more.rollback
        self.bury += more.bury

    def departing(self, inflight: Inflight) -> Moves:
        """Those that may begin: one that is tried again is obsolete once its id was taken anew."""
        scores = {id(entry): score for entry, score in self.rollback}
        back = inflight.depart(entry for entry, _ in self.rollback)
        return Moves(
            inflight.depart(self.commit),
            [(entry, scores[id(entry)]) for entry in back],
            inflight.depart(self.bury),
        )

    def by_row(self, entry: Entry, row: TryRow | None) -> None:
        """Decide by the row alone, as the row check does."""
        # [rule: row-decides]
        if row is None or row.status in (TaskStatus.PROCESSED, TaskStatus.CANCELLED):
            self.commit.append(entry)
        elif row.status == TaskStatus.DEAD:
            self.bury.append(entry)
        else:
            entry.row = row
            self.rollback.append((entry, entry.row_score()))


class Finisher:
    """The loop that flushes; other threads hand entries in."""

    def __init__(
        self, *, store: Store, queues: Queues, catalog: TopicCatalog, inflight: Inflight, clock: Clock
    ) -> None:
        self._store = store
        self._queues = queues
        self._catalog = catalog
        self._inflight = inflight
        self._clock = clock
        self._ended: deque[tuple[Entry, BaseException | None]] = deque()
        self._moves: deque[Moves] = deque()
        self._outcomes: Counter[tuple[str, str]] = Counter()
        """(topic, outcome) -> tries of the present flush."""
        self._finish_step = Step("finish")
        self._commit_step = Step("commit")
        self.busy = False
        self.crowded: Callable[[], bool] = lambda: False
        """Whether more is due here than can be started at once. Set by who knows."""
        self._flushed_at = 0.0
        self.loop = Loop("finish", self.run_once)

    def ended(self, entry: Entry, error: BaseException | None) -> None:
        """A try ended: None for success, else what the handler raised. Called by who settled the entry."""
        entry.ended = self._clock.monotonic()
        self._ended.append((entry, error))
        self.loop.wake()

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Return entries that did not run to the StoreQueue, at their row's time. Charges nothing."""
        self._roll_back([(entry, entry.row_score()) for entry in entries])

    def give_back_running(self, entries: Iterable[Entry]) -> None:
        """The same for entries whose handlers run and will be stopped: their rows say so."""
        running = list(entries)
        if running:
            pairs = [(entry, entry.row_score()) for entry in running]
            self._moves.append(Moves(rollback=pairs, stopped=[entry.job_id for entry in running]))
            self.loop.wake()

    def give_back_unread(self, entries: Iterable[Entry]) -> None:
        """The same for entries whose row could not be read."""
        self._roll_back([(entry, entry.unread_score()) for entry in entries])

    def give_back_later(self, entries: Iterable[Entry], now: int) -> None:
        """Return entries that Redis's clock calls due and ours (``now``) does not, for that long."""
        self._roll_back(
            [(entry, entry.row_score(entry.taken + entry.row.next_time - now)) for entry in entries]
        )

    def give_back_until(self, times: Iterable[tuple[Entry, int]]) -> None:
        """Return entries until these instants, at which somebody else's lease on their rows ends."""
        self._roll_back([(entry, entry.row_score(at)) for entry, at in times])

    def _roll_back(self, pairs: list[tuple[Entry, float]]) -> None:
        if pairs:
            self._moves.append(Moves(rollback=pairs))
            self.loop.wake()

    def settle_by_row(self, entries: Iterable[tuple[Entry, TryRow | None]]) -> None:
        """Move entries whose row says that they must not run."""
        moves = Moves()
        for entry, row in entries:
            moves.by_row(entry, row)
        self._moves.append(moves)
        self.loop.wake()

    @property
    def backlog(self) -> int:
        """How many tries have ended and are not written yet."""
        return len(self._ended)

    @property
    def idle(self) -> bool:
        """Whether everything handed in has been written."""
        return not self._ended and not self._moves and not self.busy

    def run_once(self) -> float:
        """Flush what is there. Returns the seconds until the next call."""
        self.busy = True
        try:
            gather = GATHER_BUSY_SECONDS if self.crowded() else GATHER_SECONDS
            self.loop.pause(self._flushed_at + gather - self._clock.monotonic())
            self._flushed_at = self._clock.monotonic()
            batch = [self._ended.popleft() for _ in range(min(len(self._ended), FLUSH_LIMIT))]
            moves = self._moves.popleft() if self._moves else Moves()
            while self._moves:
                moves.add(self._moves.popleft())
            pause = 0.0
            failed = self._move(moves)  # before the rows: these need no MySQL, which may hang
            moves = Moves()
            if batch:
                try:
                    self._write(batch, moves)  # and only then the moves that follow  [rule: row-first]
                    failpoint("finish.rows-written")
                except StoreUnavailable as exc:
                    # Guards make writing all of it again safe; the entries stay held and are kept alive.
                    self._ended.extendleft(reversed(batch))
                    log.warning("rows_not_written", tries=len(batch), error=str(exc))
                    pause = RETRY_SECONDS
            failed.add(self._move(moves))
            if failed.commit or failed.rollback or failed.bury:
                self._moves.appendleft(failed)
                pause = RETRY_SECONDS
            if self._ended or self._moves:
                return pause
            return IDLE_SECONDS
        finally:
            self.busy = False

    # --- rows

    def _write(self, batch: list[tuple[Entry, BaseException | None]], moves: Moves) -> None:
        done = [entry for entry, error in batch if error is None]
        failed = [(entry, error) for entry, error in batch if error is not None]
        measured = self._measured(entry for entry, _ in batch)
        self._outcomes.clear()
        began = self._clock.monotonic()
        if done:
            self._write_successes(done, moves)
        if failed:
            self._write_failures(failed, moves)
        # Only now: if the rows cannot be written, all of it is written, and counted, again.
        self._finish_step.took(self._clock.monotonic() - began, len(batch))
        for topic, (late, ran) in measured.items():
            LATENESS.of(topic).observe(late)
            RUNTIME.of(topic).observe(ran)
        for labels, count in self._outcomes.items():
            TRIES.of(*labels).add(count)

    def _measured(self, entries: Iterable[Entry]) -> dict[str, tuple[list[float], list[float]]]:
        """By topic: how late tries started and how long they ran, in seconds. Before rows are read anew."""
        by_topic: dict[str, list[Entry]] = {}
        for entry in entries:
            if entry.started:  # not if a suspect's last run ended unseen
                by_topic.setdefault(entry.topic.name, []).append(entry)
        wall = self._clock.time() - self._clock.monotonic()
        return {
            topic: (
                [entry.started + wall - entry.row.next_time / 1000 for entry in some],
                [entry.ended - entry.started for entry in some],
            )
            for topic, some in by_topic.items()
        }

    def _write_successes(self, done: list[Entry], moves: Moves) -> None:
        cases = self._store.finish([(entry.job_id, entry.row.version) for entry in done])
        reread: list[Entry] = []
        for entry in done:
            case = cases[entry.job_id]
            if case is Finish.DONE:
                outcome = "processed"
            else:
                outcome = "duplicate" if case is Finish.ALREADY else "overtaken"
            self._outcomes[entry.topic.name, outcome] += 1
            if case in (Finish.RESCHEDULED, Finish.DEAD):
                reread.append(entry)
            else:
                moves.commit.append(entry)
        self._by_row(reread, moves)

    def _write_failures(self, failed: list[tuple[Entry, BaseException]], moves: Moves) -> None:
        now = self._clock.now_ms()
        retries: dict[int, Failure] = {}
        deaths: dict[int, Failure] = {}
        for entry, error in failed:
            row = entry.row
            attempts = row.attempts + 1
            dead = isinstance(error, Dead) or attempts >= entry.topic.retries
            delay = 0 if dead else retry_delay_ms(error, entry.topic, attempts)
            next_time = max(now + delay, row.action_time)  # not before it, even if the clock was set back
            crashes = row.crashes if isinstance(error, ProcessEnded) else 0
            failure = Failure(
                row.job_id,
                row.version,
                row.attempts,
                row.crashes,
                attempts,
                crashes,
                next_time,
                describe(error),
            )
            (deaths if dead else retries)[entry.job_id] = failure
        guards = self._store.fail(list(retries.values())) if retries else {}
        if deaths:
            guards |= self._store.die(list(deaths.values()))  # [rule: dead-first]
        lost: list[Entry] = []
        for entry, error in failed:
            # Its class alone: what an error says may be a payload's.
            about = {"job_id": entry.job_id, "topic": entry.topic.name, "error": type(error).__name__}
            if guards[entry.job_id] is Guard.LOST:
                self._outcomes[entry.topic.name, "overtaken"] += 1
                lost.append(entry)
            elif entry.job_id in deaths:
                self._outcomes[entry.topic.name, "dead"] += 1
                log.warning("task_dead", attempts=deaths[entry.job_id].new_attempts, **about)
                moves.bury.append(entry)
            else:
                self._outcomes[entry.topic.name, "failed"] += 1
                entry.leased = 0.0  # the row has no lease any more
                failure = retries[entry.job_id]
                wait = (failure.next_time - now) / 1000
                log.info("try_failed", attempts=failure.new_attempts, again_in_seconds=wait, **about)
                left = entry.topic.remaining(failure.new_attempts)
                moves.rollback.append((entry, store_score(failure.next_time, left, failure.new_attempts)))
            log.debug("handler_raised", exc_info=error, **about)
        self._by_row(lost, moves)

    def _by_row(self, entries: list[Entry], moves: Moves) -> None:
        """The guard met a row that somebody else has changed: the row, read again, decides."""
        if not entries:
            return
        rows = self._store.read_tries([entry.job_id for entry in entries])
        cancelled = [row.job_id for row in rows.values() if row.status == TaskStatus.CANCELLED]
        moved = [row.job_id for row in rows.values() if row.status == TaskStatus.PENDING]
        # Before the entry goes: a cancel that is under way, or comes later, looks for it.  [rule: mark-tried]
        if cancelled:
            self._store.mark_tried(cancelled)
        if moved:
            self._store.mark_begun(moved, TRIED_BEFORE)
        for entry in entries:
            moves.by_row(entry, rows.get(entry.job_id))

    # --- index

    def _move(self, moves: Moves) -> Moves:
        """Apply the transitions under their fences; returns those whose node did not answer."""
        count = len(moves.commit) + len(moves.rollback) + len(moves.bury)
        if not count:
            return moves
        began = self._clock.monotonic()
        if moves.stopped:
            # Before the lease and the entry go, by which a cancel knows so far.  [rule: mark-tried]
            self._mark_stopped(moves.stopped)
        # While they are held here: a lease that is given up must not be one that was taken anew.
        self._release([e for e, _ in moves.rollback if e.leased and self._inflight.get(e.job_id) is e])
        try:
            return self._send(moves.departing(self._inflight))
        finally:
            self._inflight.arrived()
            self._commit_step.took(self._clock.monotonic() - began, count)

    def _send(self, moves: Moves) -> Moves:
        now = self._clock.now_ms()
        beyond = [e for e, score in moves.rollback if score - now > e.topic.horizon * 1000]
        if beyond:  # it waits in its row alone; the sweep brings it back in time
            moves.commit += beyond
            moves.rollback = [(e, score) for e, score in moves.rollback if e not in beyond]
        failed = Moves()
        if moves.commit:
            commits = _by_slot(moves.commit)
            results = self._queues.commit({s: [(e.job_id, e.fence) for e in es] for s, es in commits.items()})
            for slot, entries in commits.items():
                if isinstance(results[slot], IndexUnavailable):
                    failed.commit += entries
        if moves.rollback:
            backs: dict[Slot, list[tuple[Entry, float]]] = {}
            for entry, score in moves.rollback:
                backs.setdefault(entry.slot, []).append((entry, score))
            returned = self._queues.rollback(
                {slot: [(e.job_id, e.fence, score) for e, score in pairs] for slot, pairs in backs.items()}
            )
            for slot, pairs in backs.items():
                if isinstance(returned[slot], IndexUnavailable):
                    failed.rollback += pairs
        if moves.bury:
            buries = _by_slot(moves.bury)
            buried = self._queues.bury(
                {slot: [(e.job_id, e.fence, now) for e in es] for slot, es in buries.items()}
            )
            for slot, entries in buries.items():
                if isinstance(buried[slot], IndexUnavailable):
                    failed.bury += entries
        return failed

    def _mark_stopped(self, job_ids: list[int]) -> None:
        try:
            self._store.mark_begun(job_ids, "its worker stopped before it had ended")
        except StoreUnavailable as exc:  # the tasks run again: that must not wait
            log.warning("rows_not_written", tries=len(job_ids), error=str(exc))

    def _release(self, entries: list[Entry]) -> None:
        """Give up the leases of what goes back."""
        if not entries:
            return
        try:
            self._store.leases.release([entry.job_id for entry in entries])
        except StoreUnavailable as exc:
            log.warning("rows_not_written", tries=len(entries), error=str(exc))  # they will run out
        for entry in entries:
            entry.leased = entry.lease_at = 0.0  # whoever takes the id anew asks anew  [rule: lease-released]


def _by_slot(entries: Iterable[Entry]) -> dict[Slot, list[Entry]]:
    grouped: dict[Slot, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.slot, []).append(entry)
    return grouped


def retry_delay_ms(error: BaseException, topic: Topic, attempts: int) -> int:
    """How long the task waits: what the handler asked for with Retry, else the topic's backoff."""
    after = error.after if isinstance(error, Retry) else None
    if isinstance(after, timedelta) and timedelta() <= after <= timedelta(seconds=MAX_RETRY_SECONDS):
        return -(-after // timedelta(milliseconds=1))
    return topic.retry_delay_ms(attempts)


def describe(error: BaseException) -> str:
    """The last error as it is kept on the row."""
    text = error_text(error)
    if not isinstance(error, (Dead, Retry)):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()


def error_text(error: BaseException) -> str:
    """What the error says, whatever its ``__str__`` does."""
    try:
        return str(error)[:MAX_ERROR_CHARS]
    except BaseException:
        return "(its text cannot be made)"
