"""Fault 24: kill -9 of worker processes, of all of them, of a whole host."""

from __future__ import annotations

import os
import signal
import time

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from harness.system import System

from benchmarks.local import RedisServer, ZooKeeper
from toc import NewTask

PREPARE_TIMEOUT = 3
SESSION = 2
AGAIN = 1.0
"""Seconds until what a dead process ran runs again, where its daemon lives."""
TAKEN_OVER = SESSION + 3.0
"""Seconds until what is due on a dead host and had not started runs."""
UNWRITTEN = 15
"""How many more a process may have begun, or ended and not written, as it is killed."""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_a_killed_process_ran_runs_again_within_a_second_while_its_daemon_lives(
    build: Build, clean_redis: RedisServer, verdict: Verdict, kills: int
) -> None:
    line = verdict(24, "kill -9 of a worker process", f"{kills} times, one of two processes")
    # The long ones, some killed three times in a row, would run alone from then on, one after the other.
    system = build(clean_redis.url, max_crashes=100)
    daemon = system.start(processes=2)
    again: list[float] = []
    flying = 0
    with Load(system.client, rate=60, ahead=(0.2, 1.0), attribute={"sleep": 0.01}):
        for number in range(kills):
            # Else nobody would be left to take it over.
            system.wait(lambda: daemon.told().count("worker_ready") == number + 2, "two are ready", 60)  # noqa: B023
            long_ones = set(system.client.submit_many(_long(20, number)))
            system.wait(lambda: len(system.late(long_ones)) == 20, "the long ones run", 60)  # noqa: B023
            victim = max(daemon.workers(), key=lambda pid: len(_held(system, pid) & long_ones))
            running = _held(system, victim)
            held = running & long_ones
            flying += len(running)
            killed = _kill(system, [victim])
            again += _again(system, held, killed, 20)
    worst = max(again)
    line.prove(
        len(again) >= kills,
        f"{kills} kills, {flying} tasks in flight, {len(again)} of them long ones that ran again within "
        f"{worst:.2f} s",
    )
    assert worst < AGAIN + line.slack
    line.judge(system, within=3, at_most=flying + UNWRITTEN * kills)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["all workers of a daemon", "a whole host"])
def test_a_killed_host_is_replaced(
    build: Build,
    clean_redis: RedisServer,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    verdict: Verdict,
    whole: bool,
) -> None:
    line = verdict(24, "kill -9 of all workers", "a whole host" if whole else "the daemon lives")
    system = build(
        clean_redis.url,
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
        session_timeout=SESSION,
        topic_prepare_timeout=PREPARE_TIMEOUT,
    )
    first = system.start("host-a", processes=2)
    system.start("host-b", processes=1)
    with Load(system.client, rate=100, ahead=(0.2, 1.0)):
        long_ones = set(system.client.submit_many(_long(60, 0)))
        system.wait(lambda: len(system.late(long_ones)) == 60, "the long ones run", 60)
        workers = first.workers()
        running = {job_id for pid in workers for job_id in _held(system, pid)}
        held = running & long_ones
        unstarted = system.client.submit_many([NewTask("test.async", n, 1.0) for n in range(200)])
        killed = _kill(system, [first.process.pid, *workers] if whole else workers)
        again = _again(system, held, killed, 30)
        system.wait(lambda: len(system.late(unstarted)) == 200, "the others run", 60)
    worst = max(again)
    late = system.late(unstarted)[-1] / 1000
    line.prove(
        len(held) > 5,
        f"{len(held)} handlers were running; they ran again within {worst:.2f} s; the latest of 200 due "
        f"meanwhile was {late:.2f} s late",
    )
    assert worst < (PREPARE_TIMEOUT + 1 if whole else AGAIN) + line.slack
    assert late < (TAKEN_OVER if whole else AGAIN) + line.slack
    line.judge(system, within=TAKEN_OVER, at_most=len(running) + UNWRITTEN * len(workers))


def test_processes_that_outlive_their_daemon_finish_what_they_run_and_leave(
    build: Build, clean_redis: RedisServer, zookeeper: ZooKeeper, zookeeper_root: str, verdict: Verdict
) -> None:
    line = verdict(24, "kill -9 of a daemon", "its processes leave in good order")
    system = build(clean_redis.url, zookeeper=zookeeper.url, cluster=zookeeper_root, session_timeout=SESSION)
    first, _ = (system.start(host, processes=2) for host in ("host-a", "host-b"))
    orphans = set(first.workers())
    system.client.submit_many(tasks(1000, ahead=(1.0, 10.0)))
    system.client.submit_many(_long(40, 10))
    system.wait(lambda: all(_held(system, pid) for pid in orphans), "both run tasks", 10)
    with system.recorder.fault("other", note="a daemon was killed"):
        first.process.kill()
        first.process.wait()
        killed = time.time_ns()
    line.judge(system, within=TAKEN_OVER)
    ended = sum(
        event.pid in orphans and event.event == "end" and event.at > killed for event in system.history()
    )
    line.prove(
        ended > 0 and "daemon_gone" in first.told(),
        f"the processes without a daemon ended {ended} tries after that, and left",
    )


def _long(count: int, number: int) -> list[NewTask]:
    return [NewTask("test.async", 1000 * number + n, 0.2, attribute={"sleep": 4}) for n in range(count)]


def _held(system: System, pid: int) -> set[int]:
    """What this process runs now."""
    running: set[int] = set()
    for event in system.history():
        if event.pid == pid:
            (running.add if event.event == "start" else running.discard)(event.job_id)
    return running


def _kill(system: System, pids: list[int]) -> float:
    """Returns when, in seconds since 1970."""
    with system.recorder.fault("kill", pids=pids):
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return at


def _again(system: System, job_ids: set[int], killed: float, seconds: float) -> list[float]:
    """How long after the kill each of these ran again; those that had ended just before it are left out."""
    ended = {event.job_id for event in system.history() if event.event == "end" and event.at / 1e9 <= killed}
    wanted = job_ids - ended

    def starts() -> dict[int, float]:
        return {
            event.job_id: event.at / 1e9 - killed
            for event in system.history()
            if event.event == "start" and event.job_id in wanted and event.at / 1e9 > killed
        }

    system.wait(lambda: starts().keys() == wanted, "all of them run again", seconds)
    return list(starts().values())
