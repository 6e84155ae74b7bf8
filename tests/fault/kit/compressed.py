"""A scheduler for which a year passes in less than a minute: ``-m fault.kit.compressed BEGIN YEAR SKEW``.

BEGIN is when the year begins on the machine's clock, YEAR how many seconds it takes there, SKEW how many
seconds this process is ahead of that. Everything of the scheduler but the clock is the real one, over all
tables. Prints "ready", works until it is killed, and dies with whoever started it.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime

from toc import TimeoutCenter
from toc.maintenance.scheduler import Scheduler
from toc.maintenance.sweep import Sweep
from toc.model import schedule
from toc.model.clock import Clock, to_ms

NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC)
SECONDS_OF_YEAR = 365 * 86_400


class Compressed(Clock):
    def __init__(self, begin: float, year: float, skew: float) -> None:
        self.begin, self.factor, self.skew = begin, SECONDS_OF_YEAR / year, skew

    def time(self) -> float:
        return to_ms(NEW_YEAR) / 1000 + (time.time() - self.begin + self.skew) * self.factor

    def now_ms(self) -> int:
        return int(self.time() * 1000)

    def monotonic(self) -> float:
        return time.monotonic() * self.factor


def main() -> None:
    begin, year, skew = map(float, sys.argv[1:4])
    clock = Compressed(begin, year, skew)
    schedule.LEAD_MS = 12 * 3_600_000  # as much longer as this year is shorter, or nothing is ever ahead
    center = TimeoutCenter(clock=clock)
    store, catalog = center.store, center.catalog
    catalog.refresh()
    schedulers = []
    for tables in store.tables_of_server():
        schedulers.append(Scheduler(store, catalog, Sweep(store, center.queues, catalog, clock)))
        schedulers[-1].add(tables)
    print("ready", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        seconds = min(scheduler.run_once() for scheduler in schedulers)
        time.sleep(min(seconds / clock.factor, 0.05))


if __name__ == "__main__":
    main()
