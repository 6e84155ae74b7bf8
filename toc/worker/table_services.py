"""The services of a worker process for its tables: sweep, purge, give up former slots, purge the audit."""

from __future__ import annotations

from collections.abc import Collection

from toc.index.queues import Queues
from toc.maintenance.audit_retention import AuditRetention
from toc.maintenance.former_slots import FormerSlots
from toc.maintenance.retention import Retention
from toc.maintenance.sweep import Sweep
from toc.maintenance.sweeper import Sweeper, Sweepers
from toc.sdk.client import TimeoutCenter
from toc.worker.loop import Loop, Wake
from toc.worker.stages.inbox import Pressure


class TableServices:
    """The loops over tables: one per database server that sweeps, one that purges, one for former slots,
    one for the audit."""

    def __init__(self, center: TimeoutCenter, queues: Queues, pressure: Pressure) -> None:
        store, catalog, clock = center.store, center.catalog, center.clock
        sweep, layout = Sweep(store, queues, catalog, clock), store.tables_of_server()
        wakes = [Wake() for _ in layout]
        self.sweepers = Sweepers(layout, [Sweeper(sweep, wake, lambda: pressure.crowded) for wake in wakes])
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
        ]

    def add(self, tables: Collection[int]) -> None:
        """Serve these tables from now on."""
        self.sweepers.add(tables)
        self._retention.add(tables)
        self._former_slots.add(tables)
        self._audit_retention.add(tables)

    def remove(self, tables: Collection[int]) -> None:
        """Stop serving these tables: another worker has them."""
        self.sweepers.remove(tables)
        self._retention.remove(tables)
        self._former_slots.remove(tables)
        self._audit_retention.remove(tables)

    def end(self) -> None:
        """Begin no further step. A current one ends by itself."""
        for loop in self.loops:
            loop.stop(0)
