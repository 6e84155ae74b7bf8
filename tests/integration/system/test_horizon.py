"""Tasks due later than their topic's horizon wait in MySQL alone, and every change knows it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from harness.system import System

from benchmarks.local import RedisServer
from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus
from toc.index.messages import Peek

HOUR = 3600


@pytest.fixture
def running(system: System) -> System:
    system.create_topics(horizon=HOUR)
    system.start()
    return system


def entries(system: System) -> int:
    """How many entries of the topic there are in Redis."""
    peeks = system.center.queues.peek(system.center.catalog.get("test.sync").slots()).values()
    return sum(peek.store + peek.prepared + peek.dead for peek in peeks if isinstance(peek, Peek))


def test_a_retry_beyond_the_horizon_leaves_redis_and_keeps_its_row(running: System) -> None:
    job_id = running.center.submit(
        "test.sync", biz_id=1, delay=0.1, attribute={"fail": 1, "retry_after": 2 * HOUR}
    )
    running.wait(lambda: running.row(job_id).attempts == 1, "it has failed", 10)
    running.wait(lambda: entries(running) == 0, "it has left Redis", 5)
    assert running.row(job_id).status == TaskStatus.PENDING
    sooner = datetime.now(UTC) + timedelta(seconds=1)
    assert running.center.reschedule(job_id, action_time=sooner) is RescheduleOutcome.MAY_HAVE_STARTED
    # A new deadline has all its tries, of which the first fails as asked.
    running.wait(lambda: len(running.starts(job_id)) == 2, "it runs at its new time", 5)


def test_reschedule_goes_over_the_horizon_both_ways(running: System) -> None:
    center = running.center
    job_id = center.submit("test.sync", biz_id=1, delay=HOUR / 2)
    assert entries(running) == 1
    far, near = (datetime.now(UTC) + timedelta(hours=hours) for hours in (2, 0.6))
    assert center.reschedule(job_id, action_time=far) is RescheduleOutcome.RESCHEDULED
    assert entries(running) == 0
    assert [task.job_id for task in center.find(biz_id=1)] == [job_id]
    assert center.reschedule(job_id, action_time=near) is RescheduleOutcome.RESCHEDULED
    assert entries(running) == 1
    assert center.reschedule(job_id, action_time=far) is RescheduleOutcome.RESCHEDULED
    soon = datetime.now(UTC) + timedelta(seconds=1)
    assert center.reschedule(job_id, action_time=soon) is RescheduleOutcome.RESCHEDULED
    running.wait(lambda: running.row(job_id).status == TaskStatus.PROCESSED, "it has run", 5)
    assert len(running.starts(job_id)) == 1


def test_what_lies_beyond_the_horizon_can_be_cancelled_and_is_not_brought_in_by_a_refill(
    running: System, clean_redis: RedisServer
) -> None:
    center = running.center
    far = center.submit_many([NewTask("test.sync", n, 2 * HOUR) for n in range(20)])
    near = center.submit_many([NewTask("test.sync", n, HOUR / 2) for n in range(20)])
    assert entries(running) == 20
    assert center.cancel(far[0]) is CancelOutcome.CANCELLED
    assert center.cancel(far[0]) is CancelOutcome.CANCELLED
    # A loss amid the first filling may show in no key; then they come back with the pass over the window.
    running.wait(running.whole, "the first generation is recorded", 15)
    clean_redis.call("FLUSHALL")
    running.wait(lambda: entries(running) == len(near), "what lies inside is back", 10)
    assert {running.row(job_id).status for job_id in far[1:]} == {TaskStatus.PENDING}
