"""What a worker process does for its tables: sweep, schedules, retention, counts of what comes due; for all,
the horizon."""

import threading
from collections.abc import Collection
from functools import partial

from toc.loop import Loop
from toc.maintenance.due_walk import DueWalk
from toc.maintenance.horizon import HorizonKeeper
from toc.maintenance.retention import Retention
from toc.maintenance.scheduler import Scheduler
from toc.maintenance.sweep import Sweep
from toc.maintenance.sweeper import Sweeper
from toc.model.errors import TocError
from toc.model.horizon import Budget
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.worker.tools import Tools

log = get_logger(__name__)

DECLARE_AGAIN_SECONDS = 5.0
"""When a schedule that the application declares is tried again, if it could not be created or changed."""


class TableServices:
    """The loops over tables: per database server one that sweeps and one for schedules; one that purges, one
    that counts. One keeps the horizon, one makes the schedules that the application declares."""

    def __init__(self, center: TimeoutCenter, tools: Tools) -> None:
        store, catalog, clock = tools.store, tools.catalog, tools.clock
        self._tables: frozenset[int] = frozenset()
        retention = Retention(store, catalog, clock, self._mine, audit=center.settings.audit_retention)
        self.loops = [
            Loop("retention", retention.run_once),
            # Its last turn finds no tables, and takes back what it tells of them.
            Loop("due", DueWalk(store, catalog, clock, self._mine).run_once, last=True),
            Loop("declared-schedules", self._declare_schedules),
        ]

        def died(job_id: int, topic: str, reason: str) -> None:
            if topic in tools.handlers:  # else it is none of this application
                tools.died(job_id, reason)

        sweep = Sweep(store, tools.queues, catalog, clock, died)
        self._sweepers: list[Sweeper] = []
        for number, of_server in enumerate(map(frozenset, store.tables_of_server())):
            mine = partial(self._mine, of_server)
            sweeper = Sweeper(sweep, mine, lambda: tools.backlogged)
            self._sweepers.append(sweeper)
            self.loops += [
                Loop(f"sweep-{number}", sweeper.run_once),
                Loop(f"schedules-{number}", Scheduler(store, catalog, sweep, mine).run_once),
            ]
        budget = Budget.of(center.settings.redis_budget)
        if tools.queues.present and budget is not None:
            self.loops.append(Loop("horizon", HorizonKeeper(store, tools.queues, clock, budget).run_once))
        self._schedules = center.schedules
        self._undeclared = frozenset(declared.name for declared in center.schedules.declared)

    def add(self, tables: Collection[int]) -> None:
        """Serve these tables from now on."""
        self._tables = self._tables.union(tables)
        self._wake()

    def remove(self, tables: Collection[int]) -> None:
        """Stop serving these tables: another worker has them."""
        self._tables = self._tables.difference(tables)

    def _mine(self, among: frozenset[int] | None = None) -> frozenset[int]:
        """Return the tables that are served now, of all or ``among`` these."""
        return self._tables if among is None else self._tables & among

    def _wake(self) -> None:
        for loop in self.loops:
            loop.wake()

    def refill(self) -> None:
        """Restore everything, soonest first: the index has lost data."""
        for sweeper in self._sweepers:
            sweeper.refill()
        self._wake()

    def refilled(self) -> float:
        """Return when the last refill began that has ended on every server (monotonic)."""
        return min(sweeper.refilled for sweeper in self._sweepers)

    def _declare_schedules(self) -> float:
        """Create or change the schedules that the application declares, each once. What operators change
        later stays in force until another worker starts.

        Servers that do not answer hold up nothing but the schedules that belong to them.
        """
        if not self._undeclared:
            return threading.TIMEOUT_MAX
        try:
            failed = self._schedules.reconcile(self._undeclared)
        except TocError as exc:
            failed = dict.fromkeys(self._undeclared, exc)
        for name, error in failed.items():
            log.warning("schedules_not_declared", schedule=name, error=str(error))
        self._undeclared = frozenset(failed)
        return DECLARE_AGAIN_SECONDS

    def end(self) -> None:
        """Begin no further step, and serve no table. A current step ends by itself."""
        self._tables = frozenset()
        for loop in self.loops:
            loop.stop(0)
