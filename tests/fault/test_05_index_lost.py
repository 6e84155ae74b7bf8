"""Fault 5: Redis comes back empty, or with an older state of its data."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit import servers
from fault.kit.load import tasks
from fault.kit.proxy import Proxy
from fault.kit.table import overdue
from harness.final import read_final
from harness.system import System
from harness.tables import raw, task_tables

from benchmarks.local import RedisServer
from toc import NewTask

FAR_MS = 2_000_000_000_000
"""Later than all that is pending, and still an instant to FROM_UNIXTIME."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wiped", "old snapshot"])
def test_an_index_that_is_gone_or_old_is_made_again_from_the_table(
    build: Build, launch: Launch, relay: Callable[..., Proxy], verdict: Verdict, how: str
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


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_an_emptied_redis_has_its_two_hundred_thousand_tasks_back_the_soonest_first(
    build: Build, launch: Launch, verdict: Verdict
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
        missing = lacking(system, redis, FAR_MS)
    line.prove(missing > 190_000, f"{missing:,} entries were gone")
    took = []
    for until_ms in (int((began + 60) * 1000), FAR_MS):
        system.wait(lambda: lacking(system, redis, until_ms) <= 0, f"all due until {until_ms}", 200)  # noqa: B023
        took.append(time.time() - began)
    system.wait(lambda: not overdue(system, 0) and time.time() > began + 92, "those due soon have run", 120)
    late = system.late(since=began, before=began + 88)
    line.prove(
        True, f"what is due in a minute was back after {took[0]:.1f} s, all after {took[1]:.0f} s; {late}"
    )
    line.within(took[0], 3)
    line.within(took[1], 60)
    line.on_time(late, most=5_000)
    line.judge(system, within=5, at_most=20)


def lacking(system: System, redis: RedisServer, until_ms: int) -> int:
    """How many pending tasks that are due by then have no entry. What runs meanwhile makes it smaller."""
    found = servers.count_queued(redis, until_ms)
    with raw(system.settings) as connection:
        pending = sum(
            connection.exec_driver_sql(
                f"SELECT COUNT(*) FROM {name} WHERE status=0 AND next_time<=FROM_UNIXTIME({until_ms / 1000})"
            ).scalar_one()
            for name in task_tables(system.settings)
        )
    return int(pending) - found
