"""Fault 37: a daemon and its processes are killed, and started again on the same host."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from harness.system import System

from benchmarks.local import RedisServer, ZooKeeper
from toc import NewTask

AGAIN = 1.0
"""Seconds from when the new processes are ready until what the killed ones held runs."""
UNWRITTEN = 15
"""How many more a process may have begun, or ended and not written, as it is killed."""


@pytest.mark.parametrize(
    "cluster",
    [pytest.param(False, id="alone", marks=pytest.mark.slow), pytest.param(True, id="with ZooKeeper")],
)
def test_what_a_killed_daemon_and_its_processes_held_runs_as_soon_as_they_are_started_again(
    build: Build,
    clean_redis: RedisServer,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    verdict: Verdict,
    request: pytest.FixtureRequest,
    cluster: bool,
) -> None:
    line = verdict(37, "kill -9 of a host's processes, started again", request.node.callspec.id)
    # A session that lasts, and leases and prepared entries for 30 s: nothing here runs out by itself.
    keeper: dict[str, Any] = {"zookeeper": zookeeper.url, "cluster": zookeeper_root, "session_timeout": 10}
    system = build(clean_redis.url, **(keeper if cluster else {}))
    daemon = system.start(processes=2)
    long_ones = set(system.client.submit_many(_long(2)))
    system.wait(lambda: len(system.late(long_ones)) == 40, "they run", 30)
    system.wait(lambda: _leased(system, long_ones) == 40, "each has a lease", 30)
    with system.recorder.fault("kill", pids=[daemon.process.pid, *daemon.workers()]):
        killed = time.time()
        daemon.kill()
    later = system.start(processes=2)
    ready = time.time()
    again = _again(system, long_ones, killed)
    worst = max(again) / 1e3 - ready
    line.prove(
        "workers_proved_gone" in later.told(),
        f"40 tasks were running, with leases; {ready - killed:.1f} s after the kill the new processes were "
        f"ready; all ran again within {max(worst, 0):.2f} s of that",
    )
    assert worst < AGAIN + line.slack
    line.judge(system, within=10, at_most=40 + UNWRITTEN)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [False, True], ids=["alone", "with ZooKeeper"])
def test_processes_that_outlive_their_daemon_are_not_taken_for_gone(
    build: Build,
    clean_redis: RedisServer,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    verdict: Verdict,
    request: pytest.FixtureRequest,
    cluster: bool,
) -> None:
    line = verdict(37, "kill -9 of a daemon alone, started again", request.node.callspec.id)
    keeper: dict[str, Any] = {"zookeeper": zookeeper.url, "cluster": zookeeper_root, "session_timeout": 2}
    system = build(clean_redis.url, **(keeper if cluster else {}))
    daemon = system.start(processes=2)
    orphans = set(daemon.workers())
    long_ones = set(system.client.submit_many(_long(6)))
    system.wait(lambda: len(system.late(long_ones)) == 40, "they run", 30)
    with system.recorder.fault("other", note="the daemon was killed"):
        daemon.process.kill()
        daemon.process.wait()
    try:
        later = system.start(processes=2)
        meanwhile = system.client.submit_many([NewTask("test.sync", 100 + n, 0.2) for n in range(40)])
        system.wait(lambda: len(system.late(meanwhile)) == 40, "others run", 30)
        system.wait(lambda: not system.pending(long_ones), "they end", 30)
        ended = {
            event.pid for event in system.history() if event.event == "end" and event.job_id in long_ones
        }
        line.prove(
            "daemon_gone" in daemon.log.read_text() and ended <= orphans,
            "40 tasks ran on in processes without a daemon, beside those of the new one, each once",
        )
        assert "workers_proved_gone" not in later.told()
        assert not system.not_run_once([*long_ones, *meanwhile])
        line.judge(system, within=10)
    finally:  # they would work on beside the next test
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _long(seconds: float) -> list[NewTask]:
    return [NewTask("test.async", n, 0.2, attribute={"sleep": seconds}) for n in range(40)]


def _leased(system: System, job_ids: set[int]) -> int:
    """How many of the tasks have a lease."""
    rows = system.center.store.read_tries(list(job_ids))
    return sum(row.lease != 0 for row in rows.values())


def _again(system: System, job_ids: set[int], killed: float) -> list[float]:
    """When each of these that had not ended ran first after the kill, in milliseconds since 1970."""
    ended = {event.job_id for event in system.history() if event.event == "end" and event.at / 1e9 <= killed}

    def starts() -> dict[int, float]:
        found: dict[int, float] = {}
        for event in system.history():
            if event.event == "start" and event.job_id in job_ids - ended and event.at / 1e9 > killed:
                found.setdefault(event.job_id, event.at / 1e6)
        return found

    system.wait(lambda: starts().keys() == job_ids - ended, "all of them run again", 45)
    return list(starts().values())
