"""Orders of events that were wrong once, step by step on real servers.
The model in spec/ found most of it."""

from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harness.hands import SLOT, TOPIC, Pair, in_five_minutes, meanwhile, out_of_reach, submit_due
from harness.patience import PATIENCE, until
from harness.tables import engine_of, raw, task_tables

from toc import CancelOutcome, RescheduleOutcome, TaskStatus
from toc.model.sharding import table_of_job
from toc.model.verdict import Failure
from toc.store.tasks.batch import Guard
from toc.store.tasks.tries import TakeTries
from toc.worker import reclaim
from toc.worker.handover import HAND_OVER_SECONDS
from toc.worker.reclaim import EMPTY_SECONDS
from toc.worker.settle.finish import RETRY_SECONDS

# Orders of events that were wrong once, step by step on real servers. The model in spec/ found most of it.


def test_what_was_refused_after_a_pause_and_nobody_has_taken_runs_uncharged(hands: Pair) -> None:
    sleeper, _ = hands
    job_id = sleeper.take_one()
    sleeper.sleep()
    sleeper.start()
    sleeper.await_gone(job_id)
    sleeper.take()
    sleeper.await_runs(1)
    sleeper.end_and_finish()
    assert hands.ran(job_id)


@pytest.mark.parametrize("meets", ["the end of the handover", "a look of the new owner"])
def test_a_claim_number_is_kept_while_a_prepare_under_it_may_be_under_way(hands: Pair, meets: str) -> None:
    """Without it, if its worker dies, the new owner does not know whose the entry is until it times out."""
    former, owner = hands
    job_id = submit_due(hands.system)
    handover = former.worker.handover

    def go_on() -> None:
        former.clock.slept += 2 * HAND_OVER_SECONDS
        handover.step(former.clock.monotonic())

    def known_to_the_owner() -> bool:
        owner.book.renew([SLOT])
        return former.name in owner.book.owned[SLOT].others.values()

    assert known_to_the_owner()
    if meets == "the end of the handover":
        meanwhile(hands.patch, former.poller.takes, "begin", lambda: handover.drop({SLOT}), go_on)
    else:
        meanwhile(hands.patch, former.poller.takes, "begin", owner.reclaim)
    former.take()
    assert former.inflight.get(job_id) is not None
    assert known_to_the_owner()
    if meets == "the end of the handover":
        former.finish()
        go_on()
    else:
        former.start_and_wait()
        former.end_and_finish()
    owner.reclaim()
    owner.clock.slept += EMPTY_SECONDS
    owner.reclaim()
    assert not known_to_the_owner(), "nothing is left under it"


def test_the_number_of_a_worker_that_lives_stays_whoever_else_has_the_slot(hands: Pair) -> None:
    first, second = hands
    for one in (first, second, first, second):
        one.worker.watch.ask_owner()
    second.book.renew([SLOT])  # it meets the first
    for _ in range(2):
        second.reclaim()
        second.clock.slept += EMPTY_SECONDS
    second.reclaim()
    assert second.queues.claims([SLOT])[SLOT] == {one.book.owned[SLOT].claim: one.name for one in hands}


def test_of_two_owners_the_slower_does_not_charge_the_next_try_for_this_ones_crash(hands: Pair) -> None:
    quick, slow = hands
    job_id = quick.take_one()
    quick.forget()
    quick.sleep()
    slow.book.dead = frozenset({"a:1"})  # the process that has just let go is known to be dead
    meanwhile(hands.patch, slow.store, "read_tries", quick.reclaim, quick.take)
    slow.reclaim()
    assert (hands.row(job_id).attempts, hands.row(job_id).crashes) == (1, 1)
    quick.start_and_wait()
    quick.end_and_finish(fails=True)
    assert (hands.row(job_id).attempts, hands.row(job_id).crashes) == (2, 0)


