"""Leases on rows: one owner at a time, judged by the server's clock, honoured by every other write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.clocks import PushedClock
from harness.leases import taken
from harness.patience import until
from harness.rows import change, insert

from toc.model.task import TaskRow, TaskStatus, TryRow
from toc.model.verdict import CRASHED, Failure, after_expiry
from toc.store.store import Store
from toc.store.tasks.batch import Guard
from toc.store.tasks.leases import RAN_OUT
from toc.store.tasks.scan import Position

NewRow = Callable[..., TaskRow]


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
    found = two.get(row.job_id)
    assert found is not None
    assert (found.status, found.expired, found.attempts, found.last_error) == (4, 1, 1, CRASHED)


def test_leases_of_workers_known_to_be_dead_are_free_at_once(one: Store, two: Store, row: TaskRow) -> None:
    one.leases.take({row.job_id: 30})
    two.leases.set_dead(["worker-one"])
    assert lease(two, row) == RAN_OUT
    assert due(two, row) == [row.job_id]
    assert two.fail([failure(row, new_crashes=1)]) == {row.job_id: Guard.APPLIED}
    assert lease(two, row) == 0
    assert taken(two.leases, {row.job_id: 30}) == {row.job_id}


def test_a_failure_touches_nothing_that_another_has_leased(one: Store, two: Store, row: TaskRow) -> None:
    one.leases.take({row.job_id: 30})
    assert two.fail([failure(row)]) == {row.job_id: Guard.LOST}
    assert two.die([failure(row)]) == {row.job_id: Guard.LOST}
    assert one.fail([failure(row)]) == {row.job_id: Guard.APPLIED}
    again = two.read_tries([row.job_id])[row.job_id]
    assert (again.attempts, again.lease) == (1, 0)


def test_a_cancel_of_a_leased_row_says_that_it_was_tried(one: Store, two: Store, row: TaskRow) -> None:
    one.leases.take({row.job_id: 30})
    changed, before = two.cancel_many([row.job_id])[row.job_id]
    assert (changed, before and before.attempts) == (True, 1)
    after = two.get(row.job_id)
    assert after is not None
    assert (after.status, after.attempts) == (TaskStatus.CANCELLED, 1)


def test_a_reschedule_keeps_the_lease_and_says_that_it_was_tried(
    one: Store, two: Store, row: TaskRow
) -> None:
    one.leases.take({row.job_id: 30})
    changed, before = two.reschedule(row.job_id, row.action_time + 1000)
    assert (changed, before and before.attempts) == (True, 1)
    assert lease(two, row) > 0
    after = two.get(row.job_id)
    assert after is not None
    assert (after.attempts, after.version) == (0, 1)


def test_a_redrive_begins_without_a_lease(one: Store, two: Store, row: TaskRow) -> None:
    one.leases.take({row.job_id: 30})
    one.die([failure(row)])
    assert len(two.redrive([row.job_id], row.action_time)) == 1
    assert lease(two, row) == 0


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


def test_a_crash_is_not_written_where_this_very_worker_has_a_lease(
    one: Store, two: Store, row: TaskRow
) -> None:
    """Its fallback has taken the row since its reclaim has read it; the end of its own try is written."""
    crash = Failure(row.job_id, row.version, row.attempts, row.crashes, 1, 1, row.next_time, "crashed")
    assert taken(one.leases, {row.job_id: 30}) == {row.job_id}
    assert one.crash([crash]) == {row.job_id: Guard.LOST}
    assert lease(two, row) > 0
    assert one.fail([crash]) == {row.job_id: Guard.APPLIED}
    assert one.crash([crash._replace(attempts=1, crashes=1)]) == {row.job_id: Guard.APPLIED}
