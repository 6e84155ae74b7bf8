"""Batches over many tasks: each guard's answer is named, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness.clocks import StandingClock
from harness.rows import insert, insert_many

from toc.model.clock import Clock
from toc.model.errors import InvalidExpiry
from toc.model.raised import Delivered, Sent
from toc.model.sharding import BizId
from toc.model.task import TaskRow, TaskStatus
from toc.model.verdict import Failure, after_expiry
from toc.store.servers.server import DatabaseServer, Result, Statement
from toc.store.store import Store
from toc.store.tasks.batch import Finish, Guard
from toc.store.tasks.history import LINE_CHARS
from toc.store.tasks.plan import TRIED_BEFORE

NewRow = Callable[..., TaskRow]

T0 = 1_900_000_000_000


def failure(row: TaskRow, **changes: Any) -> Failure:
    made = Failure(
        row.job_id, row.version, row.attempts, row.crashes, row.attempts + 1, 0, row.next_time + 1000, "boom"
    )
    return made._replace(**changes)


@pytest.mark.parametrize(("due", "expires"), [(60_000, 120_000), (-60_000, 60_000)])
def test_a_row_that_has_not_expired_by_its_server_is_not_ended_by_a_clock_that_is_ahead(
    store: Store, new_row: NewRow, due: int, expires: int
) -> None:
    now = Clock().now_ms()
    row = new_row(action_time=now + due, expires_at=now + expires)
    insert(store, row)
    ends = after_expiry(store.read_tries([row.job_id])[row.job_id], now + 3_600_000)
    assert store.expire([ends]) == store.die([ends]) == {row.job_id: Guard.LOST}
    assert store.get(row.job_id) == row


def test_a_reschedule_past_its_expiry_needs_another_one(store: Store, new_row: NewRow) -> None:
    row = new_row(action_time=T0, expires_at=T0 + 5)
    insert(store, row)
    with pytest.raises(InvalidExpiry):
        store.reschedule(row.job_id, T0 + 6)
    assert store.get(row.job_id) == row
    assert store.reschedule(row.job_id, T0 + 5)[0]
    assert store.reschedule(row.job_id, T0 + 6, expires_at=T0 + 7)[0]
    found = store.get(row.job_id)
    assert found is not None
    assert (found.action_time, found.expires_at, found.version) == (T0 + 6, T0 + 7, 2)


def test_what_each_failed_try_raised_is_kept_and_the_oldest_give_way(store: Store, new_row: NewRow) -> None:
    row = new_row()
    insert(store, row)
    assert store.history(row.job_id) == []
    errors = ["boom", "é' %s \x00 \u2028 \n", *(f"{n} {'ü' * 1000}" for n in range(40))]
    for number, error in enumerate(errors, start=1):
        assert store.fail([failure(row, new_attempts=number, error=error)]) == {row.job_id: Guard.APPLIED}
        row = row._replace(attempts=number)
        if number == 2:
            first, second = store.history(row.job_id)
            assert (first.attempt, first.crashes, first.version, first.error) == (1, 0, 0, "boom")
            assert (second.attempt, second.error) == (2, errors[1])
            now = store.get(row.job_id)
            assert now is not None
            assert first.at <= second.at == now.gmt_modified  # whole milliseconds
    assert store.fail([failure(row, error=None)]) == {row.job_id: Guard.APPLIED}
    row = row._replace(attempts=row.attempts + 1)
    assert store.die([failure(row, error="the end")]) == {row.job_id: Guard.APPLIED}
    kept = store.history(row.job_id)
    assert [each.attempt for each in kept] == [*range(44 - len(kept), 43), 44]
    assert len(kept) >= 12
    assert kept[-1].error == "the end"
    assert kept[-2].error == f"39 {'ü' * 197}"
    assert store.history(new_row().job_id) == []


def test_finish_names_every_case_and_changes_only_pending_rows(store: Store, new_row: NewRow) -> None:
    done, already, cancelled, dead, rescheduled, missing = (new_row() for _ in range(6))
    bystanders = [new_row() for _ in range(20)]
    insert_many(store, [done, already, cancelled, dead, rescheduled, *bystanders])
    store.finish([(already.job_id, 0)])
    store.cancel_many([cancelled.job_id])
    store.die([failure(dead)])
    store.reschedule(rescheduled.job_id, T0)
    before = store.read([already.job_id, dead.job_id, rescheduled.job_id])

    cases = store.finish([(r.job_id, 0) for r in (done, already, cancelled, dead, rescheduled, missing)])

    assert cases == {
        done.job_id: Finish.DONE,
        already.job_id: Finish.ALREADY,
        cancelled.job_id: Finish.CANCELLED,
        dead.job_id: Finish.DEAD,
        rescheduled.job_id: Finish.RESCHEDULED,
        missing.job_id: Finish.MISSING,
    }
    assert store.read(before) == before
    after = store.read([done.job_id, cancelled.job_id])
    assert after[done.job_id].status == TaskStatus.PROCESSED
    assert after[cancelled.job_id].status == TaskStatus.CANCELLED
    assert after[cancelled.job_id].attempts == 1  # marked as tried before finish returned
    assert store.read([row.job_id for row in bystanders]) == {row.job_id: row for row in bystanders}


def test_what_receivers_answered_is_added_to_the_histories_of_what_was_sent(
    store: Store, new_row: NewRow
) -> None:
    sent, again, plain, late = rows = [new_row() for _ in range(4)]
    insert_many(store, rows)
    store.cancel_many([late.job_id])
    store.fail([failure(again, error="refused")])
    text = "'); DROP \u00e4 \\ \N{SNOWMAN}\n" + "x" * 500
    told = {row.job_id: (2, Delivered(Sent(204, 17), text)) for row in (sent, again, late)}
    cases = store.finish([(row.job_id, 0) for row in rows], told)
    assert [cases[row.job_id] for row in rows] == [Finish.DONE] * 3 + [Finish.CANCELLED]
    for row, before in ((sent, 0), (again, 1)):
        *failed, last = store.history(row.job_id)
        assert len(failed) == before
        assert (last.attempt, last.status, last.ms, last.error) == (2, 204, 17, text[:LINE_CHARS])
    assert store.history(plain.job_id) == store.history(late.job_id) == []


def test_each_task_is_done_by_one_of_many_threads(store: Store, new_row: NewRow) -> None:
    rows = [new_row() for _ in range(60)]
    insert_many(store, rows)
    items = [(row.job_id, 0) for row in rows]

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda n: store.finish(items[n:] + items[:n]), range(8)))

    for row in rows:
        cases = [result[row.job_id] for result in results]
        assert sorted(case.value for case in cases) == ["already"] * 7 + ["done"]


def test_failures_of_a_batch_are_guarded_one_by_one(store: Store, new_row: NewRow) -> None:
    rows = [new_row() for _ in range(40)]
    insert_many(store, rows)
    store.finish([(row.job_id, 0) for row in rows[::4]])

    guards = store.fail([failure(row) for row in rows])

    assert [guards[row.job_id] for row in rows[::4]] == [Guard.LOST] * 10
    assert sum(guard is Guard.APPLIED for guard in guards.values()) == 30


def test_the_ids_of_a_biz_id_are_read_page_by_page_and_without_the_rows(
    store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Statement] = []
    run = DatabaseServer.run

    def spy(server: DatabaseServer, statements: Sequence[Statement], **how: Any) -> list[Result]:
        sent.extend(statements)
        return run(server, statements, **how)

    rows = [new_row("order-7") for _ in range(7)]
    insert_many(store, [*rows, new_row("order-7", biz_type=8), new_row()])
    monkeypatch.setattr("toc.store.store.IDS_READ", 3)
    monkeypatch.setattr(DatabaseServer, "run", spy)
    assert store.ids_of(BizId.of("order-7"), 7) == sorted(row.job_id for row in rows)
    assert len(sent) == 3
    assert not any("attribute" in statement.sql for statement in sent)


def test_of_a_cancel_and_a_finish_at_once_exactly_one_wins(store: Store, new_row: NewRow) -> None:
    rows = [new_row() for _ in range(40)]
    insert_many(store, rows)

    def both(row: TaskRow) -> tuple[bool, Finish]:
        with ThreadPoolExecutor(2) as pair:
            cancel = pair.submit(store.cancel_many, [row.job_id])
            finish = pair.submit(store.finish, [(row.job_id, 0)])
            return cancel.result()[row.job_id][0], finish.result()[row.job_id]

    with ThreadPoolExecutor(3) as threads:
        for row, outcome in zip(rows, threads.map(both, rows), strict=True):
            assert outcome in {(True, Finish.CANCELLED), (False, Finish.DONE)}
            after = store.get(row.job_id)
            assert after is not None
            assert (after.status, after.attempts) == ((3, 1) if outcome[0] else (2, 0))


def test_only_cancelled_rows_are_marked_as_tried_and_only_up(store: Store, new_row: NewRow) -> None:
    fresh, tried, pending = new_row(), new_row(attempts=3), new_row()
    insert_many(store, [fresh, tried, pending])
    store.cancel_many([fresh.job_id])
    store.cancel_many([tried.job_id])

    store.mark_tried([fresh.job_id, tried.job_id, pending.job_id])

    attempts = {
        job_id: row.attempts
        for job_id, row in store.read([r.job_id for r in (fresh, tried, pending)]).items()
    }
    assert attempts == {fresh.job_id: 1, tried.job_id: 3, pending.job_id: 0}


def test_a_new_deadline_that_forgets_a_crash_remembers_that_there_was_a_try(
    store: Store, new_row: NewRow
) -> None:
    crashed, fresh = new_row(crashes=1), new_row()
    insert_many(store, [crashed, fresh])

    for row in (crashed, fresh):
        assert store.reschedule(row.job_id, T0)[0]

    after = store.read([crashed.job_id, fresh.job_id])
    assert after[crashed.job_id].last_error == TRIED_BEFORE
    assert after[fresh.job_id].last_error is None


def test_a_begun_try_is_noted_where_no_error_stands_and_on_no_ended_row(
    store: Store, new_row: NewRow
) -> None:
    pending, failed, done, cancelled = new_row(), new_row(attempts=1, last_error="boom"), new_row(), new_row()
    rows = [pending, failed, done, cancelled]
    insert_many(store, rows)
    store.finish([(done.job_id, 0)])
    store.cancel_many([cancelled.job_id])

    store.mark_begun([row.job_id for row in rows], "it's begun")

    after = store.read([row.job_id for row in rows])
    assert [after[row.job_id].last_error for row in rows] == ["it's begun", "boom", None, "it's begun"]
    assert store.fail([failure(pending)]) == {pending.job_id: Guard.APPLIED}, "guards do not look at it"


@pytest.mark.parametrize("times", [1, 8])
def test_a_reschedule_does_not_take_anothers_of_the_same_millisecond_for_its_own(
    place: Any, store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Nor is it refused because others change the task, as when each event of a user puts it off."""
    row = new_row()
    one, other = (place.open(clock=StandingClock(T0 - 1)) for _ in range(2))
    insert(one, row)
    run = DatabaseServer.run
    beaten: list[object] = []

    def beaten_to_it(server: DatabaseServer, statements: Sequence[Statement], **more: bool) -> list[Result]:
        if len(beaten) < times and statements[0].sql.startswith("UPDATE"):
            with monkeypatch.context() as still:
                still.setattr(DatabaseServer, "run", run)
                beaten.append(other.reschedule(row.job_id, T0 + 5000))
        return run(server, statements, **more)

    monkeypatch.setattr(DatabaseServer, "run", beaten_to_it)
    assert one.reschedule(row.job_id, T0 + 9000)[0]
    for each in (one, other):
        each.close()

    after = store.get(row.job_id)
    assert len(beaten) == times
    assert after is not None
    assert (after.version, after.action_time) == (times + 1, T0 + 9000)
