"""Fault 12: ZooKeeper is out of reach for minutes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load
from fault.kit.owners import hosts_by_slot, owners, shared
from fault.kit.table import lateness
from harness.system import TOPICS as ALL_TOPICS

from benchmarks.local import RedisServer, ZooKeeper
from toc.coordination.operator import Operator

SLOTS = 8
TABLES = 8
RESTARTED = 3.0
"""Seconds by which a task may be late whose process ends: until its successor is there."""
UNWRITTEN = 15
"""How many tasks a process may run, or have run and not written, as it is killed."""


@pytest.mark.parametrize(
    ("how", "seconds"),
    [
        pytest.param("killed", 20, id="killed, 20 s", marks=pytest.mark.slow),
        pytest.param("hangs", 12, id="hangs, 12 s", marks=pytest.mark.slow),
        pytest.param("killed", 600, id="killed, 10 min", marks=[pytest.mark.chaos, pytest.mark.timeout(900)]),
    ],
)
def test_without_zookeeper_lateness_is_what_it_was_and_every_slot_keeps_its_owner(
    build: Build,
    clean_redis: RedisServer,
    launch: Callable[..., ZooKeeper],
    verdict: Verdict,
    request: pytest.FixtureRequest,
    how: str,
    seconds: int,
) -> None:
    line = verdict(12, "ZooKeeper unreachable", request.node.callspec.id)
    keeper = launch(ZooKeeper)
    system = build(clean_redis.url, zookeeper=keeper.url, cluster="fault", session_timeout=2, slots=SLOTS)
    daemons = [system.start(host, processes=1) for host in ("host-a", "host-b")]
    with Operator(keeper.url, cluster="fault") as operator:
        system.wait(lambda: shared(operator) == {"host-a", "host-b"}, "each host has its slots", 20)
    with Load(system.client, rate=100, ahead=(0.2, 1.0), fail=0.0) as load:
        system.wait(lambda: len(load.job_ids) > 300, "the load runs", 20)
        before = time.time()
        with system.recorder.fault("zk_down"):
            if how == "killed":
                keeper.kill()
            else:
                keeper.pause()
            time.sleep(seconds)
            after = time.time()
            keeper.resume()
            keeper.start()  # does nothing when it runs
        count = len(load.job_ids)
        system.wait(lambda: len(load.job_ids) > count + 100, "the load goes on", 20)
    away = sum(daemon.log.read_text().count("zookeeper_suspended") for daemon in daemons)
    usual = lateness(system, before - 2, before)
    without = lateness(system, before, after)
    line.prove(
        away >= len(daemons),
        f"{away} sessions suspended; lateness p50 {without.p50:.0f} ms, p99 {without.p99:.0f} ms, before "
        f"{usual.p50:.0f} and {usual.p99:.0f} ms",
    )
    assert without.p50 < usual.p50 + 50
    assert without.p99 < usual.p99 + 250
    kept, amount = hosts_by_slot(system, daemons, before, after), len(TOPICS) * SLOTS
    assert len(kept) == amount, "a slot whose tasks nobody ran"
    assert all(len(hosts) == 1 for hosts in kept.values()), f"slots changed hands: {kept}"
    line.prove(
        len(set().union(*kept.values())) == 2, f"each of {amount} slots was served by one of two hosts"
    )
    assert {daemon.process.poll() for daemon in daemons} == {None}
    assert not load.errors
    line.judge(system, within=3)


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        pytest.param("killed", "one", id="killed, kill -9 of one of two processes", marks=pytest.mark.slow),
        pytest.param("killed", "all", id="killed, kill -9 of all processes", marks=pytest.mark.slow),
        pytest.param("killed", "recycled", id="killed, all processes are recycled", marks=pytest.mark.slow),
        pytest.param("hangs", "one", id="hangs, kill -9 of one of two processes", marks=pytest.mark.slow),
    ],
)
def test_slots_of_a_process_that_ends_without_zookeeper_are_served_by_its_host(
    build: Build,
    clean_redis: RedisServer,
    launch: Callable[..., ZooKeeper],
    verdict: Verdict,
    request: pytest.FixtureRequest,
    how: str,
    ends: str,
) -> None:
    line = verdict(12, "ZooKeeper unreachable, processes end", request.node.callspec.id)
    keeper = launch(ZooKeeper)
    system = build(
        clean_redis.url, zookeeper=keeper.url, cluster="fault", session_timeout=2, slots=SLOTS, tables=TABLES
    )
    daemon, other = system.start("host-a", processes=2), system.start("host-b", processes=1)
    with Operator(keeper.url, cluster="fault") as operator:
        system.wait(lambda: shared(operator) == {"host-a", "host-b"}, "each host has its slots", 20)
    first = daemon.workers()
    victims = first[:1] if ends == "one" else first
    with Load(system.client, rate=60, ahead=(0.2, 1.0), fail=0.0) as load:
        system.wait(lambda: len(load.job_ids) > 60, "the load runs", 20)
        with system.recorder.fault("zk_down"):
            if how == "killed":
                keeper.kill()
            else:
                keeper.pause()
            system.wait(
                lambda: all(each.events("zookeeper_suspended") for each in (daemon, other)), "away", 20
            )
            began = time.time()
            if ends == "recycled":
                for number, pid in enumerate(victims, start=3):
                    os.kill(pid, signal.SIGTERM)
                    system.wait(lambda: len(daemon.events("worker_ready")) == number, "its successor", 20)  # noqa: B023
            else:
                with system.recorder.fault("kill", pids=victims):
                    for pid in victims:
                        os.kill(pid, signal.SIGKILL)
                amount = 2 + len(victims)
                system.wait(lambda: len(daemon.events("worker_ready")) == amount, "the successors", 20)
            ready, count = time.time(), len(load.job_ids)
            system.wait(lambda: len(load.job_ids) > count + 120, "the load goes on", 20)
            system.wait(
                lambda: (
                    len(hosts_by_slot(system, [daemon, other], ready, time.time())) == len(TOPICS) * SLOTS
                ),
                "tasks of every slot have run",
                20,
            )
            ended = time.time()
            due = list(load.job_ids)
            system.wait(lambda: not system.pending(due), "all have run, without ZooKeeper", 20)
            keeper.resume()
            keeper.start()  # does nothing when it runs
        with Operator(keeper.url, cluster="fault") as operator:
            system.wait(lambda: _all_owned(operator), "each slot has one owner, each process slots", 30)
        count = len(load.job_ids)
        system.wait(lambda: len(load.job_ids) > count + 60, "the load goes on", 20)
    without = lateness(system, began, ended)
    line.prove(
        not set(victims) & set(daemon.workers()),
        f"{len(victims)} of 2 processes ended and were replaced in {ready - began:.1f} s; the most that "
        f"a task was late is {without.most / 1e3:.1f} s, p50 {without.p50:.0f} ms",
    )
    print(line.proof)
    assert without.most / 1e3 < RESTARTED + line.slack
    kept = hosts_by_slot(system, [daemon, other], ready, ended)
    assert all(len(hosts) == 1 for hosts in kept.values()), f"slots changed hands: {kept}"
    assert not load.errors
    line.judge(system, within=3, at_most=0 if ends == "recycled" else UNWRITTEN * len(victims))


def _all_owned(operator: Operator) -> bool:
    """Whether every slot and table has the owner that it should have; each of three processes has some."""
    owned, workers = owners(operator), {each.member.worker_id for each in operator.workers()}
    whole = len(owned) == len(ALL_TOPICS) * SLOTS + TABLES
    return whole and len(workers) == 3 and set(owned.values()) == workers
