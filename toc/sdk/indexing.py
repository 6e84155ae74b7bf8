"""Updates the index after each change of a row, if Redis can be reached.

If it cannot, the sweep makes the update later. So nothing here fails a caller whose row is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from toc.failpoint import failpoint
from toc.index.messages import CancelReply
from toc.model.clock import MAX_CLOCK_SKEW_MS, Clock, RateLimit
from toc.model.errors import IndexUnavailable, TocError
from toc.model.task import TaskRow
from toc.model.topic import Slot
from toc.model.verdict import beyond_horizon, entry_score
from toc.observe.log import get_logger
from toc.store.tasks.plan import PENDING, Stored

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

log = get_logger(__name__)

COMPLAIN_SECONDS = 1.0
"""How often it is logged that Redis takes no entries: each submit meets it."""


class Indexing:
    """The part of a TimeoutCenter that speaks to the index. Thread-safe."""

    def __init__(self, center: TimeoutCenter) -> None:
        self._center = center
        self._complains = RateLimit(Clock(), COMPLAIN_SECONDS)

    def stored(self, rows: Sequence[TaskRow]) -> None:
        """Add the entries of rows that submits have stored.

        Their outcomes are fixed: what fails here is the sweep's to do. Any other error is raised: it may be
        one that a signal handler of the application raises.
        """
        failpoint("submit.row-stored")
        try:
            if pending := [row for row in rows if row.status == PENDING]:
                self.add(pending)
        except TocError as exc:
            log.warning("submit_not_indexed", tasks=len(rows), error=str(exc))

    def apply(self, done: Sequence[Stored]) -> None:
        """Tell the index what submits have changed on rows, as ``stored`` does."""
        self.stored([row for one in done if (row := one.inserted or one.kept)])
        for one in done:
            if one.before is not None and self.move(one.before, one.due, self._center.clock.now_ms()) is None:
                break  # out of reach: the sweep moves the others, too

    def add(self, rows: Iterable[TaskRow]) -> None:
        """Add the entries of pending rows. Raises StoreUnavailable or SchemaBehind if a topic cannot be
        looked up."""
        catalog, now = self._center.catalog, self._center.clock.now_ms()
        entries: dict[Slot, list[tuple[int, float]]] = {}
        for row in rows:
            topic = catalog.of_type(row.biz_type)
            if topic is None or beyond_horizon(topic, row.next_time, now):
                continue  # the sweep adds it to Redis when it comes within the horizon
            score = entry_score(topic, row.next_time, row.attempts)
            entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append((row.job_id, score))
        results = self._center.queues.add(entries).values()
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
                return self._center.queues.cancel(slot, row.job_id)
            return self._center.queues.reschedule(slot, row.job_id, entry_score(topic, due, 0))
        except TocError as exc:  # its topic may be impossible to look up, too
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
        replies = self._center.queues.cancel_many(slots)
        failed = [(one, reply) for one, reply in replies.items() if isinstance(reply, IndexUnavailable)]
        if failed:
            job_id, error = failed[0]
            log.warning("index_not_told", job_id=job_id, tasks=len(failed), error=str(error))
        return {one: reply for one, reply in replies.items() if not isinstance(reply, IndexUnavailable)}


def near(row: TaskRow, at: int) -> bool:
    """Whether a worker may have taken the task at time ``at`` (ms), allowing for clock skew."""
    return row.action_time - at <= MAX_CLOCK_SKEW_MS
