"""Fault 36: coroutines past max_runtime, which clean up."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict

from toc import TaskStatus
from toc.worker.run.handler_loop import CLEAN_UP_SECONDS

APP = "fault.apps.hostile:center"


def test_a_coroutine_past_max_runtime_is_cancelled_once_and_may_await_its_clean_up(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(36, "a coroutine past max_runtime", "it awaits in finally")
    system = build(topic_max_runtime=1, topic_retries=1)
    daemon = system.start(processes=1, app=APP)
    before = daemon.workers()
    submit = system.client.submit
    clean_up = CLEAN_UP_SECONDS - 2.5
    tidy = [
        submit("test.async", biz_id=n, delay=0.3, attribute={"sleep": 3600, "clean_up": clean_up})
        for n in range(4)
    ]
    system.wait(lambda: not system.pending(tidy), "they have failed", 30)
    assert daemon.workers() == before, "nobody had to be replaced"
    # One that does not end in time takes its process with it, and nobody else.
    endless = submit("test.async", biz_id=9, delay=0.1, attribute={"sleep": 3600, "clean_up": 3600})
    neighbour = submit("test.sync", biz_id=10, delay=0.1, attribute={"sleep": 0.9})
    system.wait(lambda: not system.pending([endless]), "its try has failed", 20)
    system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 20)
    began = {event.job_id: event.at for event in system.history() if event.event == "start"}
    took = [
        (event.at - began[event.job_id]) / 1e9
        for event in system.history()
        if event.event == "end" and event.job_id in tidy
    ]
    line.prove(
        len(took) == 4 and min(took) >= 1 + clean_up,
        f"{len(took)} coroutines cleaned up for {clean_up:g} s, which ended after {min(took):.1f} s or later",
    )
    rows = system.center.store.read([*tidy, endless, neighbour])
    assert all(rows[job_id].last_error == "CancelledError: max_runtime is over" for job_id in tidy)
    assert "max_runtime" in (rows[endless].last_error or "")
    assert rows[neighbour].status == TaskStatus.PROCESSED
    line.judge(system, within=5)


@pytest.mark.slow
def test_a_coroutine_that_runs_alone_may_await_its_clean_up_too(build: Build, verdict: Verdict) -> None:
    line = verdict(36, "a coroutine past max_runtime", "it runs alone")
    system = build(topic_max_runtime=2, topic_retries=4)
    system.start(processes=1, app=APP)
    attribute = {"deed": "exit 1", "deeds": 3, "sleep": 3600, "clean_up": 2}
    job_id = system.client.submit("test.async", biz_id=1, delay=0.3, attribute=attribute)
    system.wait(lambda: not system.pending([job_id]), "its run alone has ended", 30)
    *_, begun, ended = (event for event in system.history() if event.job_id == job_id)
    took = (ended.at - begun.at) / 1e9
    line.prove(ended.outcome == "raise" and took >= 4, f"it was cancelled, and ended after {took:.1f} s")
    row = system.row(job_id)
    assert (row.status, row.last_error) == (TaskStatus.DEAD, "CancelledError: max_runtime is over")
    line.judge(system, within=15, at_most=3, crash_limit=3)
