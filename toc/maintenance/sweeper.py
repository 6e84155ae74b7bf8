"""The schedule of the sweep: when each pass compares which rows of a worker's tables with the index.

Each table is swept by one worker, over all topics at once:

    due soon   each second        rows due from a moment ago to a moment ahead
    overdue    every 5 s          everything due before that
    window     every 5 minutes    all rows up to the horizon
    dead       every minute       rows of status 4 get their DeadQueue entry back
    refill     when the index has lost data: everything at once, what is due soonest first

Two workers that sweep one table do no harm.

None of this may disturb live traffic. A pass consists of steps of few rows, spread over its period,
and rests after each step in proportion to its time. With too much to do, passes take longer than
their period; the pass over rows due soon then reads further ahead. Entries that were found a few
seconds ago are not looked up again. Each server of the task table has its own Sweeper, so that one
that hangs holds up no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf

from toc.failpoint import failpoint
from toc.maintenance.known_entries import KnownEntries
from toc.maintenance.round import Round
from toc.maintenance.sweep import (
    COMPLAIN_SECONDS,
    LEAST_PAGE,
    ROWS_PER_STEP,
    Crawl,
    Sweep,
    restore_passes,
)
from toc.model.clock import RateLimit
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.task import TaskStatus
from toc.observe.log import get_logger
from toc.observe.metrics import INDEX_REBUILDS, SWEEP_FAILURES
from toc.store.scan import Position
from toc.store.shards import OF_TABLES, Trouble

log = get_logger(__name__)

SOON_EVERY = 1.0
OVERDUE_EVERY = 5.0
WINDOW_EVERY = 300.0
DEAD_EVERY = 60.0

JUST_DUE_MS = 5000
"""How long ago a row of the first pass may be due. A transaction that uses now as its time may take this long
to commit and is still indexed within a second. Older rows wait for the pass over overdue rows."""
AHEAD = 1.2
"""How far ahead the first pass reads, in its periods: a later round reads the rest in time."""
MAX_AHEAD_SECONDS = 30.0
SOON_ROWS = 16
"""Rows per step of this pass, about. It reads them while live tasks, due in the same second, wait for the
same cores. Steps of 200 rows added more than 1 ms to the slowest percent."""
SOON_STEPS = 32
"""Most steps of a round, besides further pages. Each costs most of a millisecond, whatever it reads."""
OVERDUE_STEPS = 4
"""Least steps of a round over overdue rows, as it also runs beside live tasks."""

REST_SOON, REST_OVERDUE, REST_CRAWL = 3, 9, 99
"""The rest after a step of each pass, as a multiple of its time. The slow passes may take their
time: they repair entries of tasks that are due much later. A task that becomes due during a step is
late by the time of that step. When the steps took a twentieth of the time, they doubled the
lateness of the slowest percent."""
CRAWL_ROWS = 50
"""Rows per step of the slow passes, about: they keep a core busy for a millisecond."""
REST_BUSY = 9
"""The rest of the pass over rows due soon under back-pressure. Otherwise it would read the whole
backlog again and again, on the cores that should start the tasks."""
REST_NEAR, REST_FAR = 1, 4
"""The rest in a refill, for what is due within a minute and for the rest, and in new tables."""
REFILL_ROWS = 500

RETRY_SECONDS = 1.0
LATER_SECONDS = 1.5
"""How long after a server came back all due rows are looked up once more: other workers learn of it a moment
later, and postpone entries until then."""


class _Refill:
    """One pass over everything in some tables, what is due within a minute first."""

    def __init__(self, sweep: Sweep, tables: Sequence[int], began: float) -> None:
        self.began = began
        self.rows = self.added = self.failed = 0
        self.crawls = deque(restore_passes(sweep, tables, rows_per_step=REFILL_ROWS))

    @property
    def near(self) -> bool:
        """Whether some rows due within a minute have yet to be restored."""
        return len(self.crawls) == 3

    def step(self) -> None:
        """Restore the next rows. Raises StoreUnavailable."""
        counts = self.crawls[0].step()
        self.rows += counts.rows
        self.added += counts.added
        self.failed += counts.failed
        if not self.crawls[0].tables_left:
            self.crawls.popleft()


class Sweeper:
    """The schedule of the passes over this worker's tables of one server.

    ``wake`` makes its thread call ``run_once`` now; ``backlogged`` is the back-pressure: whether more is
    due here than can start at once. ``every``: all tables of the server. If it is empty, tables of
    other workers are not checked.
    """

    def __init__(
        self,
        sweep: Sweep,
        wake: Callable[[], None] = lambda: None,
        backlogged: Callable[[], bool] = lambda: False,
        every: Iterable[int] = (),
    ) -> None:
        self._sweep = sweep
        self._wake = wake
        self._backlogged = backlogged
        self._clock = sweep.clock
        self._every = sorted(every)
        self._tables: frozenset[int] = frozenset()
        self._fresh: deque[int] = deque()
        """Tables that were added and have not been crawled yet."""
        self._known = KnownEntries(self._clock)
        self._failing_tables: set[int] = set()
        """Tables that did not answer the last time, while others of the server did."""
        self._with_due_rows: set[int] = set()
        """Tables with due-soon rows in the last pass. Their ids are read without asking first."""
        now = self._clock.monotonic()
        self._soon_at = self._overdue_at = self._dead_at = self._window_at = now
        self._soon = Round(now)
        self._overdue = Round(now)
        self._first: Crawl | None = None
        """The pass over newly added tables."""
        self._window: Crawl | None = None
        self._window_began = now
        self._dead: Crawl | None = None
        self._dead_began = now
        self._refill: _Refill | None = None
        self._refill_at = now
        self._refill_wanted = float("-inf")
        self._refilled = float("-inf")
        self._later_at = inf
        """When to look up all due rows once more."""
        self._back = False
        """Whether the server, or a table of it, has come back since the last step."""
        self._failing_since: float | None = None
        self._complains = RateLimit(self._clock, COMPLAIN_SECONDS)

    def add(self, tables: Iterable[int]) -> None:
        """Sweep these tables from now on. All their rows are read soon."""
        more = frozenset(tables) - self._tables
        self._tables |= more
        self._fresh.extend(sorted(more))
        self._wake()

    def remove(self, tables: Iterable[int]) -> None:
        """Leave these tables to another worker."""
        self._tables -= frozenset(tables)

    def forget(self) -> None:
        """Forget all known ids: the index may have lost entries. Any thread may call it."""
        self._known.forget()

    def refill(self) -> None:
        """Restore everything, soonest first: the index has lost data. Any thread may call it."""
        self._known.forget()
        self._refill_wanted = self._clock.monotonic()
        self._wake()

    def catch_up(self) -> None:
        """Look up all due rows again: the server is back, and workers have postponed entries meanwhile. Any
        thread may call it."""
        self._back = True
        self._wake()

    @property
    def refilled(self) -> float:
        """When the last complete refill began (monotonic)."""
        return self._refilled if self._tables else float("inf")

    def run_once(self) -> float:
        """Run the next step of the pass that is due first. Returns the seconds until another is due."""
        if not self._tables:
            self._ask_server()
            return RETRY_SECONDS
        now = self._clock.monotonic()
        if self._back or self._later_at <= now:
            self._later_at = now + LATER_SECONDS if self._back else inf
            self._back = False
            self._look_again(now)
        try:
            if self._soon_at <= now:
                self._step_soon(now)
            elif (self._refill or self._refill_wanted > self._refilled) and self._refill_at <= now:
                self._step_refill(now)
            elif self._overdue_at <= now:
                self._step_overdue(now)
            elif self._dead_at <= now:
                self._step_dead(now)
            elif self._window_at <= now or self._news:
                self._step_window(now)
        except (StoreUnavailable, SchemaBehind) as exc:
            return self._failed(now, exc)
        if self._failing_since is not None:
            log.info("sweep_resumed", seconds=round(now - self._failing_since, 1))
            self._failing_since = None
            self._back = True
        if self._back:
            return 0.0
        window_at = now if self._news else self._window_at
        due = min(self._soon_at, self._overdue_at, self._dead_at, window_at, self._later_at)
        if self._refill:
            due = min(due, self._refill_at)
        return max(0.0, due - self._clock.monotonic())

    def _ask_server(self) -> None:
        """Look at one table of the server although none is swept here, so that this worker can tell if the
        server does not answer."""
        if self._every:
            self._follow_switchover(self._every[0])
            self._sweep.scans.look(self._every[:1], {}, 0, 1, 1)

    def _follow_switchover(self, table: int) -> None:
        server = self._sweep.scans.follow_switchover(table)
        if server and self._complains("read-only"):
            log.warning("database_read_only", server=server)

    @property
    def _news(self) -> bool:
        """Whether some added tables have no pass yet."""
        return self._first is None and bool(self._fresh)

    def _failed(self, now: float, exc: Trouble) -> float:
        SWEEP_FAILURES.of().add()
        if self._failing_since is None:
            self._failing_since = now
            self._complains = RateLimit(self._clock, COMPLAIN_SECONDS)
        if self._complains():
            log.warning("sweep_failed", error=str(exc))
        return RETRY_SECONDS

    def _rest(self, began: float, factor: int, until: float) -> float:
        """When the next step may run: not before ``until``, nor before a rest."""
        now = self._clock.monotonic()
        return max(until, now + factor * (now - began))

    # --- due soon

    def _step_soon(self, began: float) -> None:
        soon = self._soon
        if not soon.tables and not soon.more:
            tables = sorted(self._tables)
            if tables:  # another thread may have taken the last one away
                self._follow_switchover(tables[0])
            slices = ceil(soon.rows / SOON_ROWS)
            soon.start(began, tables, min(slices, SOON_STEPS))
            self._known.age()
        now_ms = self._clock.now_ms()
        ahead = min(AHEAD * max(soon.period, SOON_EVERY), MAX_AHEAD_SECONDS)
        from_ms, to_ms = now_ms - JUST_DUE_MS, now_ms + int(ahead * 1000)
        self._look(soon, soon.take(), from_ms, to_ms)
        # Further pages come at once, the next slice at its time, the next round after its period.
        until = began if soon.more else soon.began + SOON_EVERY * soon.part_done
        self._soon_at = self._rest(began, REST_BUSY if self._backlogged() else REST_SOON, until)

    # --- overdue

    def _step_overdue(self, began: float) -> None:
        overdue = self._overdue
        if not overdue.tables and not overdue.more:
            overdue.start(began, sorted(self._tables), OVERDUE_STEPS)
        self._look(overdue, overdue.take(), 0, self._clock.now_ms() - JUST_DUE_MS)
        until = began if overdue.tables or overdue.more else overdue.began + OVERDUE_EVERY
        self._overdue_at = self._rest(began, REST_OVERDUE, until)

    def _look(self, round_: Round, tables: Sequence[int], from_ms: int, to_ms: int) -> None:
        """One step of a round: index what is due in a range, in these tables and where pages are left."""
        start = Position(from_ms)
        soon = round_ is self._soon
        busy = dict(round_.more)
        quiet = []
        for table in tables:
            if soon and table in self._with_due_rows:
                busy[table] = start
            else:
                quiet.append(table)
        epoch = self._known.epoch
        limit = max(LEAST_PAGE, ROWS_PER_STEP // max(1, len(busy)))
        whole = not round_.known_before
        looked = self._sweep.scans.look(quiet, busy, from_ms, to_ms, limit, whole=whole)
        self._note_failing([*quiet, *busy], looked.failed)
        found = looked.ids
        round_.more = {table: _last(ids) for table, ids in found.items() if len(ids) >= limit}
        if soon:
            self._with_due_rows.difference_update(busy.keys() - found.keys())
            self._with_due_rows.update(looked.with_due_rows)
        # Tables that turned out to have due rows are read in the next step. In the pass over rows
        # due soon, that step follows at once, and such tables are few.
        round_.more |= dict.fromkeys(looked.with_due_rows, start)
        pairs = [pair for ids in found.values() for pair in ids]
        unknown = self._known.without(pairs)
        round_.rows += len(pairs)
        round_.unknown += len(unknown)
        if unknown:
            failpoint("sweep.rows-read")
            if whole:
                rows = [row for row in looked.rows if row.job_id in unknown]
            else:
                rows = self._sweep.scans.pending(unknown)
            _, failed = self._sweep.add(rows, to_ms - self._clock.now_ms())
            for job_id in failed:
                del unknown[job_id]
            self._known.learn(unknown, epoch)

    def _note_failing(self, asked: Sequence[int], failed: Mapping[int, Trouble]) -> None:
        """Continue without tables that do not answer. When they answer again, all their due rows are read.

        Raises the error if it is of another kind: then the whole server has failed.
        """
        for error in failed.values():
            if not isinstance(error, OF_TABLES):
                raise error
        back = self._failing_tables.intersection(asked).difference(failed)
        self._failing_tables.difference_update(back)
        self._failing_tables.update(failed)
        if back:
            self._back = True

    def _look_again(self, now: float) -> None:
        """Read all due rows again, with nothing known.

        The rounds continue instead of starting again. Otherwise a server that comes and goes, or a
        table that is locked again and again, would keep them from ever reaching their last rows.
        """
        self._known.forget()
        self._soon.read_again()
        self._overdue.read_again()
        self._soon_at = self._overdue_at = now

    # --- refill

    def _step_refill(self, began: float) -> None:
        refill = self._refill
        if refill is None or refill.began < self._refill_wanted:
            refill = self._refill = _Refill(self._sweep, sorted(self._tables), began)
        near = refill.near
        try:
            refill.step()
        except OF_TABLES:
            self._refill_at = began + RETRY_SECONDS
            return
        self._refill_at = self._rest(began, REST_NEAR if near else REST_FAR, began)
        if not refill.crawls:
            self._refill = None
            if refill.failed:
                self._refill_at = began + RETRY_SECONDS  # a node is out of reach: start over
            else:
                self._refilled = refill.began
                INDEX_REBUILDS.of().add()
                seconds = round(self._clock.monotonic() - refill.began, 1)
                log.info("index_refilled", rows=refill.rows, entries=refill.added, seconds=seconds)

    # --- window and dead

    def _step_window(self, began: float) -> None:
        if self._first is None and self._fresh:
            fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
            self._first = self._whole_window(fresh, ROWS_PER_STEP)
        if self._first is not None:  # new tables do not wait for their turn
            try:
                self._first.step()
            except OF_TABLES:
                self._window_at = began + RETRY_SECONDS
                return
            if not self._first.tables_left:
                self._first = None
            self._window_at = self._rest(began, REST_FAR, began)
            return
        if self._window is None:
            self._window_began = began
            self._window = self._whole_window(sorted(self._tables), CRAWL_ROWS)
        self._window, self._window_at = self._crawl(self._window, began, self._window_began, WINDOW_EVERY)

    def _whole_window(self, tables: Sequence[int], rows_per_step: int) -> Crawl:
        now_ms = self._clock.now_ms()
        end = now_ms + self._sweep.horizon_ms()
        return Crawl(self._sweep, tables, from_ms=now_ms, to_ms=end, rows_per_step=rows_per_step)

    def _step_dead(self, began: float) -> None:
        if self._dead is None:
            self._dead_began = began
            self._dead = Crawl(
                self._sweep,
                sorted(self._tables),
                from_ms=0,
                to_ms=self._clock.now_ms() + 1000,
                status=TaskStatus.DEAD,
                rows_per_step=CRAWL_ROWS,
            )
        self._dead, self._dead_at = self._crawl(self._dead, began, self._dead_began, DEAD_EVERY)

    def _crawl(
        self, crawl: Crawl, began: float, pass_began: float, every: float
    ) -> tuple[Crawl | None, float]:
        """Make one step of a slow pass, whose steps are spread over its period.

        Returns the pass, or None if it is over, and when the next step is due.
        """
        try:
            crawl.step()
        except OF_TABLES:  # none of these tables answers; others come next
            return crawl, began + RETRY_SECONDS
        done = 1 - crawl.tables_left / max(1, crawl.tables)
        until = began if crawl.amid else pass_began + every * done
        return crawl if crawl.tables_left else None, self._rest(began, REST_CRAWL, until)


def _last(ids: Sequence[tuple[int, int]]) -> Position:
    job_id, due = ids[-1]
    return Position(due, job_id)
