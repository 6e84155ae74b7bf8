"""Leases and hand-outs on rows: one owner at a time, judged by the server's clock,
one end of each version."""

import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from harness.clocks import PushedClock, StandingClock
from harness.leases import taken
from harness.patience import until
from harness.rows import NewRow, change, insert, insert_many, known

from toc.model.pull import LEASE_ENDED, AckOutcome, PullLease, PullRow
from toc.model.task import TaskRow, TaskStatus, TryRow
from toc.model.topic import Topic
from toc.model.verdict import CRASHED, Failure, Nack, Unpulled, after_expiry, after_lapse, unpulled
from toc.store.store import Store
from toc.store.tasks.batch import Guard
from toc.store.tasks.leases import RAN_OUT
from toc.store.tasks.pulls import HandOut
from toc.store.tasks.scan import Position
from toc.store.tasks.select import Selection

# Leases on rows: one owner at a time, judged by the server's clock, honoured by every other write.


@pytest.fixture
def one(place: Any) -> Iterator[Store]:
    store = place.open()
    store.leases.identify("worker-one")
    yield store
    store.close()


@pytest.fixture
def two(place: Any) -> Iterator[Store]:
    store = place.open(clock=PushedClock(3_600_000))
    store.leases.identify("worker-two")
    yield store
    store.close()


@pytest.fixture
def row(one: Store, new_row: NewRow) -> TaskRow:
    row = new_row()
    insert(one, row)
    return row


def lease(store: Store, row: TaskRow) -> int:
    return store.read_tries([row.job_id])[row.job_id].lease


def due(store: Store, row: TaskRow) -> list[int]:
    """The row's id, if a look for rows that may be taken finds it."""
    tables = [table for tables in store.tables_of_server() for table in tables]
    starts = dict.fromkeys(tables, Position(row.next_time))
    pages = store.scans.page(starts, row.next_time + 1, 100, where=f" AND {store.leases.untaken()}")
    return [found.job_id for page in pages.values() for found in page if found.job_id == row.job_id]


def tried(store: Store, row: TaskRow) -> TryRow:
    """The row as a row check reads it."""
    return store.read_tries([row.job_id])[row.job_id]


def failure(row: TaskRow, **changes: Any) -> Failure:
    return Failure(row.job_id, 0, row.attempts, row.crashes, 1, 0, row.next_time, "boom")._replace(**changes)


def test_one_of_two_takes_a_row_and_may_take_it_again(one: Store, two: Store, row: TaskRow) -> None:
    assert taken(one.leases, {row.job_id: 30}) == {row.job_id}
    assert taken(two.leases, {row.job_id: 30}) == set()
    assert taken(one.leases, {row.job_id: 30}) == {row.job_id}
    assert lease(one, row) == 0
    assert 15_000 < lease(two, row) <= 30_001
    one.leases.release([row.job_id])
    assert lease(two, row) == 0
    assert taken(two.leases, {row.job_id: 30}) == {row.job_id}


def test_a_lease_runs_out_by_the_clock_of_the_server(one: Store, two: Store, row: TaskRow) -> None:
    """The other worker's clock, an hour ahead, has no say."""
    one.leases.take({row.job_id: 30})
    assert 0 < lease(two, row) <= 30_001
    assert due(two, row) == []
    one.leases.take({row.job_id: 1})
    assert lease(two, row) <= 1001
    assert until(lambda: lease(two, row) == RAN_OUT, 60)
    assert due(two, row) == [row.job_id]
    assert taken(two.leases, {row.job_id: 30}) == set(), "its crash is charged first"
    assert two.fail([failure(row)]) == {row.job_id: Guard.APPLIED}
    assert taken(two.leases, {row.job_id: 30}) == {row.job_id}
    assert lease(one, row) > 15_000
    assert taken(one.leases, {row.job_id: 30}) == set()


