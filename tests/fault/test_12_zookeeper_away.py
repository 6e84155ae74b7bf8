"""Fault 12: ZooKeeper is out of reach for minutes."""

from __future__ import annotations

import os
import signal
import time

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load
from fault.kit.owners import hosts_by_slot, operator_of, owners, wait_for_shares
from harness.system import TOPICS as ALL_TOPICS

from benchmarks.local import ZooKeeper
from toc.coordination.operator import Operator

SLOTS = TABLES = 8
RATE = 60
RESTARTED_MS = 3000
"""By which a task may be late whose process ends: until its successor is there."""
UNWRITTEN = 15
"""How many tasks a process may run, or have run and not written, as it is killed."""


@pytest.mark.parametrize(
    ("how", "ends", "seconds"),
    [
        pytest.param("killed", "none ends", 20, marks=pytest.mark.slow),
        pytest.param("hangs", "none ends", 12, marks=pytest.mark.slow),
        pytest.param("killed", "none ends", 600, marks=[pytest.mark.chaos, pytest.mark.timeout(900)]),
        pytest.param("hangs", "one is killed", 2, marks=pytest.mark.slow),
        pytest.param("killed", "all are killed", 2, marks=pytest.mark.slow),
        pytest.param("killed", "all are recycled", 2, marks=pytest.mark.slow),
    ],
)
def test_without_zookeeper_every_slot_keeps_its_host_and_lateness_is_what_it_was(
    build: Build, launch: Launch, verdict: Verdict, how: str, ends: str, seconds: int
) -> None:
    """What a process had that ends meanwhile, another of its host takes up."""
    line = verdict(12, "ZooKeeper unreachable", f"{how}, {seconds} s; of two processes of a host {ends}")
    keeper = launch(ZooKeeper)
    system = build(zookeeper=keeper.url, cluster="fault", session_timeout=2, slots=SLOTS, tables=TABLES)
    daemon, other = daemons = [system.start("host-a", processes=2), system.start("host-b", processes=1)]
    wait_for_shares(system, "host-a", "host-b")
    first = daemon.workers()
    victims = {"none ends": [], "one is killed": first[:1]}.get(ends, first)
    with Load(system.client, rate=RATE, ahead=(0.2, 1.0), fail=0.0) as load:
        load.more(3 * RATE)
        before = time.time()
        with system.recorder.fault("zk_down"):
            (keeper.kill if how == "killed" else keeper.pause)()
            system.wait(lambda: all(each.events("zookeeper_suspended") for each in daemons), "away", 20)
            if ends == "all are recycled":
                for number, pid in enumerate(victims, start=3):
                    os.kill(pid, signal.SIGTERM)
                    system.wait(lambda: len(daemon.events("worker_ready")) == number, "its successor", 20)  # noqa: B023
            else:
                with system.recorder.fault("kill", pids=victims):
                    for pid in victims:
                        os.kill(pid, signal.SIGKILL)
                amount = 2 + len(victims)
                system.wait(lambda: len(daemon.events("worker_ready")) == amount, "the successors", 20)
            ready = time.time()
            load.more(RATE * seconds)
            every = len(TOPICS) * SLOTS
            system.wait(
                lambda: len(hosts_by_slot(system, daemons, ready, time.time())) == every, "all slots", 20
            )
            ended, due = time.time(), list(load.job_ids)
            system.wait(lambda: not system.pending(due), "all have run, without ZooKeeper", 20)
            keeper.resume()
            keeper.start()  # does nothing when it runs
        with operator_of(system) as operator:
            system.wait(lambda: _all_owned(operator), "each slot has one owner, each process slots", 30)
        load.more(RATE)
    usual, without = system.late(since=before - 2, before=before), system.late(since=before, before=ended)
    line.prove(
        not set(victims) & set(daemon.workers()), f"both sessions suspended; {without}, before {usual}"
    )
    if victims:
        line.on_time(without, most=RESTARTED_MS)
    else:
        line.on_time(without, p50=usual.p50 + 50, p99=usual.p99 + 250)
    kept = hosts_by_slot(system, daemons, ready, ended)
    assert all(len(hosts) == 1 for hosts in kept.values()), f"slots changed hands: {kept}"
    assert (daemon.process.poll(), other.process.poll()) == (None, None)
    assert not load.errors
    line.judge(system, within=3, at_most=0 if "recycled" in ends else UNWRITTEN * len(victims))


def _all_owned(operator: Operator) -> bool:
    """Whether every slot and table has the owner that it should have; each of three processes has some."""
    owned, workers = owners(operator), {each.member.worker_id for each in operator.workers()}
    whole = len(owned) == len(ALL_TOPICS) * SLOTS + TABLES
    return whole and len(workers) == 3 and set(owned.values()) == workers
