"""Fault 12: one member of a ZooKeeper ensemble of three is lost, the leader too."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.kit.table import lateness

from benchmarks.cluster import ZooKeeperEnsemble
from benchmarks.local import RedisServer, ZooKeeper
from toc.coordination.operator import Operator


@pytest.mark.slow
def test_the_loss_of_one_of_three_zookeepers_moves_nothing_and_operators_work_on(
    build: Build, clean_redis: RedisServer, zookeeper: ZooKeeper, tmp_path: Path, verdict: Verdict
) -> None:
    assert zookeeper.running()  # that is: it is to be had on this machine
    line = verdict(12, "ZooKeeper loses a member", "its leader")
    with ZooKeeperEnsemble(tmp_path / "ensemble") as ensemble:
        assert sorted(map(mode, ensemble.nodes)) == ["follower", "follower", "leader"]
        system = build(clean_redis.url, zookeeper=ensemble.url, cluster="fault", session_timeout=4)
        daemons = [system.start(host, processes=1) for host in ("host-a", "host-b")]
        operator = Operator(ensemble.url, cluster="fault", connect_timeout=20)
        with Load(system.client, rate=100, ahead=(0.2, 1.0), fail=0.0) as load:
            system.wait(lambda: len(load.job_ids) > 300, "the load runs", 20)
            with operator:
                owners = {(row.topic, row.number): row.owner for row in operator.slots()}
            before = time.time()
            leader = next(node for node in ensemble.nodes if mode(node) == "leader")
            with system.recorder.fault("zk_down"):
                leader.kill()
                left = [node for node in ensemble.nodes if node is not leader]
                system.wait(lambda: sorted(map(mode, left)) == ["follower", "leader"], "a new leader", 20)
                system.wait(lambda: len(load.job_ids) > 700, "the load goes on", 30)
            after = time.time()
            with operator:
                assert {(row.topic, row.number): row.owner for row in operator.slots()} == owners
                operator.drain("host-b", by="ann")
                began = time.monotonic()
                system.wait(lambda: not drained_owns(operator, "host-b"), "host-b is drained", 20)
                drained_s = time.monotonic() - began
                leader.start()
                system.wait(lambda: mode(leader) == "follower", "the lost one is back", 20)
                operator.undrain("host-b")
                system.wait(lambda: bool(drained_owns(operator, "host-b")), "host-b has slots again", 20)
        suspended = sum(daemon.log.read_text().count("zookeeper_suspended") for daemon in daemons)
        usual, without = lateness(system, before - 2, before), lateness(system, before, after)
        line.prove(
            suspended > 0,
            f"{suspended} sessions suspended, another leader elected; p99 lateness {without.p99:.0f} ms, "
            f"before {usual.p99:.0f} ms; a drain with two members took {drained_s:.1f} s",
        )
        assert without.p99 < usual.p99 + 250
        assert {daemon.process.poll() for daemon in daemons} == {None}
        assert not load.errors
        line.judge(system, within=3)


def drained_owns(operator: Operator, host: str) -> int:
    return sum((row.owner or "").startswith(host) for row in operator.slots())


def mode(node: ZooKeeper) -> str:
    """``leader`` or ``follower``; "" while it serves nobody."""
    try:
        with socket.create_connection(("127.0.0.1", node.port), timeout=2) as connection:
            connection.sendall(b"srvr")
            said = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    except OSError:
        return ""
    found = re.search(r"^Mode: (\w+)", said, re.MULTILINE)
    return found[1] if found else ""
