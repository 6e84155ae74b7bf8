"""Fault 1: crashes between a row and its index entry, and submits while Redis is down."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, in_another_process, tasks
from fault.kit.table import lateness
from harness.final import read_final
from harness.patience import until
from harness.system import DaemonProcess, System

from benchmarks.local import RedisServer


def indexed(system: System) -> set[int]:
    """The ids that stand in a StoreQueue."""
    return {
        job_id
        for job_id, places in read_final(system.center).index.items()
        if any(place.queue == "store" for place in places)
    }


def rows(system: System) -> dict[int, tuple[int, int]]:
    """job_id -> (status, action_time)."""
    return {row.job_id: (row.status, row.action_time) for row in read_final(system.center).rows}


def test_what_a_producer_stored_before_it_died_runs_although_nobody_indexed_it(
    build: Build, clean_redis: RedisServer, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(1, "crash between row and index", "submit, submit_many, cancel, reschedule")
    system = build(clean_redis.url)

    def die_at(name: str, call: dict[str, object]) -> str:
        once = tmp_path / f"died-{name}"
        done = in_another_process(
            system, [call], env={"TOC_FAILPOINT": name, "TOC_FAILPOINT_ONCE": str(once)}
        )
        assert done.returncode == -9, done.stderr
        return once.read_text().split()[0]

    victims = system.client.submit_many(tasks(40, ahead=(4.0, 4.5), first=5000))
    ahead = [2.0, 3.0]
    with ThreadPoolExecutor(2) as pool:
        died = list(
            pool.map(
                die_at,
                (
                    "submit.row-stored:31",
                    "submit.row-stored",
                    "cancel.row-written:10",
                    "reschedule.row-written:10",
                ),
                (
                    {"do": "submit", "count": 60, "ahead": ahead},
                    {"do": "submit_many", "count": 400, "first": 1000, "ahead": ahead},
                    {"do": "cancel", "job_ids": victims[:20]},
                    {"do": "reschedule", "job_ids": victims[20:], "ahead": 1.5},
                ),
            )
        )
    stored, entries = rows(system), indexed(system)
    assert len(stored) == 31 + 400 + 40
    unindexed = {job_id for job_id, (status, _) in stored.items() if status == 0} - entries
    # The entry of a cancelled row still stands; that of a rescheduled one stands at its old, later time.
    stale = {job_id for job_id, (status, _) in stored.items() if status == 3} & entries
    line.prove(
        len(died) == 4 and len(unindexed) == 401 and len(stale) == 1,
        f"killed {len(died)} times; {len(unindexed)} rows without an entry, {len(stale)} cancelled with one",
    )
    with system.recorder.fault("other", note="no worker yet"):
        system.start()
    line.judge(system, within=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("poll.taken", (0.5, 1.5)),
        ("finish.rows-written:3", (0.5, 1.5)),
        ("reclaim.rows-written", (0.5, 1.5)),
        ("sweep.rows-read", (4.0, 6.0)),
    ],
)
def test_a_worker_that_dies_between_rows_and_index_repeats_nothing_that_is_done(
    build: Build,
    clean_redis: RedisServer,
    tmp_path: Path,
    verdict: Verdict,
    name: str,
    ahead: tuple[float, float],
) -> None:
    line = verdict(1, "crash between row and index", f"worker at {name}")
    system = build(clean_redis.url, topic_prepare_timeout=3)
    system.client.submit_many(tasks(600, ahead=ahead, fail=0.1))
    once = tmp_path / "died"
    with system.recorder.fault("other", note="no worker yet"):
        daemon = system.start(env={"TOC_FAILPOINT": name, "TOC_FAILPOINT_ONCE": str(once)})
    if name.startswith("reclaim"):  # which needs something to reclaim
        system.client.submit("test.sync", biz_id=9_000_000, delay=0.2, attribute={"die": 1})
    assert until(lambda: once.exists() and once.read_text().endswith("\n"), 60), system.logs()
    pid = int(once.read_text().split()[1])
    with system.recorder.fault("kill", pids=[pid], note=name):
        system.wait(lambda: (pid, -9) in _deaths(daemon), "it is seen", 60)
    line.prove(True, f"process {pid} was killed at {name}")
    line.judge(system, within=5, at_most=200, write=10)


def _deaths(daemon: DaemonProcess) -> set[tuple[int, int]]:
    """The processes whose end the daemon has told of, with their exit codes."""
    return {(event["pid"], event["exit_code"]) for event in daemon.events("worker_died")}


def test_submits_while_redis_is_down_are_acknowledged_and_run_on_time_or_soon_after(
    build: Build, launch: Callable[..., RedisServer], verdict: Verdict
) -> None:
    line = verdict(1, "Redis down at submit")
    redis = launch(RedisServer)
    system = build(redis.url)
    daemon = system.start()
    with Load(system.client, rate=150, ahead=(0.3, 1.0)) as load:
        system.wait(lambda: len(load.job_ids) > 40, "the load runs", 60)
        with system.recorder.fault("redis_down"):
            redis.kill()
            before = len(load.job_ids)
            system.wait(lambda: len(load.job_ids) > before + 200, "submits go on", 60)
            redis.start()
    refused = daemon.log.read_text().count("prepare_failed")
    line.prove(refused, f"200 submits acknowledged while Redis was down; prepare failed {refused} times")
    assert not load.errors
    assert load.slowest < 2 + line.slack
    line.judge(system, within=4)


LATE_WITHOUT_REDIS_MS = 2_000.0
"""What a task may be late while Redis is away, 99 of 100 of them."""


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [300, 1000])
def test_a_minute_without_redis_under_load_loses_no_submit(
    build: Build, launch: Callable[..., RedisServer], verdict: Verdict, rate: int
) -> None:
    line = verdict(1, "a minute without Redis under load", f"{rate} tasks/s")
    redis = launch(RedisServer)
    system = build(redis.url, databases=2, tables=16)
    system.start("host-a")
    for first in range(0, (rate - 100) * 100, 5000):
        system.client.submit_many(tasks(5000, ahead=(1.0, 101.0), fail=0.05, first=first))
    with Load(system.client, rate=100, ahead=(0.5, 5.0)) as load:
        system.wait(lambda: len(load.job_ids) > 500, "the load runs", 60)
        with system.recorder.fault("redis_down"):
            began = time.time()
            redis.kill()
            before = len(load.job_ids)
            system.wait(lambda: time.time() > began + 60, "a minute is over", 70)
            acknowledged = len(load.job_ids) - before
            redis.start()
            ended = time.time()
        count = len(load.job_ids)
        system.wait(lambda: len(load.job_ids) > count + 300, "the load goes on", 60)
    line.judge(system, within=10, at_most=20, wait=120)
    late = lateness(system, began, ended)
    line.prove(
        acknowledged > 4500,
        f"{acknowledged} submits acknowledged without Redis; {late.tasks:,} tasks ran meanwhile, lateness "
        f"p50 {late.p50:.0f} ms, p99 {late.p99:.0f} ms, most {late.most:.0f} ms",
    )
    assert not load.errors, load.said  # every submit was acknowledged
    assert late.p99 <= LATE_WITHOUT_REDIS_MS