def test_a_leased_row_does_not_expire_by_the_sweep_and_one_whose_lease_ran_out_was_tried(
    one: Store, two: Store, new_row: NewRow
) -> None:
    row = new_row(action_time=1_600_000_000_000, expires_at=1_600_000_000_001)
    insert(one, row)
    ends = after_expiry(tried(one, row), row.next_time)
    one.leases.take({row.job_id: 1})
    for store in (one, two):
        assert store.expire([ends]) == {row.job_id: Guard.LOST}, "it may be running, in this very process"
    assert until(lambda: lease(two, row) == RAN_OUT, 60)
    ends = after_expiry(tried(two, row), row.next_time)
    assert ends.started
    assert two.expire([ends]) == {row.job_id: Guard.APPLIED}
    found = known(two.get(row.job_id))
    assert (found.status, found.expired, found.attempts, found.last_error) == (4, 1, 1, CRASHED)


def test_leases_of_workers_known_to_be_dead_are_free_at_once(one: Store, two: Store, row: TaskRow) -> None:
    one.leases.take({row.job_id: 30})
    two.leases.set_dead(["worker-one"])
    assert lease(two, row) == RAN_OUT
    assert due(two, row) == [row.job_id]
    assert two.fail([failure(row, new_crashes=1)]) == {row.job_id: Guard.APPLIED}
    assert lease(two, row) == 0
    assert taken(two.leases, {row.job_id: 30}) == {row.job_id}


def test_without_a_name_a_lease_is_always_anothers(place: Any, one: Store, row: TaskRow) -> None:
    one.leases.take({row.job_id: 30})
    nobody = place.open()
    assert lease(nobody, row) > 0
    assert nobody.fail([failure(row)]) == {row.job_id: Guard.LOST}
    nobody.close()


def test_who_only_renews_takes_no_lease_where_nobody_has_one(one: Store, two: Store, row: TaskRow) -> None:
    mine = {row.job_id: 30}
    assert taken(one.leases, mine, renew=mine) == set()
    assert lease(two, row) == 0
    assert taken(one.leases, mine) == set(mine)
    assert taken(one.leases, mine, renew=mine) == set(mine)
    assert taken(two.leases, mine, renew=mine) == set()
    one.leases.release(mine)
    assert taken(one.leases, mine, renew=mine) == set()


def test_a_lease_whose_end_was_emptied_by_hand_has_ended(one: Store, two: Store, row: TaskRow) -> None:
    assert taken(one.leases, {row.job_id: 30}) == {row.job_id}
    change(two, row.job_id, "lease_until=NULL")
    assert lease(two, row) == RAN_OUT
    crash = Failure(row.job_id, row.version, row.attempts, row.crashes, 1, 1, row.next_time, "crashed")
    assert two.crash([crash]) == {row.job_id: Guard.APPLIED}
    assert lease(two, row) == 0


def test_a_crash_is_not_written_where_this_worker_has_a_lease(one: Store, two: Store, row: TaskRow) -> None:
    """Its fallback has taken the row since its reclaim has read it; the end of its own try is written."""
    crash = Failure(row.job_id, row.version, row.attempts, row.crashes, 1, 1, row.next_time, "crashed")
    assert taken(one.leases, {row.job_id: 30}) == {row.job_id}
    assert one.crash([crash]) == {row.job_id: Guard.LOST}
    assert lease(two, row) > 0
    assert one.fail([crash]) == {row.job_id: Guard.APPLIED}
    assert one.crash([crash._replace(attempts=1, crashes=1)]) == {row.job_id: Guard.APPLIED}


# Hand-outs on rows: one holder at a time, one end of each version, whoever comes at the end of ttr.


def hand_out(
    store: Store, rows: Iterable[TaskRow], *, ttr_ms: int = 60_000, retries: int = 16
) -> dict[int, tuple[PullRow, PullLease | None]]:
    """Each row as it is then, with the lease of what was handed out."""
    items = [HandOut(row.job_id, row.biz_type, retries, ttr_ms, secrets.token_bytes(16)) for row in rows]
    found = store.pulls.hand_out(items, int(time.time() * 1000)).whole()
    return {
        item.job_id: (
            found[item.job_id],
            PullLease(item.job_id, found[item.job_id].version, item.biz_type, 0, item.nonce)
            if found[item.job_id].nonce == item.nonce
            else None,
        )
        for item in items
    }


def due_rows(store: Store, new_row: NewRow, count: int, biz_type: int = 7) -> list[TaskRow]:
    due = int(time.time() * 1000) - 10
    rows = [new_row(action_time=due, biz_type=biz_type) for _ in range(count)]
    insert_many(store, rows)
    return rows


