"""The sweep: makes the Redis index complete again from the task table.

A crash between row and index, a submit while Redis was down, a row written in a caller's transaction, a
task that comes inside the horizon: in each case the row is there and the entry is not. This file
goes from rows to entries; which rows, and when, is decided in ``toc.maintenance.sweeper``.

Entries are added with ZADD LT unless the id stands in the PrepareQueue: one too early is harmless (the row
check puts it back), one too late or absent is not. There is no high-water mark in id or time, because commit
order is not id order: each pass looks at its whole range.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from toc.failpoint import failpoint
from toc.index.calls import IndexBroken
from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import IndexUnavailable, StoreUnavailable
from toc.model.task import TaskStatus
from toc.model.topic import Slot, Topic
from toc.model.verdict import beyond_horizon, entry_score
from toc.observe.log import get_logger
from toc.observe.metrics import ROWS_WITHOUT_TOPIC, SWEEP_ADDED, SWEEP_ROWS
from toc.store.scan import DueRow, Position
from toc.store.store import Store

log = get_logger(__name__)

ROWS_PER_STEP = 200
"""Rows that one step reads, about: one or two milliseconds of this process's time."""
LEAST_PAGE = 20
TABLES_PER_PAGE = 32
NEAR_MS = 60_000
"""What is due within a minute comes back first."""
FAST_ROWS = 1000
"""Rows per step where nothing else is held up."""
WIDEN_SECONDS = 0.5
COMPLAIN_SECONDS = 60.0
"""How often the same trouble is logged."""


class SweepCounts(NamedTuple):
    """What was done: rows looked at, entries that were absent or too late, rows whose node failed, and rows
    whose slot is broken: its owner fills it again once it is not."""

    rows: int = 0
    added: int = 0
    failed: int = 0
    broken: int = 0


class Sweep:
    """From rows to entries. Thread-safe. ``counts``: rows, added, dead_added, no_topic."""

    def __init__(self, store: Store, queues: Queues, catalog: TopicCatalog, clock: Clock) -> None:
        self.scans = store.scans
        self._topics = store.topics
        self._widened: dict[str, float] = {}
        """When a topic was last asked to have more slots consumed."""
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._queues = queues
        self._catalog = catalog
        self._no_topic: dict[int, float] = {}
        """When a biz_type that has no topic was last complained of."""
        self._complained = float("-inf")

    def horizon_ms(self) -> int:
        """How far ahead any topic keeps tasks in Redis."""
        return max((topic.horizon for topic in self._catalog.known().values()), default=0) * 1000

    def add(
        self, rows: Iterable[DueRow], within_ms: int = 0, *, missing: bool = False
    ) -> tuple[SweepCounts, set[int]]:
        """Index pending rows; also returns the ids of those whose node is out of reach.

        Rows that are due within ``within_ms`` are indexed however near their topic's horizon is: the next
        look at them may come too late. ``missing``: most entries are probably absent, so they are added
        without asking first.
        """
        now = self.clock.now_ms()
        entries: dict[Slot, list[tuple[int, float]]] = {}
        count = 0
        for row in rows:
            count += 1
            topic = self._topic(row)
            if topic is None:
                continue
            if row.next_time - now <= within_ms or not beyond_horizon(topic, row.next_time, now):
                score = entry_score(topic, row.next_time, row.attempts)
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, score))
                if row.slot_amount > topic.consumed:
                    self._consume(topic, row.slot_amount)
        added, failed, broken = self._complete(entries, missing)
        self.counts["rows"] += count
        self.counts["added"] += added
        SWEEP_ROWS.of().add(count)
        SWEEP_ADDED.of("store").add(added)
        if added:
            log.debug("sweep_indexed", entries=added)  # what was finished meanwhile counts too
        return SweepCounts(count, added, len(failed) - broken, broken), failed

    def restore_dead(self, rows: Iterable[DueRow]) -> tuple[SweepCounts, set[int]]:
        """Give rows of status 4 their DeadQueue entries back; returns the same."""
        entries: dict[Slot, list[tuple[int, int]]] = {}
        count = 0
        for row in rows:
            count += 1
            topic = self._topic(row)
            if topic is not None:
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, row.next_time))
        restored = self._queues.restore_dead(entries)  # [rule: dead-restored]
        added, failed, broken = self._outcome(entries, restored)
        self.counts["dead_added"] += added
        SWEEP_ROWS.of().add(count)
        SWEEP_ADDED.of("dead").add(added)
        return SweepCounts(count, added, len(failed) - broken, broken), failed

    def _complete(
        self, entries: Mapping[Slot, Sequence[tuple[int, float]]], missing: bool
    ) -> tuple[int, set[int], int]:
        """Add what is absent or too late; returns as ``_outcome``."""
        if missing:
            return self._outcome(entries, self._queues.add(entries))
        lacking: dict[Slot, list[tuple[int, float]]] = {}
        unknown: dict[Slot, IndexUnavailable] = {}
        for slot, found in self._queues.lacking(entries).items():
            if isinstance(found, IndexUnavailable):
                unknown[slot] = found
            elif found:
                lacking[slot] = found
        results = self._queues.add(lacking) if lacking else {}
        return self._outcome(entries, {**results, **unknown})

    def _outcome(
        self,
        entries: Mapping[Slot, Sequence[tuple[int, float]]],
        results: Mapping[Slot, int | IndexUnavailable],
    ) -> tuple[int, set[int], int]:
        """How many entries were added, the ids that were not taken, how many of these for a broken slot."""
        added = broken = 0
        failed: set[int] = set()
        for slot, result in results.items():
            if isinstance(result, IndexUnavailable):
                failed.update(job_id for job_id, _ in entries[slot])
                if isinstance(result, IndexBroken):
                    broken += len(entries[slot])
                now = self.clock.monotonic()
                if now - self._complained > COMPLAIN_SECONDS:
                    self._complained = now
                    log.warning("sweep_not_indexed", slot=str(slot), error=str(result))
            else:
                added += result
        return added, failed, broken

    def _consume(self, topic: Topic, slot_amount: int) -> None:
        """A row is stamped with an amount whose slots nobody consumes any more: whoever wrote it had read the
        topic long ago. (Or this process has: then the topic knows, and nothing changes.)"""
        now = self.clock.monotonic()
        if now - self._widened.get(topic.name, float("-inf")) < WIDEN_SECONDS:
            return
        self._widened[topic.name] = now
        try:
            if self._topics.keep_consuming(topic.name, slot_amount):
                log.info("slots_consumed_again", topic=topic.name, slots=slot_amount)
        except StoreUnavailable:
            pass  # out of reach; the row comes again

    def _topic(self, row: DueRow) -> Topic | None:
        topic = self._catalog.known_type(row.biz_type)
        if topic is not None:
            return topic
        self.counts["no_topic"] += 1
        ROWS_WITHOUT_TOPIC.of().add()
        now = self.clock.monotonic()
        if now - self._no_topic.get(row.biz_type, float("-inf")) < COMPLAIN_SECONDS:
            return None
        self._no_topic[row.biz_type] = now
        try:
            topic = self._catalog.of_type(row.biz_type)
        except StoreUnavailable:
            return None  # the topic table is out of reach; the rows come again
        if topic is None:
            log.error("no_topic_for_row", job_id=row.job_id, biz_type=row.biz_type)
        return topic


