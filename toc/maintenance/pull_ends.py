"""Ends pulled tasks without a consumer: those that have expired, or whose last ttr is over.

A pull meets such a task when it is due and ends it. While nobody pulls from a topic, the worker that sweeps a
table does so instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.task import TaskStatus
from toc.model.topic import Delivery, Slot, Topic
from toc.model.verdict import PullEnd, Unpulled, after_lapse, unpulled
from toc.observe.log import get_logger
from toc.store.scan import DueRow, Position
from toc.store.store import Store

log = get_logger(__name__)

LOOK_SECONDS = 5.0
PAGE = 500
"""Due rows of a table that one look reads. The next look continues from there."""
START = Position(0)


@dataclass(eq=False)
class PullEnds:
    """The loop that ends these tasks. Idle while no topic is pulled. ``tables`` returns this
    worker's tables."""

    store: Store
    queues: Queues
    catalog: TopicCatalog
    clock: Clock
    tables: Callable[[], Iterable[int]]

    def __post_init__(self) -> None:
        self._places: dict[int, Position] = {}
        """Tables that hold more than was read, with the place from which to read on."""

    def run_once(self) -> float:
        """One look at every table. Returns the seconds until the next."""
        topics = {
            topic.biz_type: topic
            for topic in self.catalog.known().values()
            if topic.delivery is Delivery.PULL and not topic.paused
        }
        starts = {table: self._places.get(table, START) for table in self.tables()}
        if not topics or not starts:
            return LOOK_SECONDS
        where = f" AND biz_type IN ({','.join(map(str, topics))})"
        pages = self.store.scans.page(starts, self.clock.now_ms() + 1, PAGE, where=where)
        self._places = {table: page[-1].position for table, page in pages.items() if len(page) == PAGE}
        now = self.clock.now_ms()
        self._end(
            {
                row.job_id: row
                for page in pages.values()
                for row in page
                if row.attempts or 0 != row.expires_at < now
            },
            topics,
        )
        return LOOK_SECONDS

    def _end(self, due: Mapping[int, DueRow], topics: Mapping[int, Topic]) -> None:
        """End those of these rows whose time is over."""
        rows = self.store.pulls.read(due)
        ends: list[PullEnd] = [
            after_lapse(row)
            for row in rows.values()
            if row.biz_type in topics
            and unpulled(row, topics[row.biz_type]) in (Unpulled.LAPSED, Unpulled.EXPIRED)
        ]
        ended = self.store.pulls.end(ends)
        dead: dict[Slot, list[tuple[int, int]]] = {}
        gone: dict[Slot, list[int]] = {}
        for end in ends:
            row = end.row
            if not ended.get(row.job_id):
                continue
            topic = topics[row.biz_type]
            slot = topic.slot(row.slot_crc, row.slot_amount)
            if end.status == TaskStatus.DEAD:
                log.warning("task_dead", job_id=row.job_id, topic=topic.name, error=end.error)
                dead.setdefault(slot, []).append((row.job_id, self.clock.now_ms()))
            else:
                gone.setdefault(slot, []).append(row.job_id)
        # If these calls fail, whoever finds an entry reads its row.
        if dead:
            self.queues.restore_dead(dead)
        if gone:
            self.queues.forget(gone)
