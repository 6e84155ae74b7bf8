"""Fault 20: the sweep meets consume, death, redrive and purge: no second run, no revival, no loss."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks

from toc import NewTask
from toc.model.task import TaskStatus
from toc.operate import admin
from toc.store.tasks.select import Selection

SECONDS = 60


@pytest.mark.slow
def test_sweeps_without_pause_double_nothing_and_revive_nothing(build: Build, verdict: Verdict) -> None:
    line = verdict(20, "sweep meets consume, death, redrive, purge", f"{SECONDS} s of each without pause")
    system = build(topic_retries=2, topic_backoff_base=0.05)
    system.start(processes=2)
    counts: Counter[str] = Counter()
    center, client = system.center, system.client

    def sweep() -> None:
        counts["rows swept"] += admin.refill(center).rows

    def operate() -> None:
        """Dead tasks are redriven or purged, a few of them only looked at."""
        dead = center.store.selections.page(Selection(TaskStatus.DEAD), None, 50, newest=True).rows
        for row in dead[10:20]:
            system.recorder.seen(row)
        counts["redriven"] += len(client.redrive([row.job_id for row in dead[:5]]))
        purged = [row.job_id for row in dead[5:10]]
        client.purge_dead(purged)
        counts["purged"] += len(purged)

    def enough() -> bool:
        return counts["rows swept"] > 5_000 and counts["redriven"] >= 5 and counts["purged"] >= 5

    client.submit_many(tasks(1500, ahead=(1.5, SECONDS), fail=0.3))
    doomed = [NewTask("test.doomed", n, 0.3 + SECONDS * n / 400) for n in range(400)]
    client.submit_many(doomed)
    over = threading.Event()

    def again(step: Callable[[], None]) -> None:
        while not over.is_set():
            step()

    with Load(client, rate=100, fail=0.2), ThreadPoolExecutor(3) as threads:
        running = [threads.submit(again, step) for step in (sweep, sweep, operate)]
        time.sleep(SECONDS)
        system.wait(lambda: any(one.done() for one in running) or enough(), "each has met the others", 60)
        over.set()
        for one in running:
            one.result()
    line.prove(
        enough(),
        ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items())),
    )
    line.judge(system, within=5)
