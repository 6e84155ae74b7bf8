"""Fault 17: tasks that kill the process that runs them, again and again."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load, tasks
from fault.kit.table import Line
from harness.system import DaemonProcess, System

from benchmarks.local import RedisServer
from toc import NewTask, TaskStatus

SETTLE_SECONDS = 60
"""How long a neighbour may wait for its own run alone. Each culprit costs its worker process two loads of the
application, which take several seconds where the machine has other things to do."""
IN_FLIGHT = 120
"""How many tasks a process has running, or ended and not yet written, when one of them kills it: a new one
finds hundreds overdue, and those of the topic with coroutines begin all at once."""


@pytest.mark.slow
def test_poison_tasks_end_alone_and_no_neighbour_dies_of_them(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(17, "tasks that kill their process", "6 of 1,000, all due in one second")
    system = build(clean_redis.url)
    daemon = system.start(processes=2)
    poison = [NewTask(topic, n, 1.5, attribute={"die": 99}) for n, topic in enumerate(TOPICS * 2)]
    poison_ids = system.client.submit_many(poison)
    system.client.submit_many(tasks(1000, ahead=(1.0, 2.0), first=100, fail=0.1))
    wait_until_dead(system, poison_ids)
    judge(line, system, daemon, poison_ids)


@pytest.mark.slow
def test_fresh_work_goes_on_while_poison_keeps_coming(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(17, "tasks that kill their process", "one after the other beside 60 tasks a second")
    system = build(clean_redis.url)
    daemon = system.start(processes=2)
    poison_ids: list[int] = []
    with Load(system.client, rate=60, ahead=(0.2, 1.0)):
        for n in range(4):
            poison_ids.append(system.client.submit(TOPICS[n % 3], biz_id=n, delay=0.2, attribute={"die": 99}))
            wait_until_dead(system, poison_ids)
    judge(line, system, daemon, poison_ids)


def wait_until_dead(system: System, poison_ids: list[int]) -> None:
    def pending() -> list[int]:
        rows = system.center.store.read(poison_ids)
        return [job_id for job_id, row in rows.items() if row.status != TaskStatus.DEAD]

    system.wait(lambda: not pending(), "the poison is dead", 90)


def judge(line: Line, system: System, daemon: DaemonProcess, poison_ids: list[int]) -> None:
    """What killed its process is dead, of that; whoever was beside it is not."""
    text = daemon.log.read_text()
    died = text.count("worker_died")
    line.prove(died >= 3, f"{died} processes died, {text.count('task_quarantined')} tasks ran alone")
    rows = system.center.store.read(poison_ids)
    assert all("alone" in (row.last_error or "") for row in rows.values())
    verdict = line.judge(
        system, within=SETTLE_SECONDS, wait=SETTLE_SECONDS + 30, at_most=IN_FLIGHT * died, crash_limit=3
    )
    assert verdict.counts["dead"] == len(poison_ids)
