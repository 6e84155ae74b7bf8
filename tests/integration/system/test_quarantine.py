"""Tasks that kill the process that runs them: they end alone, and nobody dies of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from harness.system import System, buried

from toc import NewTask, TaskStatus
from toc.model.verdict import Failure
from toc.store.tasks.batch import Guard
from toc.worker.quarantine import ALONE, MAX_UNSEEN


@pytest.mark.parametrize("topic", ["test.sync", "test.async", "test.batch"])
def test_a_task_that_kills_every_process_is_dead_after_a_run_alone_and_its_neighbours_live(
    system: System, topic: str
) -> None:
    system.create_topics(slots=2)
    daemon = system.start(processes=1)
    center = system.center
    poison = center.submit(topic, biz_id=0, delay=0.5, attribute={"die": 99})
    neighbours = center.submit_many(
        [NewTask(topic, n, 0.5, attribute={"sleep": 0.1, "fail": n % 2}) for n in range(40)]
    )
    system.wait(lambda: system.row(poison).status == TaskStatus.DEAD, "the culprit is dead", 30)
    row = system.row(poison)
    starts = system.starts(poison)
    # Three times with its worker, then alone; once more if that process had run a neighbour before.
    assert [start.attempt for start in starts[:4]] == [1, 2, 3, 4]
    assert 4 <= len(starts) <= 5
    assert (row.attempts, row.crashes) == (4, len(starts))
    assert row.last_error == (
        f"its handler ended its process {len(starts)} times, the last time alone (signal 9)"
    )
    slot = center.catalog.get(topic).slot(row.slot_crc)
    system.wait(lambda: poison in buried(center, [slot]), "it is in the DeadQueue", 30)
    system.wait(
        lambda: all(system.row(job_id).status == TaskStatus.PROCESSED for job_id in neighbours),
        "every neighbour has ended well",
        30,
    )
    system.wait(lambda: len(daemon.workers()) == 1, "the process of the runs alone has left", 10)
    assert daemon.workers()[0] != starts[-1].pid
    text = daemon.log.read_text()
    assert text.count("worker_died") == 3
    assert "task_quarantined" in text
    assert "task_dead" in text


def test_a_handler_that_runs_alone_may_raise_retry_and_dead(system: System) -> None:
    system.create_topics()
    raises: dict[TaskStatus, tuple[str, dict[str, Any]]] = {
        TaskStatus.PROCESSED: ("retry after 0.2 s", {"retry_after": 0.2, "fail": 1}),
        TaskStatus.DEAD: ("as asked", {"dead": True}),
    }
    expected = {
        _suspect(system, topic, **attribute): (status, error)
        for topic in ("test.sync", "test.async", "test.batch")
        for status, (error, attribute) in raises.items()
    }
    daemon = system.start(processes=1)
    system.wait(lambda: not system.pending(expected.keys()), "all have ended", 15)
    rows = system.center.store.read(expected)
    system.wait(lambda: len(daemon.workers()) == 1, "their process has left", 10)
    assert {job_id: (row.status, row.last_error) for job_id, row in rows.items()} == expected
    alone = {system.starts(job_id)[0].pid for job_id in expected}
    assert not alone & set(daemon.workers())


def test_suspects_that_are_innocent_run_well_one_after_the_other_in_few_processes(system: System) -> None:
    system.create_topics()
    job_ids = [_suspect(system, "test.async", biz_id=n, sleep=0.01) for n in range(60)]
    daemon = system.start(processes=1)
    system.wait(
        lambda: all(system.row(job_id).status == TaskStatus.PROCESSED for job_id in job_ids),
        "all have run",
        40,
    )
    events = system.history()
    pids = {event.pid for event in events}
    assert len(pids) <= 4, "their process is used again"
    system.wait(lambda: len(daemon.workers()) == 1, "it has left", 10)
    assert daemon.workers()[0] not in pids
    assert [event.event for event in events] == ["start", "end"] * len(job_ids), "one at a time"


def test_only_a_process_that_ran_nothing_before_convicts(system: System) -> None:
    system.create_topics(slots=1)
    daemon = system.start(processes=1)
    first = _suspect(system, "test.sync", biz_id=1, delay=1.0, sleep=1)
    culprit = _suspect(system, "test.sync", biz_id=2, delay=1.5, die=99)
    system.wait(lambda: system.row(culprit).status == TaskStatus.DEAD, "it is dead", 20)
    assert system.row(first).status == TaskStatus.PROCESSED
    assert system.row(culprit).last_error == (
        "its handler ended its process 5 times, the last time alone (signal 9)"
    )
    (once,) = system.starts(first)
    shared, alone = system.starts(culprit)
    assert once.pid == shared.pid != alone.pid
    assert "worker_died" not in daemon.log.read_text()


def test_sigterm_lets_a_run_alone_end_and_a_second_gives_it_back_uncharged(system: System) -> None:
    system.create_topics()
    quick = _suspect(system, "test.sync", sleep=2)
    daemon = system.start("host-a", processes=1)
    system.wait(lambda: bool(system.history()), "it runs", 30)
    daemon.terminate()
    assert daemon.process.wait(60) == 0, system.logs()
    assert system.row(quick).status == TaskStatus.PROCESSED

    slow = _suspect(system, "test.sync", sleep=60)
    daemon = system.start("host-b", processes=1)
    system.wait(lambda: bool(system.starts(slow)), "it runs", 30)
    assert system.row(slow).crashes == 4, "counted before it began"
    daemon.terminate()
    system.wait(lambda: "daemon_stopping" in daemon.log.read_text(), "it is stopping", 5)
    daemon.terminate()
    daemon.process.wait(60)
    system.wait(lambda: not _lives(system.starts(slow)[0].pid), "its process has ended", 5)
    row = system.row(slow)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 3)
    assert row.next_time <= time.time() * 1000, "it is due again at once"
    slot = system.center.catalog.get("test.sync").slot(row.slot_crc)
    peek = system.center.queues.peek([slot])[slot]
    assert not isinstance(peek, Exception)
    assert peek.store
    assert not peek.prepared


def test_a_run_alone_whose_end_nobody_saw_is_counted_and_comes_later(system: System) -> None:
    system.create_topics()
    enough = system.directory / "enough"
    job_id = _suspect(system, "test.sync", until=str(enough))
    daemon = system.start(processes=1)
    system.wait(lambda: bool(system.history()), "it runs", 30)
    waiting = _suspect(system, "test.sync", delay=0.5, biz_id=2)
    system.wait(lambda: system.row(waiting).next_time > time.time() * 1000 + 1000, "the other is put off", 5)
    daemon.kill()
    enough.touch()
    row = system.row(job_id)
    assert (row.crashes, row.last_error) == (4, ALONE)
    daemon = system.start(processes=1)
    system.wait(lambda: system.row(waiting).status == TaskStatus.PROCESSED, "the other has run", 30)
    assert (system.row(waiting).attempts, system.row(waiting).crashes) == (0, 4), "charged nothing"
    assert (len(system.starts(job_id)), system.row(job_id).crashes) == (1, 4)
    slot = system.center.catalog.get("test.sync").slot(row.slot_crc)
    peek = system.center.queues.peek([slot])[slot]
    assert not isinstance(peek, Exception)
    assert peek.next_due is not None
    assert peek.next_due >= row.next_time > system.starts(job_id)[0].at / 1e6, "not at once"


def test_a_task_that_ends_its_worker_even_when_it_runs_alone_is_dead_in_the_end(system: System) -> None:
    system.create_topics()
    unseen = _suspect(system, "test.sync", crashes=3 + MAX_UNSEEN, error=ALONE)
    # The limit was lowered: so many crashes, and no run alone among them.
    never_alone = _suspect(system, "test.sync", crashes=3 + MAX_UNSEEN, error="the worker died")
    system.start(processes=1)
    system.wait(lambda: system.row(unseen).status == TaskStatus.DEAD, "it is dead", 30)
    assert not system.starts(unseen)
    assert "8 times" in (system.row(unseen).last_error or "")
    system.wait(lambda: system.row(never_alone).status == TaskStatus.PROCESSED, "it ran well", 30)


def _suspect(
    system: System,
    topic: str,
    *,
    biz_id: int = 1,
    delay: float = 0.1,
    crashes: int = 3,
    error: str = "the worker that ran it died",
    **attribute: Any,
) -> int:
    """A task that has been in flight when so many workers died."""
    job_id = system.center.submit(topic, biz_id=biz_id, delay=delay, attribute=attribute)
    _accuse(system, [job_id], crashes, error)
    return job_id


def _accuse(system: System, job_ids: list[int], crashes: int = 3, error: str = "the worker died") -> None:
    store = system.center.store
    guards = store.fail(
        [
            Failure(row.job_id, row.version, 0, 0, 0, crashes, row.next_time, error)
            for row in store.read(job_ids).values()
        ]
    )
    assert set(guards.values()) == {Guard.APPLIED}


def _lives(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
