"""Faults 3 to 7: the index loses what was done last, or all of it; its memory is full;
its hash slots move."""

import random
import time

import pytest
from fault.conftest import Case
from fault.kit import servers
from fault.kit.load import Load, tasks
from fault.kit.servers import Reshard, Sentinel, cluster_replica, errors_told
from fault.kit.table import Line
from harness import forks
from harness.final import read_final
from harness.patience import until
from harness.system import System

from benchmarks.local import RedisCluster, RedisServer
from toc import CancelOutcome, NewTask
from toc.index.calls import IndexFull
from toc.model.errors import IndexUnavailable

# Faults 3 and 4: the master of the index dies, and its replica had not heard of what was done last.


def test_a_failover_that_loses_adds_and_removals_costs_no_task_and_no_second_run(case: Case) -> None:
    adds, removals = case.verdict(3, "failover loses adds"), case.verdict(4, "failover loses removals")
    master, replica = case.launch(RedisServer), case.launch(RedisServer)
    proxy = case.relay(master.port)
    system = case.build(f"redis://127.0.0.1:{proxy.port}")
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
def test_a_cluster_that_promotes_a_replica_by_itself_loses_and_doubles_nothing(case: Case) -> None:
    line = case.verdict(3, "failover", "Redis Cluster, by itself")
    cluster = case.launch(RedisCluster)
    system = case.build(cluster.url)
    victim = cluster.nodes[0]
    with cluster_replica(victim, case.path / "replica") as replica:
        _lose_the_master(system, line, victim, replica)


@pytest.mark.slow
def test_a_failover_by_sentinels_loses_and_doubles_nothing(case: Case) -> None:
    line = case.verdict(3, "failover", "sentinel")
    master, replica = case.launch(RedisServer), case.launch(RedisServer)
    servers.replicate(replica, master)
    with Sentinel(case.path / "sentinel", master=master) as sentinel:
        assert until(lambda: "slaves=1" in str(sentinel.call("INFO", "sentinel")), 60)
        system = case.build(sentinel.url)
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


# Fault 5: Redis comes back empty, or with an older state of its data.


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wiped", "old snapshot"])
def test_an_index_that_is_gone_or_old_is_made_again_from_the_table(case: Case, how: str) -> None:
    line = case.verdict(5, "Redis restarts empty or with an old snapshot", how)
    redis = case.launch(RedisServer, aof=False)
    proxy = case.relay(redis.port)
    system = case.build(f"redis://127.0.0.1:{proxy.port}")
    client = system.client
    with system.recorder.fault("other", note="no worker yet"):
        old = client.submit_many(tasks(300, ahead=(0.5, 1.0)))
        # It takes the sweep a minute to come round to dead tasks.
        count = 5 if how == "old snapshot" else 0
        dead = client.submit_many(
            [NewTask("test.sync", 500 + n, 0.1, attribute={"dead": True}) for n in range(count)]
        )
        aside = servers.save_aside(redis)
        system.start()
    far = client.submit_many(tasks(500, ahead=(600, 1200), first=1000))
    system.wait(lambda: not system.pending(old), "the old ones are done", 15)
    soon = client.submit_many(tasks(400, ahead=(0.5, 2.5), first=2000, fail=0.1))
    with system.recorder.fault("redis_loss"):
        proxy.refuse()
        redis.kill()
        servers.wipe(redis)
        if how == "old snapshot":
            servers.restore(redis, aside)
        redis.start()
        found = servers.queued(redis)
        proxy.accept()
    lacking, revived = len({*far, *soon} - found), len(found & set(old))
    line.prove(
        lacking > 800 and revived == (300 if count else 0), f"{lacking} entries were gone, {revived} revived"
    )
    system.wait(lambda: standing(system, "store") >= set(far), "those due in ten minutes are back", 60)
    system.wait(lambda: standing(system, "dead") == set(dead), "dead tasks are listed again", 75)
    judged = line.judge(system, within=4, at_most=8)
    assert judged.counts["dead"] == len(dead)


def standing(system: System, queue: str) -> set[int]:
    """What stands in StoreQueues, or in DeadQueues."""
    index = read_final(system.center).index
    return {job_id for job_id, places in index.items() if any(place.queue == queue for place in places)}


