"""Tries of a task's own, past the 31 that a score tells apart; tasks that expire,
or kill the process that runs them."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness.hands import Pair, meanwhile, submit_due
from harness.metrics import ANY_ADDRESS, samples
from harness.patience import in_a_moment
from harness.rows import known
from harness.system import System

from benchmarks.local import RedisServer
from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus
from toc.model.errors import InvalidExpiry
from toc.model.raised import EXPIRED
from toc.model.task import UNLIMITED
from toc.model.topic import Backoff
from toc.model.verdict import Failure, try_as_read
from toc.operate.bulk_jobs import redrive
from toc.operate.cluster import open_operator
from toc.store.tasks.batch import Guard
from toc.worker.quarantine import ALONE, MAX_UNSEEN

# Tries of a task's own, past the 31 that a score tells apart, and tasks that expire, wherever they wait.

CANCELLED, DEAD, PROCESSED = TaskStatus.CANCELLED, TaskStatus.DEAD, TaskStatus.PROCESSED

IN_TIME = 5.0
"""Seconds in which a task that is due starts on a busy machine."""


def ahead(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def expiring(system: System, topic: str, biz_id: int, delay: float, after: float, **attribute: Any) -> int:
    """A task that is due in ``delay`` seconds and expires ``after`` that."""

    def submit(due: datetime) -> int:
        expires_at = due + timedelta(seconds=after)
        return system.center.submit(
            topic, biz_id=biz_id, action_time=due, expires_at=expires_at, attribute=attribute
        )

    return in_a_moment(submit, delay)


def ended(system: System, job_id: int, seconds: float = 20) -> tuple[int, int, int]:
    """Wait for its end; (status, expired, attempts)."""
    system.wait(lambda: not system.pending([job_id]), f"{job_id} has ended", seconds)
    row = system.row(job_id)
    return row.status, row.expired, row.attempts


def queues(system: System) -> tuple[int, int, int]:
    """How many entries the StoreQueues, PrepareQueues and DeadQueues have; -1 if Redis does not tell."""
    peeks = system.peeks()
    if len(peeks) < len(system.slots()):
        return -1, -1, -1
    return sum(p.store for p in peeks), sum(p.prepared for p in peeks), sum(p.dead for p in peeks)


def counted(system: System, name: str) -> float:
    """What the first daemon shows of all series of one metric."""
    shown = samples(system.daemons[0].told())
    return sum(value for sample, value in shown.items() if sample.split("{")[0] == name)


def test_each_task_has_its_own_tries_and_each_is_made_once_past_31_and_across_kills(system: System) -> None:
    """Workers die with try 15, 30, 31, 32 and 39 of forty, on a topic of 16: each costs one try, none two."""
    system.create_topics(retries=16, backoff=Backoff.IMMEDIATE)
    daemon = system.start(processes=2)
    center = system.center
    killing = {"fail": 99, "die_at": [15, 30, 31, 32, 39]}
    forty, unlimited, one, plain = center.submit_many(
        [
            NewTask("test.sync", 1, 0.2, attribute=killing, tries=40),
            NewTask("test.sync", 2, 0.2, attribute={"fail": 70}, tries=UNLIMITED),
            NewTask("test.sync", 3, 0.2, attribute={"fail": 99}, tries=1),
            NewTask("test.sync", 4, 0.2, attribute={"fail": 99}),
        ]
    )
    system.wait(lambda: not system.pending([forty, unlimited, one, plain]), "all have ended", 90)
    found = {job_id: system.row(job_id) for job_id in (forty, unlimited, one, plain)}
    assert [(row.status, row.expired) for row in found.values()] == [
        (DEAD, 0),
        (PROCESSED, 0),
        (DEAD, 0),
        (DEAD, 0),
    ]
    assert [found[job_id].attempts for job_id in (forty, one)] == [40, 1]
    assert [start.attempt for start in system.starts(forty)] == list(range(1, 41))
    # The others may have been in flight when a neighbour killed their process, which costs them a try.
    for job_id in (unlimited, plain):
        attempts = [start.attempt for start in system.starts(job_id)]
        assert sorted(set(attempts)) == attempts, "no try was made twice"
    assert 71 <= system.starts(unlimited)[-1].attempt <= 71 + 5
    assert found[plain].attempts == 16
    assert center.get(forty).tries == 40  # type: ignore[union-attr]
    assert len(daemon.events("worker_died")) == 5
    assert sum(str(forty) in event["job_ids"] for event in daemon.events("tries_crashed")) == 5


def test_a_task_expires_where_it_waits_and_no_try_starts_after_it(system: System) -> None:
    """In backoff, behind another task, on a paused topic, after a kill; and what runs may finish."""
    system.create_topics(prepare_timeout=3, backoff_base=60, backoff_cap=60, concurrency=1)
    system.center.store.topics.alter("test.batch", paused=True)
    system.start(processes=1, env=ANY_ADDRESS)
    center = system.center
    enough = system.directory / "enough"
    never = expiring(system, "test.batch", 5, 0.1, 0.1)
    tried = expiring(system, "test.batch", 6, 0.1, IN_TIME)
    center.store.mark_begun([tried], "its worker stopped before it had ended")
    stays = center.submit("test.batch", biz_id=7, delay=0.1)
    runs = expiring(system, "test.sync", 1, 0.3, IN_TIME, until=str(enough))
    system.wait(lambda: system.starts(runs), "it runs", 10)
    behind = expiring(system, "test.sync", 2, 0.3, 0.1)
    backoff = expiring(system, "test.async", 3, 0.3, IN_TIME, fail=1, retry_after=30)
    in_time = expiring(system, "test.async", 4, 0.3, 300, fail=1, retry_after=0.1)
    assert ended(system, backoff) == (DEAD, 1, 1)
    assert "attempt 1" not in (system.row(backoff).last_error or ""), "Retry gives its own text"
    assert system.row(backoff).last_error
    assert ended(system, in_time) == (PROCESSED, 0, 1)

    def both_expired() -> bool:
        return all(system.row(one).expires_at < system.center.clock.now_ms() for one in (runs, behind))

    system.wait(both_expired, "both have expired while the one runs", 10)
    enough.touch()
    assert ended(system, behind) == (CANCELLED, 1, 0)
    assert ended(system, runs) == (PROCESSED, 0, 0)
    assert not system.starts(behind)
    assert ended(system, never) == (CANCELLED, 1, 0)
    assert ended(system, tried) == (DEAD, 1, 0)
    assert system.pending([stays])
    system.wait(lambda: queues(system) == (1, 0, 2), "the index has followed", 10)
    assert center.cancel(never) is CancelOutcome.CANCELLED
    assert center.cancel(tried) is CancelOutcome.TOO_LATE
    task = known(center.get(never))
    assert task.expired
    assert task.expires_at is not None

    killed = expiring(system, "test.async", 8, 0.2, IN_TIME, sleep=IN_TIME + 1, die=1)
    assert ended(system, killed) == (DEAD, 1, 1)
    assert system.row(killed).crashes == 1
    assert len(system.starts(killed)) == 1
    system.wait(lambda: counted(system, "toc_expired_tasks_total") == 5, "each is counted", 10)
    assert not system.starts(never)

    with pytest.raises(InvalidExpiry):
        center.reschedule(stays, action_time=ahead(9), expires_at=ahead(8))

    def move(due: datetime) -> RescheduleOutcome:
        return center.reschedule(stays, action_time=due, expires_at=due + timedelta(seconds=300))

    in_a_moment(move)
    with pytest.raises(InvalidExpiry):
        center.reschedule(stays, action_time=ahead(600))
    assert redrive(center, [tried])["redriven"] == 1
    center.store.topics.alter("test.batch", paused=False)
    assert ended(system, tried) == (PROCESSED, 0, 0)
    assert ended(system, stays) == (PROCESSED, 0, 0)


def test_tasks_expire_without_redis(system: System, clean_redis: RedisServer) -> None:
    """A task behind one that runs, and one that is paused; and the row's tries count there, too."""
    system.create_topics(prepare_timeout=3, concurrency=1, retries=2, backoff=Backoff.IMMEDIATE)
    system.center.store.topics.alter("test.batch", paused=True)
    system.start(processes=1)
    warm = system.center.submit("test.sync", biz_id=1, delay=0.1)
    assert ended(system, warm) == (PROCESSED, 0, 0)
    clean_redis.kill()
    enough = system.directory / "enough"
    runs = expiring(system, "test.sync", 2, 0.3, IN_TIME, until=str(enough))
    often = system.center.submit("test.async", biz_id=3, delay=3, attribute={"fail": 99}, tries=33)
    row = system.center.store.read_tries([often])[often]
    failures = [Failure(*try_as_read(row), 30, 0, row.next_time)]
    assert system.center.store.fail(failures) == {often: Guard.APPLIED}
    system.wait(lambda: bool(system.starts(runs)), "it runs without Redis", 10)
    behind = expiring(system, "test.sync", 4, 0.1, 0.3)
    paused = expiring(system, "test.batch", 5, 0.1, 0.3)
    expires_at = system.row(runs).expires_at
    system.wait(lambda: expires_at < system.center.clock.now_ms(), "it has expired while it runs", 10)
    enough.touch()
    assert ended(system, runs) == (PROCESSED, 0, 0)
    assert ended(system, behind) == (CANCELLED, 1, 0)
    assert ended(system, paused) == (CANCELLED, 1, 0)
    assert ended(system, often) == (DEAD, 0, 33)
    assert [start.attempt for start in system.starts(often)] == [31, 32, 33]
    clean_redis.start()
    system.wait(lambda: queues(system)[:2] == (0, 0), "the index has followed", 15)
    assert not system.starts(behind)
    assert not system.starts(paused)


