"""Retention: what is old is deleted bit by bit, in the background: ended rows once their topic's retention is
over, rows of the audit, bulk jobs, episodes, and the answers to named requests.

The worker that sweeps a table purges it, in a separate thread. A step reads a page of rows in the order of
their end, deletes those that are old enough, and rests many times as long as it took, so that traffic never
waits for it. It never touches pending and dead rows, nor rows whose biz_type has no topic and never had one.
Rows of a deleted topic are kept for the retention that the topic had.

What is deleted is gone for good, so the row must be old enough by the clock of its server too: this
host's clock may be days ahead. The audit and the jobs belong to the worker that sweeps table 0; the answers
in database N, which holds table N, to the one that sweeps that table.

Topics with equal retention are purged together. The next pass over a table continues where the last one
stopped, so rows that other topics keep longer are not read each time. The position is forgotten once a day,
after the end of a pass, and when a retention is altered, because that changes what lies behind it.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product

from toc.maintenance.sweep import Mine
from toc.model.bulk import KEPT_MS
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, RateLimit
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.minute import KEPT, MINUTE_MS
from toc.model.task import TaskStatus
from toc.observe.log import get_logger
from toc.observe.metrics import PURGED
from toc.store.servers.server import Locked
from toc.store.store import Store
from toc.store.tasks.batch import FINAL
from toc.store.tasks.scan import Position

log = get_logger(__name__)

MIN_SECONDS = 60
"""How long a finished row is kept at least, whatever the topic says. Another worker that ran the
task too, or a caller who asks for the outcome of a cancel, must still find it."""
CYCLE_SECONDS = 60.0
"""How often every table is checked."""
TABLES = 32
PAGE = 16
"""Rows per table that a look at many tables reads. If a table has more, it is then purged alone."""
LARGE_PAGE = 250
REST = 19
"""The rest after a step, as a multiple of its time: 5 % of the time of one connection."""
REST_BEHIND = 4
"""The same once a cycle takes longer than its period. At 5 %, two processes deleted some 600 rows a second of
tables with 10^8: fewer than may end there."""
SHORTEST_REST_SECONDS = 0.05
OVERLAP_MS = 120_000
"""The next pass reads again what ended in this time: the clock by which a row was stamped may lag."""
FORGET_SECONDS = 86_400.0
"""How often a pass begins again with the oldest rows."""
RECORDS_SECONDS = 600.0
"""How often the audit and the requests are purged."""
KEEP_REQUESTS_MS = 86_400_000


class Retention:
    """The loop over the tables of this worker, which ``tables`` returns. ``audit``: seconds for which rows of
    the audit are kept."""

    def __init__(
        self, store: Store, catalog: TopicCatalog, clock: Clock, tables: Mine, *, audit: float
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._mine = tables
        self._tables: frozenset[int] = frozenset()
        self._keep: dict[int, int] = {}
        """biz_type -> seconds, as of this cycle."""
        self._retired: dict[int, int] = {}
        """biz_type of a deleted topic -> seconds. Read in each cycle."""
        self._done: dict[tuple[int, TaskStatus, int], Position] = {}
        """(retention, status, table) -> the place up to which all rows were checked."""
        self._records: list[tuple[int, Callable[[], bool]]] = [
            (0, partial(store.audit.purge, round(audit * 1000))),
            (0, partial(store.bulk.purge, KEPT_MS)),
            (0, partial(store.minutes.purge, 2 * KEPT * MINUTE_MS)),
            (0, store.episodes.purge),
        ]
        """What else is purged, with the tables whose workers do it. Each returns whether more may be left."""
        databases, requests = range(store.requests.databases), store.requests.purge
        self._records += [(number, partial(requests, number, KEEP_REQUESTS_MS)) for number in databases]
        self._steps: deque[Callable[[], None]] = deque()
        self._cycle_at = self._forget_at = self._records_at = float("-inf")
        self._complains = RateLimit(clock)

    def run_once(self) -> float:
        """One step. Returns the seconds until the next."""
        began = self._clock.monotonic()
        before, self._tables = self._tables, self._mine()
        if self._tables - before:
            self._cycle_at = began  # look at what is new
        keep = self._retired | {
            topic.biz_type: max(topic.retention, MIN_SECONDS) for topic in self._catalog.known().values()
        }
        altered = any(self._keep.get(biz_type, seconds) != seconds for biz_type, seconds in keep.items())
        self._keep = keep
        # Among many rows that other topics keep, a pass may take longer than a day.
        if altered or (began >= self._forget_at and not self._steps):
            self._forget_at = began + FORGET_SECONDS
            self._done.clear()
            self._steps.clear()
            self._cycle_at = began
        if not self._steps:
            if began < self._cycle_at:
                return min(self._cycle_at - began, 1.0)  # a retention may be altered meanwhile
            self._cycle_at = began + CYCLE_SECONDS
            self._plan(began)
            if not self._steps:
                return 1.0
        step = self._steps.popleft()
        try:
            step()
        except (StoreUnavailable, SchemaBehind) as exc:
            if self._complains():
                log.warning("purge_failed", error=str(exc))
        rest = REST_BEHIND if began > self._cycle_at else REST
        return max((self._clock.monotonic() - began) * rest, SHORTEST_REST_SECONDS)

    def _read_retired(self) -> None:
        """Learn of deleted topics, for the next cycle."""
        found = self._store.topics.retired()
        retired = {biz_type: max(seconds, MIN_SECONDS) for biz_type, seconds in found.items()}
        if retired != self._retired:
            self._retired = retired
            self._done.clear()  # rows of these may have been passed over

    def _plan(self, now: float) -> None:
        """Plan the steps of a cycle, which checks everything once, records now and then."""
        tables = self._tables
        if tables:
            self._steps.append(self._read_retired)
        self._done = {key: place for key, place in self._done.items() if key[2] in tables}
        mine, kept = sorted(tables), sorted(set(self._keep.values()))
        for first, retention, status in product(range(0, len(mine), TABLES), kept, FINAL):
            self._steps.append(partial(self._take, retention, status, mine[first : first + TABLES], PAGE))
        if now >= self._records_at:
            self._records_at = now + RECORDS_SECONDS
            for table, purge in self._records:
                if table in tables:
                    self._steps.append(partial(self._purge_records, purge))

    def _purge_records(self, purge: Callable[[], bool]) -> None:
        if purge():
            self._steps.append(partial(self._purge_records, purge))

    def _take(self, retention: int, status: TaskStatus, tables: Sequence[int], limit: int) -> None:
        """Purge rows of a status that ended more than ``retention`` seconds ago, in these tables."""
        mine = [table for table in tables if table in self._tables]
        starts = {table: self._done.get((retention, status, table), Position(0)) for table in mine}
        now, keep, scans = self._clock.now_ms(), retention * 1000, self._store.scans
        scanned = scans.scan((), starts, 0, now - keep, limit, status=status, where=scans.ended_ago(keep))
        rows = chain.from_iterable(scanned.pages.values())
        old = [row for row in rows if self._keep.get(row.biz_type, retention + 1) <= retention]
        sizes = {row.job_id: row.body_length for row in old}
        left = self._store.delete_ended(sizes).failed
        for biz_type, count in Counter(row.biz_type for row in old if row.job_id not in left).items():
            topic = self._catalog.known_type(biz_type)
            PURGED.of("?" if topic is None else topic.name).add(count)
        for table, page in scanned.pages.items():
            stays = [left.get(row.job_id) for row in page]
            passed = len(page) == limit and not all(stays) and {*map(type, stays)} <= {Locked, type(None)}
            if any(stays) and not passed:
                continue  # the next cycle continues at the same position
            place = page[-1].position if page else starts[table]
            self._done[retention, status, table] = min(place, Position(now - OVERLAP_MS))
            if len(page) == limit:
                self._steps.append(partial(self._take, retention, status, [table], LARGE_PAGE))
        for error in chain(scanned.failed.values(), left.values()):
            raise error
