"""A scheduler for which a year passes in less than a minute: ``-m fault.kit.compressed YEAR SKEW FILE``.

YEAR is how many seconds the year takes on the machine's clock, SKEW how many seconds this process is ahead of
that. FILE holds how many seconds of the year may have passed: a busy machine gets more time. Everything of
the scheduler but the clock is the real one, over all tables. Prints "ready", reads when the year begins,
works until it is killed, and dies with whoever started it.
"""

import os
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from toc import TimeoutCenter
from toc.maintenance.scheduler import Scheduler
from toc.maintenance.sweep import Sweep
from toc.model import schedule_state
from toc.model.clock import Clock, to_ms

NEW_YEAR = datetime(2023, 1, 1, tzinfo=UTC)
SECONDS_OF_YEAR = 365 * 86_400


class Compressed(Clock):
    def __init__(self, begin: float, year: float, skew: float) -> None:
        self.begin, self.factor, self.skew = begin, SECONDS_OF_YEAR / year, skew
        self.most = 0.0
        """It stands still when so many seconds of the year have passed."""

    def time(self) -> float:
        passed = (time.time() - self.begin + self.skew) * self.factor
        return to_ms(NEW_YEAR) / 1000 + min(passed, self.most)

    def now_ms(self) -> int:
        return int(self.time() * 1000)

    def monotonic(self) -> float:
        return time.monotonic() * self.factor


def main() -> None:
    year, skew = map(float, sys.argv[1:3])
    clock = Compressed(time.time(), year, skew)
    schedule_state.LEAD_MS = (
        12 * 3_600_000
    )  # as much longer as this year is shorter, or nothing is ever ahead
    center = TimeoutCenter(clock=clock)
    store, catalog = center.store, center.catalog
    catalog.refresh()
    sweep = Sweep(store, center.queues, catalog, clock)
    schedulers = [
        Scheduler(store, catalog, sweep, partial(frozenset, tables)) for tables in store.tables_of_server()
    ]
    print("ready", flush=True)
    clock.begin = float(sys.stdin.readline())
    parent = os.getppid()
    while os.getppid() == parent:
        clock.most = float(Path(sys.argv[3]).read_text())
        seconds = min(scheduler.run_once() for scheduler in schedulers)
        time.sleep(min(seconds / clock.factor, 0.05))


if __name__ == "__main__":
    main()
