"""Fault 34: handlers that leave their process no descriptors, or not its own."""

from __future__ import annotations

import os
import resource
import signal

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

APP = "fault.apps.hostile:center"
NO_MESSAGES = ("a number", "no fields", "deep nesting", "no reason", "no names")
"""As in that app."""


def test_a_process_whose_descriptors_a_handler_has_closed_ends_at_once(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(34, "a handler closes all descriptors", "os.closerange(3, 65535)")
    system = build()
    daemon = system.start(processes=2, app=APP)
    with Load(system.client, rate=100, fail=0) as load:
        closing = system.client.submit("test.sync", biz_id=0, delay=1.0, attribute={"deed": "close from 3"})
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is replaced", 30)
        system.wait(lambda: not system.pending([closing]), "it has ended", 30)
    died = daemon.events("worker_died")
    line.prove(len(died) >= 1, "the process ended by itself")  # which thread notices first, and how, is open
    line.judge(system, within=5, at_most=50)
    line.on_time(system.late(load.job_ids), most=3000)
    rows = system.center.store.read(load.job_ids).values()
    assert all(row.attempts <= 1 for row in rows), "charged as for any death of their process"


@pytest.mark.slow
def test_a_handler_that_writes_to_the_line_to_the_daemon_ends_its_own_process_alone(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(34, "a handler writes to its daemon", "what is JSON and no message")
    system = build()
    daemon = system.start(processes=2, app=APP)
    job_ids = []
    with Load(system.client, rate=30):
        for n, what in enumerate(NO_MESSAGES, 1):
            attribute = {"deed": f"write {what} to the link"}
            job_ids.append(system.client.submit("test.sync", biz_id=n, delay=0.1, attribute=attribute))
            system.wait(lambda: len(daemon.events("worker_killed")) == n, "its process was killed", 20)  # noqa: B023
            system.wait(lambda: len(daemon.events("worker_ready")) == n + 2, "it is replaced", 20)  # noqa: B023
            assert daemon.process.poll() is None
        system.wait(lambda: not system.pending(job_ids), "all have ended", 20)
    reasons = [event["reason"] for event in daemon.events("worker_killed")]
    died = len(daemon.events("worker_died"))
    line.prove(
        all(reason.startswith("it sent a malformed message") for reason in reasons) and died == len(reasons),
        f"{died} processes were killed, each for the message that it sent",
    )
    line.judge(system, within=15, at_most=100)


@pytest.mark.slow
def test_a_daemon_that_has_no_descriptors_left_goes_on_with_the_processes_that_it_has(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(34, "no descriptors left", "for the daemon")
    system = build()
    daemon = system.start(processes=2, app=APP)
    pid = daemon.process.pid
    victim, other = daemon.workers()
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with Load(system.client, rate=30):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        with system.recorder.fault("kill", pids=[victim]):
            os.kill(victim, signal.SIGKILL)
            system.wait(lambda: bool(daemon.events("worker_not_started")), "it cannot be replaced", 20)
        assert daemon.process.poll() is None
        assert daemon.workers() == [other]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is replaced", 30)
    errors = {event["error"] for event in daemon.events("worker_not_started")}
    line.prove("Too many open files" in str(errors), "a process that was killed could not be replaced")
    line.judge(system, within=5, at_most=60)
