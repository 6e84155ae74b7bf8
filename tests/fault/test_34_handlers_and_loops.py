"""Fault 34: handlers that take from their process what it lives on; internal loops that end."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

from benchmarks.local import RedisServer
from toc import NewTask, TaskStatus
from toc.loop import EXIT_THREAD_DIED

APP = "fault.apps.hostile:center"
BLOCK_SECONDS = 4.0
"""As in that app."""


def test_a_handler_that_stops_the_event_loop_holds_up_no_other_and_its_process_is_replaced(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(34, "a handler stops the event loop", "beside 200 coroutines")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    before = daemon.workers()
    others = system.client.submit_many(
        [NewTask("test.async", n, 0.5 + n / 200, attribute={"sleep": 0.5}) for n in range(200)]
    )
    stopping = [
        system.client.submit("test.async", biz_id=n, delay=1.0, attribute={"deed": "stop the event loop"})
        for n in range(3)
    ]
    system.wait(lambda: not system.pending([*others, *stopping]), "all have ended", 15)
    system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 30)
    stopped = len(daemon.events("event_loop_stopped"))
    reasons = {event["reason"] for event in daemon.events("worker_recycled")}
    line.prove(
        stopped and reasons == {"a handler stopped the event loop"},
        f"its event loop was stopped {stopped} times beside {len(others)} coroutines",
    )
    rows = system.center.store.read(others).values()
    assert all((row.status, row.attempts, row.crashes) == (TaskStatus.PROCESSED, 0, 0) for row in rows)
    assert system.late(others)[-1] < 5000 + 1000 * line.slack, "nobody waited for another process"
    line.judge(system, within=5)


@pytest.mark.parametrize(
    "deed", ["cancel all", pytest.param("cancel all from a thread", marks=pytest.mark.slow)]
)
def test_coroutines_that_a_neighbour_cancels_are_not_charged(
    build: Build, clean_redis: RedisServer, verdict: Verdict, deed: str
) -> None:
    line = verdict(34, "a handler cancels every coroutine", deed)
    system = build(clean_redis.url)
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


def test_coroutines_whose_executor_a_neighbour_shuts_down_run_elsewhere_uncharged(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(34, "a handler shuts the default executor down", "beside others that use it")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    before = daemon.workers()
    tasks = [NewTask("test.async", n, 0.5 + n / 50, attribute={"in_thread": 0.02}) for n in range(100)]
    shutting = NewTask("test.async", 200, 1.0, attribute={"deed": "shut the executor down"})
    job_ids = system.client.submit_many([*tasks, shutting])
    system.wait(lambda: not system.pending(job_ids), "all have ended", 30)
    system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 20)
    disturbed = daemon.events("try_disturbed")
    reasons = {event["reason"] for event in daemon.events("worker_recycled")}
    line.prove(
        disturbed and reasons == {"a handler shut the default executor down"},
        f"{len(disturbed)} tries could not use it, then the process was replaced",
    )
    rows = system.center.store.read(job_ids).values()
    assert {(row.status, row.attempts) for row in rows} == {(TaskStatus.PROCESSED, 0)}
    line.judge(system, within=10, at_most=len(disturbed))


@pytest.mark.parametrize(
    ("deed", "reason"),
    [("freeze the clock", "a handler has changed its time.monotonic"), ("forget the running loop", None)],
)
def test_what_a_handler_patches_for_its_process_stops_no_coroutine(
    build: Build, clean_redis: RedisServer, verdict: Verdict, deed: str, reason: str | None
) -> None:
    line = verdict(34, f"a handler lets its process {deed}", "beside coroutines that sleep")
    system = build(clean_redis.url, topic_max_runtime=60)
    daemon = system.start(processes=1, app=APP)
    culprit = system.client.submit("test.async", biz_id=0, delay=1.0, attribute={"deed": deed})
    others = system.client.submit_many(
        [NewTask("test.async", n, 1.0 + n / 100, attribute={"sleep": 2.0}) for n in range(1, 100)]
    )
    system.wait(lambda: not system.pending([culprit, *others]), "all have ended", 60)
    told = [event["reason"] for event in daemon.events("worker_recycled")]
    assert told == ([reason] if reason else [])
    line.prove(True, f"{len(others)} coroutines slept beside it, and ended")
    rows = system.center.store.read([culprit, *others]).values()
    assert {(row.status, row.attempts) for row in rows} == {(TaskStatus.PROCESSED, 0)}
    line.judge(system, within=10)


def test_a_coroutine_that_blocks_the_event_loop_is_named_and_harms_no_handler_on_threads(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(34, "a coroutine blocks the event loop", f"for {BLOCK_SECONDS:g} s")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    attribute = {"deed": "block the event loop"}
    blocking = system.client.submit("test.async", biz_id=1, delay=0.5, attribute=attribute)
    system.wait(lambda: bool(system.starts(blocking)), "it blocks", 10)
    on_threads, coroutines = (
        system.client.submit_many([NewTask(topic, n, 0.2 + n / 100) for n in range(2, 102)])
        for topic in ("test.sync", "test.async")
    )
    system.wait(lambda: not system.pending(on_threads), "those on threads have ended", 10)
    late = system.late(on_threads)
    assert system.pending([blocking]), "it blocks still"
    system.wait(lambda: not system.pending([blocking, *coroutines]), "all have ended", 10)
    system.wait(lambda: bool(daemon.events("event_loop_free")), "it is said that it goes on", 5)
    (told,) = daemon.events("event_loop_blocked")
    assert (told["job_id"], told["topic"]) == (blocking, "test.async")
    assert "time.sleep(BLOCK_SECONDS)" in told["stack"]
    held_up = system.late(coroutines)[-1] / 1000
    line.prove(held_up > 1, f"coroutines were {held_up:.1f} s late, handlers on threads {late[-1]:.0f} ms")
    line.judge(system, within=10)
    assert late[98] < 200 + 1000 * line.slack, "handlers on threads waited for it"


def test_a_process_whose_standard_streams_a_handler_closes_is_replaced_and_nothing_is_written_elsewhere(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(34, "a handler closes descriptors 0 to 2", "and a connection gets the number of stderr")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    culprits = []
    with Load(system.client, rate=60, fail=0.3) as load:  # each failure is a line of the log
        for n, deed in enumerate(("close 0 to 2", "connection at 2"), 1):
            culprits.append(system.client.submit("test.sync", biz_id=n, delay=0.2, attribute={"deed": deed}))
            system.wait(lambda: len(daemon.events("worker_recycled")) == n, "it is replaced", 60)  # noqa: B023
            system.wait(lambda: not system.pending(culprits), "it has run", 60)
    line.prove(True, "; ".join(event["reason"] for event in daemon.events("worker_recycled")))
    assert not daemon.events("worker_died")
    rows = system.center.store.read([*culprits, *load.job_ids])
    assert rows[culprits[1]].attempts == 0, "nothing was written into the connection"
    assert all(row.crashes == 0 and row.attempts <= 1 for row in rows.values())
    line.judge(system, within=5)


def test_an_internal_loop_that_ends_without_an_error_ends_its_process(
    build: Build, clean_redis: RedisServer, tmp_path: Path, verdict: Verdict
) -> None:
    line = verdict(34, "a loop ends without an error", "poll, reclaim")
    ends = tmp_path / "ends"
    ends.mkdir()
    system = build(clean_redis.url)
    faults = [system.recorder.fault("kill", note="a loop ends") for _ in range(2)]
    daemon = system.start(processes=2, env={"TOC_TEST_ENDS": str(ends)}, app="fault.broken.loop_ends:center")
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
