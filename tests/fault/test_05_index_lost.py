"""Fault 5: Redis comes back empty, or with an older state of its data."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fault.conftest import Build, Verdict
from fault.kit import servers
from fault.kit.load import tasks
from fault.kit.proxy import Proxy
from harness.final import read_final
from harness.system import System

from toc import NewTask, TaskStatus
from toc.local.servers import RedisServer


def in_index(system: System) -> dict[int, float]:
    """job_id -> score of what stands in StoreQueues."""
    return {
        job_id: place.score
        for job_id, places in read_final(system.center).index.items()
        for place in places
        if place.queue == "store"
    }


@pytest.mark.parametrize("how", ["wiped", pytest.param("old snapshot", marks=pytest.mark.slow)])
def test_an_index_that_is_gone_or_old_is_made_again_from_the_table(
    build: Build,
    launch: Callable[..., RedisServer],
    relay: Callable[..., Proxy],
    verdict: Verdict,
    how: str,
) -> None:
    line = verdict(5, "Redis restarts empty or with an old snapshot", how)
    redis = launch(RedisServer, aof=False)
    proxy = relay(redis.port)
    system = build(f"redis://127.0.0.1:{proxy.port}")
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
    system.wait(lambda: not _pending(system, old), "the old ones are done", 15)
    soon = client.submit_many(tasks(400, ahead=(0.5, 2.5), first=2000, fail=0.1))
    with system.recorder.fault("redis_loss"):
        proxy.refuse()
        redis.kill()
        if how == "wiped":
            servers.wipe(redis)
        else:
            servers.restore(redis, aside)
        redis.start()
        found = servers.queued(redis)
        proxy.accept()
        back = time.monotonic()
    lacking = len({*far, *soon} - found)
    if how == "wiped":
        line.prove(lacking > 800, f"{lacking} of {len(far) + len(soon)} entries were gone")
    else:
        revived = len(found & set(old))
        line.prove(lacking > 800 and revived == 300, f"{lacking} entries were gone, {revived} revived")
    system.wait(lambda: in_index(system).keys() >= set(far), "those due in ten minutes are back", 60)
    rebuilt = time.monotonic() - back
    line.prove(True, f"all back after {rebuilt:.1f} s")
    system.wait(lambda: listed_dead(system) == set(dead), "dead tasks are listed again", 75)
    judged = line.judge(system, within=4, at_most=8)
    assert judged.counts["dead"] == len(dead)


def listed_dead(system: System) -> set[int]:
    """What stands in DeadQueues."""
    index = read_final(system.center).index
    return {job_id for job_id, places in index.items() if any(place.queue == "dead" for place in places)}


def _pending(system: System, job_ids: list[int]) -> bool:
    rows = system.center.store.read(job_ids).values()
    return any(row.status == TaskStatus.PENDING for row in rows)