def held(store: Store, biz_type: int) -> int:
    return store.selections.count(Selection(TaskStatus.PENDING, biz_types=[biz_type], held=True))


def test_of_two_acks_in_one_millisecond_one_ends_the_task(place: Any, store: Store, new_row: NewRow) -> None:
    (row,) = due_rows(store, new_row, 1, 43)
    lease = known(hand_out(store, [row])[row.job_id][1])
    here, there = (place.open(clock=StandingClock(1_900_000_000_000)) for _ in range(2))
    outcomes = [one.pulls.ack([lease])[row.job_id] for one in (here, there)]
    here.close()
    there.close()
    assert outcomes == [AckOutcome.ACKED, AckOutcome.ALREADY]


def test_a_lease_that_names_another_topic_ends_nothing_beside_an_ack(store: Store, new_row: NewRow) -> None:
    now = int(time.time() * 1000)
    rows = [new_row("one table", action_time=now - 10, biz_type=45) for _ in range(2)]
    insert_many(store, rows)
    late, other = rows
    _, lease = hand_out(store, [late], ttr_ms=1)[late.job_id]
    hand_out(store, [other])
    assert lease is not None
    assert until(lambda: not store.pulls.read([late.job_id])[late.job_id].living, 10)
    forged = PullLease(other.job_id, 0, 46, 0, bytes(16))
    assert store.pulls.ack([lease, forged]) == {
        late.job_id: AckOutcome.LATE,
        other.job_id: AckOutcome.UNKNOWN,
    }
    assert store.pulls.read([other.job_id])[other.job_id].status == TaskStatus.PENDING


def test_a_task_with_a_new_deadline_still_tells_that_a_try_had_begun(store: Store, new_row: NewRow) -> None:
    (row,) = due_rows(store, new_row, 1, 47)
    as_read, lease = hand_out(store, [row])[row.job_id]
    assert lease is not None
    assert (as_read.attempts, as_read.begun) == (1, 0)
    store.pulls.nack([(lease, Nack(as_read, False, 0, "payment refused"))])
    store.reschedule(row.job_id, int(time.time() * 1000) + 60_000)
    found = store.pulls.read([row.job_id])[row.job_id]
    assert (found.attempts, found.begun) == (0, 1)


@pytest.mark.parametrize("dead", [False, True])
def test_of_two_nacks_in_one_millisecond_one_has_given_the_task_back(
    place: Any, store: Store, new_row: NewRow, dead: bool
) -> None:
    (row,) = due_rows(store, new_row, 1, 44)
    as_read, lease = hand_out(store, [row])[row.job_id]
    assert lease is not None
    here, there = (place.open(clock=StandingClock(1_900_000_000_000)) for _ in range(2))
    nack = Nack(as_read, dead, 0, "no")
    first, second = (one.pulls.nack([(lease, nack)]).whole()[row.job_id] for one in (here, there))
    here.close()
    there.close()
    assert first is not None
    assert (first.nonce, first.status) == (b"", TaskStatus.DEAD if dead else TaskStatus.PENDING)
    assert second is None, "it is too late"


def test_what_has_failed_more_often_than_its_topic_now_allows_is_charged_and_released_as_before(
    store: Store, new_row: NewRow
) -> None:
    row = new_row(action_time=int(time.time() * 1000) - 10)._replace(attempts=3)
    insert_many(store, [row])
    ((as_read, lease),) = hand_out(store, [row], retries=2).values()
    assert (as_read.attempts, lease is not None) == (4, True)
    store.pulls.release([known(lease)]).whole()
    assert known(store.get(row.job_id)).attempts == 3


def test_a_last_try_that_is_over_ends_its_task_unless_the_hand_out_is_another_one_by_then(
    store: Store, new_row: NewRow
) -> None:
    """Taking a later hand-out back leaves version, attempts and crashes as they were."""
    over, again = rows = due_rows(store, new_row, 2, 50)
    hand_out(store, rows, retries=1, ttr_ms=1)
    job_ids = [row.job_id for row in rows]
    assert until(lambda: not any(row.living for row in store.pulls.read(job_ids).values()))
    read = store.pulls.read(job_ids)
    assert {unpulled(row, Topic("t", 50, 1, retries=1)) for row in read.values()} == {Unpulled.OVER}
    _, lease = hand_out(store, [again], retries=2)[again.job_id]
    store.pulls.release([known(lease)]).whole()
    assert store.pulls.read([again.job_id])[again.job_id].attempts == read[again.job_id].attempts
    ends = [after_lapse(row) for row in read.values()]
    assert store.expire(ends) == {over.job_id: Guard.APPLIED, again.job_id: Guard.LOST}
    found = known(store.get(over.job_id))
    assert (found.status, found.expired, found.attempts, found.last_error) == (4, 0, 1, LEASE_ENDED)
    assert [(one.attempt, one.error) for one in store.history(over.job_id)] == [(1, LEASE_ENDED)]


