"""Fault 12: ZooKeeper is out of reach for minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load
from fault.kit.owners import hosts_by_slot, shared
from fault.kit.table import lateness

from toc.coordination.operator import Operator
from toc.local.servers import RedisServer, ZooKeeper

SLOTS = 8


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
    with Operator(keeper.url, cluster="fault") as visit:
        system.wait(lambda: shared(visit) == {"host-a", "host-b"}, "each host has its slots", 20)
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
