"""Fault 25: a background thread dies: its process says so and ends, another takes its place."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness.patience import until
from harness.sessions import kill_session

from toc.loop import EXIT_THREAD_DIED

APP = "fault.broken.thread_dies:center"
KNOWN = {
    *("main", "poll", "handler", "async-handlers", "finish-0", "heartbeat", "quarantine", "alone", "reclaim"),
    *("watch", "sweep-0", "retention", "wake", "catalog", "leases-0", "rows-0", "dead", "beat"),
    *("bodies-0", "schedules-0", "declared-schedules", "adopt", "due", "episodes", "horizon"),
}
"""Threads that a worker process has."""
STEPS = {"a start on the event loop", "a report on the event loop", "a row check on a thread of the store"}
"""Steps on threads that are not theirs."""


@pytest.mark.parametrize(
    ("processes", "spared"),
    [(2, KNOWN), pytest.param(5, set(), marks=pytest.mark.slow)],
    ids=["steps", "all"],
)
def test_a_process_whose_background_thread_dies_says_so_and_is_replaced(
    build: Build, tmp_path: Path, verdict: Verdict, processes: int, spared: set[str]
) -> None:
    line = verdict(
        25, "a background thread dies", "steps on others' threads" if spared else "each of a worker process"
    )
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    for name in spared:
        (deaths / name).touch()
    system = build()
    faults = [
        system.recorder.fault("kill", note="a thread dies") for _ in range(len(KNOWN - spared) + len(STEPS))
    ]
    daemon = system.start(processes=processes, env={"TOC_TEST_DEATHS": str(deaths)}, app=APP)
    with Load(system.client, rate=50):
        system.wait((deaths / "none-left").exists, "all have had their turn", 120)
        victims = {path.name for path in deaths.iterdir()} - {"none-left"} - spared
        system.wait(lambda: len(daemon.events("worker_died")) >= len(victims), "all have died", 30)
        died = daemon.events("worker_died")
        for fault, event in zip(faults, died, strict=True):
            fault.end(pids=[event["pid"]])
        system.wait(lambda: len(daemon.workers()) == processes, "all have been replaced", 60)
    named = {re.sub(r"handler-\d+", "handler", event["thread"]) for event in daemon.events("thread_died")}
    codes = [event["exit_code"] for event in died]
    assert victims - STEPS == KNOWN - spared
    assert victims >= STEPS
    line.prove(
        named == victims - STEPS | {"async-handlers", "store"} and codes == [EXIT_THREAD_DIED] * len(victims),
        f"an error raised in {len(victims - STEPS)} threads, in {len(STEPS) - 1} steps on the event loop and "
        f"in a row check on a thread of the store: each named in the log, exit code {EXIT_THREAD_DIED}",
    )
    line.judge(system, within=15, at_most=200)


@pytest.mark.parametrize("victim", ["catalog", "main"])
def test_a_daemon_whose_background_thread_dies_ends(
    build: Build, tmp_path: Path, verdict: Verdict, victim: str
) -> None:
    line = verdict(25, "a background thread dies", f"of the daemon: {victim}")
    system = build()
    env = {"TOC_TEST_DEATHS": str(tmp_path), "TOC_TEST_DAEMON_DIES": victim}
    with suppress(AssertionError):  # it may have ended before its process is ready
        system.start(processes=1, env=env, app=APP)
    (daemon,) = system.daemons
    try:
        assert until(lambda: daemon.process.poll() is not None, 60)
    finally:
        kill_session(daemon.process.pid)  # its processes would work on for a while
    code = daemon.process.wait(0)
    if victim == "main":
        said, right = "Unthought" in daemon.log.read_text(), code > 0
    else:
        said, right = daemon.events("thread_died")[0]["thread"] == victim, code == EXIT_THREAD_DIED
    line.prove(said and right, f"exit code {code}, said in the log")
