"""How worker processes treat handlers that take long, crash or never end, and how they leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.hands import Pair
from harness.system import System

from toc import TaskStatus
from toc.coordination.coordinator import SlotState
from toc.coordination.operator import Operator


def test_a_second_sigterm_gives_back_what_runs_at_once(system: System) -> None:
    system.create_topics()
    daemon = system.start(processes=1)
    job_id = system.center.submit("test.sync", biz_id=1, delay=0.1, attribute={"sleep": 20})
    system.wait(lambda: bool(system.history()), "it has started", 5)
    daemon.terminate()
    system.wait(lambda: "daemon_stopping" in daemon.log.read_text(), "it is stopping", 5)
    daemon.terminate()
    daemon.process.wait(60)
    row = system.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    slot = system.center.catalog.get("test.sync").slot(row.slot_crc)
    peek = system.center.queues.peek([slot])[slot]
    assert not isinstance(peek, Exception)
    assert (peek.store, peek.prepared) == (1, 0)


def test_an_idle_daemon_costs_next_to_no_cpu(cluster: System) -> None:
    cluster.create_topics(slots=256)
    daemon = cluster.start(processes=2)
    center = cluster.center
    job_id = center.submit("test.sync", biz_id=1, delay=3)  # until then the first sweep has ended
    cluster.wait(lambda: cluster.row(job_id).status == TaskStatus.PROCESSED, "it has run", 10)
    settings = cluster.settings
    with Operator(settings.zookeeper or "", cluster=settings.cluster) as operator:
        cluster.wait(
            lambda: {row.state for row in operator.slots()} == {SlotState.OWNED}, "all are claimed", 20
        )
    pids = [daemon.process.pid, *daemon.workers()]
    before, began = sum(map(_cpu_seconds, pids)), time.monotonic()
    time.sleep(3)  # what is measured
    share = (sum(map(_cpu_seconds, pids)) - before) / (time.monotonic() - began)
    assert share < 0.1, f"{share} of a core"


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_who_finds_that_a_process_must_be_replaced_does_not_mind_a_main_thread_that_is_busy(
    hands: Pair,
) -> None:
    """It has not read its wake-ups for long."""
    worker, _ = hands
    for _ in range(10_000):  # more than it holds
        worker.worker._bell()
    worker.worker._recycle("as the test wants")
