"""Fault 17: tasks that kill the process that runs them, again and again."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load, tasks

from toc import NewTask

SETTLE_SECONDS = 60
"""How long a neighbour may wait for its own run alone. Each culprit costs its worker process two loads of the
application, which take several seconds where the machine has other things to do."""
IN_FLIGHT = 120
"""How many tasks a process has running, or ended and not yet written, when one of them kills it: a new one
finds hundreds overdue, and those of the topic with coroutines begin all at once."""


@pytest.mark.slow
def test_poison_tasks_end_alone_and_no_neighbour_dies_of_them(build: Build, verdict: Verdict) -> None:
    """Six all at once amid a thousand, then one after the other."""
    line = verdict(17, "tasks that kill their process", "6 of 1,000, all due in one second, and 3 more")
    system = build()
    daemon = system.start(processes=2)
    poison = [NewTask(topic, n, 1.5, attribute={"die": 99}) for n, topic in enumerate(TOPICS * 2)]
    poison_ids = system.client.submit_many(poison)
    system.client.submit_many(tasks(1000, ahead=(1.0, 2.0), first=100, fail=0.1))
    system.wait(lambda: not system.pending(poison_ids), "the poison is dead", 90)
    with Load(system.client, rate=60, ahead=(0.2, 1.0)):
        for n, topic in enumerate(TOPICS):
            poison_ids.append(system.client.submit(topic, biz_id=n, delay=0.2, attribute={"die": 99}))
            system.wait(lambda: not system.pending(poison_ids), "the poison is dead", 90)
    died, alone = len(daemon.events("worker_died")), len(daemon.events("task_quarantined"))
    line.prove(died >= 3, f"{died} processes died, {alone} tasks ran alone")
    assert all("alone" in (system.row(job_id).last_error or "") for job_id in poison_ids)
    judged = line.judge(
        system, within=SETTLE_SECONDS, wait=SETTLE_SECONDS + 30, at_most=IN_FLIGHT * died, crash_limit=3
    )
    assert judged.counts["dead"] == len(poison_ids)
