"""Fault 5: Redis comes back empty, or with an older state of its data."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fault.conftest import Build, Verdict
from fault.kit import servers
from fault.kit.load import tasks
from fault.kit.proxy import Proxy
from fault.kit.table import count_pending, lateness, overdue
from harness.final import read_final
from harness.system import System

from benchmarks.local import RedisServer
from toc import NewTask


def in_index(system: System) -> dict[int, float]:
    """job_id -> score of what stands in StoreQueues."""
    return {
        job_id: place.score
        for job_id, places in read_final(system.center).index.items()
        for place in places
        if place.queue == "store"
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wiped", "old snapshot"])
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
    system.wait(lambda: not system.pending(old), "the old ones are done", 15)
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


BACK_SOON = 3.0
"""Seconds until everything is back that is due within a minute."""
BACK_ALL = 60.0
"""Seconds until 200,000 are back."""
MAX_LATE_MS = 5_000.0


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_an_emptied_redis_has_its_two_hundred_thousand_tasks_back_the_soonest_first(
    build: Build, launch: Callable[..., RedisServer], verdict: Verdict
) -> None:
    line = verdict(5, "FLUSHALL with 200,000 pending")
    redis = launch(RedisServer)
    system = build(redis.url, databases=8, tables=64)
    system.start()
    system.wait(system.whole, "the index is recorded as whole", 20)
    for first in range(0, 190_000, 5000):
        system.client.submit_many(tasks(5000, ahead=(3600, 7200), first=first))
    system.client.submit_many(tasks(10_000, ahead=(5, 95), first=1_000_000))
    with system.recorder.fault("redis_loss"):
        redis.call("FLUSHALL")
        began = time.time()
        missing = count_pending(system, 1 << 60) - servers.count_queued(redis, 1 << 60)
    line.prove(missing > 190_000, f"{missing:,} entries were gone")
    soon = _back(system, redis, began, int((began + 60) * 1000))
    everything = _back(system, redis, began, 1 << 60)
    system.wait(lambda: not overdue(system, 0), "all those due soon have run", 120)
    system.wait(lambda: time.time() > began + 92, "the last of them are due", 95)
    late = lateness(system, began, began + 88)
    line.prove(
        soon > 0,
        f"what is due in a minute was back after {soon:.1f} s, all after {everything:.0f} s; the latest task "
        f"came {late.most / 1000:.1f} s late, p99 {late.p99:.0f} ms",
    )
    assert soon <= BACK_SOON
    assert everything <= BACK_ALL
    assert late.most <= MAX_LATE_MS
    line.judge(system, within=MAX_LATE_MS / 1000, at_most=20)


def _back(system: System, redis: RedisServer, began: float, until_ms: int) -> float:
    """Seconds from ``began`` until all that is pending and due by then stands in the index."""

    def complete() -> bool:
        # In this order: what runs meanwhile can only make the table's number smaller.
        found = servers.count_queued(redis, until_ms)
        return found >= count_pending(system, until_ms)

    system.wait(complete, f"everything due until {until_ms} is back", 200)
    return time.time() - began


def listed_dead(system: System) -> set[int]:
    """What stands in DeadQueues."""
    index = read_final(system.center).index
    return {job_id for job_id, places in index.items() if any(place.queue == "dead" for place in places)}
