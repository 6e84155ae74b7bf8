"""The passes of the sweep: which rows each compares with the index and how often, and its way through tables.

A pass reads its tables in rounds, step by step. A step asks some tables in one statement whether they hold
any row of the pass, and reads a page of others that do. Pages that are left come in the next steps, so that
no table with many rows holds up the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import ceil
from typing import NamedTuple

from toc.failpoint import failpoint
from toc.maintenance.sweep import MAX_AHEAD_MS, Sweep, SweepCounts
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.task import TaskStatus
from toc.store.servers.shards import Trouble
from toc.store.tasks.scan import Position

JUST_DUE_MS = 5000
"""How long ago a row of SOON may be due. A transaction that uses now as its time may take this long to commit
and is still indexed within a second. Older rows wait for OVERDUE."""
AHEAD = 1.2
"""How far ahead SOON reads, in its periods: a later round reads the rest in time."""
NEAR_MS = 60_000
"""Tasks due within this time (a minute) are restored first."""
OVERLAP_MS = 1000
"""How much of what EDGE has read it reads again: programs whose clocks are behind commit there still."""
NOTICED_MS = 5000
"""How long before a sweep notices a shorter horizon what lies beyond it may have been removed."""

ROWS_PER_STEP = 200
"""Rows that one step reads, about: one or two milliseconds of this process's time."""
CRAWL_ROWS = 50
"""Rows per step of the slow passes, about: they keep a core busy for a millisecond."""
REFILL_ROWS = 500
SOON_ROWS = 16
"""Rows in the tables that a step of SOON asks, about. It reads them while live tasks, due in the same second,
wait for the same cores. Steps of 200 rows added more than 1 ms to the slowest percent."""
MIN_PAGE = 20
MAX_TABLES = 32
"""Most tables of which a step reads a page."""
MAX_PROBES = 600
"""Tables that a step asks whether anything is due: less than 10 ms of the server's time. Waking up for a
step costs a worker more than its tables do, so few due rows mean few steps."""
MAX_SLICES = 32
"""Most steps of a round, besides further pages. Each costs most of a millisecond, whatever it reads."""


Horizon = Callable[[], int]
"""How far ahead (ms) any topic keeps tasks in Redis."""


class Pass(NamedTuple):
    """How a pass goes over its tables."""

    window: Callable[[int, Horizon, float], tuple[int, int]]
    """The range of next_time (ms), by the time, the horizon, and how long the last round took (s)."""
    every: float
    """A round's period (s); 0 if it follows its rests alone."""
    rest: int
    """The rest after a step, as a multiple of its time."""
    rows: int = ROWS_PER_STEP
    """Rows per step, about."""
    slice_rows: int = ROWS_PER_STEP
    """Rows in the tables that one step asks, about."""
    slices: int = 1
    """Least steps of a round."""
    spread: bool = True
    """Whether the steps are spread over the period."""
    status: TaskStatus = TaskStatus.PENDING


def _soon(now: int, _horizon: Horizon, took: float) -> tuple[int, int]:
    ahead = int(AHEAD * max(took, SOON.every) * 1000)
    return now - JUST_DUE_MS, now + min(ahead, MAX_AHEAD_MS)


def _overdue(now: int, _horizon: Horizon, _took: float) -> tuple[int, int]:
    return 0, now - JUST_DUE_MS


def _near(now: int, _horizon: Horizon, _took: float) -> tuple[int, int]:
    return 0, now + NEAR_MS


def _far(now: int, horizon: Horizon, _took: float) -> tuple[int, int]:
    return now + NEAR_MS, now + max(NEAR_MS, horizon())


def _all_ahead(now: int, horizon: Horizon, _took: float) -> tuple[int, int]:
    return now, now + horizon()


def _dead(now: int, _horizon: Horizon, _took: float) -> tuple[int, int]:
    return 0, now + 1000


