"""What a worker process does for the tables that it was given: sweep, purge, give former slots up."""

from __future__ import annotations

from collections.abc import Callable, Collection

from toc.index.queues import Queues
from toc.maintenance.former_slots import FormerSlots
from toc.maintenance.retention import Retention
from toc.maintenance.sweep import Sweep
from toc.maintenance.sweeper import Sweepers
from toc.sdk.client import TimeoutCenter
from toc.worker.loop import Loop


class TableServices:
    """The loops over tables: one per database server that sweeps, one that purges, one that narrows.

    ``busy`` tells whether more is due than can be started at once.
    """

    def __init__(self, center: TimeoutCenter, queues: Queues, busy: Callable[[], bool]) -> None:
        store, catalog, clock = center.store, center.catalog, center.clock
        self.sweepers = Sweepers(Sweep(store, queues, catalog, clock), store.tables_of_server())
        self._retention = Retention(store, catalog, clock)
        self._narrowing = FormerSlots(store, queues, catalog, clock)
        self.loops = [
            Loop("retention", self._retention.run_once),
            Loop("narrow", self._narrowing.run_once),
        ]
        for number, sweeper in enumerate(self.sweepers.sweepers):
            loop = Loop(f"sweep-{number}", sweeper.run_once)
            sweeper.wake, sweeper.busy = loop.wake, busy
            self.loops.append(loop)

    def add(self, tables: Collection[int]) -> None:
        """These tables are this worker's from now on."""
        self.sweepers.add(tables)
        self._retention.add(tables)
        self._narrowing.add(tables)

    def remove(self, tables: Collection[int]) -> None:
        """These tables are another's."""
        self.sweepers.remove(tables)
        self._retention.remove(tables)
        self._narrowing.remove(tables)

    def end(self) -> None:
        """Begin no further step. What is under way ends by itself."""
        for loop in self.loops:
            loop.stop(0)
