"""Cancels and reschedules: what a change of a row is answered with, also in a caller's transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from toc.failpoint import failpoint
from toc.index.messages import CancelReply
from toc.model.clock import Clock
from toc.model.errors import NotCommitted
from toc.model.sharding import BizId
from toc.model.task import CancelOutcome, RescheduleOutcome, Submission, TaskRow, TaskStatus
from toc.sdk.indexing import Indexing, near
from toc.store.store import Store
from toc.store.tasks.callers_transaction import AfterCommit

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")


class Changes:
    """Judges changes by row and index. Thread-safe."""

    def __init__(self, store: Callable[[], Store], indexing: Indexing, clock: Callable[[], Clock]) -> None:
        self._store = store
        self._indexing = indexing
        self._clock = clock

    def cancel(self, job_ids: Sequence[int]) -> dict[int, CancelOutcome]:
        """Cancel tasks, and return the outcome of each."""
        found = self._store().cancel_many(job_ids)  # [rule: row-first]
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
        replies = self._indexing.take_out(row for _, row in cancelled.values())
        started = {
            job_id: self._may_have_started(row, replies.get(job_id), changed=changed)
            for job_id, (changed, row) in cancelled.items()
        }
        doubtful = [job_id for job_id, may in started.items() if may is None]
        # No entry: the task was never taken, or it finished between our two steps. The worker that finishes a
        # cancelled or rescheduled task marks its row as tried before it moves the entry.
        # [rule: honest-cancel]
        for job_id, seen in self._store().read(doubtful).items() if doubtful else ():
            started[job_id] = seen.attempts > 0 or seen.last_error is not None
        tried = [job_id for job_id, may in started.items() if may]
        if tried:
            self._store().mark_tried(tried)
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
            return row.version > 0 or near(row, self._clock().now_ms() if changed else row.gmt_modified)
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
        now = self._clock().now_ms()
        reply = self._indexing.move(row, due, now)
        may_have_started = (
            row.attempts
            or row.crashes
            or (near(row, now) if reply is None else reply.redis_now_ms >= row.action_time)
        )
        return RescheduleOutcome.MAY_HAVE_STARTED if may_have_started else RescheduleOutcome.RESCHEDULED


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


class CallersWork(Protocol):
    """Submits and changes in one transaction of a caller."""

    def submit(self, many: Sequence[Submission]) -> list[int]:
        """Store tasks; return their job_ids in order."""

    def ids(self, biz: BizId, biz_type: int) -> list[int]:
        """Return the tasks of a biz_id, with those of the transaction."""

    def cancel(self, job_ids: Sequence[int], answer: Callable[[dict[int, CancelOutcome]], T]) -> Change[T]:
        """Cancel tasks. ``answer`` makes the outcome of theirs."""

    def reschedule(self, job_id: int, due: int, expiry: int) -> Change[RescheduleOutcome]:
        """Give a task another deadline ``due`` (ms); it expires at ``expiry`` (ms; 0: as before)."""


class InTransaction:
    """Does the work of a caller over the ``connection`` of its transaction."""

    def __init__(
        self,
        store: Store,
        changes: Changes,
        after_commit: AfterCommit[int | Change[Any]],
        connection: Connection,
    ) -> None:
        self._store = store
        self._changes = changes
        self._after_commit = after_commit
        self.connection = connection

    def submit(self, many: Sequence[Submission]) -> list[int]:
        """Store tasks; return their job_ids in order."""
        job_ids = self._store.callers.put_many(self.connection, many)
        self._after_commit.add(self.connection, job_ids)
        return job_ids

    def ids(self, biz: BizId, biz_type: int) -> list[int]:
        """Return the tasks of a biz_id, with those of the transaction."""
        return self._store.ids_with(self.connection, biz, biz_type)

    def cancel(self, job_ids: Sequence[int], answer: Callable[[dict[int, CancelOutcome]], T]) -> Change[T]:
        """Cancel tasks. ``answer`` makes the outcome of theirs."""
        found = self._store.callers.cancel(self.connection, job_ids)

        def judge() -> T:
            rows = self._store.read(found)
            for job_id, row in rows.items():
                _, before = found[job_id]
                if before.status in (TaskStatus.PENDING, TaskStatus.CANCELLED) and (
                    row.status != TaskStatus.CANCELLED or row.gmt_modified != before.gmt_modified
                ):
                    raise _not_committed(job_id)
            there = {job_id: (found[job_id][0], row) for job_id, row in rows.items()}
            return answer(self._changes.judge_cancels(job_ids, there))

        return self._changed(judge)

    def reschedule(self, job_id: int, due: int, expiry: int) -> Change[RescheduleOutcome]:
        """Give a task another deadline ``due`` (ms); it expires at ``expiry`` (ms; 0: as before)."""
        changed, before = self._store.callers.reschedule(self.connection, job_id, due, expiry)

        def judge() -> RescheduleOutcome:
            row = self._store.get(job_id)
            now = None if row is None else (row.version, row.action_time)
            if changed and before is not None and now != (before.version + 1, due):
                raise _not_committed(job_id)
            if not changed and row is not None and row.status == TaskStatus.PENDING:
                raise _not_committed(job_id)  # it was cancelled in the same transaction
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
