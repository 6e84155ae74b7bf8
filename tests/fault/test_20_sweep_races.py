"""Fault 20: the sweep meets consume, death, redrive and purge: no second run, no revival, no loss."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks

from benchmarks.local import RedisServer
from toc import NewTask
from toc.model.task import TaskStatus
from toc.operate import admin
from toc.store.tasks.select import Selection


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [60])
def test_sweeps_without_pause_double_nothing_and_revive_nothing(
    build: Build, clean_redis: RedisServer, verdict: Verdict, seconds: int
) -> None:
    line = verdict(20, "sweep meets consume, death, redrive, purge", f"{seconds} s of each without pause")
    system = build(clean_redis.url, topic_retries=2, topic_backoff_base=0.05)
    system.start(processes=2)
    counts: Counter[str] = Counter()
    center, client = system.center, system.client

    def sweep() -> None:
        counts["rows swept"] += admin.refill(center).rows

    def operate() -> None:
        """Dead tasks are redriven or purged, a few of them only looked at."""
        dead = center.store.selections.newest(Selection(TaskStatus.DEAD), None, 50).rows
        for row in dead[10:20]:
            system.recorder.seen(row)
        counts["redriven"] += len(client.redrive([row.job_id for row in dead[:5]]))
        purged = [row.job_id for row in dead[5:10]]
        client.purge_dead(purged)
        counts["purged"] += len(purged)

    def enough() -> bool:
        return counts["rows swept"] > 5_000 and counts["redriven"] >= 5 and counts["purged"] >= 5

    client.submit_many(tasks(1500, ahead=(1.5, seconds), fail=0.3))
    doomed = [NewTask("test.doomed", n, 0.3 + seconds * n / 400) for n in range(400)]
    client.submit_many(doomed)
    with Load(client, rate=100, fail=0.2), _Loops([sweep, sweep, operate]) as loops:
        time.sleep(seconds)
        system.wait(lambda: bool(loops.errors) or enough(), "each has met the others", 60)
    assert not loops.errors, loops.errors
    line.prove(
        enough(),
        ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items())),
    )
    line.judge(system, within=5)


class _Loops:
    """Runs each of these again and again, on a thread of its own, until the block is left."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        self.errors: list[BaseException] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=[step]) for step in steps]

    def __enter__(self) -> _Loops:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, step: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                step()
            except BaseException as exc:
                self.errors.append(exc)
                return
