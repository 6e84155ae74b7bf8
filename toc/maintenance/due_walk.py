"""The walk that counts what comes due when: all pending rows of this worker's tables, page by page.

    NEAR   each minute        what is overdue, and the minutes of the next hour
    FAR    every ten minutes  the hours of the next week, and what is due later

The result of each table is written beside it when its last page is counted (toc.model.due). Two workers that
walk one table do no harm.

A page reads some thousand entries of an index and no rows. After each page the walk rests, for a period at
most: its steps take SHARE of the time of one connection to each database server, however many workers share
the tables. So it costs the same with any number of rows; with more of them its rounds take longer than that.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from toc.maintenance.sweep import Mine
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, RateLimit
from toc.model.due import FAR, NEAR, OTHERS, Counted, Part, listed, sums, write
from toc.observe.log import get_logger
from toc.observe.metrics import PENDING
from toc.store.servers.shards import Trouble
from toc.store.store import Store
from toc.store.tasks.scan import Place, Position

log = get_logger(__name__)

SHARE = 0.01
"""The part of the time of a connection to each database server that all walks take, about: as the slow
passes of the sweep, so that no more than the slowest percent of tasks can meet a step."""
PERIOD_SECONDS = {NEAR: 60.0, FAR: 600.0}
"""How often each part is counted, at most."""
ROWS = 2000
"""Rows per step, about: a millisecond or two of the server's time."""
LEAST_PAGE = 100
TABLES = 16
"""Most tables of which a step reads a page."""
IDLE_SECONDS = 1.0


@dataclass(slots=True)
class _Walk:
    """The way through one table: where it is, when it began (monotonic), and what it has counted."""

    place: Place
    began: float
    groups: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(slots=True)
class _Round:
    """A round of a part: the tables that wait, and those that are being counted."""

    part: Part
    at: float
    """When the next round begins (monotonic); it has begun if tables are left."""
    waiting: deque[int] = field(default_factory=deque)
    walks: dict[int, _Walk] = field(default_factory=dict)
    at_once: int = 1
    """Of how many tables a step reads a page: more while they hold little."""


class DueWalk:
    """The loop over the tables of this worker, which ``tables`` returns."""

    def __init__(self, store: Store, catalog: TopicCatalog, clock: Clock, tables: Mine) -> None:
        self._store = store
        self._catalog = catalog
        self._clock = clock
        self._tables = tables
        servers = store.tables_of_server()
        self._servers_per_table = len(servers) / max(1, sum(map(len, servers)))
        self._mine: frozenset[int] = frozenset()
        self._rounds = deque(_Round(part, clock.monotonic()) for part in (NEAR, FAR))
        self._told: dict[tuple[Part, int], Counter[tuple[str, str]]] = {}
        """What the metric tells of a part of each table, by topic and time."""
        self._sums = Counter[tuple[str, str]]()
        self._complains = RateLimit(clock)

    def run_once(self) -> float:
        """Count a page of some tables. Returns the seconds until the next step."""
        mine, began = self._tables(), self._clock.monotonic()
        new, self._mine = sorted(mine - self._mine), mine
        if new:
            for each in self._rounds:
                each.waiting.extend(new)
                each.at = min(each.at, began)
        for part, table in [key for key in self._told if key[1] not in mine]:
            self._tell(part, table, None)
        if not mine:
            return IDLE_SECONDS
        due = next((each for each in self._rounds if each.at <= began), None)
        if due is None:
            return min(min(each.at for each in self._rounds) - began, IDLE_SECONDS)
        if self._rounds[0] is due:  # the parts take turns: neither keeps the other from being counted
            self._rounds.rotate(-1)
        if not (due.waiting or due.walks):
            due.waiting.extend(sorted(mine))
            due.at = began
        for error in self._step(due, mine, began).values():
            if self._complains():
                log.warning("due_not_counted", error=str(error))
        if not (due.waiting or due.walks):
            due.at = max(due.at + PERIOD_SECONDS[due.part], began)
        share = SHARE * min(1.0, len(mine) * self._servers_per_table)
        # After a step that hung for seconds the counts would grow hours old.
        return min((self._clock.monotonic() - began) * (1 / share - 1), PERIOD_SECONDS[due.part])

    def _step(self, due: _Round, mine: frozenset[int], began: float) -> Mapping[int, Trouble]:
        """Count a page of each of some tables, and write what is counted. Returns the tables that failed,
        which keep what was written before."""
        part, now = due.part, self._clock.now_ms()
        for table in due.walks.keys() - mine:
            del due.walks[table]
        while due.waiting and len(due.walks) < due.at_once:
            if (table := due.waiting.popleft()) in mine:
                due.walks[table] = _Walk(Place(Position(0 if part is NEAR else now), now), began)
        if not due.walks:
            return {}
        walks = dict(islice(due.walks.items(), due.at_once))
        limit = max(LEAST_PAGE, ROWS // len(walks))
        places = {table: walk.place for table, walk in walks.items()}
        pages = self._store.due_counts.page(places, part, limit)
        rows, ready = 0, {}
        for table, page in pages.items():
            walk = walks[table]
            for (biz_type, span), count in page.groups.items():
                known = self._catalog.known_type(biz_type) is not None
                walk.groups[biz_type if known else OTHERS, span] += count
                rows += count
            if page.following is not None:
                walk.place = walk.place._replace(at=page.following)
                continue
            del due.walks[table]
            counted = listed(part, walk.place.now_ms // part.length, walk.groups)
            self._tell(part, table, counted)
            ready[table] = write(counted), round((self._clock.monotonic() - walk.began) * 1000)
        for table in pages.unanswered:
            del due.walks[table]
        due.at_once = max(1, due.at_once // 2) if rows > ROWS / 2 else min(2 * due.at_once, TABLES)
        return {**pages.unanswered, **(self._store.due_counts.keep(part, ready) if ready else {})}

    def _tell(self, part: Part, table: int, counted: Counted | None) -> None:
        """Tell by the metric what was counted of a table; None: it is another worker's by now."""
        before, now = self._told.pop((part, table), Counter()), Counter[tuple[str, str]]()
        if counted is not None:
            for biz_type, counts in counted.spans.items():
                topic = self._catalog.known_type(biz_type)
                for due, count in sums(part, counts).items():
                    now["?" if topic is None else topic.name, due] += count
            self._told[part, table] = now
        self._sums.update(now)
        self._sums.subtract(before)
        for key in before.keys() | now.keys():
            PENDING.of(*key).set(self._sums[key])
