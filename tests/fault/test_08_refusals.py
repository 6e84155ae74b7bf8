"""Fault 8: scripts forgotten, masters demoted, data being loaded, snapshots that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Launch
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.servers import errors_told, fill, info, pause_replication, promote
from harness.patience import until

from benchmarks.local import RedisServer


@pytest.mark.slow
def test_every_passing_refusal_of_redis_is_outlived(build: Build, launch: Launch, verdict: Verdict) -> None:
    line = verdict(8, "NOSCRIPT, READONLY, LOADING, MISCONF")
    redis = launch(
        RedisServer,
        aof=False,
        # "save": refuses writes when that fails. The other: answers while it loads, if only that it does.
        config=["enable-debug-command local", "save 3600 1", "loading-process-events-interval-bytes 1024"],
    )
    redis.call("DEBUG", "POPULATE", 500, "ballast", 100)
    system = build(redis.url)
    daemon = system.start()
    system.client.submit_many(tasks(200, ahead=(300, 400), first=5000))
    told = errors_told([])
    with Load(system.client, rate=150, ahead=(0.1, 1.0)) as load:
        load.more(50)
        with system.recorder.fault("other", note="SCRIPT FLUSH"):
            for _ in range(10):
                redis.call("SCRIPT", "FLUSH")
                load.more(10)
        with system.recorder.fault("redis_down", note="demoted"):
            pause_replication(redis)
            load.more(60)
            promote(redis)
        with system.recorder.fault("redis_down", note="cannot save"):
            (redis.directory / "dump.rdb").mkdir()  # nothing can be renamed to that
            redis.call("BGSAVE")
            assert until(lambda: info(redis, "persistence")["rdb_last_bgsave_status"] == "err", 60)
            load.more(60)
            (redis.directory / "dump.rdb").rmdir()
            redis.call("BGSAVE")
            assert until(lambda: info(redis, "persistence")["rdb_last_bgsave_status"] == "ok", 60)
        load.more(30)
        told += errors_told([redis])
        with system.recorder.fault("redis_down", note="loading"):
            redis.stop()
            redis.config.append("key-load-delay 5000")  # microseconds a key
            redis.start()
            redis.config.pop()
        told += errors_told([redis])
        load.more(30)
    line.prove(
        told["NOSCRIPT"] > 10 and told["READONLY"] > 10 and told["MISCONF"] > 10 and told["LOADING"] > 0,
        "answered " + ", ".join(f"{told[name]} {name}" for name in sorted(told) if told[name]),
    )
    assert not load.errors
    line.within(load.slowest, 2)
    assert daemon.process.poll() is None
    line.judge(system, within=8)


@pytest.mark.slow
def test_a_redis_whose_disk_is_full_is_outlived_as_one_that_is_away(
    build: Build, small_disk: Callable[[int], Path], verdict: Verdict
) -> None:
    line = verdict(8, "Redis's disk is full")
    disk = small_disk(16)
    with RedisServer(disk / "redis") as redis:
        system = build(redis.url)
        daemon = system.start()
        system.client.submit_many(tasks(1000, ahead=(0.5, 8.0), fail=0.1))
        with Load(system.client, rate=100, ahead=(0.1, 2.0)) as load:
            load.more(50)
            with system.recorder.fault("redis_down"):
                ballast = fill(disk)
                system.wait(lambda: "(MISCONF)" in daemon.log.read_text(), "the workers meet it", 60)
                load.more(200)
                ballast.unlink()
            load.more(100)
        told = errors_told([redis])
        line.prove(told["MISCONF"] > 10, f"answered {told['MISCONF']} MISCONF")
        assert not load.errors
        line.judge(system, within=8)
        system.stop()
