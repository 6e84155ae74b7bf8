"""Fault 1: crashes between a row and its index entry, and submits while Redis is down."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit.load import Load, in_another_process, tasks
from harness.final import read_final
from harness.patience import until

from benchmarks.local import RedisServer

CALLS: dict[str, dict[str, object]] = {
    "submit.row-stored:31": {"do": "submit", "count": 60, "ahead": [2.0, 3.0]},
    "submit.row-stored": {"do": "submit_many", "count": 400, "first": 1000, "ahead": [2.0, 3.0]},
    "cancel.row-written:10": {"do": "cancel"},
    "reschedule.row-written:10": {"do": "reschedule", "ahead": 1.5},
}
"""Where a producer dies, and what it calls."""


def test_what_a_producer_stored_before_it_died_runs_although_nobody_indexed_it(
    build: Build, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(1, "crash between row and index", "submit, submit_many, cancel, reschedule")
    system = build()
    victims = system.client.submit_many(tasks(40, ahead=(4.0, 4.5), first=5000))

    def die_at(name: str) -> bool:
        once = tmp_path / f"died-{name}"
        env = {"TOC_FAILPOINT": name, "TOC_FAILPOINT_ONCE": str(once)}
        job_ids = victims[:20] if name.startswith("cancel") else victims[20:]
        done = in_another_process(system, [{"job_ids": job_ids, **CALLS[name]}], env=env)
        return done.returncode == -9 and once.exists()

    with ThreadPoolExecutor(2) as pool:
        died = sum(pool.map(die_at, CALLS))
    final = read_final(system.center)
    stored = {row.job_id: row.status for row in final.rows}
    entries = {one for one, places in final.index.items() if any(place.queue == "store" for place in places)}
    assert len(stored) == 31 + 400 + 40
    unindexed = {job_id for job_id, status in stored.items() if status == 0} - entries
    # The entry of a cancelled row still stands; that of a rescheduled one stands at its old, later time.
    stale = {job_id for job_id, status in stored.items() if status == 3} & entries
    line.prove(
        (died, len(unindexed), len(stale)) == (4, 401, 1),
        f"killed {died} times; {len(unindexed)} rows without an entry, {len(stale)} cancelled with one",
    )
    with system.recorder.fault("other", note="no worker yet"):
        system.start()
    line.judge(system, within=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["poll.taken", "finish.rows-written:3", "reclaim.rows-written", "sweep.rows-read"]
)
def test_a_worker_that_dies_between_rows_and_index_repeats_nothing_that_is_done(
    build: Build, tmp_path: Path, verdict: Verdict, name: str
) -> None:
    line = verdict(1, "crash between row and index", f"worker at {name}")
    system = build(topic_prepare_timeout=3)
    ahead = (4.0, 6.0) if name.startswith("sweep") else (0.5, 1.5)
    system.client.submit_many(tasks(600, ahead=ahead, fail=0.1))
    once = tmp_path / "died"
    with system.recorder.fault("other", note="no worker yet"):
        daemon = system.start(env={"TOC_FAILPOINT": name, "TOC_FAILPOINT_ONCE": str(once)})
    if name.startswith("reclaim"):  # which needs something to reclaim
        system.client.submit("test.sync", biz_id=9_000_000, delay=0.2, attribute={"die": 1})
    assert until(lambda: once.exists() and once.read_text().endswith("\n")), system.logs()
    pid = int(once.read_text().split()[1])
    with system.recorder.fault("kill", pids=[pid], note=name):
        system.wait(
            lambda: pid in {event["pid"] for event in daemon.events("worker_died")}, "its death is seen", 60
        )
    line.prove(True, f"process {pid} was killed at {name}")
    line.judge(system, within=5, at_most=600, write=10)


def test_submits_while_redis_is_down_are_acknowledged_and_run_on_time_or_soon_after(
    build: Build, launch: Launch, verdict: Verdict
) -> None:
    line = verdict(1, "Redis down at submit")
    redis = launch(RedisServer)
    system = build(redis.url)
    daemon = system.start()
    with Load(system.client, rate=150, ahead=(0.3, 1.0)) as load:
        load.more(40)
        with system.recorder.fault("redis_down"):
            redis.kill()
            load.more(200)
            redis.start()
    refused = daemon.log.read_text().count("prepare_failed")
    line.prove(refused, f"200 submits acknowledged while Redis was down; prepare failed {refused} times")
    assert not load.errors
    line.within(load.slowest, 2)
    line.judge(system, within=4)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [300, 1000])
def test_a_minute_without_redis_under_load_loses_no_submit(
    build: Build, launch: Launch, verdict: Verdict, rate: int
) -> None:
    line = verdict(1, "a minute without Redis under load", f"{rate} tasks/s")
    redis = launch(RedisServer)
    system = build(redis.url, tables=16)
    system.start("host-a")
    for first in range(0, (rate - 100) * 100, 5000):
        system.client.submit_many(tasks(5000, ahead=(1.0, 101.0), fail=0.05, first=first))
    with Load(system.client, rate=100, ahead=(0.5, 5.0)) as load:
        load.more(500)
        with system.recorder.fault("redis_down"):
            began, before = time.time(), len(load.job_ids)
            redis.kill()
            time.sleep(60)
            acknowledged = len(load.job_ids) - before
            redis.start()
            ended = time.time()
        load.more(300)
    line.judge(system, within=10, at_most=20, wait=120)
    late = system.late(since=began, before=ended)
    line.prove(acknowledged > 4500, f"{acknowledged} submits acknowledged without Redis; meanwhile {late}")
    assert not load.errors, load.raised  # every submit was acknowledged
    line.on_time(late, p99=2_000)