def test_what_has_expired_while_it_waited_ran_at_no_time(hands: Pair) -> None:
    """The heartbeat looks between the last look at it and its end."""
    worker, _ = hands
    worker.clock.slept += 7200  # a machine that has been up for longer than a try may take
    late, early = submit_due(hands.system), submit_due(hands.system)
    worker.take()
    entries = worker.dispatcher.withdraw()
    assert [entry.job_id for entry in entries] == [late, early]
    now = worker.clock.now_ms()
    entries[0].row = entries[0].row._replace(expires_at=now - 1)
    entries[1].row = entries[1].row._replace(next_time=now + 60_000)
    ended: list[object] = []
    hands.patch.setattr(worker.finisher, "ended", lambda _entry, error: ended.append(error))
    meanwhile(hands.patch, worker.worker.tools.early, "put", worker.heartbeat.run_once)
    assert not worker.dispatcher.handler_threads._calls.last_look(entries, worker.clock.monotonic())
    assert ended == [EXPIRED]


# Tasks that kill the process that runs them: they end alone, and nobody dies of them.


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


def test_suspects_of_a_host_that_is_drained_run_on_another(cluster: System) -> None:
    cluster.create_topics()
    enough = cluster.directory / "enough"
    jobs = {_suspect(cluster, "test.sync", biz_id=n, until=str(enough)) for n in (1, 2)}
    daemon = cluster.start("host-a", processes=1)
    cluster.wait(lambda: bool(cluster.history()), "one runs", 30)
    first = cluster.history()[0].job_id
    (second,) = jobs - {first}
    before = cluster.row(second).action_time
    cluster.wait(lambda: cluster.row(second).next_time > before + 1000, "the other is put off, and named", 30)
    with open_operator(cluster.settings) as operator:
        operator.want("drain", "host-a", by="ann")
        cluster.wait(lambda: not any(row.owned for row in operator.workers()), "it is drained", 30)
    enough.touch()
    cluster.wait(lambda: len(daemon.workers()) == 1, "the process of the runs alone has left", 30)
    assert [cluster.row(job_id).status for job_id in (first, second)] == [
        TaskStatus.PROCESSED,
        TaskStatus.PENDING,
    ]
    cluster.start("host-b", processes=1)
    cluster.wait(lambda: cluster.row(second).status == TaskStatus.PROCESSED, "it has run elsewhere", 60)


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
    before = system.row(waiting).action_time
    system.wait(lambda: system.row(waiting).next_time > before + 1000, "the other is put off", 30)
    daemon.kill()
    enough.touch()
    row = system.row(job_id)
    assert (row.crashes, row.last_error) == (4, ALONE)
    daemon = system.start(processes=1)
    system.wait(lambda: system.row(waiting).status == TaskStatus.PROCESSED, "the other has run", 30)
    assert (system.row(waiting).attempts, system.row(waiting).crashes) == (0, 4), "charged nothing"
    first, *again = system.starts(job_id)
    assert all(start.at / 1e6 >= row.next_time for start in again), "on a busy machine it is due by now"
    slot = system.center.catalog.get("test.sync").slot(row.slot_crc)
    peek = system.center.queues.peek([slot])[slot]
    assert not isinstance(peek, Exception)
    assert again or known(peek.next_due) >= row.next_time
    assert row.next_time > first.at / 1e6, "not at once"


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
    row = system.row(job_id)
    failure = Failure(job_id, row.version, 0, 0, 0, crashes, row.next_time, error)
    assert system.center.store.fail([failure]) == {job_id: Guard.APPLIED}
    return job_id


def _lives(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