def test_a_move_that_is_under_way_does_not_take_away_the_same_id_taken_anew(hands: Pair) -> None:
    sleeper, other = hands
    job_id = submit_due(hands.system)
    for _ in range(2):  # both tries that may be charged: from now on the fence stays the same
        sleeper.take()
        sleeper.forget()
        sleeper.sleep()
        other.reclaim()
    sleeper.begin()
    sleeper.sleep()
    other.reclaim()
    sleeper.end(fails=True)
    rollback = sleeper.queues.rollback

    def taken_meanwhile(entries: Any) -> Any:
        sleeper.take()
        return rollback(entries)

    with hands.patch.context() as patch:
        patch.setattr(sleeper.queues, "rollback", taken_meanwhile)
        sleeper.finish()
    assert sleeper.inflight.get(job_id) is None
    other.take()
    sleeper.take()
    assert (other.inflight.get(job_id) is None) != (sleeper.inflight.get(job_id) is None)


def test_what_a_move_takes_away_while_it_is_adopted_is_not_held(hands: Pair) -> None:
    worker, other = hands
    job_id = worker.begin_one()
    entry = worker.held(job_id)
    worker.end(fails=True)
    rollback, extend = worker.queues.rollback, worker.queues.extend
    moved: list[Any] = []

    def looks_for_it_meanwhile(entries: Any) -> Any:
        def moved_meanwhile(asked: Any) -> Any:
            standing = extend(asked)
            moved.append(rollback(entries))
            worker.inflight.arrived([entry])
            return standing

        with hands.patch.context() as patch:
            patch.setattr(worker.queues, "extend", moved_meanwhile)
            worker.adopter.reply_lost(SLOT, worker.book.owned[SLOT].claim)
            worker.adopt()
        return moved[0] if moved else rollback(entries)

    with hands.patch.context() as patch:
        patch.setattr(worker.queues, "rollback", looks_for_it_meanwhile)
        worker.finish()
    other.take()
    assert other.inflight.get(job_id) is not None, "it was rolled back, and is due"
    assert worker.inflight.get(job_id) is None


def test_what_is_taken_anew_while_it_is_adopted_is_checked_once_its_server_answers(hands: Pair) -> None:
    """The adopter holds it, another worker moves it back, and the poller takes it under the same fence.

    Both ask for its row: the older one last.
    """
    worker, _ = hands
    job_id = worker.take_one()
    entry = worker.held(job_id)
    worker.dispatcher.withdraw()
    worker.forget()
    worker.adopter.reply_lost(SLOT, worker.book.owned[SLOT].claim)

    asked: list[tuple[list[int], TakeTries]] = []

    def moved_back() -> None:
        worker.queues.rollback({SLOT: [(job_id, entry.fence, entry.row_score())]})

    with hands.patch.context() as patch:
        patch.setattr(worker.checker.reader, "ask", lambda ids, take: asked.append((list(ids), take)))
        meanwhile(patch, worker.queues, "extend", moved_back, worker.take)
        worker.adopt()
    for job_ids, take in asked:
        if job_ids:
            take(job_ids, worker.store.read_tries(job_ids))
    assert worker.dispatcher.load()[SLOT.topic] == (0, 1)
    worker.start_and_wait()
    worker.end_well(job_id)


def test_an_id_that_waits_for_the_clock_twice_runs_once(hands: Pair) -> None:
    worker, _ = hands
    job_id = submit_due(hands.system)
    due = hands.row(job_id).action_time
    with hands.patch.context() as patch:
        patch.setattr(worker.clock, "now_ms", lambda: due - 50)
        for _ in range(2):
            worker.take()
            entry = worker.held(job_id)
            worker.turn()
            worker.queues.rollback({SLOT: [(job_id, entry.fence, float(due))]})  # by whoever took it for lost
        worker.take()
    worker.turn()
    worker.start_and_wait()
    worker.end_and_finish()
    assert len(worker.runs) == 1
    assert hands.row(job_id).status == TaskStatus.PROCESSED


def test_an_entry_that_is_taken_again_before_it_has_started_is_checked_again(hands: Pair) -> None:
    sleeper, other = hands
    job_id = submit_due(hands.system)
    due = hands.row(job_id).action_time
    sleeper.take()
    sleeper.sleep()
    other.reclaim()
    hands.center.reschedule(job_id, action_time=in_five_minutes())
    assert hands.center.cancel(job_id) is not CancelOutcome.UNKNOWN
    hands.center.queues.add({SLOT: [(job_id, float(due))]})  # by a sweep that had read the row before
    sleeper.take()
    sleeper.start()
    sleeper.finish()
    sleeper.await_gone(job_id)
    assert sleeper.runs == []


