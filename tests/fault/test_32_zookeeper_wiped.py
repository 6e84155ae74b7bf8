"""Fault 32: what stands in ZooKeeper is deleted, or its disk is wiped and it starts anew."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.kit.owners import hosts_by_slot, operator_of, owners, shared, wait_for_shares
from fault.kit.servers import wipe_zookeeper
from harness import secured
from kazoo.client import KazooClient  # type: ignore[import-untyped]  # kazoo has no type information
from kazoo.exceptions import NoNodeError  # type: ignore[import-untyped]

from benchmarks.local import ZooKeeper
from toc.coordination.operator import Operator

BACK = 10.0
"""Seconds until every daemon has registered and claimed again."""
SESSION = 2
TAKEN_OVER = SESSION + 4.0
"""Seconds until what is due on a dead host runs elsewhere."""


def test_nodes_that_are_deleted_come_back_and_no_task_waits_for_them(
    build: Build, zookeeper: ZooKeeper, zookeeper_root: str, verdict: Verdict
) -> None:
    """Directories, then all of it; and a host that starts right after that takes its share, no more."""
    line = verdict(32, "ZooKeeper's nodes are deleted", "directories, all of it, a host joins")
    system = build(hosts=True, session_timeout=10)
    daemons = [system.start(host, processes=1) for host in ("host-a", "host-b")]
    took: dict[str, float] = {}
    with (
        _onlooker(zookeeper) as onlooker,
        operator_of(system) as operator,
        Load(system.client, rate=60, ahead=(0.2, 1.0), fail=0.0) as load,
    ):
        system.wait(lambda: shared(operator) == {"host-a", "host-b"}, "each host has its slots", 20)
        before, began = owners(operator), time.time()
        for name in ("/workers", "/assignment", ""):
            with system.recorder.fault("other", note=f"{name or 'all'} deleted"):
                deleted = _delete(onlooker, f"/toc/{zookeeper_root}{name}")
                at = time.monotonic()
                system.wait(lambda: _as_before(operator, before), f"{name or 'all'} is there again", 30)
                took[name or "all"] = time.monotonic() - at
            assert deleted > 0
        ended = time.time()
        system.wait(lambda: len(load.job_ids) > 300, "the load went on", 30)
        kept = hosts_by_slot(system, daemons, began, ended)
        assert all(len(hosts) == 1 for hosts in kept.values()), f"slots changed hands: {kept}"
        with system.recorder.fault("other", note="all deleted, a host joins"):
            _delete(onlooker, f"/toc/{zookeeper_root}")
            joined = time.time()
            daemons.append(system.start("host-c", processes=1))
            everybody = {"host-a", "host-b", "host-c"}
            system.wait(lambda: shared(operator) == everybody, "each host has its share", 30)
        after = owners(operator)
        count = len(load.job_ids)
        system.wait(lambda: len(load.job_ids) > count + 60, "the load goes on", 30)
    noticed = [len(daemon.events("zookeeper_nodes_lost")) for daemon in daemons[:2]]
    back = f"all there again after at most {max(took.values()):.1f} s"
    line.prove(min(noticed) >= 3, f"deleted four times, noticed {noticed} times; {back}")
    line.within(max(took.values()), BACK)
    line.on_time(system.late(since=began, before=time.time() - 0.5), p99=250)
    moved = {slot for slot in before if after[slot] != before[slot]}
    assert {owner.rpartition("-")[0] for owner in (after[slot] for slot in moved)} == {"host-c-0"}
    assert len(moved) <= len(before) / 3 + 1, "a host that joins takes its share"
    for slot, hosts in hosts_by_slot(system, daemons, joined, time.time()).items():
        assert len(hosts - {"host-c"}) <= 1, f"{slot} went round: {hosts}"
    assert not load.errors
    line.judge(system, within=3)


@pytest.mark.slow
def test_a_zookeeper_whose_disk_was_wiped_is_filled_again_and_a_host_that_dies_then_is_replaced(
    build: Build, launch: Launch, verdict: Verdict
) -> None:
    """Meanwhile a host joins, which may lead alone for a moment and take all slots: they move back then."""
    line = verdict(32, "ZooKeeper starts anew", "its disk is wiped, and a host joins")
    keeper = launch(secured.kind(ZooKeeper))
    # What the host that dies had taken waits for the prepare timeout.
    system = build(zookeeper=keeper.url, cluster="fault", session_timeout=SESSION, topic_prepare_timeout=3)
    daemons = [system.start(host, processes=1) for host in ("host-a", "host-b")]
    wait_for_shares(system, "host-a", "host-b")
    with Load(system.client, rate=60, ahead=(0.2, 1.0), fail=0.0) as load:
        load.more(100)
        began = time.time()
        with system.recorder.fault("zk_down"):
            keeper.kill()
            wipe_zookeeper(keeper)
            keeper.start()
            up = time.monotonic()
            daemons.append(system.start("host-c", processes=1))
            wait_for_shares(system, "host-a", "host-b", "host-c")
            took = time.monotonic() - up
            with operator_of(system) as operator:
                system.wait(lambda: _even(operator), "each host has its share", 30)
        load.more(60)
        late = system.late(since=began, before=time.time() - 1)
        with system.recorder.fault("kill", pids=[daemons[0].process.pid, *daemons[0].workers()]):
            daemons[0].kill()
        load.more(400)
    line.prove(
        all(daemon.events("zookeeper_nodes_lost") for daemon in daemons[:2]),
        f"registered and claimed again after {took:.1f} s; {late}",
    )
    line.within(took, BACK)
    line.on_time(late, p99=250)
    assert not load.errors
    line.judge(system, within=TAKEN_OVER, at_most=30)


def _even(operator: Operator) -> bool:
    """Whether all has an owner and no worker has two more than another."""
    counts = Counter(owners(operator).values()).values() or [0]
    return 0 < max(counts) <= min(counts) + 1


@contextlib.contextmanager
def _onlooker(zookeeper: ZooKeeper) -> Iterator[KazooClient]:
    client = secured.zookeeper_client(zookeeper)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def _delete(client: KazooClient, path: str) -> int:
    """Delete a node and all below it; returns how many. All at once: daemons put back what is missing."""
    for _ in range(200):
        with contextlib.suppress(NoNodeError):  # one of them has just gone
            nodes = _below(client, path)
            deletion = client.transaction()
            for node in reversed(nodes):
                deletion.delete(node)
            if all(result is True for result in deletion.commit()):
                return len(nodes)
    raise AssertionError(f"{path} could not be deleted")


def _below(client: KazooClient, path: str) -> list[str]:
    """A node and all below it, each after its parent."""
    return [path, *(one for name in client.get_children(path) for one in _below(client, f"{path}/{name}"))]


def _as_before(operator: Operator, before: dict[tuple[str, int], str]) -> bool:
    """Whether both workers are registered again, one leads, and each slot is its former owner's."""
    workers = operator.workers()
    return len(workers) == 2 and any(each.leader for each in workers) and owners(operator) == before
