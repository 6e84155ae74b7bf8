"""Fault 6: a Redis that would evict, and one whose memory is full."""

from __future__ import annotations

from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit import servers
from fault.kit.load import tasks
from harness import forks

from benchmarks.local import RedisServer
from toc.index.calls import IndexFull
from toc.model.errors import IndexUnavailable


def test_a_redis_that_evicts_is_refused_and_a_full_one_drains_while_submits_go_on(
    build: Build, launch: Launch, verdict: Verdict
) -> None:
    evicts = verdict(6, "eviction configured")
    full = verdict(6, "memory full")
    redis = launch(RedisServer)
    system = build(redis.url)
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
