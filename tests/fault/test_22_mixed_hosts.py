"""Fault 22: a rolling upgrade: hosts that do not know every topic, a topic that none knows for a while."""

from __future__ import annotations

import time

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness.system import System

from benchmarks.local import RedisServer, ZooKeeper
from toc import NewTask, TaskStatus
from toc.model.task import TaskRow


@pytest.mark.slow
def test_what_a_host_has_no_handler_for_waits_uncharged_for_one_that_has(
    build: Build, clean_redis: RedisServer, zookeeper: ZooKeeper, zookeeper_root: str, verdict: Verdict
) -> None:
    line = verdict(22, "rolling upgrade, unknown handlers", "an older host beside a newer one, then alone")
    system = build(clean_redis.url, zookeeper=zookeeper.url, cluster=zookeeper_root, session_timeout=2)
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
            time.sleep(3)  # the older host has all slots that it can serve
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


@pytest.mark.slow
def test_hosts_restarted_one_after_the_other_into_a_version_that_knows_more_charge_nothing(
    build: Build, clean_redis: RedisServer, zookeeper: ZooKeeper, zookeeper_root: str, verdict: Verdict
) -> None:
    line = verdict(22, "rolling upgrade, unknown handlers", "a topic that no host knows, then one, then both")
    system = build(clean_redis.url, zookeeper=zookeeper.url, cluster=zookeeper_root, session_timeout=2)
    older = "fault.apps.older:center"
    hosts = {host: system.start(host, processes=1, app=older) for host in ("host-a", "host-b")}
    new_ones = system.client.submit_many([NewTask("test.batch", n, 1 + n / 60) for n in range(600)])
    with Load(system.client, rate=60, ahead=(0.2, 1.0), topics=("test.sync", "test.async")) as load:
        system.wait(lambda: len(_overdue(system, new_ones)) > 100, "tasks of the new topic wait", 60)
        waited = len(_overdue(system, new_ones))
        for host, daemon in hosts.items():
            count = len(load.job_ids)
            system.wait(lambda: len(load.job_ids) > count + 100, "the load goes on", 30)  # noqa: B023
            with system.recorder.fault("stop", note=host):
                daemon.terminate()
                assert daemon.process.wait(60) == 0, system.logs()
                hosts[host] = system.start(host, processes=1)
        system.wait(lambda: len(system.late(new_ones)) == len(new_ones), "they all run", 40)
    line.prove(waited > 100, f"{waited} were due, uncharged, while no host had a handler for them")
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
