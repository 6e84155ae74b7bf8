"""Dead tasks while everybody is at them: deaths, redrives, purges and sweeps at the same time."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable

from harness.system import System, buried

from toc import NewTask, TaskStatus
from toc.maintenance.sweep import Sweep, sweep_all
from toc.operate import admin, bulk
from toc.store.select import Selection

DEAD = Selection(TaskStatus.DEAD)
SECONDS = 8
PACE = 0.02
"""Seconds between two steps of a loop: four that never rest leave the daemon little of the processor."""


class Loops:
    """Threads that do the same again and again until they are stopped; the first error is raised then."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, step: Callable[[], object]) -> None:
        """Do this until ``stop``."""

        def run() -> None:
            try:
                while not self._stop.wait(PACE):
                    step()
            except BaseException as exc:
                self._errors.append(exc)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def stop(self) -> None:
        """End all and raise what went wrong."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def test_no_task_is_lost_or_revived_while_tasks_die_and_are_redriven_purged_and_swept(system: System) -> None:
    system.create_topics(retries=1, slots=4)
    daemon = system.start(processes=2)
    center, store = system.center, system.center.store
    sweep = Sweep(store, center.queues, center.catalog, center.clock)
    tables = [table for part in store.tables_of_server() for table in part]
    dice = random.Random(20)
    submitted: list[int] = []
    purged: dict[int, int] = {}
    redriven = 0

    def submit() -> None:
        submitted.extend(
            center.submit_many([NewTask("test.doomed", dice.randrange(500), 0.05) for _ in range(20)])
        )
        time.sleep(0.1)

    def redrive() -> None:
        nonlocal redriven
        some = [job_id for job_id in store.selections.ids(DEAD) if dice.random() < 0.3]
        redriven += admin.redrive(
            store, center.queues, store.topics.list(), some, now_ms=center.clock.now_ms()
        ).tasks

    def purge() -> None:
        some = [job_id for job_id in store.selections.ids(DEAD) if dice.random() < 0.1]
        for _ in bulk.purge_dead(center, some):
            at = time.time_ns()
        gone = set(some) - set(store.read(some))
        purged.update(dict.fromkeys(gone, at if some else 0))

    loops = Loops()
    for step in (submit, redrive, purge, lambda: sweep_all(sweep, tables)):
        loops.start(step)
    began = time.monotonic()

    def enough() -> bool:
        return time.monotonic() - began > SECONDS and len(purged) > 20 and redriven > 100

    try:
        system.wait(enough, "the purge and the redrive were at work", SECONDS)
    finally:
        loops.stop()
    left = [job_id for job_id in submitted if job_id not in purged]
    system.wait(
        lambda: {row.status for row in store.read(left).values()} == {TaskStatus.DEAD}, "all is dead", 20
    )
    assert set(store.read(left)) == set(left), "lost"
    assert not store.read(purged), "revived"
    late = [event for event in system.history() if event.event == "start" and event.job_id in purged]
    assert not [event for event in late if event.at > purged[event.job_id]], "run after it was purged"
    # A sweep may have read a row just before it died and was purged: its entry is dropped, not run.
    dropped = [json.loads(line) for line in daemon.log.read_text().splitlines() if "orphan_dropped" in line]
    assert {line["job_id"] for line in dropped} <= set(purged)

    sweep_all(sweep, tables)
    slots = center.catalog.get("test.doomed").slots()

    def entries() -> list[int]:
        return sorted(buried(center, slots))

    system.wait(lambda: entries() == sorted(left), "what is dead, and nothing else, is in the DeadQueues", 5)