def test_what_fell_silent_is_looked_for_each_second_until_it_times_out(hands: Pair) -> None:
    """Not at every peek alone, which would cost up to five seconds more."""
    silent, other = hands
    job_id = silent.take_one()
    other.reclaim()
    assert silent.inflight.get(job_id), "it was not timed out yet"
    silent.sleep()
    other.reclaimer.run_once()
    assert hands.row(job_id).crashes == 1


def test_an_old_snapshot_that_tells_of_a_try_for_a_former_deadline_costs_one_try(hands: Pair) -> None:
    """Nothing tells its entry from one whose worker has fallen silent; the new deadline has begun anew."""
    worker, other = hands
    job_id = worker.take_one()
    old = worker.snapshot()
    worker.start_and_wait()
    worker.end_and_finish(fails=True)
    assert hands.row(job_id).attempts == 1
    due = datetime.now(UTC) + timedelta(seconds=0.3)
    assert hands.center.reschedule(job_id, action_time=due) is RescheduleOutcome.MAY_HAVE_STARTED
    assert until(lambda: datetime.now(UTC) > due + timedelta(seconds=0.01), PATIENCE)
    for crashes in (1, 2):  # the second time the row shows that its first try is paid for
        other.restore(old)
        other.reclaim()
        row = hands.row(job_id)
        assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 1, crashes)
    other.begin()
    other.end_well(job_id)


def test_what_cannot_be_read_does_not_hold_back_what_timed_out_behind_it(hands: Pair) -> None:
    worker, other = hands
    hands.patch.setattr(reclaim, "RECLAIM_LIMIT", 2)
    job_ids = [hands.system.client.submit(TOPIC, biz_id=biz_id, delay=0.02) for biz_id in [1] * 5 + [2]]
    unread = set(map(str, job_ids[:5]))
    table, elsewhere = (
        table_of_job(job_id, hands.system.settings.tables) for job_id in (job_ids[0], job_ids[5])
    )
    assert table != elsewhere

    def taken() -> bool:
        worker.take()
        return len(worker.snapshot()) == len(job_ids)

    def left_after_a_look() -> set[str]:
        other.reclaimer.run_once()
        return set(worker.snapshot())

    assert until(taken, PATIENCE), "it takes all"
    worker.time_out()
    name = task_tables(hands.system.settings)[table]
    with raw(hands.system.settings) as connection:
        connection.exec_driver_sql(f"RENAME TABLE {name} TO {name}_away")
        other.reclaimer.look_now()
        assert until(lambda: left_after_a_look() == unread, PATIENCE), "the other one is given back"
        connection.exec_driver_sql(f"RENAME TABLE {name}_away TO {name}")
    assert until(lambda: not left_after_a_look(), PATIENCE), "all are given back"


# Orders of events in which a cancel once said more than it could know. See test_interleavings.py.


@pytest.mark.parametrize("before", ["a cancel that broke off", "another deadline"])
@pytest.mark.parametrize("then", ["its end is written meanwhile", "the index is out of reach"])
def test_a_cancel_knows_a_run_that_began_before_its_row_changed(hands: Pair, before: str, then: str) -> None:
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


def test_a_cancel_far_ahead_admits_a_run_for_an_older_deadline_without_an_index(hands: Pair) -> None:
    worker, _ = hands
    job_id = worker.take_one()  # it may start at any time
    hands.center.reschedule(job_id, action_time=in_five_minutes())
    with out_of_reach(hands.redis):
        assert hands.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


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


def test_a_try_whose_row_was_locked_waits_for_no_row_that_is_locked_later(hands: Pair) -> None:
    """Such as those that a caller cancels in a long transaction, while their tries end one after another."""
    worker, _ = hands

    def end_locked() -> int:
        job_id = worker.begin_one()
        hands.center.cancel(job_id, connection=transactions.enter_context(engine.connect()))
        worker.end_and_finish()
        return job_id

    url = hands.system.settings.need_database_urls()[0]
    with engine_of(url) as engine, ExitStack() as transactions:
        first = end_locked()
        transactions.close()
        for _ in range(3):
            worker.clock.slept += 0.75 * RETRY_SECONDS
            end_locked()
    assert hands.ran(first)
