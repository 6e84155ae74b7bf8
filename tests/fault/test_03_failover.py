"""Faults 3 and 4: the master of the index dies, and its replica had not heard of what was done last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit import servers
from fault.kit.load import Load, tasks
from fault.kit.proxy import Proxy
from fault.kit.servers import Sentinel, cluster_replica
from fault.kit.table import Line
from harness.patience import until
from harness.system import System

from benchmarks.local import RedisCluster, RedisServer
from toc import CancelOutcome


def test_a_failover_that_loses_adds_and_removals_costs_no_task_and_no_second_run(
    build: Build, launch: Launch, relay: Callable[..., Proxy], verdict: Verdict
) -> None:
    adds, removals = verdict(3, "failover loses adds"), verdict(4, "failover loses removals")
    master, replica = launch(RedisServer), launch(RedisServer)
    proxy = relay(master.port)
    system = build(f"redis://127.0.0.1:{proxy.port}")
    client = system.client
    kept = client.submit_many(tasks(300, ahead=(1.0, 1.2)))
    cancelled = kept[::10]
    later = client.submit_many(tasks(200, ahead=(3.0, 4.0), first=1000))
    servers.replicate(replica, master)
    servers.pause_replication(replica)
    assert {client.cancel(job_id) for job_id in cancelled} == {CancelOutcome.CANCELLED}
    with system.recorder.fault("other", note="no worker yet"):
        system.start()
    system.wait(lambda: not system.pending(kept), "they are done", 60)
    lost = client.submit_many(tasks(300, ahead=(4.0, 5.0), first=2000, fail=0.1))
    with system.recorder.fault("redis_loss"):
        before = servers.queued(master)
        proxy.refuse()
        master.kill()
        servers.promote(replica)
        after = servers.queued(replica)
        proxy.target = replica.port
        proxy.accept()
    missing = len(before - after)
    revived = len((after - before) & set(kept))
    adds.prove(missing > 100, f"the new master lacked {missing} entries")
    removals.prove(revived > 250, f"the new master had {revived} entries of tasks that had ended")
    judged = adds.judge(system, within=4, at_most=8)
    removals.judge(system, within=4, at_most=8)
    assert judged.counts["processed"] == len(kept) - len(cancelled) + len(later) + len(lost)
    adds.tasks, removals.tasks = len(later) + len(lost), len(kept)  # of one system: each counts once
    # What came back is dropped, one by one, as the row check meets it.
    system.wait(lambda: not servers.queued(replica), "nothing is left of it", 60)


@pytest.mark.slow
def test_a_cluster_that_promotes_a_replica_by_itself_loses_and_doubles_nothing(
    build: Build, launch: Launch, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(3, "failover", "Redis Cluster, by itself")
    cluster = launch(RedisCluster)
    system = build(cluster.url)
    victim = cluster.nodes[0]
    with cluster_replica(victim, tmp_path / "replica") as replica:
        _lose_the_master(system, line, victim, replica)


@pytest.mark.slow
def test_a_failover_by_sentinels_loses_and_doubles_nothing(
    build: Build, launch: Launch, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(3, "failover", "sentinel")
    master, replica = launch(RedisServer), launch(RedisServer)
    servers.replicate(replica, master)
    with Sentinel(tmp_path / "sentinel", master=master) as sentinel:
        assert until(lambda: "slaves=1" in str(sentinel.call("INFO", "sentinel")), 60)
        system = build(sentinel.url)
        _lose_the_master(system, line, master, replica)


def _lose_the_master(system: System, line: Line, master: RedisServer, replica: RedisServer) -> None:
    """Under load; somebody promotes the replica. Nothing is lost and little is doubled."""
    system.start()
    system.client.submit_many(tasks(2000, ahead=(0.5, 8.0), fail=0.1))
    with Load(system.client, rate=150, ahead=(0.1, 2.0)) as load:
        load.more(150)
        held = len(servers.queued(master))
        with system.recorder.fault("redis_loss"):
            master.kill()
            system.wait(
                lambda: servers.info(replica, "replication")["role"] == "master", "it is the master", 60
            )
        load.more(300)
    line.prove(held > 10, f"the master died with {held} entries, its replica was promoted")
    assert not load.errors
    line.judge(system, within=6, at_most=20)
    system.stop()
