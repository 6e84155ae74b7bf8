"""Faults 30 and 34: what handlers do to their process, beside others; internal loops that end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness.system import DaemonProcess, System

from toc import NewTask, TaskStatus
from toc.loop import EXIT_THREAD_DIED

APP = "fault.apps.hostile:center"
NEIGHBOURS = 60


class Deed(NamedTuple):
    """What a handler does, and what comes of it."""

    name: str
    topic: str = "test.sync"
    beside: Mapping[str, Any] = {}
    """What others of its topic do meanwhile."""
    culprits: int = 1
    reason: str = ""
    """Why its process is replaced, if it is."""
    event: str = ""
    """What is logged for each."""
    error: str = ""
    """How its own try fails, if it does."""


ON_THREADS = [
    # Each failure beside it is a line of the log.
    Deed("close 0 to 2", beside={"fail": 1}, reason="a handler has closed its descriptor"),
    Deed("connection at 2", beside={"fail": 1}, reason="a handler has closed its descriptor 2"),
    Deed("kill 0", reason="SIGTERM was sent to it"),
    Deed("leak descriptors", reason="a handler has left it hardly any descriptors", error="OSError"),
    Deed("raise what is wordy", error="Wordy: xxx"),
    Deed("use copies", culprits=2),
    # A copy has those that wait, and those that run, as its original has them.
    Deed("fork", beside={"sleep": 0.05}, culprits=2, event="copy_ended"),
]
COROUTINES = [
    Deed("stop the event loop", "test.async", {"sleep": 0.5}, 3, "a handler stopped the event loop"),
    Deed("use copies", "test.async"),
    Deed("fork", "test.async", {"sleep": 0.05}, 2, event="copy_ended"),
    Deed("fork and go on", "test.async", {"sleep": 0.05}, 2, event="copy_ended"),
]
SLOW = [Deed("raise the unspeakable", error="Unspeakable: (its text cannot be made)")]


@pytest.mark.parametrize(
    "deeds",
    [ON_THREADS, COROUTINES, pytest.param(SLOW, marks=pytest.mark.slow)],
    ids=["on threads", "coroutines", "slow"],
)
def test_what_a_handler_does_to_its_process_costs_no_other_task_a_try(
    build: Build, verdict: Verdict, deeds: list[Deed]
) -> None:
    """One deed after the other; what outlives it, the next one finds."""
    system = build(topic_max_runtime=60)
    daemon = system.start(processes=1, app=APP)
    lines = [verdict(34, f"a handler lets its process {deed.name}", deed.topic) for deed in deeds]
    for deed, line in zip(deeds, lines, strict=True):
        try:
            line.prove(True, _do(system, daemon, deed))
        except AssertionError as exc:
            exc.add_note(deed.name)
            raise
    assert not daemon.events("worker_died")
    lines[0].judge(system, within=10, at_most=len(daemon.events("try_disturbed")))
    lines[0].on_time(system.late(), most=5000)


def _do(system: System, daemon: DaemonProcess, deed: Deed) -> str:
    """Have it done beside others; returns what showed that it was."""
    system.wait(lambda: len(daemon.workers()) == 1, "the process that the last deed cost is gone", 60)
    before = daemon.workers()
    recycled, logged = (len(daemon.events(name)) for name in ("worker_recycled", deed.event))
    others = system.client.submit_many(
        [NewTask(deed.topic, n, 0.3 + n / NEIGHBOURS, attribute=deed.beside) for n in range(NEIGHBOURS)]
    )
    culprits = [
        system.client.submit(deed.topic, biz_id=1000 + n, delay=0.6 + n / 4, attribute={"deed": deed.name})
        for n in range(deed.culprits)
    ]
    system.wait(lambda: not system.pending([*others, *culprits]), f"all have ended: {deed.name}", 60)
    if deed.reason:
        system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 30)
        system.wait(lambda: len(daemon.events("worker_recycled")) > recycled, "it is said why", 30)
    reasons = [event["reason"] for event in daemon.events("worker_recycled")[recycled:]]
    assert bool(reasons) == bool(deed.reason), reasons
    assert all(reason.startswith(deed.reason) for reason in reasons), reasons
    assert not deed.event or len(daemon.events(deed.event)) == logged + deed.culprits
    assert deed.reason or daemon.workers() == before
    if deed.event:  # of copies, none of which has run or ended anything
        assert {event.pid for event in system.history() if event.job_id in {*others, *culprits}} == {*before}
    rows = system.center.store.read([*others, *culprits])
    assert {(rows[one].status, rows[one].attempts) for one in others} == {
        (TaskStatus.PROCESSED, deed.beside.get("fail", 0))
    }
    disturbed = {event["job_id"] for event in daemon.events("try_disturbed")}
    assert not any(rows[one].crashes for one in {*others} - disturbed)
    own = [rows[job_id] for job_id in culprits]
    assert {(row.status, row.attempts) for row in own} == {(TaskStatus.PROCESSED, int(bool(deed.error)))}
    errors = [row.last_error or "" for row in own]
    assert all(error.startswith(deed.error) and len(error) <= 1000 for error in errors), errors
    return (
        "; ".join([*dict.fromkeys(reasons), *filter(None, errors)])
        or f"done {deed.culprits} times beside others"
    )


@pytest.mark.parametrize(
    "deed", ["cancel all", pytest.param("cancel all from a thread", marks=pytest.mark.slow)]
)
def test_coroutines_that_a_neighbour_cancels_are_not_charged(
    build: Build, verdict: Verdict, deed: str
) -> None:
    line = verdict(34, "a handler cancels every coroutine", deed)
    system = build()
    daemon = system.start(processes=1, app=APP)
    # Some wait, some of them for a child, and some are due at that instant: these have had no step yet.
    others = [
        *(NewTask("test.async", n, 0.5, attribute={"sleep": 2.0}) for n in range(50)),
        *(NewTask("test.async", n, 0.5, attribute={"sleep": 2.0, "child": True}) for n in range(50, 100)),
        *(NewTask("test.async", n, 1.0) for n in range(100, 200)),
    ]
    topic = "test.sync" if "thread" in deed else "test.async"
    culprits = [NewTask(topic, 200 + n, 1.0, attribute={"deed": deed}) for n in range(2)]
    job_ids = system.client.submit_many([*others, *culprits])
    system.wait(lambda: not system.pending(job_ids), "all have ended", 20)
    refused = daemon.events("cancel_refused")
    disturbed = {event["job_id"] for event in daemon.events("try_disturbed")}
    line.prove(
        len(disturbed) >= 50,
        f"{len(disturbed)} of {len(others)} coroutines ended by that, {len(refused)} times it was refused",
    )
    rows = system.center.store.read(job_ids)
    assert {(rows[one].status, rows[one].attempts) for one in job_ids[: len(others)]} == {(2, 0)}
    if topic == "test.async":
        assert {event["job_id"] for event in refused} == set(job_ids[len(others) :]), "it is known who it was"
        assert not disturbed & set(job_ids[:50]), "a coroutine without children noticed nothing"
        assert {rows[one].attempts for one in job_ids[len(others) :]} == {1}, "who cancels himself has failed"
    line.judge(system, within=10, at_most=3 * len(job_ids))


def test_a_coroutine_that_blocks_the_event_loop_is_named_and_harms_no_handler_on_threads(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(34, "a coroutine blocks the event loop", "until the others have run")
    system = build()
    daemon = system.start(processes=1, app=APP)
    attribute = {"deed": "block the event loop"}
    blocking = system.client.submit("test.async", biz_id=1, delay=0.5, attribute=attribute)
    system.wait(lambda: bool(system.starts(blocking)), "it blocks", 10)
    on_threads, coroutines = (
        system.client.submit_many([NewTask(topic, n, 0.2 + n / 100) for n in range(2, 102)])
        for topic in ("test.sync", "test.async")
    )
    system.wait(lambda: not system.pending(on_threads), "those on threads have ended", 10)
    system.wait(lambda: bool(daemon.events("event_loop_blocked")), "it is said that it blocks", 10)
    late = system.late(on_threads)
    (system.directory / "released").touch()
    system.wait(lambda: not system.pending([blocking, *coroutines]), "all have ended", 10)
    told = daemon.events("event_loop_blocked")[0]
    assert (told["job_id"], told["topic"]) == (blocking, "test.async")
    assert "_block_the_event_loop" in told["stack"]
    held_up = system.late(coroutines)
    line.prove(held_up.most > 500, f"coroutines: {held_up}; handlers on threads: {late}")
    line.judge(system, within=10)
    line.on_time(late, p99=200)


def test_an_internal_loop_that_ends_without_an_error_ends_its_process(
    build: Build, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(34, "a loop ends without an error", "poll, reclaim")
    system = build()
    faults = [system.recorder.fault("kill", note="a loop ends") for _ in range(2)]
    env = {"TOC_TEST_ENDS": str(tmp_path)}
    daemon = system.start(processes=2, env=env, app="fault.broken.loop_ends:center")
    with Load(system.client, rate=30):
        system.wait(lambda: len(daemon.events("worker_died")) == 2, "both have ended", 30)
        died = daemon.events("worker_died")
        for fault, event in zip(faults, died, strict=True):
            fault.end(pids=[event["pid"]])
        system.wait(lambda: len(daemon.workers()) == 2, "both have been replaced", 20)
    named = {event["thread"] for event in daemon.events("thread_died")}
    codes = [event["exit_code"] for event in died]
    line.prove(
        named == {"poll", "reclaim"} and codes == [EXIT_THREAD_DIED] * 2,
        f"{', '.join(sorted(named))} returned: each named in the log, exit code {EXIT_THREAD_DIED}",
    )
    line.judge(system, within=10, at_most=200)
