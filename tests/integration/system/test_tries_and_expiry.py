"""Tries of a task's own, past the 31 that a score tells apart, and tasks that expire, wherever they wait."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harness.metrics import ANY_ADDRESS, samples
from harness.patience import in_a_moment
from harness.system import System

from benchmarks.local import RedisServer
from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus
from toc.index.messages import Peek
from toc.model.errors import InvalidExpiry
from toc.model.task import UNLIMITED
from toc.model.topic import Backoff
from toc.model.verdict import Failure, try_as_read
from toc.operate.bulk import redrive
from toc.store.tasks.batch import Guard

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
    slots = [slot for topic in system.center.store.topics.list() for slot in topic.slots()]
    peeks = [peek for peek in system.center.queues.peek(slots).values() if isinstance(peek, Peek)]
    if len(peeks) < len(slots):
        return -1, -1, -1
    return sum(p.store for p in peeks), sum(p.prepared for p in peeks), sum(p.dead for p in peeks)


def counted(system: System, name: str) -> float:
    """What the first daemon shows of all series of one metric."""
    shown = samples(system.daemons[0].told())
    return sum(value for sample, value in shown.items() if sample.split("{")[0] == name)


def test_each_task_has_its_own_tries_and_each_is_made_once_also_past_31_and_across_kills(
    system: System,
) -> None:
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
    task = center.get(never)
    assert task is not None
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
