"""What follows the change of a row: the index is updated, and cancels and reschedules get their outcome.

The index is updated if Redis can be reached. If it cannot, the sweep makes the update later. So nothing of
that fails a caller whose row is written. Also in a caller's transaction: then it comes after the commit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from toc.failpoint import failpoint
from toc.index.messages import CancelReply
from toc.model.clock import MAX_CLOCK_SKEW_MS, Clock, RateLimit
from toc.model.errors import IndexUnavailable, InvalidInput, NotCommitted, TocError
from toc.model.sharding import BizId
from toc.model.task import CancelOutcome, RescheduleOutcome, Submission, TaskRow, TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import beyond_horizon, entry_score
from toc.observe.log import get_logger
from toc.store.tasks.plan import PENDING, Expiry, Stored

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from toc.sdk.client import TimeoutCenter
    from toc.store.tasks.callers_transaction import AfterCommit

log = get_logger(__name__)
T = TypeVar("T")

NEVER_TAKEN = CancelReply(prepared=False, redis_now_ms=0)
"""Without an index only the row, which was read before, tells whether a try has begun."""
COMPLAIN_SECONDS = 1.0
"""How often it is logged that Redis takes no entries: each submit meets it."""


class Changes:
    """What a TimeoutCenter does once rows are written. Thread-safe."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._complains = RateLimit(Clock(), COMPLAIN_SECONDS)

    # --- the index

    def stored(self, rows: Sequence[TaskRow]) -> None:
        """Add the entries of rows that submits have stored.

        Their outcomes are fixed: what fails here is the sweep's to do. Any other error is raised: it may be
        one that a signal handler of the application raises.
        """
        failpoint("submit.row-stored")
        try:
            self.add(rows)
        except TocError as exc:
            log.warning("submit_not_indexed", tasks=len(rows), error=str(exc))

    def apply(self, done: Sequence[Stored]) -> None:
        """Tell the index what submits have changed on rows, as ``stored`` does."""
        self.stored([row for one in done if (row := one.inserted or one.kept)])
        for one in done:
            if one.before is not None and self.move(one.before, one.due, self._center.clock.now_ms()) is None:
                break  # out of reach: the sweep moves the others, too

    def add(self, rows: Iterable[TaskRow]) -> None:
        """Add the entries of the pending ones of these rows. Raises StoreUnavailable or SchemaBehind if a
        topic cannot be looked up."""
        catalog, now = self._center.catalog, self._center.clock.now_ms()
        entries: dict[Slot, list[tuple[int, float]]] = {}
        for row in rows:
            if row.status != PENDING:
                continue
            topic = catalog.of_type(row.biz_type)
            if topic is None or beyond_horizon(topic, row.next_time, now):
                continue  # the sweep adds it to Redis when it comes within the horizon
            score = entry_score(topic, row.next_time, row.attempts)
            entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append((row.job_id, score))
        results = self._center.queues.add(entries).values() if entries else ()
        failures = [result for result in results if isinstance(result, IndexUnavailable)]
        if failures and self._complains():
            log.warning("submit_not_indexed", slots=len(failures), error=str(failures[0]))

    def move(self, row: TaskRow, due: int, now: int) -> CancelReply | None:
        """Move the entry of a row, given as it was, to its new time. None if the index is out of reach."""
        try:
            topic = self._center.catalog.of_type(row.biz_type)
            if topic is None:
                return None
            slot = topic.slot(row.slot_crc, row.slot_amount)
            if beyond_horizon(topic, due, now):  # it waits in MySQL alone
                return self.take_out([row]).get(row.job_id)
            return self._center.queues.reschedule(slot, row.job_id, entry_score(topic, due, 0))
        except TocError as exc:  # its topic may be impossible to look up, too
            if isinstance(exc, IndexUnavailable) and self._no_index():
                return NEVER_TAKEN
            log.warning("index_not_told", job_id=row.job_id, error=str(exc))
            return None

    def take_out(self, rows: Iterable[TaskRow]) -> dict[int, CancelReply]:
        """Remove cancelled tasks from the index; return its replies, without those of nodes out of reach."""
        slots: dict[int, Slot] = {}
        for row in rows:
            try:
                topic = self._center.catalog.of_type(row.biz_type)
            except TocError as exc:
                log.warning("index_not_told", job_id=row.job_id, error=str(exc))
                continue
            if topic is not None:
                slots[row.job_id] = topic.slot(row.slot_crc, row.slot_amount)
        replies = self._center.queues.cancel(slots)
        failed = [(one, reply) for one, reply in replies.items() if isinstance(reply, IndexUnavailable)]
        if failed and self._no_index():
            replies |= dict.fromkeys(dict(failed), NEVER_TAKEN)
        elif failed:
            job_id, error = failed[0]
            log.warning("index_not_told", job_id=job_id, tasks=len(failed), error=str(error))
        return {one: reply for one, reply in replies.items() if not isinstance(reply, IndexUnavailable)}

    def _no_index(self) -> bool:
        """Whether the rows say that there is no index, whatever the settings of this process say: operators
        may have switched it on since. The rows do not tell of each try any more then."""
        try:
            return not self._center.store.identity.indexed()
        except TocError:
            return False

    # --- outcomes

    def cancel(self, job_ids: Sequence[int]) -> dict[int, CancelOutcome]:
        """Cancel tasks, and return the outcome of each."""
        found = self._center.store.cancel_many(job_ids)  # [rule: row-first]
        failpoint("cancel.row-written")
        return self.judge_cancels(job_ids, found)

    def judge_cancels(
        self, job_ids: Sequence[int], found: Mapping[int, tuple[bool, TaskRow]]
    ) -> dict[int, CancelOutcome]:
        """Take cancelled tasks out of the index, and return each outcome.

        ``found`` are the rows that there are, and whether this call has cancelled them.
        """
        outcomes = dict.fromkeys(job_ids, CancelOutcome.UNKNOWN)
        cancelled: dict[int, tuple[bool, TaskRow]] = {}
        for job_id, (changed, row) in found.items():
            if row.status in (TaskStatus.PROCESSED, TaskStatus.DEAD):
                outcomes[job_id] = CancelOutcome.TOO_LATE
                continue
            outcomes[job_id] = CancelOutcome.CANCELLED
            if not row.expired:  # else it ended by itself, before its first try
                cancelled[job_id] = changed, row
        replies = self.take_out(row for _, row in cancelled.values())
        started = {
            job_id: self._may_have_started(row, replies.get(job_id), changed=changed)
            for job_id, (changed, row) in cancelled.items()
        }
        doubtful = [job_id for job_id, may in started.items() if may is None]
        # No entry: the task was never taken, or it finished between our two steps. The worker that finishes a
        # cancelled or rescheduled task marks its row as tried before it moves the entry.
        # [rule: honest-cancel]
        for job_id, seen in self._center.store.read(doubtful).items() if doubtful else ():
            started[job_id] = seen.attempts > 0 or seen.last_error is not None
        tried = [job_id for job_id, may in started.items() if may]
        if tried:
            self._center.store.mark_tried(tried)
            outcomes |= dict.fromkeys(tried, CancelOutcome.MAY_HAVE_STARTED)
        return outcomes

    def _may_have_started(self, row: TaskRow, reply: CancelReply | None, *, changed: bool) -> bool | None:
        """Whether a try of a cancelled task may have started. ``changed``: this call cancelled it.

        None: only the row can tell, and it must be read after the index was asked.
        """
        if row.attempts or row.crashes or row.last_error is not None:
            return True  # redrive and reschedule give all tries back, and keep the error
        if reply is None:
            # With a version, the task may be running for the deadline it had before it was rescheduled.
            return row.version > 0 or near(row, self._center.clock.now_ms() if changed else row.gmt_modified)
        if reply.prepared:
            due = reply.redis_now_ms >= row.action_time if changed else near(row, row.gmt_modified)
            return row.version > 0 or due
        if changed and row.version == 0 and reply.redis_now_ms < row.action_time:
            return False
        return None

    def judge_reschedule(self, row: TaskRow | None, due: int, *, changed: bool) -> RescheduleOutcome:
        """Move the entry of a rescheduled task to its new time, and return the outcome. ``row``: as it was
        before."""
        if row is None:
            return RescheduleOutcome.UNKNOWN
        if not changed:
            return RescheduleOutcome.TOO_LATE
        now = self._center.clock.now_ms()
        reply = self.move(row, due, now)
        may_have_started = (
            row.attempts
            or row.crashes
            or (near(row, now) if reply is None else reply.redis_now_ms >= row.action_time)
            or (reply is NEVER_TAKEN and row.last_error is not None and near(row, now))
        )
        return RescheduleOutcome.MAY_HAVE_STARTED if may_have_started else RescheduleOutcome.RESCHEDULED