class Crawl:
    """One pass over all rows of a status in some tables, in steps: each table soonest first.

    ``where`` is one more SQL condition on the rows, ``missing`` as in ``Sweep.add``. A step that raises
    StoreUnavailable can be repeated.
    """

    def __init__(
        self,
        sweep: Sweep,
        tables: Iterable[int],
        *,
        from_ms: int,
        to_ms: int,
        status: TaskStatus = TaskStatus.PENDING,
        where: str = "",
        rows_per_step: int = ROWS_PER_STEP,
        missing: bool = False,
    ) -> None:
        self._missing = missing
        self._sweep = sweep
        self._waiting = deque(tables)
        self._active: dict[int, Position] = {}
        self._broken_off: dict[int, Position] = {}
        """How far those of the waiting tables were read that did not answer then."""
        self._from = Position(from_ms)
        self._to_ms = to_ms
        self._status = status
        self._where = where
        self._rows = rows_per_step
        self._at_once = 1
        """How many tables a step reads: more while they hold little."""
        self.tables = len(self._waiting)

    @property
    def tables_left(self) -> int:
        """How many tables have yet to be read to their end."""
        return len(self._waiting) + len(self._active)

    @property
    def amid(self) -> bool:
        """Whether a table is read in part."""
        return bool(self._active)

    def step(self) -> SweepCounts:
        """Read and index the next rows. Raises StoreUnavailable; Locked, if only locked tables are left."""
        starts = dict(self._active)
        for table in list(self._waiting)[: max(0, self._at_once - len(starts))]:
            starts[table] = self._broken_off.pop(table, self._from)
        if not starts:
            return SweepCounts()
        limit = max(LEAST_PAGE, self._rows // len(starts))
        pages = self._sweep.scans.page(starts, self._to_ms, limit, status=self._status, where=self._where)
        for _ in range(len(starts) - len(self._active)):
            self._waiting.popleft()
        # Tables that do not answer come again after all others, from where they were.
        self._waiting.extend(pages.unanswered)
        self._broken_off.update((table, starts[table]) for table in pages.unanswered)
        self._active = {table: page[-1].position for table, page in pages.items() if len(page) >= limit}
        if not pages:
            pages.whole()
        rows = [row for page in pages.values() for row in page]
        if rows:
            failpoint("sweep.rows-read")
        dead = self._status is TaskStatus.DEAD
        if dead:
            counts, _ = self._sweep.restore_dead(rows)
        else:
            counts, _ = self._sweep.add(rows, missing=self._missing)
        if len(rows) < self._rows / 2:
            self._at_once = min(2 * self._at_once, TABLES_PER_PAGE)
        else:
            self._at_once = max(self._at_once // 2, 1)
        return counts


def sweep_all(
    sweep: Sweep,
    tables: Sequence[int],
    *,
    where: str = "",
    progress: Callable[[float, SweepCounts], None] = lambda _part, _counts: None,
) -> SweepCounts:
    """Every pass once over these tables, without rests, soonest first: pending rows, then dead ones.

    ``progress`` gets the part that is done, 0 to 1, and the counts so far. Raises StoreUnavailable.
    """
    now = sweep.clock.now_ms()
    near, far = now + NEAR_MS, now + max(NEAR_MS, sweep.horizon_ms())
    crawls = [
        Crawl(
            sweep,
            tables,
            from_ms=start,
            to_ms=end,
            status=status,
            where=where,
            rows_per_step=FAST_ROWS,
            missing=True,
        )
        for status, start, end in (
            (TaskStatus.PENDING, 0, near),
            (TaskStatus.PENDING, near, far),
            (TaskStatus.DEAD, 0, now + 1000),
        )
    ]
    total = SweepCounts()
    for crawl in crawls:
        while crawl.tables_left:
            counts = crawl.step()
            total = SweepCounts(*(a + b for a, b in zip(total, counts, strict=True)))
            left = sum(other.tables_left for other in crawls)
            progress(1 - left / max(1, len(crawls) * len(tables)), total)
    return total
