"""Fault 30: handlers that copy their process (os.fork), by intention or not."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load

from benchmarks.local import RedisServer
from toc import NewTask, TaskStatus

APP = "fault.apps.hostile:center"


@pytest.mark.parametrize(
    ("topic", "deed"), [("test.sync", "fork"), ("test.async", "fork"), ("test.async", "fork and go on")]
)
def test_a_handler_that_returns_in_a_copy_of_its_process_too_doubles_nothing(
    build: Build, clean_redis: RedisServer, verdict: Verdict, topic: str, deed: str
) -> None:
    line = verdict(30, "a handler forks and returns in the copy", f"{topic}, {deed}")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    (worker,) = daemon.workers()
    # More than can run at once: a copy has those that wait, and those that run, as its original has them.
    beside = system.client.submit_many(
        [NewTask(topic, n, 1.0 + n / 100, attribute={"sleep": 0.05}) for n in range(200)]
    )
    forking = [
        system.client.submit(topic, biz_id=1000 + n, delay=1.2 + n / 2, attribute={"deed": deed})
        for n in range(4)
    ]
    system.wait(lambda: not system.pending([*beside, *forking]), "all have ended", 30)
    line.prove(len(daemon.events("copy_ended")) == 4, "four copies came to the end of their handlers")
    assert {event.pid for event in system.history() if event.event in ("start", "end")} == {worker}
    assert not system.not_run_once([*beside, *forking])
    rows = system.center.store.read([*beside, *forking]).values()
    assert all((row.status, row.attempts, row.crashes) == (TaskStatus.PROCESSED, 0, 0) for row in rows)
    assert system.late(beside)[-1] < 2000 + 1000 * line.slack
    assert daemon.workers() == [worker]
    line.judge(system, within=5)


def test_what_programs_rightly_do_with_copies_works(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(30, "a handler forks", "multiprocessing, Pool, preexec_fn, sys.exit in the copy")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    before = daemon.workers()
    with Load(system.client, rate=30):
        copying = [
            system.client.submit(topic, biz_id=n, delay=0.3 + n / 5, attribute={"deed": "use copies"})
            for n, topic in enumerate(("test.sync", "test.async", "test.sync"))
        ]
        system.wait(lambda: not system.pending(copying), "they have ended", 30)
    rows = system.center.store.read(copying).values()
    assert [(row.attempts, row.last_error) for row in rows] == [(0, None)] * 3
    line.prove(rows, "each copy did what it was made for")
    assert daemon.workers() == before
    line.judge(system, within=5)


def test_a_copy_of_the_process_in_which_a_task_runs_alone_answers_for_nobody(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    line = verdict(30, "a handler forks and returns in the copy", "where it runs alone")
    system = build(clean_redis.url)
    daemon = system.start(processes=1, app=APP)
    attribute = {"die": 3, "deed": "fork", "deeds": 99}
    with Load(system.client, rate=30):
        suspects = [
            system.client.submit("test.sync", biz_id=n, delay=0.2, attribute=attribute) for n in range(4)
        ]
        system.wait(lambda: not system.pending(suspects), "all have ended", 60)
    copies = len(daemon.events("copy_ended"))
    line.prove(copies >= 1, f"{copies} copies came to the end of their handlers")
    quarantined = {event["job_id"] for event in daemon.events("task_quarantined")}
    alone = [system.starts(job_id)[-1] for job_id in quarantined & set(suspects)]
    assert alone
    died = len(daemon.events("worker_died"))
    line.judge(system, within=60, at_most=120 * died, crash_limit=3)
    ends = [event for event in system.history() if event.event == "end"]
    for start in alone:
        assert [end.outcome for end in ends if (end.job_id, end.pid) == (start.job_id, start.pid)] == ["ok"]
