"""The sweep: completes the Redis index from the task table.

An entry can be missing although its row exists: after a crash between row and index, a submit while Redis was
down, a row written in a caller's transaction, or when a task comes inside the horizon. This file goes from
rows to entries. ``toc.maintenance.passes`` decides which rows, and when.

Entries are added with ZADD LT unless the id is in the PrepareQueue: an early entry is harmless (the row check
puts it back), a late or absent one is not. There is no high-water mark in id or time, because commit order is
not id order: each pass covers its whole range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from toc.index.calls import IndexBroken, Scored
from toc.index.queues import Queues
from toc.maintenance.ends import Ends, may_be_over
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, RateLimit
from toc.model.errors import IndexUnavailable, SchemaBehind, StoreUnavailable
from toc.model.topic import SLOT_AMOUNTS, Slot, Topic
from toc.model.verdict import beyond_horizon, entry_score
from toc.observe.log import get_logger
from toc.observe.metrics import ROWS_WITHOUT_TOPIC, SWEEP_ADDED, SWEEP_ROWS
from toc.store.store import Store
from toc.store.tasks.scan import DueRow

log = get_logger(__name__)

MAX_AHEAD_MS = 30_000
"""Tasks due within this time are indexed even beyond their topic's horizon: the next look at them may come so
much later."""
COMPLAIN_SECONDS = 60.0
"""How often the same trouble is logged."""


class SweepCounts(NamedTuple):
    """Counts: rows read, entries that were absent or too late, rows whose node failed, rows whose slot is
    broken. The owner of a broken slot fills it again once it is mended.
    """

    rows: int = 0
    added: int = 0
    failed: int = 0
    broken: int = 0

    def plus(self, other: SweepCounts) -> SweepCounts:
        """The sums of these and others."""
        return SweepCounts(*(a + b for a, b in zip(self, other, strict=True)))


class Sweep:
    """Adds the index entries that rows lack. Thread-safe."""

    def __init__(self, store: Store, queues: Queues, catalog: TopicCatalog, clock: Clock) -> None:
        self.scans = store.scans
        self._topics = store.topics
        self._ends = Ends(store, queues)
        self.clock = clock
        self._queues = queues
        self.indexed = queues.present
        """Whether there is an index to complete. If not, only what is over by its row is to be ended."""
        self._catalog = catalog
        self._complains = RateLimit(clock, COMPLAIN_SECONDS)

    def horizon_ms(self) -> int:
        """How far ahead (ms) any topic keeps tasks in Redis."""
        return max((topic.horizon for topic in self._catalog.known().values()), default=0) * 1000

    def add(self, rows: Collection[DueRow]) -> SweepCounts:
        """Index pending rows that are due within their topic's horizon; end those whose time is over."""
        now = self.clock.now_ms()
        known = self._catalog.known_type
        entries: dict[Slot, list[tuple[int, float]]] = {}
        pairs = [(row, known(row.biz_type) or self._topic(row)) for row in rows]
        over = {row.job_id: (row, topic) for row, topic in pairs if topic and may_be_over(row, topic, now)}
        ended = self._ends.end(over, now) if over else set()
        for row, topic in pairs:
            if topic is None or row.job_id in ended:
                continue
            if row.next_time - now <= MAX_AHEAD_MS or not beyond_horizon(topic, row.next_time, now):
                score = entry_score(topic, row.next_time, row.attempts)
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, score))
                if row.slot_amount != topic.slot_amount:
                    self._stamped_otherwise(topic, row)
        counts = self._outcome("store", len(rows), entries, self._queues.add(entries))
        if counts.added:
            log.debug("sweep_indexed", entries=counts.added)  # also tasks that have ended meanwhile
        return counts

    def restore_dead(self, rows: Collection[DueRow]) -> SweepCounts:
        """Restore the DeadQueue entries of rows of status 4."""
        entries: dict[Slot, list[tuple[int, int]]] = {}
        for row in rows:
            if topic := self._topic(row):
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, row.next_time))
        restored = self._queues.restore_dead(entries)  # [rule: dead-restored]
        return self._outcome("dead", len(rows), entries, restored)

    def _outcome(
        self, queue: str, rows: int, entries: Scored, results: Mapping[Slot, int | IndexUnavailable]
    ) -> SweepCounts:
        added = failed = broken = 0
        for slot, result in results.items():
            if isinstance(result, IndexUnavailable):
                if isinstance(result, IndexBroken):
                    broken += len(entries[slot])
                else:
                    failed += len(entries[slot])
                if self._complains():
                    log.warning("sweep_not_indexed", slot=str(slot), error=str(result))
            else:
                added += result
        SWEEP_ROWS.of().add(rows)
        SWEEP_ADDED.of(queue).add(added)
        return SweepCounts(rows, added, failed, broken)

    def _stamped_otherwise(self, topic: Topic, row: DueRow) -> None:
        """Give the topic the slots that a row needs, if it has fewer: another program has changed one of
        them, or this process has an old view of the topic, and then nothing changes.

        An amount that no topic can have is only named: ``Topic.slot`` ignores it.
        """
        legal = row.slot_amount in SLOT_AMOUNTS
        if (legal and row.slot_amount < topic.slot_amount) or not self._complains((topic, row.slot_amount)):
            return
        if not legal:
            log.warning(
                "slot_amount_not_understood",
                job_id=row.job_id, topic=topic.name, slot_amount=row.slot_amount,
            )  # fmt: skip
            return
        with suppress(StoreUnavailable, SchemaBehind):  # the topic table does not answer; the row comes again
            if self._topics.raise_slots(topic.name, row.slot_amount):
                log.warning("slots_raised", job_id=row.job_id, topic=topic.name, slots=row.slot_amount)

    def _topic(self, row: DueRow) -> Topic | None:
        topic = self._catalog.known_type(row.biz_type)
        if topic is not None:
            return topic
        if not self._complains(row.biz_type):
            return None
        try:
            topic = self._catalog.of_type(row.biz_type)
        except (StoreUnavailable, SchemaBehind):
            return None  # the topic table does not answer; the rows come again
        if topic is None:
            ROWS_WITHOUT_TOPIC.of().add()
            log.error("no_topic_for_row", job_id=row.job_id, biz_type=row.biz_type)
        return topic