# Fault 6: a Redis that would evict, and one whose memory is full.


def test_a_redis_that_evicts_is_refused_and_a_full_one_drains_while_submits_go_on(case: Case) -> None:
    evicts = case.verdict(6, "eviction configured")
    full = case.verdict(6, "memory full")
    redis = case.launch(RedisServer)
    system = case.build(redis.url)
    redis.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    worker = forks.run(["worker", "--app", "harness.app:center"], env=system.env)
    evicts.prove(
        worker.returncode not in (0, -9) and "allkeys-lru" in worker.stdout + worker.stderr,
        f"the daemon refused to start (exit code {worker.returncode}) and named allkeys-lru",
    )
    redis.call("CONFIG", "SET", "maxmemory-policy", "noeviction")

    client = system.client
    with system.recorder.fault("full") as fault:
        before = client.submit_many(tasks(1000, ahead=(1.5, 2.5), fail=0.1))
        system.start()
        redis.call("CONFIG", "SET", "maxmemory", 1_000_000)
        slot = system.center.catalog.get("test.sync").slot(0)
        refused = system.center.queues.add({slot: [(1, 1e15)]})[slot]
        assert isinstance(refused, IndexUnavailable)
        meanwhile = client.submit_many(tasks(200, ahead=(1.0, 2.0), first=5000))
        assert not servers.queued(redis) & set(meanwhile)
        system.wait(lambda: not servers.queued(redis), "it has drained while it was full", 60)
        system.wait(
            lambda: not system.pending([*before, *meanwhile]), "what came meanwhile ran from the rows", 60
        )
        errors = int(servers.info(redis, "errorstats")["errorstat_OOM"].partition("=")[2])
        full.prove(
            isinstance(refused, IndexFull) and errors > 0,
            f"OOM answered {errors} times; {len(before)} drained, {len(meanwhile)} submits acknowledged and "
            f"run from their rows",
        )
        redis.call("CONFIG", "SET", "maxmemory", 0)
        fault.end()
    judged = full.judge(system, within=4)
    evicts.tasks = 0
    assert judged.counts["processed"] == len(before) + len(meanwhile)
    assert servers.info(redis, "stats")["evicted_keys"] == "0"


# Fault 7: hash slots of a Redis Cluster move from node to node while tasks run.


def hash_slots(system: System) -> list[int]:
    """The hash slots of all slots of the test topics."""
    topics = system.center.store.topics.list()
    slots = [topic.slot(number) for topic in topics for number in range(topic.slot_amount)]
    return sorted({system.center.queues.keys(slot).hash_slot for slot in slots})


@pytest.mark.slow
def test_moving_slots_of_the_cluster_under_load_loses_and_doubles_nothing(case: Case) -> None:
    line = case.verdict(7, "cluster reshard: MOVED, ASK, TRYAGAIN")
    cluster = case.launch(RedisCluster)
    system = case.build(cluster.url, topic_prepare_timeout=5)
    reshard = Reshard(cluster)
    dice = random.Random(7)
    system.start()
    system.client.submit_many(tasks(1500, ahead=(0.5, 3.0), fail=0.1))
    wanted = dice.sample(hash_slots(system), 12)
    with Load(system.client, rate=100, ahead=(0.1, 2.0)) as load, system.recorder.fault("move"):
        for number in wanted:
            target = dice.choice([n for n in range(3) if n != reshard.owner(number)])
            source = reshard.begin(number, target)
            # Half-way some keys are here, some there: who asks for both has to wait (TRYAGAIN). When all are
            # there but nobody has said so, one is sent on (ASK). Each state lasts, for requests to meet it.
            reshard.carry(number, source, target, limit=1)
            time.sleep(0.02)
            reshard.carry(number, source, target)
            time.sleep(0.02)
            reshard.end(number, source, target)
    told = errors_told(cluster.nodes)
    line.prove(
        told["MOVED"] and told["ASK"] and told["TRYAGAIN"],
        f"{reshard.moved_slots} slots moved; answered {told['MOVED']} MOVED, {told['ASK']} ASK, "
        f"{told['TRYAGAIN']} TRYAGAIN",
    )
    assert not load.errors
    line.judge(system, within=3)