def test_what_is_not_due_ended_or_expired_is_not_handed_out(store: Store, new_row: NewRow) -> None:
    early, ended = new_row(), new_row(action_time=int(time.time() * 1000) - 10)
    insert_many(store, [early, ended])
    store.finish([(ended.job_id, 0)])
    for row in (early, ended):
        ((as_read, lease),) = hand_out(store, [row]).values()
        assert (lease, as_read.attempts) == (None, 0)


def test_a_new_deadline_ends_a_lease_and_waits_for_its_consumer(store: Store, new_row: NewRow) -> None:
    soon, late = due_rows(store, new_row, 2, 41)
    before = {one: row for one, (row, _) in hand_out(store, [soon, late], ttr_ms=20_000).items()}
    far = int(time.time() * 1000) + 3_600_000
    for when in (1, 2):  # whoever moves it once more is held to the same
        for row, due in ((soon, int(time.time() * 1000)), (late, far)):
            changed, as_read = store.reschedule(row.job_id, due)
            assert changed
            assert as_read is not None
            after = store.pulls.read([row.job_id])[row.job_id]
            assert (after.nonce, after.version, after.action_time) == (b"", when, due)
            assert after.next_time == max(due, before[row.job_id].next_time)
    changed, _ = store.reschedule(late.job_id, int(time.time() * 1000))
    assert changed
    assert store.pulls.read([late.job_id])[late.job_id].next_time == before[late.job_id].next_time
    assert held(store, 41) == 2, "their consumers may be at work"


def test_an_ack_of_a_former_version_ends_nothing_of_the_one_that_is_handed_out(
    store: Store, new_row: NewRow
) -> None:
    (row,) = due_rows(store, new_row, 1, 49)
    _, former = hand_out(store, [row], ttr_ms=1)[row.job_id]
    store.reschedule(row.job_id, int(time.time() * 1000))
    assert until(lambda: hand_out(store, [row])[row.job_id][1] is not None, 10)
    assert store.pulls.ack([known(former)]) == {row.job_id: AckOutcome.REPLACED}
    assert store.pulls.read([row.job_id])[row.job_id].status == TaskStatus.PENDING


def test_a_task_that_waits_after_its_lease_has_ended_is_held_by_nobody(store: Store, new_row: NewRow) -> None:
    moved, failed, died, redriven = rows = due_rows(store, new_row, 4, 42)
    hand_out(store, rows, ttr_ms=1)
    until = time.monotonic() + 10
    while any(row.living for row in store.pulls.read(row.job_id for row in rows).values()):
        assert time.monotonic() < until
    later = int(time.time() * 1000) + 3_600_000
    store.reschedule(moved.job_id, later)
    tries = {row.job_id: row for row in store.read(row.job_id for row in rows).values()}

    def tried(row: TaskRow) -> Failure:
        attempts = tries[row.job_id].attempts
        return Failure(row.job_id, 0, attempts, 0, attempts, 0, later, "it raised")

    store.fail([tried(failed)])
    store.die([tried(died), tried(redriven)])
    store.redrive([redriven.job_id], later)
    found = store.pulls.read(row.job_id for row in rows)
    assert {row.nonce for row in found.values()} == {b""}
    assert held(store, 42) == 0


def test_rows_are_read_with_a_clock_that_is_not_behind(store: Store, new_row: NewRow) -> None:
    """Else a lease that a statement takes for ended and the row for living would be given to two."""
    (row,) = due_rows(store, new_row, 1)
    for _ in range(100):
        before = time.time_ns() // 1_000_000
        assert store.pulls.read([row.job_id])[row.job_id].now >= before
