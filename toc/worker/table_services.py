"""The services of a worker process for its tables: sweep, schedules, purge, former slots, purge of audit."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial

from toc.index.queues import Queues
from toc.maintenance.audit_retention import AuditRetention
from toc.maintenance.former_slots import FormerSlots
from toc.maintenance.retention import Retention
from toc.maintenance.scheduler import Scheduler
from toc.maintenance.sweep import Sweep
from toc.maintenance.sweeper import Sweeper, Sweepers
from toc.model.errors import TocError
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.worker.loop import Loop, Wake
from toc.worker.stages.inbox import Pressure

log = get_logger(__name__)

DECLARE_AGAIN_SECONDS = 5.0
"""When the schedules that the application declares are compared again, if a server did not answer."""


class TableServices:
    """The loops over tables: per database server one that sweeps and one for schedules; one that purges, one
    for former slots, one for the audit. One more makes the schedules that the application declares."""

    def __init__(self, center: TimeoutCenter, queues: Queues, pressure: Pressure) -> None:
        store, catalog, clock = center.store, center.catalog, center.clock
        sweep, layout = Sweep(store, queues, catalog, clock), store.tables_of_server()
        wakes = [Wake() for _ in layout]
        self.sweepers = Sweepers(layout, [Sweeper(sweep, wake, lambda: pressure.crowded) for wake in wakes])
        schedule_wakes = [Wake() for _ in layout]
        self._schedulers = [
            Scheduler(store, catalog, sweep, wake, lambda: pressure.crowded) for wake in schedule_wakes
        ]
        self._layout = list(map(frozenset, layout))
        self._retention = Retention(store, catalog, clock)
        self._former_slots = FormerSlots(store, queues, catalog, clock)
        self._audit_retention = AuditRetention(store, clock, center.settings.audit_retention)
        self.loops = [
            Loop("retention", self._retention.run_once),
            Loop("former-slots", self._former_slots.run_once),
            Loop("audit-retention", self._audit_retention.run_once),
            *(
                Loop(f"sweep-{number}", sweeper.run_once, wake)
                for number, (sweeper, wake) in enumerate(zip(self.sweepers.sweepers, wakes, strict=True))
            ),
            *(
                Loop(f"schedules-{number}", scheduler.run_once, wake)
                for number, (scheduler, wake) in enumerate(zip(self._schedulers, schedule_wakes, strict=True))
            ),
            Loop("declared-schedules", partial(declare, center)),
        ]

    def add(self, tables: Collection[int]) -> None:
        """Serve these tables from now on."""
        self.sweepers.add(tables)
        for scheduler, own in zip(self._schedulers, self._layout, strict=True):
            scheduler.add(own.intersection(tables))
        self._retention.add(tables)
        self._former_slots.add(tables)
        self._audit_retention.add(tables)

    def remove(self, tables: Collection[int]) -> None:
        """Stop serving these tables: another worker has them."""
        self.sweepers.remove(tables)
        for scheduler in self._schedulers:
            scheduler.remove(tables)
        self._retention.remove(tables)
        self._former_slots.remove(tables)
        self._audit_retention.remove(tables)

    def end(self) -> None:
        """Begin no further step. A current one ends by itself."""
        for loop in self.loops:
            loop.stop(0)


def declare(center: TimeoutCenter) -> float:
    """Create or change the schedules that the application declares, once: what operators change later stands
    until another worker starts. Returns the seconds until the next time.

    Servers that do not answer hold up nothing but the schedules that belong to them.
    """
    if not center.schedules.declared:
        return threading.TIMEOUT_MAX
    try:
        failed = center.schedules.reconcile()
    except TocError as exc:
        log.warning("schedules_not_declared", error=str(exc))
        return DECLARE_AGAIN_SECONDS
    for name, error in failed.items():
        log.warning("schedules_not_declared", schedule=name, error=str(error))
    return DECLARE_AGAIN_SECONDS if failed else threading.TIMEOUT_MAX
