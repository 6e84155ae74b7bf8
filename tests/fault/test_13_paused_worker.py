"""Fault 13: workers that stand still, sessions that end, slots with two owners."""

from __future__ import annotations

import os
import signal
import time

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import tasks
from harness.system import DaemonProcess, System

from toc import NewTask

PREPARE_TIMEOUT = 3


def stand_still(daemon: DaemonProcess) -> list[int]:
    """SIGSTOP the daemon and its processes; returns the pids."""
    pids = [daemon.process.pid, *daemon.workers()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def go_on(pids: list[int]) -> None:
    """SIGCONT."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def long_ones(count: int, first: int, seconds: float) -> list[NewTask]:
    """Tasks that run so long and fail the first time. Due one after the other: where two hosts want
    them, neither gets all."""
    attribute = {"sleep": seconds, "fail": 1}
    return [NewTask("test.async", first + n, 1.0 + n / 40, attribute=attribute) for n in range(count)]


def test_two_owners_of_every_slot_and_a_pause_double_only_what_was_held(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(13, "double owner, paused worker", "two hosts that do not know of each other")
    system = build(hosts=True, topic_prepare_timeout=PREPARE_TIMEOUT)
    first = system.start("host-a", processes=1)
    # In a cluster of its own, by mistake: each takes all slots.
    apart = {"TOC_CLUSTER": f"{system.settings.cluster}-apart"}
    second = system.start("host-b", processes=1, env=apart)
    burst = system.client.submit_many(tasks(600, ahead=(0.5, 2.0), fail=0.1))
    system.wait(lambda: not system.pending(burst), "the two have run what both wanted", 60)
    for batch in range(1, 6):  # until the first has got some of one
        long = set(system.client.submit_many(long_ones(20, 10_000 * batch, 4.0)))
        system.wait(lambda: len(system.late(long)) == 20, "the long ones run", 60)  # noqa: B023
        if len(_running(system, first) & long) > 3:
            break
    with system.recorder.fault("pause", pids=first.workers()):
        pids = stand_still(first)
        held = _running(system, first) & long
        system.wait(lambda: "reclaimed" in second.log.read_text(), "the second takes them over", 60)
        # Their second try runs there when the first one's late failures arrive.
        system.wait(lambda: len(held - _running(system, second)) == 0, "they run again", 60)
        go_on(pids)
    owners = {event.pid for event in system.history()}
    judged = line.judge(system, within=6, at_most=200)
    doubled = judged.duplicates["pause"]
    line.prove(
        len(owners) == 2 and held and doubled >= len(held),
        f"both hosts ran tasks of all slots; {len(held)} tries were running when one was stopped",
    )


@pytest.mark.slow
def test_a_host_that_stands_still_for_three_timeouts_loses_its_session_and_does_no_harm(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(13, "session expiry", "host stopped for 3 timeouts")
    system = build(hosts=True, session_timeout=2, topic_prepare_timeout=PREPARE_TIMEOUT)
    first, second = (system.start(host, processes=1) for host in ("host-a", "host-b"))
    system.client.submit_many(tasks(3000, ahead=(2.0, 14.0), fail=0.1))
    system.client.submit_many(long_ones(40, 10_000, 4.0))
    system.wait(lambda: len(_running(system, first)) > 3, "long ones run on the first", 60)
    held = len(_running(system, first))
    with system.recorder.fault("pause", pids=first.workers()):
        pids = stand_still(first)
        time.sleep(3 * PREPARE_TIMEOUT)
        go_on(pids)
    system.wait(lambda: "zookeeper_session_ended" in first.log.read_text(), "its session has ended", 60)
    judged = line.judge(system, within=6, at_most=200)
    line.prove(
        "reclaimed" in second.log.read_text() and judged.duplicates["pause"],
        f"its session ended; {held} tries were running on it, the other host took over",
    )


def _running(system: System, daemon: DaemonProcess) -> set[int]:
    """The tasks whose handler has started in a process of the daemon and not ended."""
    workers = set(daemon.workers())
    found: set[int] = set()
    for event in system.history():
        if event.pid in workers:
            (found.add if event.event == "start" else found.discard)(event.job_id)
    return found
