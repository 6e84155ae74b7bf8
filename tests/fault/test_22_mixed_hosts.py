"""Fault 22: a rolling upgrade: hosts that do not know every topic, a topic that none knows for a while."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.kit.owners import wait_for_shares
from harness.system import System

from toc import NewTask, TaskStatus
from toc.model.task import TaskRow


@pytest.mark.slow
def test_what_a_host_has_no_handler_for_waits_uncharged_for_one_that_has(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(22, "rolling upgrade, unknown handlers", "an older host beside a newer one, then alone")
    system = build(hosts=True)
    older = system.start("host-a", processes=1, app="fault.apps.older:center")
    newer = system.start("host-b", processes=1)
    older_pids = set(older.workers())
    new_ones = system.client.submit_many([NewTask("test.batch", n, 2 + n / 60) for n in range(900)])
    with Load(system.client, rate=60, ahead=(0.2, 1.0), topics=("test.sync", "test.async")) as load:
        system.wait(lambda: len(system.late(new_ones)) > 100, "the newer host runs the new topic", 30)
        with system.recorder.fault("stop", note="the newer host"):
            newer.terminate()
            assert newer.process.wait(60) == 0, system.logs()
            left = len(system.late(new_ones))
            wait_for_shares(system, "host-a")
            system.wait(lambda: len(_overdue(system, new_ones)) > 100, "many are overdue", 30)
            assert len(system.late(new_ones)) == left
            waiting = _uncharged(system, new_ones)
            overdue = _overdue(system, new_ones)
            system.start("host-b", processes=1)  # upgraded
        system.wait(lambda: len(system.late(new_ones)) == len(new_ones), "they all run", 40)
    on_older = {event.job_id for event in system.history() if event.pid in older_pids}
    line.prove(
        len(on_older) > 50 and len(waiting) == len(new_ones) - left and len(overdue) > 100,
        f"{len(on_older)} tasks ran on the older host, none of the new topic; {len(overdue)} of it were due "
        "and waited uncharged",
    )
    assert not on_older & set(new_ones)
    assert not load.errors
    judged = line.judge(system, within=10)
    assert not judged.duplicates


def _overdue(system: System, job_ids: list[int]) -> list[TaskRow]:
    """Those of the uncharged that are due for a second and more."""
    now = system.center.clock.now_ms()
    return [row for row in _uncharged(system, job_ids) if row.action_time < now - 1000]


def _uncharged(system: System, job_ids: list[int]) -> list[TaskRow]:
    """Those that are pending and of which no try and no crash has been charged."""
    rows = system.center.store.read(job_ids).values()
    return [r for r in rows if r.status == TaskStatus.PENDING and not r.attempts and not r.crashes]
