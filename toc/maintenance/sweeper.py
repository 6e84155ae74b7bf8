"""The sweep of a worker: its passes, that is which rows each compares with the index and how often, which of
them takes the next step, and the refill after a loss.

Each table is swept by one worker, over all topics at once:

    SOON        each second        rows due from a moment ago to a moment ahead
    LOST        when the index has lost data: everything at once, what is due soonest first
    OVERDUE     every 5 s          everything due before that
    EDGE        every 10 s         what the horizon has reached since
    DEAD        every minute       rows of status 4 get their DeadQueue entry back
    FULL        every half hour    all rows up to the horizon

Two workers that sweep one table do no harm.

None of this may disturb live traffic. A pass consists of steps of few rows, and rests after each step in
proportion to its time. With too much to do, passes take longer than their period; SOON then reads further
ahead. Each server of the task table has its own Sweeper, so that one that hangs holds up no other.

A pass reads its tables in rounds, step by step. A step asks some tables in one statement whether they hold
any row of the pass, and reads a page of others that do. Pages that are left come in the next steps, so that
no table with many rows holds up the others.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import ceil, inf
from typing import NamedTuple

from toc.failpoint import failpoint
from toc.maintenance.sweep import MAX_AHEAD_MS, Mine, Sweep, SweepCounts
from toc.model.clock import RateLimit
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.task import TaskStatus
from toc.observe.log import get_logger
from toc.observe.metrics import INDEX_REBUILDS, SWEEP_FAILURES
from toc.store.servers.shards import OF_TABLES, Trouble
from toc.store.tasks.scan import Position

log = get_logger(__name__)

REST_BUSY = 9
"""The rest of the pass over rows due soon under back-pressure. Otherwise it would read the whole
backlog again and again, on the cores that should start the tasks."""
REST_BEHIND = 19
"""The rest of the pass over what the horizon reaches, once a round takes longer than its period."""
RETRY_SECONDS = 1.0


MOST_REST = 2.0
"""Longest rest of a pass whose period is shorter: a step of seconds stood still more than it worked."""
JUST_DUE_MS = 5000
"""How long ago a row of SOON may be due. A transaction that uses now as its time may take this long to commit
and is still indexed within a second. Older rows wait for OVERDUE."""
AHEAD_MS = 1200
"""How far ahead SOON reads, more than its period: a later round reads the rest in time."""
DEAD_MS = 1000
"""The passes over dead rows read what has died by their time, and what clocks that are ahead say of it."""
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


class Pass(NamedTuple):
    """How a pass goes over its tables. The first two say which rows it reads, by their next_time."""

    first: int | None
    """From when on (ms from now); None: from the oldest on."""
    last: int | None
    """Up to when (ms from now); None: up to the horizon, how far ahead any topic keeps tasks in Redis."""
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
    stretches: bool = False
    """Whether it reads further ahead, up to MAX_AHEAD_MS, if its rounds take longer than their period."""
    status: TaskStatus = TaskStatus.PENDING


# The slow passes may take their time: they repair entries of tasks that are due much later. A task that
# becomes due during a step is late by the time of that step. When the steps took a twentieth of the time,
# they doubled the lateness of the slowest percent.
SOON = Pass(-JUST_DUE_MS, AHEAD_MS, 1.0, 3, slice_rows=SOON_ROWS, stretches=True)
OVERDUE = Pass(None, -JUST_DUE_MS, 5.0, 9, slices=4, spread=False)
DEAD = Pass(None, DEAD_MS, 60.0, 99, CRAWL_ROWS, CRAWL_ROWS, MAX_SLICES, status=TaskStatus.DEAD)
EDGE = Pass(0, None, 10.0, 99, CRAWL_ROWS, CRAWL_ROWS)
FULL = Pass(0, None, 1800.0, 99, CRAWL_ROWS, CRAWL_ROWS, MAX_SLICES)
LOST = (
    Pass(None, NEAR_MS, 0.0, 1, REFILL_ROWS),
    Pass(NEAR_MS, None, 0.0, 4, REFILL_ROWS),
    Pass(None, DEAD_MS, 0.0, 4, REFILL_ROWS, status=TaskStatus.DEAD),
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
        self, plan: Pass, sweep: Sweep, at: float, *, now_ms: int | None = None, where: str = ""
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
        first, last, every = self.plan.first, self.plan.last, self.plan.every
        if last is None:
            last = max(first or 0, self._sweep.horizon_ms())
        elif self.plan.stretches:
            last = min(int(last * max(1.0, self._took / every)), MAX_AHEAD_MS)
        return 0 if first is None else now_ms + first, now_ms + last

    def rest(self, stepped: float, factor: int) -> None:
        """Plan the next step, after one that began then. Further pages come after a rest, the next tables at
        their time, the next round after its period."""
        now, until = self._sweep.clock.monotonic(), stepped
        if not self._more and (self.plan.spread or not self._tables):
            until = self.began + self.plan.every * (1 - len(self._tables) / max(1, self._all))
        self.at = max(until, now + min(factor * (now - stepped), max(self.plan.every, MOST_REST)))


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
    sweep: Sweep, tables: Sequence[int], *, where: str, progress: Callable[[float, SweepCounts], None]
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


class Sweeper:
    """The passes over this worker's tables of one server, which ``tables`` returns. ``backlogged`` is the
    back-pressure: whether more is due here than can start at once.
    """

    def __init__(self, sweep: Sweep, tables: Mine, backlogged: Callable[[], bool]) -> None:
        self._sweep = sweep
        self._mine = tables
        self._backlogged = backlogged
        self._clock = sweep.clock
        self._tables: frozenset[int] = frozenset()
        now = self._clock.monotonic()
        self._soon = Round(SOON, sweep, now)
        self._overdue = Round(OVERDUE, sweep, now)
        self._edge = Edge(sweep, now)
        self._slow = [self._edge, Round(DEAD, sweep, now), Round(FULL, sweep, now)]
        self._refill = deque[Round]()
        """What restores all tables after a loss: the rounds that are not over."""
        self._refill_counts = SweepCounts()
        self._refill_wanted = self._refill_began = self._refilled = -inf
        """When a loss was seen, when the last refill began, and the last complete one (monotonic)."""
        self._complains = RateLimit(self._clock)

    def refill(self) -> None:
        """Restore everything, soonest first: the index has lost data. Any thread may call it."""
        self._refill_wanted = self._clock.monotonic()

    @property
    def refilled(self) -> float:
        """When the last complete refill began (monotonic)."""
        return self._refilled if self._mine() else inf

    def run_once(self) -> float:
        """Run the next step of the pass that is due first. Returns the seconds until another is due."""
        now = self._clock.monotonic()
        before, self._tables = self._tables, self._mine()
        if not self._tables:
            return RETRY_SECONDS
        if self._tables - before and self._refill:  # it is without them
            self._refill_wanted = now
        if self._refill_wanted > self._refill_began:
            self._begin_refill(now)
        due = next((each for each in self._rounds() if each.at <= now), None)
        if due is not None and (error := self._step(due, now)) is not None:
            SWEEP_FAILURES.of().add()
            if self._complains():
                log.warning("sweep_failed", error=str(error))
            return RETRY_SECONDS
        until = min(each.at for each in self._rounds())
        return max(0.0, until - self._clock.monotonic())

    def _rounds(self) -> Iterable[Round]:
        """The rounds of all passes, what is urgent first. Without an index only overdue rows matter: some are
        over."""
        if not self._sweep.indexed:
            yield self._overdue
            return
        yield self._soon
        if self._refill:
            yield self._refill[0]
        yield self._overdue
        yield from self._slow

    def _step(self, each: Round, now: float) -> Trouble | None:
        """Take a step. Returns the error if the whole server has failed."""
        if not each.left:
            tables = sorted(self._tables)
            if each is next(iter(self._rounds())):
                server = self._sweep.scans.follow_switchover(tables[0])
                if server and self._complains("read-only"):
                    log.warning("database_read_only", server=server)
            each.start(now, tables)
        stepped = each.step()
        behind = each is self._edge and now - each.began > each.plan.every
        busy = each is self._soon and self._backlogged()
        each.rest(now, REST_BUSY if busy else REST_BEHIND if behind else each.plan.rest)
        if self._refill and each is self._refill[0]:
            self._refilled_some(stepped, now)
        # Tables that do not answer are left out of the round.
        return next((error for error in stepped.failed.values() if not isinstance(error, OF_TABLES)), None)

    # --- after a loss

    def _begin_refill(self, now: float) -> None:
        self._refill_began, self._refill_counts = now, SweepCounts()
        self._refill = restore_rounds(self._sweep, sorted(self._tables))

    def _refilled_some(self, stepped: Stepped, now: float) -> None:
        """Note a step of the refill. Tables that did not answer come again after all others."""
        each = self._refill[0]
        self._refill_counts = counts = self._refill_counts.plus(stepped.counts)
        each.read_again(stepped.failed)
        if stepped.failed.keys() >= set(stepped.asked):
            each.at = now + RETRY_SECONDS
        if each.left:
            return
        self._refill.popleft()
        if not self._refill and counts.failed:  # a node is out of reach: start over
            self._begin_refill(now)
            self._refill[0].at = now + RETRY_SECONDS
        elif not self._refill:
            self._refilled = self._refill_began
            INDEX_REBUILDS.of().add()
            seconds = round(self._clock.monotonic() - self._refilled, 1)
            log.info("index_refilled", rows=counts.rows, entries=counts.added, seconds=seconds)
