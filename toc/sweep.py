"""The sweep: makes the Redis index complete again from the task table.

A crash between row and index, a submit while Redis was down, a row written in a caller's transaction, a
task that comes inside the horizon: in each case the row is there and the entry is not. Each table is swept
by one worker, over all topics at once:

    due soon   each second          rows due about now and in the next seconds
    overdue    every few seconds    everything due before that, page by page
    window     one page a second    all pending rows up to the horizon, table after table, for ever
    dead       every minute         rows of status 4 get their DeadQueue entry back, page by page

Entries are added with ZADD LT unless the id stands in the PrepareQueue: one too early is harmless (the row
check puts it back), one too late or absent is not. There is no high-water mark in id or time, because commit
order is not id order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toc.catalog import TopicCatalog
from toc.clock import Clock
from toc.errors import IndexUnavailable, StoreUnavailable
from toc.failpoint import failpoint
from toc.log import get_logger
from toc.queue.queues import Queues
from toc.queue.scores import store_score
from toc.sharding import table_of_job
from toc.store.batch import DueRow
from toc.store.store import Store
from toc.task import TaskRow
from toc.topic import Slot

log = get_logger(__name__)

PAGE = 500
"""Most rows that are read of one table at a time."""
ROWS_PER_PASS = 4000
"""How many rows a pass over many tables reads at most, about: in a burst they are all in the index already,
and reading them again would cost as much as running them."""
LEAST_PAGE = 20
SAME_INSTANT = 4000
"""Most rows of one table that are read when a whole page is due in one millisecond."""
SOON_MS = 1200
JUST_DUE_MS = 2000
OVERDUE_EVERY = 3
DEAD_EVERY = 60


class SweepCounts(NamedTuple):
    """What one pass did: rows read, entries that were absent or too late in the index."""

    rows: int
    added: int


class Sweep:
    """The passes. Each reads a bounded number of rows and returns what it did."""

    def __init__(self, store: Store, queues: Queues, catalog: TopicCatalog, clock: Clock) -> None:
        self._store = store
        self._queues = queues
        self._catalog = catalog
        self._clock = clock
        self._table_count = sum(map(len, store.tables_of_server()))
        self._overdue_from: dict[int, int] = {}
        """Where the overdue pass goes on in tables that have more than a page."""
        self._window: tuple[int, int] | None = None
        """(table, from) where the window pass goes on."""
        self._dead_after: TaskRow | None = None
        """The last dead row that was looked at, when there are more."""

    def due_soon(self, tables: Sequence[int]) -> SweepCounts:
        """Index rows due from just now to the next seconds."""
        now = self._clock.now_ms()
        return self._page(tables, now - JUST_DUE_MS, now + SOON_MS)[0]

    def overdue(self, tables: Sequence[int]) -> SweepCounts:
        """Index what was due before; a table with more than a page goes on there in the next pass."""
        until = self._clock.now_ms() - JUST_DUE_MS
        fresh = [table for table in tables if table not in self._overdue_from]
        counts, full = self._page(fresh, 0, until)
        total = [counts]
        for table, start in list(self._overdue_from.items()):
            del self._overdue_from[table]
            if table in tables:
                counts, more = self._page([table], start, until)
                total.append(counts)
                full |= more
        self._overdue_from |= full
        return SweepCounts(sum(c.rows for c in total), sum(c.added for c in total))

    def window(self, tables: Sequence[int]) -> SweepCounts:
        """Index one page of one table; call after call this goes through all rows up to the horizon."""
        if not tables:
            return SweepCounts(0, 0)
        now = self._clock.now_ms()
        horizon = max((topic.horizon for topic in self._catalog.known().values()), default=0) * 1000
        if self._window is None or self._window[0] not in tables:
            self._window = (tables[0], now)
        table, start = self._window
        counts, full = self._page([table], start, now + horizon)
        following = tables[(tables.index(table) + 1) % len(tables)]
        self._window = (table, full[table]) if table in full else (following, now)
        return counts

    def dead(self, tables: Sequence[int]) -> int:
        """Give a page of rows of status 4 their DeadQueue entries back; returns how many were absent.

        Call after call this goes through all of them, the newest death first; ``dead_left`` tells whether
        there are more.
        """
        entries: dict[Slot, list[tuple[int, int]]] = {}
        rows = self._store.dead(tables, after=self._dead_after, limit=PAGE)
        self._dead_after = rows[-1] if len(rows) == PAGE else None
        for row in rows:
            topic = self._catalog.of_type(row.biz_type)
            if topic is not None:
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, row.gmt_modified))
        results = self._queues.restore_dead(entries).values()
        return sum(count for count in results if not isinstance(count, IndexUnavailable))

    @property
    def dead_left(self) -> bool:
        """Whether the pass over dead rows has not reached its end."""
        return self._dead_after is not None

    def _page(self, tables: Sequence[int], start: int, until: int) -> tuple[SweepCounts, dict[int, int]]:
        """Index up to a page of each table; also returns where to go on in those that had a full page."""
        if not tables:
            return SweepCounts(0, 0), {}
        limit = min(PAGE, max(LEAST_PAGE, ROWS_PER_PASS // len(tables)))
        rows = self._store.pending(tables, start, until, limit)
        if rows:
            failpoint("sweep.rows-read")
        by_table: dict[int, list[DueRow]] = {}
        for row in rows:
            by_table.setdefault(table_of_job(row.job_id, self._table_count), []).append(row)
        full = {table: page[-1].next_time for table, page in by_table.items() if len(page) >= limit}
        for table in [table for table, last in full.items() if last == start]:
            # The whole page is due in one millisecond: go past it. What a larger page leaves out comes to
            # its front as the others are done.
            rows += self._store.pending([table], start, start + 1, SAME_INSTANT)
            full[table] = start + 1
        return SweepCounts(len(rows), self._add(rows)), full

    def _add(self, rows: Iterable[DueRow]) -> int:
        now = self._clock.now_ms()
        entries: dict[Slot, list[tuple[int, float]]] = {}
        for row in rows:
            topic = self._catalog.of_type(row.biz_type)
            if topic is None:
                log.error("no_topic_for_row", job_id=row.job_id, biz_type=row.biz_type)
            elif row.next_time - now <= topic.horizon * 1000:
                score = store_score(row.next_time, topic.remaining(row.attempts), row.attempts)
                slot = topic.slot(row.slot_crc, row.slot_amount)
                entries.setdefault(slot, []).append((row.job_id, score))
        if not entries:
            return 0
        results = self._queues.add(entries).values()
        failed = [result for result in results if isinstance(result, IndexUnavailable)]
        if failed:
            log.warning("sweep_not_indexed", slots=len(failed), error=str(failed[0]))
        return sum(count for count in results if not isinstance(count, IndexUnavailable))


class Sweeper:
    """The schedule of the passes over the tables that this worker was given."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._tables: frozenset[int] = frozenset()
        self._ticks = 0

    def add(self, tables: Iterable[int]) -> None:
        """Sweep these tables from now on."""
        self._tables |= frozenset(tables)

    def remove(self, tables: Iterable[int]) -> None:
        """Leave these tables to another worker."""
        self._tables -= frozenset(tables)

    def run_once(self) -> float:
        """The passes that are due; returns the seconds until the next call."""
        tables = sorted(self._tables)
        if not tables:
            return 1.0
        try:
            added = self._sweep.due_soon(tables).added + self._sweep.window(tables).added
            if self._ticks % OVERDUE_EVERY == 0:
                added += self._sweep.overdue(tables).added
            if self._ticks % DEAD_EVERY == 0 or self._sweep.dead_left:
                added += self._sweep.dead(tables)
            self._ticks += 1
            if added:
                log.debug("sweep_indexed", entries=added)  # what was finished meanwhile counts too
        except StoreUnavailable as exc:
            log.warning("sweep_failed", error=str(exc))
        return 1.0
