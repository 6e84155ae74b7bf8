"""Hand-outs on rows: one holder at a time, one end of each version, whoever comes at the end of ttr."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness.clocks import StandingClock
from harness.patience import until
from harness.rows import insert_many

from toc.model.pull import AckOutcome, PullLease, PullRow
from toc.model.task import TaskRow, TaskStatus
from toc.model.verdict import Failure, Nack
from toc.store.store import Store
from toc.store.tasks.pulls import HandOut
from toc.store.tasks.select import Selection

NewRow = Callable[..., TaskRow]


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


def take_with(store: Store) -> Callable[[TaskRow], PullLease | None]:
    return lambda row: hand_out(store, [row])[row.job_id][1]


def due_rows(store: Store, new_row: NewRow, count: int, biz_type: int = 7) -> list[TaskRow]:
    due = int(time.time() * 1000) - 10
    rows = [new_row(action_time=due, biz_type=biz_type) for _ in range(count)]
    insert_many(store, rows)
    return rows


def held(store: Store, biz_type: int) -> int:
    return store.selections.count(Selection(TaskStatus.PENDING, biz_types=[biz_type], held=True))


def test_each_of_many_is_handed_out_by_one_of_many(place: Any, store: Store, new_row: NewRow) -> None:
    rows = due_rows(store, new_row, 100)
    stores = [place.open() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: hand_out(one, rows), stores))
    for one in stores:
        one.close()
    for row in rows:
        leases = [each[row.job_id][1] for each in found]
        assert sum(lease is not None for lease in leases) == 1
        assert {each[row.job_id][0].attempts for each in found} == {1}


def test_of_two_acks_in_one_millisecond_one_has_ended_the_task(
    place: Any, store: Store, new_row: NewRow
) -> None:
    (row,) = due_rows(store, new_row, 1, 43)
    lease = take_with(store)(row)
    assert lease is not None
    here, there = (place.open(clock=StandingClock(1_900_000_000_000)) for _ in range(2))
    outcomes = [one.pulls.ack([lease])[row.job_id] for one in (here, there)]
    here.close()
    there.close()
    assert outcomes == [AckOutcome.ACKED, AckOutcome.ALREADY]


def test_a_lease_that_names_another_topic_ends_nothing_beside_a_late_ack_either(
    store: Store, new_row: NewRow
) -> None:
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


def test_what_is_not_due_ended_or_expired_is_not_handed_out(store: Store, new_row: NewRow) -> None:
    early, ended = new_row(), new_row(action_time=int(time.time() * 1000) - 10)
    insert_many(store, [early, ended])
    store.finish([(ended.job_id, 0)])
    for row in (early, ended):
        ((as_read, lease),) = hand_out(store, [row]).values()
        assert (lease, as_read.attempts) == (None, 0)


def test_a_new_deadline_ends_a_lease_and_comes_not_before_its_consumer_is_through(
    store: Store, new_row: NewRow
) -> None:
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