def near(row: TaskRow, at: int) -> bool:
    """Whether a worker may have taken the task at time ``at`` (ms), allowing for clock skew."""
    return row.action_time - at <= MAX_CLOCK_SKEW_MS


class Change(Generic[T]):
    """A cancel or reschedule that was written in a caller's transaction. Thread-safe.

    ``is_open`` tells whether that is still open. ``judge`` finds the outcome, or raises NotCommitted.
    """

    def __init__(self, is_open: Callable[[], bool], judge: Callable[[], T]) -> None:
        self._is_open, self._judge = is_open, judge
        self._found: list[T] = []
        self._lock = threading.Lock()

    @property
    def outcome(self) -> T:
        """The outcome, judged at the first use after the commit; usually a thread of toc was first.

        Raises NotCommitted while the transaction is open and if the change was rolled back; StoreUnavailable.
        """
        with self._lock:
            if not self._found:
                if self._is_open():
                    raise NotCommitted("the transaction of this change is still open: commit it first")
                self._found.append(self._judge())
            return self._found[0]

    def __repr__(self) -> str:
        return f"<Change: {self._found[0] if self._found else 'read .outcome after the commit'}>"


class InTransaction:
    """Submits and changes in one transaction of a caller, over its ``connection``."""

    def __init__(
        self, center: TimeoutCenter, after_commit: AfterCommit[int | Change[Any]], connection: Connection
    ) -> None:
        self._center, self._changes = center, center._changes
        self._after_commit = after_commit
        self.connection = connection

    def submit(self, many: Sequence[Submission], refused: Mapping[int, InvalidInput]) -> list[int]:
        """Store tasks; return their job_ids in order. ``refused``: see ``put_many``."""
        job_ids = self._center.store.callers.put_many(self.connection, many, refused)
        self._after_commit.add(self.connection, job_ids)
        return job_ids

    def ids(self, biz: BizId, biz_type: int) -> list[int]:
        """Return the tasks of a biz_id, with those of the transaction."""
        return self._center.store.ids_with(self.connection, biz, biz_type)

    def cancel(self, job_ids: Sequence[int], answer: Callable[[dict[int, CancelOutcome]], T]) -> Change[T]:
        """Cancel tasks. ``answer`` makes the outcome of theirs."""
        found = self._center.store.callers.cancel(self.connection, job_ids)

        def judge() -> T:
            there = {}
            for job_id, row in self._center.store.read(found).items():
                changed, before = found[job_id]
                if before.status in (TaskStatus.PROCESSED, TaskStatus.DEAD):
                    row = before  # a redrive may have come since
                elif row.status != TaskStatus.CANCELLED or row.gmt_modified != before.gmt_modified:
                    raise _not_committed(job_id)
                there[job_id] = changed, row
            return answer(self._changes.judge_cancels(job_ids, there))

        return self._changed(judge)

    def reschedule(self, job_id: int, due: int, expiry: Expiry) -> Change[RescheduleOutcome]:
        """Give a task another deadline ``due`` (ms)."""
        changed, before = self._center.store.callers.reschedule(self.connection, job_id, due, expiry)

        def judge() -> RescheduleOutcome:
            row = self._center.store.get(job_id)
            now = None if row is None else (row.version, row.action_time)
            if changed and before is not None and now != (before.version + 1, due):
                raise _not_committed(job_id)
            cancelled = before is not None and before.status == TaskStatus.CANCELLED  # in it, too
            if cancelled and row is not None and row.status == TaskStatus.PENDING:
                raise _not_committed(job_id)
            return self._changes.judge_reschedule(before, due, changed=changed)

        return self._changed(judge)

    def _changed(self, judge: Callable[[], T]) -> Change[T]:
        change: Change[T] = Change(lambda: is_open(), judge)
        is_open = self._after_commit.add(self.connection, [change])
        return change


def _not_committed(job_id: int) -> NotCommitted:
    return NotCommitted(
        f"the change of task {job_id} is not committed: its transaction or savepoint was rolled back, or the "
        "task was changed again since"
    )
