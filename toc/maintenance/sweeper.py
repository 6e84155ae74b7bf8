"""The sweep of a worker: which pass takes the next step, and the refill after a loss.

Each table is swept by one worker, over all topics at once:

    SOON        each second        rows due from a moment ago to a moment ahead
    LOST        when the index has lost data: everything at once, what is due soonest first
    OVERDUE     every 5 s          everything due before that
    EDGE        every 10 s         what the horizon has reached since
    DEAD        every minute       rows of status 4 get their DeadQueue entry back
    FULL        every half hour    all rows up to the horizon, and of tables that are new here

Two workers that sweep one table do no harm.

None of this may disturb live traffic. A pass consists of steps of few rows, and rests after each step in
proportion to its time. With too much to do, passes take longer than their period; SOON then reads further
ahead. Each server of the task table has its own Sweeper, so that one that hangs holds up no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from toc.maintenance.passes import DEAD, FULL, OVERDUE, SOON, Edge, Round, Stepped, restore_rounds
from toc.maintenance.sweep import COMPLAIN_SECONDS, Sweep, SweepCounts
from toc.model.clock import RateLimit
from toc.observe.log import get_logger
from toc.observe.metrics import INDEX_REBUILDS, SWEEP_FAILURES
from toc.store.servers.shards import OF_TABLES, Trouble

log = get_logger(__name__)

REST_BUSY = 9
"""The rest of the pass over rows due soon under back-pressure. Otherwise it would read the whole
backlog again and again, on the cores that should start the tasks."""
REST_BEHIND = 19
"""The rest of the pass over what the horizon reaches, once a round takes longer than its period."""
UNREAD_SECONDS = 300.0
"""How soon the pass over all rows begins again if it, or the horizon, has left tables out."""
RETRY_SECONDS = 1.0


class _Refill:
    """What restores all tables after a loss."""

    def __init__(self, sweep: Sweep, tables: Iterable[int], began: float) -> None:
        self.began = began
        self.counts = SweepCounts()
        self.rounds = restore_rounds(sweep, sorted(tables))
        """Those that are not over."""


class Sweeper:
    """The passes over this worker's tables of one server.

    ``wake`` makes its thread call ``run_once`` now; ``backlogged`` is the back-pressure: whether more is
    due here than can start at once.
    """

    def __init__(
        self,
        sweep: Sweep,
        wake: Callable[[], None] = lambda: None,
        backlogged: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sweep = sweep
        self._wake = wake
        self._backlogged = backlogged
        self._clock = sweep.clock
        self._tables: frozenset[int] = frozenset()
        now = self._clock.monotonic()
        self._soon = Round(SOON, sweep, now)
        self._overdue = Round(OVERDUE, sweep, now)
        self._edge = Edge(sweep, now)
        self._full = Round(FULL, sweep, now)
        self._slow = [self._edge, Round(DEAD, sweep, now), self._full]
        self._unread = False
        """Whether some table has yet to be read to the horizon."""
        self._refill: _Refill | None = None
        self._refill_wanted = -inf
        self._refilled = -inf
        self._failing_since: float | None = None
        self._complains = RateLimit(self._clock, COMPLAIN_SECONDS)

    def add(self, tables: Iterable[int]) -> None:
        """Sweep these tables from now on."""
        self._tables |= frozenset(tables)
        self._unread = True
        if self._refill is not None:  # it is without them
            self._refill_wanted = self._clock.monotonic()
        self._wake()

    def remove(self, tables: Iterable[int]) -> None:
        """Leave these tables to another worker."""
        self._tables -= frozenset(tables)

    def refill(self) -> None:
        """Restore everything, soonest first: the index has lost data. Any thread may call it."""
        self._refill_wanted = self._clock.monotonic()
        self._wake()

    @property
    def refilled(self) -> float:
        """When the last complete refill began (monotonic)."""
        return self._refilled if self._tables else inf

    def run_once(self) -> float:
        """Run the next step of the pass that is due first. Returns the seconds until another is due."""
        if not self._tables:
            return RETRY_SECONDS
        now = self._clock.monotonic()
        self._begin_refill(now)
        due = next((each for each in self._rounds() if each.at <= now), None)
        error = None if due is None else self._step(due, now)
        if error is not None:
            return self._failed(now, error)
        if self._failing_since is not None:
            log.info("sweep_resumed", seconds=round(now - self._failing_since, 1))
            self._failing_since = None
        until = min(each.at for each in self._rounds())
        return max(0.0, until - self._clock.monotonic())

    def _follow_switchover(self, table: int) -> None:
        server = self._sweep.scans.follow_switchover(table)
        if server and self._complains("read-only"):
            log.warning("database_read_only", server=server)

    def _failed(self, now: float, error: Trouble) -> float:
        SWEEP_FAILURES.of().add()
        if self._failing_since is None:
            self._failing_since = now
            self._complains = RateLimit(self._clock, COMPLAIN_SECONDS)
        if self._complains():
            log.warning("sweep_failed", error=str(error))
        return RETRY_SECONDS

    def _rounds(self) -> Iterable[Round]:
        """The rounds of all passes, what is urgent first. Without an index only overdue rows matter: some are
        over."""
        if not self._sweep.indexed:
            yield self._overdue
            return
        yield self._soon
        if self._refill is not None:
            yield self._refill.rounds[0]
        yield self._overdue
        yield from self._slow

    def _step(self, each: Round, now: float) -> Trouble | None:
        """Take a step. Returns the error if the whole server has failed."""
        if not each.left:
            if each is self._full:
                self._unread = False
            tables = sorted(self._tables)
            if (
                each is next(iter(self._rounds())) and tables
            ):  # another thread may have taken the last one away
                self._follow_switchover(tables[0])
            each.start(now, tables)
        stepped = each.step()
        if each is self._edge and stepped.failed:
            self._unread = True
        each.rest(now, self._rest(each, now))
        if self._unread and not self._full.left:
            self._full.at = min(self._full.at, self._full.began + UNREAD_SECONDS)
        if self._refill is not None and each is self._refill.rounds[0]:
            self._refilled_some(self._refill, stepped, now)
        # Tables that do not answer are left out of the round.
        return next((error for error in stepped.failed.values() if not isinstance(error, OF_TABLES)), None)

    def _rest(self, each: Round, now: float) -> int:
        if each is self._soon and self._backlogged():
            return REST_BUSY
        behind = each is self._edge and now - each.began > each.plan.every
        return REST_BEHIND if behind else each.plan.rest

    # --- after a loss

    def _begin_refill(self, now: float) -> None:
        """Begin one if a loss was seen since the last one began."""
        began = self._refilled if self._refill is None else self._refill.began
        if self._refill_wanted > began:
            self._refill = _Refill(self._sweep, self._tables, now)

    def _refilled_some(self, refill: _Refill, stepped: Stepped, now: float) -> None:
        """Note a step of the refill. Tables that did not answer come again after all others."""
        each = refill.rounds[0]
        refill.counts = refill.counts.plus(stepped.counts)
        each.read_again(stepped.failed)
        if stepped.failed.keys() >= set(stepped.asked):
            each.at = now + RETRY_SECONDS
        if each.left:
            return
        refill.rounds.popleft()
        if refill.rounds:
            return
        self._refill = None
        if refill.counts.failed:  # a node is out of reach: start over
            self._refill = _Refill(self._sweep, self._tables, now)
            self._refill.rounds[0].at = now + RETRY_SECONDS
            return
        self._refilled = refill.began
        INDEX_REBUILDS.of().add()
        seconds = round(self._clock.monotonic() - refill.began, 1)
        log.info("index_refilled", rows=refill.counts.rows, entries=refill.counts.added, seconds=seconds)
