"""Fault 15: handlers that run past prepare_timeout, and handlers that never end."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

from toc import NewTask, TaskStatus

PREPARE_TIMEOUT = 3
LONG = 5 * PREPARE_TIMEOUT


@pytest.mark.slow
def test_handlers_five_times_as_long_as_prepare_timeout_are_kept_alive_and_not_doubled(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(15, "handler past prepare_timeout", "5 times as long, on threads and coroutines")
    system = build(topic_prepare_timeout=PREPARE_TIMEOUT)
    # Each host takes every slot, as it knows of no other: it would take over what the other one let expire.
    for host in ("host-a", "host-b"):
        system.start(host, processes=1)
    long_ones = system.client.submit_many(
        [NewTask("test.async", n, 0.5, attribute={"sleep": LONG}) for n in range(40)]
        + [NewTask("test.sync", n, 0.5, attribute={"sleep": LONG}) for n in range(2)]  # of 3 threads
    )
    with Load(system.client, rate=30):
        system.wait(lambda: len(system.late(long_ones)) == len(long_ones), "all of them run", 10)
        system.wait(lambda: not system.pending(long_ones), "all of them have ended", LONG + 10)
    began, ended = (
        {event.job_id: event.at for event in system.history() if event.event == name}
        for name in ("start", "end")
    )
    shortest = min((ended[job_id] - began[job_id]) / 1e9 for job_id in long_ones)
    line.prove(shortest >= LONG, f"{len(long_ones)} handlers ran {shortest:.1f} s or longer")
    line.judge(system, within=3)


def test_a_handler_that_never_ends_is_a_failed_try_and_its_process_is_recycled(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(15, "handler past prepare_timeout", "never ends: max_runtime")
    system = build(topic_prepare_timeout=PREPARE_TIMEOUT, topic_max_runtime=2, topic_retries=2)
    daemon = system.start(processes=2)
    before = set(daemon.workers())
    submit = system.client.submit
    endless = [
        submit(topic, biz_id=n, delay=0.3, attribute={"sleep": 3600})
        for n, topic in enumerate(("test.sync", "test.async"))
    ]
    neighbours = [submit("test.async", biz_id=n, delay=0.3, attribute={"sleep": 1}) for n in range(2, 22)]
    with Load(system.client, rate=30):
        system.wait(lambda: not system.pending([*endless, *neighbours]), "all have ended", 25)
    replaced = system.wait(lambda: before - set(daemon.workers()), "a process was replaced", 30)
    stuck = daemon.log.read_text().count("handler_stuck")
    line.prove(stuck, f"{stuck} stuck threads logged, {len(replaced)} of 2 processes were replaced")
    rows = system.center.store.read([*endless, *neighbours])
    assert all(rows[job_id].status == TaskStatus.DEAD for job_id in endless)
    assert all("max_runtime" in (rows[job_id].last_error or "") for job_id in endless[:1])
    assert all((rows[job_id].attempts, rows[job_id].crashes) == (0, 0) for job_id in neighbours)
    line.judge(system, within=5)