# The slow passes may take their time: they repair entries of tasks that are due much later. A task that
# becomes due during a step is late by the time of that step. When the steps took a twentieth of the time,
# they doubled the lateness of the slowest percent.
SOON = Pass(_soon, 1.0, 3, slice_rows=SOON_ROWS)
OVERDUE = Pass(_overdue, 5.0, 9, slices=4, spread=False)
DEAD = Pass(_dead, 60.0, 99, CRAWL_ROWS, CRAWL_ROWS, MAX_SLICES, status=TaskStatus.DEAD)
EDGE = Pass(_all_ahead, 10.0, 99, CRAWL_ROWS, CRAWL_ROWS)
FULL = Pass(_all_ahead, 1800.0, 99, CRAWL_ROWS, CRAWL_ROWS, MAX_SLICES)
LOST = (
    Pass(_near, 0.0, 1, REFILL_ROWS),
    Pass(_far, 0.0, 4, REFILL_ROWS),
    Pass(_dead, 0.0, 4, REFILL_ROWS, status=TaskStatus.DEAD),
)
"""What restores an index without entries: what is due within a minute, the rest, dead tasks."""


class Stepped(NamedTuple):
    """What a step did: its counts, the tables that it asked, and those without an answer."""

    counts: SweepCounts
    asked: Sequence[int]
    failed: Mapping[int, Trouble]


