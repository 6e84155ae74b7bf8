"""Fault 16: tasks that always fail do not hold up fresh ones."""

from __future__ import annotations

import time

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness.system import System

from toc import NewTask

FAILING = 1000
RETRIES = 5
TOLD_APART = 500
"""Milliseconds that p99 may grow by. Were failed tries not set back, thousands of them would be ahead of a
fresh task."""


@pytest.mark.slow
def test_a_thousand_tasks_that_always_fail_leave_fresh_ones_on_time(build: Build, verdict: Verdict) -> None:
    line = verdict(16, "tasks that always fail", f"{FAILING:,}, each {RETRIES} times, beside fresh ones")
    system = build(topic_retries=RETRIES, topic_backoff_base=0.5, topic_backoff_cap=4.0)
    system.start()
    topics = ("test.sync", "test.async", "test.batch")
    with Load(system.client, rate=60, cancel=0, fail=0, ahead=(0.5, 1.0), topics=topics) as load:
        load.more(360)
        quiet = time.time()
        failing = [NewTask("test.doomed", n, 2.0) for n in range(FAILING // 2)]
        failing += [NewTask("test.sync", n, 2.0, attribute={"fail": 31}) for n in range(FAILING // 2)]
        system.client.submit_many(failing)
        began = time.time() + 1.5
        while _failed(system) < FAILING * RETRIES:
            assert time.time() < began + 120, f"{_failed(system):,} tries failed\n{system.logs()}"
            time.sleep(1)  # whoever reads the history takes time from the workers
        ended = time.time()
    line.prove(_failed(system) == FAILING * RETRIES, f"{_failed(system):,} tries failed")
    judged = line.judge(system, within=10)
    assert judged.counts["dead"] == FAILING
    before = system.late(load.job_ids, since=quiet - 4, before=quiet)
    beside = system.late(load.job_ids, since=began, before=ended)
    line.prove(len(beside) > 100, f"fresh ones meanwhile: {beside}; before {before}")
    assert beside.p99 < before.p99 + TOLD_APART, "fresh tasks waited for those that fail"


def _failed(system: System) -> int:
    return sum(event.outcome == "raise" for event in system.history())
