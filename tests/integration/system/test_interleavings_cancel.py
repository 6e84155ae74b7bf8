"""Orders of events in which a cancel once said more than it could know. See test_interleavings.py."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from harness.hands import TOPIC, Pair, in_five_minutes, meanwhile, out_of_reach

from toc import CancelOutcome, RescheduleOutcome, TaskStatus
from toc.model.verdict import Failure
from toc.store.tasks.batch import Guard


@pytest.mark.parametrize("before", ["a cancel that broke off", "another deadline"])
@pytest.mark.parametrize("then", ["its end is written meanwhile", "the index is out of reach"])
def test_a_cancel_knows_of_a_run_that_began_before_its_row_was_changed(
    hands: Pair, before: str, then: str
) -> None:
    worker, _ = hands
    job_id = worker.begin_one()
    if before == "another deadline":
        hands.center.reschedule(job_id, action_time=in_five_minutes())
    else:
        hands.center.store.cancel_many([job_id])  # and here its process dies
    if then == "the index is out of reach":
        with out_of_reach(hands.redis):
            assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
        return
    worker.end()
    # The row of the cancel is written; it has not asked the index yet.
    meanwhile(hands.patch, hands.center.queues, "cancel", worker.finish)
    assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_far_ahead_admits_a_run_for_an_older_deadline_when_the_index_is_out_of_reach(
    hands: Pair,
) -> None:
    worker, _ = hands
    job_id = worker.take_one()  # it may start at any time
    hands.center.reschedule(job_id, action_time=in_five_minutes())
    with out_of_reach(hands.redis):
        assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_knows_of_a_run_for_an_older_deadline_that_has_ended(hands: Pair) -> None:
    worker, _ = hands
    job_id = worker.begin_one()
    later = in_five_minutes()
    assert hands.center.reschedule(job_id, action_time=later) is RescheduleOutcome.MAY_HAVE_STARTED
    worker.end_and_finish()
    row = hands.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_of_what_was_taken_and_moved_before_it_started_is_sure(hands: Pair) -> None:
    worker, _ = hands
    job_id = hands.center.submit(TOPIC, biz_id=1, delay=300)
    hands.center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(minutes=6))
    worker.take()
    assert hands.center.cancel(job_id) is CancelOutcome.CANCELLED
    assert hands.center.cancel(job_id) is CancelOutcome.CANCELLED


def test_a_cancel_knows_of_tries_that_a_redrive_or_a_new_deadline_has_given_back(hands: Pair) -> None:
    worker, _ = hands
    failed = worker.fail_one()
    later = in_five_minutes()
    assert hands.center.reschedule(failed, action_time=later) is RescheduleOutcome.MAY_HAVE_STARTED
    redriven = worker.fail_one()
    row = hands.row(redriven)
    last = Failure(
        row.job_id, row.version, row.attempts, row.crashes, row.attempts + 1, 0, row.next_time, "the last"
    )
    assert hands.center.store.die([last]) == {redriven: Guard.APPLIED}
    assert hands.center.store.redrive([redriven], hands.center.clock.now_ms() + 60_000)
    for job_id in (failed, redriven):
        assert (hands.row(job_id).attempts, hands.row(job_id).crashes) == (0, 0)
        assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
        assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_knows_of_a_try_that_was_stopped_and_given_back_uncharged(hands: Pair) -> None:
    worker, _ = hands
    job_id = worker.begin_one()
    worker.finisher.give_back_running([e for e in worker.inflight.snapshot() if worker.inflight.settle(e)])
    worker.finish()
    row = hands.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_knows_of_a_run_for_an_older_deadline_whose_worker_fell_silent(hands: Pair) -> None:
    worker, other = hands
    job_id = worker.begin_one()
    later = in_five_minutes()
    assert hands.center.reschedule(job_id, action_time=later) is RescheduleOutcome.MAY_HAVE_STARTED
    worker.sleep()
    other.reclaim()
    row = hands.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0), (
        "charged to the new deadline"
    )
    assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    worker.end()  # awake again