class Round:
    """A round of a pass: the tables that it has yet to ask, and the pages left of others.

    ``at`` is when its next step is due, ``began`` when it began (monotonic). Its window is reckoned from
    ``now_ms``, or else from the time of each step. ``where`` is one more SQL condition.
    """

    def __init__(
        self,
        plan: Pass,
        sweep: Sweep,
        at: float,
        *,
        now_ms: int | None = None,
        where: str = "",
    ) -> None:
        self.plan = plan
        self.at = at
        self.began = at
        self._sweep = sweep
        self._now_ms = now_ms
        self._where = where
        self._took = 0.0
        """Seconds that the previous round took, rests included."""
        self._rows = 0
        self._tables: deque[int] = deque()
        self._more: dict[int, Position] = {}
        self._with_rows: set[int] = set()
        """Tables with rows at the last look. They are read without asking first."""
        self._slice = self._all = 1
        self._at_once = 1
        """Of how many tables a step reads a page: more while they hold little."""

    @property
    def left(self) -> int:
        """How many tables have yet to be read to their end; 0 if the round is over."""
        return len(self._tables) + len(self._more)

    def start(self, began: float, tables: Iterable[int]) -> None:
        """Begin a round over these tables."""
        self._took, self.began = began - self.began, began
        slices = max(min(ceil(self._rows / self.plan.slice_rows), MAX_SLICES), self.plan.slices)
        self._rows = 0
        self._tables = deque(tables)
        self._all = len(self._tables)
        self._slice = min(ceil(self._all / slices), MAX_PROBES)

    def read_again(self, tables: Iterable[int]) -> None:
        """Read these tables once more, after those that are left."""
        self._tables.extend(tables)

    def step(self) -> Stepped:
        """Read and index the next rows. Tables that do not answer are left out of the round."""
        sweep, plan = self._sweep, self.plan
        from_ms, to_ms = self._range(sweep.clock.now_ms() if self._now_ms is None else self._now_ms)
        start = Position(from_ms)
        some = [self._tables.popleft() for _ in range(min(self._slice, len(self._tables)))]
        # Of those that are read again, the former turn is not over.
        self._tables.extend(table for table in some if table in self._more)
        some = [table for table in some if table not in self._more]
        quiet = [table for table in some if table not in self._with_rows]
        self._more |= {table: start for table in some if table in self._with_rows}
        pages = dict(islice(self._more.items(), self._at_once))
        limit = max(MIN_PAGE, plan.rows // max(1, len(pages)))
        scanned = sweep.scans.scan(quiet, pages, from_ms, to_ms, limit, status=plan.status, where=self._where)
        for table in pages:
            del self._more[table]
            if len(page := scanned.pages.get(table, [])) >= limit:
                self._more[table] = page[-1].position
        self._more |= dict.fromkeys(scanned.with_due_rows, start)
        self._with_rows.update(scanned.with_due_rows)
        self._with_rows.difference_update(table for table, page in scanned.pages.items() if not page)
        rows = [row for page in scanned.pages.values() for row in page]
        self._rows += len(rows)
        if len(rows) < plan.rows / 2:
            self._at_once = min(2 * self._at_once, MAX_TABLES)
        elif len(rows) > plan.rows:
            self._at_once = max(self._at_once // 2, 1)
        if rows:
            failpoint("sweep.rows-read")
        counts = sweep.restore_dead(rows) if plan.status is TaskStatus.DEAD else sweep.add(rows)
        return Stepped(counts, [*quiet, *pages], scanned.failed)

    def _range(self, now_ms: int) -> tuple[int, int]:
        return self.plan.window(now_ms, self._sweep.horizon_ms, self._took)

    def rest(self, stepped: float, factor: int) -> None:
        """Plan the next step, after one that began then. Further pages come after a rest, the next tables at
        their time, the next round after its period."""
        now, until = self._sweep.clock.monotonic(), stepped
        if not self._more and (self.plan.spread or not self._tables):
            until = self.began + self.plan.every * (1 - len(self._tables) / max(1, self._all))
        self.at = max(until, now + factor * (now - stepped))


class Edge(Round):
    """A round of EDGE: what the horizon has reached since the one before.

    A shorter horizon applies at once, and what lies beyond it may have been removed. A longer one waits for a
    round: a submitter may not know it yet and leave to this pass what it stores beyond the shorter one.
    """

    def __init__(self, sweep: Sweep, at: float) -> None:
        super().__init__(EDGE, sweep, at)
        self._horizon = self._known = 0
        """The horizon (ms) as the last round began, and until when (ms) it was not shorter."""
        self._from = self._to = 0
        """From where (ms) this round reads, and up to where; 0 before the first."""

    def start(self, began: float, tables: Iterable[int]) -> None:
        """Begin a round. The first one has next to nothing to read."""
        now, horizon = self._sweep.clock.now_ms(), self._sweep.horizon_ms()
        if not self._to:
            self._horizon, self._to = horizon, now + horizon
        elif horizon < self._horizon:
            self._to = min(self._to, self._known - NOTICED_MS + horizon)
        reached = now + min(self._horizon, horizon)
        self._from, self._to, self._horizon = min(self._to, reached) - OVERLAP_MS, reached, horizon
        super().start(began, tables)

    def _range(self, now_ms: int) -> tuple[int, int]:
        horizon = self._sweep.horizon_ms()
        if horizon >= self._horizon:
            self._known = now_ms
        self._to = min(self._to, now_ms + horizon)
        return self._from, self._to


def restore_rounds(sweep: Sweep, tables: Sequence[int], *, where: str = "") -> deque[Round]:
    """Return one round of each pass of LOST over these tables."""
    now, now_ms = sweep.clock.monotonic(), sweep.clock.now_ms()
    rounds = deque(Round(plan, sweep, now, now_ms=now_ms, where=where) for plan in LOST)
    for each in rounds:
        each.start(now, tables)
    return rounds


def sweep_all(
    sweep: Sweep,
    tables: Sequence[int],
    *,
    where: str = "",
    progress: Callable[[float, SweepCounts], None] = lambda _part, _counts: None,
) -> SweepCounts:
    """Restore these tables once without rests: pending rows, soonest first, then dead ones.

    ``progress`` gets the completed part, 0 to 1, and the counts so far. If some tables do not answer, it goes
    through all others, then raises StoreUnavailable or SchemaBehind.
    """
    rounds = restore_rounds(sweep, tables, where=where)
    total = SweepCounts()
    failure: StoreUnavailable | SchemaBehind | None = None
    for each in rounds:
        while each.left:
            stepped = each.step()
            for error in stepped.failed.values():
                failure = failure or error
            if len(stepped.failed) < len(stepped.asked):
                total = total.plus(stepped.counts)
                left = sum(other.left for other in rounds)
                progress(1 - left / max(1, len(rounds) * len(tables)), total)
    if failure is not None:
        raise failure
    return total
