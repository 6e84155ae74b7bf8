"""Fault 31: handlers that hold the interpreter: no other thread of their process runs."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

from toc import NewTask, TaskStatus
from toc.worker.guards.silence import SILENT_SECONDS

APP = "fault.apps.hostile:center"


def test_a_process_that_a_handler_holds_is_ended_and_what_it_held_runs_elsewhere(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(31, "a handler holds the interpreter", "once, a call into C")
    max_runtime = 1
    system = build(topic_max_runtime=max_runtime)
    daemon = system.start(processes=2, app=APP)
    # They run beside it, as far as they are in its process.
    released = system.directory / "released"
    waiting = {"until": str(released)}
    beside = system.client.submit_many([NewTask("test.async", n, 0.2, attribute=waiting) for n in range(40)])
    system.wait(lambda: len(system.late(beside)) == len(beside), "they run", 20)
    held = {"deed": "hold the interpreter"}
    job_id = system.client.submit("test.sync", biz_id=0, delay=0.2, attribute=held)
    system.wait(lambda: bool(system.starts(job_id)), "it holds its process", 20)
    with Load(system.client, rate=30) as load:
        system.wait(lambda: daemon.events("worker_killed"), "its process was silent", 40)
        released.touch()
        system.wait(lambda: not system.pending([job_id, *beside]), "all have ended", 40)
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is replaced", 20)
    first, second = system.starts(job_id)
    took = (second.at - first.at) / 1e9
    killed = daemon.events("worker_killed")
    line.prove(
        [event["pid"] for event in killed] == [first.pid],
        f"its process was silent and was killed; it ran again elsewhere after {took:.1f} s",
    )
    line.within(took, max_runtime + SILENT_SECONDS + 10)
    rows = system.center.store.read([job_id, *beside])
    assert all(row.status == TaskStatus.PROCESSED for row in rows.values())
    assert (rows[job_id].attempts, rows[job_id].crashes) == (1, 0) or rows[job_id].crashes == 1
    again = {event.job_id for event in system.history() if event.event == "start" and event.attempt == 2}
    assert again & set(beside), "others were held with it"
    line.on_time(system.late(load.job_ids), p50=1000)  # the other process served
    line.judge(system, within=max_runtime + SILENT_SECONDS + 10, at_most=100)


@pytest.mark.slow
def test_tasks_that_hold_two_processes_at_once_again_and_again_end_alone(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(31, "a handler holds the interpreter", "a call into C and a regular expression, each time")
    max_runtime = 3
    system = build(topic_max_runtime=max_runtime)
    daemon = system.start(processes=2, app=APP)
    with Load(system.client, rate=20) as load:
        poison = [
            system.client.submit(topic, biz_id=n, delay=1.0, attribute={"deed": deed, "deeds": 99})
            for n, (topic, deed) in enumerate(
                [("test.sync", "hold the interpreter"), ("test.async", "backtrack")]
            )
        ]
        system.wait(lambda: not system.pending(poison), "both are dead", 180)
    killed = len(daemon.events("worker_killed"))
    rows = system.center.store.read(poison)
    assert all("while it ran alone" in (row.last_error or "") for row in rows.values())
    late = system.late(load.job_ids)
    line.prove(
        3 <= killed <= 6,
        f"{killed} processes were silent and were killed; others meanwhile: {late}",
    )
    # As many such tasks as processes hold all of them, until each has done so three times.
    limit = 3 * (max_runtime + SILENT_SECONDS + 10)
    assert late[-1] < 1000 * limit
    line.judge(system, within=limit, wait=120, at_most=120 * killed, crash_limit=3)
