"""Retention: ended rows are deleted once their topic's retention is over, bit by bit, in the background.

The worker that sweeps a table purges it, in a separate thread. A step reads a page of rows in the order of
their end, deletes those that are old enough, and rests many times as long as it took, so that traffic never
waits for it. It never touches pending and dead rows, nor rows whose biz_type has no topic and never had one.
Rows of a deleted topic are kept for the retention that the topic had.

What is deleted is gone for good, so the row must be old enough by the clock of its server too: this
host's clock may be days ahead.

Topics with equal retention are purged together. The next pass over a table continues where the last one
stopped, so rows that other topics keep longer are not read each time. The position is forgotten once a day,
and when a retention is altered, because that changes what lies behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.observe.log import get_logger
from toc.observe.metrics import PURGED
from toc.store.ended import FINAL, Cursor
from toc.store.store import Store

log = get_logger(__name__)

LEAST_SECONDS = 60
"""How long a finished row is kept at least, whatever the topic says. Another worker that ran the
task too, or a caller who asks for the outcome of a cancel, must still find it."""
CYCLE_SECONDS = 60.0
"""How often every table is checked."""
TABLES = 16
PAGE = 16
"""Rows per table that a look at many tables reads. If a table has more, it is then purged alone."""
LARGE_PAGE = 250
REST = 19
"""The rest after a step, as a multiple of its time: 5 % of the time of one connection."""
SHORTEST_REST_SECONDS = 0.05
OVERLAP_MS = 120_000
"""The next pass begins this long before the time up to which the last one has read: the clock by
which a row was stamped may lag."""
FORGET_SECONDS = 86_400.0
"""How often a pass begins again with the oldest rows."""
FAILED_SECONDS = 30.0
LOG_SECONDS = 60.0


class PurgeStep(NamedTuple):
    """Rows that ended more than ``retention`` seconds ago, in these tables of one server."""

    retention: int
    tables: Sequence[int]
    limit: int


class Retention:
    """The loop over the tables of this worker, which ``tables`` returns."""

    def __init__(
        self, store: Store, catalog: TopicCatalog, clock: Clock, tables: Callable[[], frozenset[int]]
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._servers = [frozenset(tables) for tables in store.tables_of_server()]
        self._mine = tables
        self._tables: frozenset[int] = frozenset()
        self._keep: dict[int, int] = {}
        """biz_type -> seconds, as of this cycle."""
        self._retired: dict[int, int] = {}
        """biz_type of a deleted topic -> seconds. Read at the start of each cycle."""
        self._done: dict[tuple[int, int, int], Cursor] = {}
        """(retention, table, status) -> the cursor before which all rows were checked."""
        self._steps: deque[PurgeStep] = deque()
        self._cycle_at = self._forget_at = float("-inf")
        self._unlogged: Counter[str] = Counter()
        self._unlogged_since = 0.0
        self._logged_at = float("-inf")

    def run_once(self) -> float:
        """One step. Returns the seconds until the next."""
        began = self._clock.monotonic()
        self._log(began)
        before, self._tables = self._tables, self._mine()
        if self._tables - before:
            self._cycle_at = began  # look at what is new
        keep = self._retired | {
            topic.biz_type: max(topic.retention, LEAST_SECONDS) for topic in self._catalog.known().values()
        }
        if keep != self._keep or began >= self._forget_at:
            self._keep = keep
            self._forget_at = began + FORGET_SECONDS
            self._done.clear()
            self._steps.clear()
            self._cycle_at = began
        if not self._steps:
            if began < self._cycle_at:
                return min(self._cycle_at - began, 1.0)  # a retention may be altered meanwhile
            self._cycle_at = began + CYCLE_SECONDS
            self._read_retired()
            self._plan()
            if not self._steps:
                return 1.0
        step = self._steps.popleft()
        try:
            self._take(step)
        except (StoreUnavailable, SchemaBehind) as exc:
            log.warning("purge_failed", tables=len(step.tables), error=str(exc))
            # Skip the other tables of that server. The next cycle continues at the same positions.
            own = next(tables for tables in self._servers if step.tables[0] in tables)
            self._steps = deque(other for other in self._steps if other.tables[0] not in own)
            self._cycle_at = began + FAILED_SECONDS
        return max((self._clock.monotonic() - began) * REST, SHORTEST_REST_SECONDS)

    def _read_retired(self) -> None:
        try:
            found = self._store.topics.retired() if self._tables else self._retired
        except (StoreUnavailable, SchemaBehind) as exc:
            log.warning("purge_failed", tables=0, error=str(exc))
            return  # what was read before still holds: no biz_type is ever used again
        retired = {biz_type: max(seconds, LEAST_SECONDS) for biz_type, seconds in found.items()}
        if retired != self._retired:
            self._retired = retired
            self._keep = retired | self._keep
            self._done.clear()  # rows of these may have been passed over

    def _plan(self) -> None:
        """Plan the steps of a cycle, which checks everything once."""
        tables = self._tables
        self._done = {key: cursor for key, cursor in self._done.items() if key[1] in tables}
        for own in self._servers:
            mine = sorted(own & tables)
            for first in range(0, len(mine), TABLES):
                for retention in sorted(set(self._keep.values())):
                    self._steps.append(PurgeStep(retention, mine[first : first + TABLES], PAGE))

    def _take(self, step: PurgeStep) -> None:
        cursors = {
            (table, status): self._done.get((step.retention, table, status), (0, 0))
            for table in step.tables
            if table in self._tables
            for status in map(int, FINAL)
        }
        if not cursors:
            return
        now = self._clock.now_ms()
        rows, before, failed = self._store.ended.page(
            cursors, now=now, keep=step.retention * 1000, limit=step.limit
        )
        if len(failed) == len({table for table, _ in cursors}):
            raise next(iter(failed.values()))
        # The next cycle looks at the tables that failed.
        cursors = {key: cursor for key, cursor in cursors.items() if key[0] not in failed}
        old = [row for row in rows if self._keep.get(row.biz_type, step.retention + 1) <= step.retention]
        if old:
            self._store.ended.delete({row.job_id: row.body_length for row in old})
            self._count(row.biz_type for row in old)
        last = {(row.table, row.status): (row.ended, row.job_id) for row in rows}
        read = Counter((row.table, row.status) for row in rows)
        for key in cursors:
            full = read[key] == step.limit
            cursor = last[key] if full else (max(before - OVERLAP_MS, 0), 0)
            self._done[(step.retention, *key)] = cursor
        for table in sorted({table for (table, _), count in read.items() if count == step.limit}):
            self._steps.append(PurgeStep(step.retention, [table], LARGE_PAGE))

    def _count(self, biz_types: Iterable[int]) -> None:
        names = {topic.biz_type: topic.name for topic in self._catalog.known().values()}
        counted = Counter(names.get(biz_type, "?") for biz_type in biz_types)
        for topic, count in counted.items():
            PURGED.of(topic).add(count)
        self._unlogged += counted

    def _log(self, now: float) -> None:
        if not self._unlogged:
            self._unlogged_since = now
        # At the end of a cycle, or now and then in a long one.
        elif now - self._logged_at >= LOG_SECONDS and (
            not self._steps or now - self._unlogged_since >= LOG_SECONDS
        ):
            self._logged_at = now
            log.info(
                "purged",
                rows=sum(self._unlogged.values()),
                topics=", ".join(f"{topic}: {count}" for topic, count in sorted(self._unlogged.items())),
            )
            self._unlogged.clear()
