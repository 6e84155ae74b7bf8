"""Inserting: what is acknowledged is there, once. Batches: each guard's answer is named,
nothing else changes."""

import sqlite3
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from harness.clocks import StandingClock
from harness.rows import NewRow, insert, insert_many, known
from harness.tables import engine_of, raw, task_tables
from sqlalchemy import Connection, create_engine, event

from toc import CancelOutcome, Change, RescheduleOutcome, Settings, TimeoutCenter, Topic
from toc.model.clock import Clock
from toc.model.errors import (
    DedupConflict,
    InvalidExpiry,
    PartialSubmit,
    StoreUnavailable,
    SubmitUnknown,
)
from toc.model.raised import Delivered, Sent
from toc.model.sharding import JOB_ID_EPOCH_MS, BizId, JobIds, created_ms, table_of_job, valid_job_id
from toc.model.task import Content, Put, PutOutcome, Submission, TaskRow, TaskStatus
from toc.model.verdict import Failure, after_expiry
from toc.operate.admin import migrator
from toc.store.servers.server import DatabaseServer, Result, Statement
from toc.store.store import Store
from toc.store.tasks.batch import Finish, Guard
from toc.store.tasks.history import LINE_CHARS
from toc.store.tasks.plan import TRIED_BEFORE, Stored

# Inserting: what is acknowledged is there, once.


def test_a_taken_job_id_is_replaced_by_a_new_one(store: Store, new_row: NewRow) -> None:
    first = new_row()
    insert(store, first)
    second = new_row(first.biz_id, job_id=first.job_id, attribute='{"second":1}')
    equal = first

    fresh = insert(store, second)
    again = insert(store, equal)

    assert len({first.job_id, fresh, again}) == 3
    assert store.get(first.job_id) == first
    assert store.get(fresh) == second._replace(job_id=fresh)


def test_a_dedup_key_repeated_inside_one_call_is_found_before_all(store: Store, new_row: NewRow) -> None:
    first = new_row(dedup_key="close")
    same = new_row(first.biz_id, dedup_key="close")
    other = new_row(first.biz_id, dedup_key="close", attribute='{"x":1}')

    with pytest.raises(DedupConflict):
        insert_many(store, [new_row(), first, other])
    assert store.find(BizId.of(first.biz_id)) == []

    assert insert_many(store, [first, same]) == [first.job_id, first.job_id]
    assert store.find(BizId.of(first.biz_id)) == [first]


def joined(store: Store, connection: Connection, one: Submission) -> int:
    """Store one row in the caller's transaction."""
    (job_id,) = store.callers.put_many(connection, [one], {})
    return job_id


# --- ambiguous commits ----------------------------------------------------------------------------------


def one_by_one(store: Store, wanted: list[Submission]) -> list[Stored]:
    return [store.put(one) for one in wanted]


def of_one_call(store: Store, wanted: list[Submission]) -> list[Stored]:
    rows: list[TaskRow] = []
    store.put_many(wanted, rows.extend, {})
    return [Stored(Put(row.job_id, PutOutcome.NEW), row) for row in rows]


def of_many_callers(store: Store, wanted: list[Submission]) -> list[Stored]:
    return [one for one in store.put_each(wanted) if isinstance(one, Stored)]


@pytest.mark.parametrize("dedup_key", [None, "close"])
@pytest.mark.parametrize("door", [one_by_one, of_one_call, of_many_callers])
def test_what_was_committed_without_an_answer_is_stored_once(
    through_proxy: Store,
    proxy: Proxy,
    new_row: NewRow,
    door: Callable[[Store, list[Submission]], list[Stored]],
    dedup_key: str | None,
) -> None:
    content = Content("a/b", b"x")
    body = {"body_length": 1, "body_sha256": content.fingerprint()}
    rows = {row.job_id: row for row in [new_row(dedup_key=dedup_key, **body) for _ in range(40)]}
    proxy.eat(b";COMMIT")
    done = door(through_proxy, [Submission(row, content) for row in rows.values()])
    assert proxy.stats.eaten == 1
    assert {one.put: one.inserted for one in done} == {
        (job_id, PutOutcome.NEW): row for job_id, row in rows.items()
    }
    assert through_proxy.read(rows) == rows
    assert [through_proxy.find(BizId.of(row.biz_id)) for row in rows.values()] == [
        [row] for row in rows.values()
    ]
    assert {through_proxy.body_of(row) for row in rows.values()} == {content}


def test_a_clash_with_another_row_after_a_lost_answer_is_a_new_task(
    mysql_store: Store, through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    first = new_row()
    insert(mysql_store, first)
    second = new_row(first.biz_id, job_id=first.job_id, attribute='{"second":1}')
    proxy.eat(b"INSERT INTO")  # the answer that is lost says "duplicate"

    job_id = insert(through_proxy, second)

    assert proxy.stats.eaten == 1
    assert job_id != first.job_id
    assert mysql_store.get(job_id) == second._replace(job_id=job_id)


def test_what_cannot_be_settled_is_unknown_and_names_the_task(
    mysql_store: Store, through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
    row = new_row()
    proxy.eat(b"INSERT INTO", refuse=True)

    with pytest.raises(SubmitUnknown) as caught:
        insert(through_proxy, row)

    assert proxy.stats.eaten == 1
    assert caught.value.job_id == row.job_id
    assert mysql_store.get(row.job_id) == row


def test_a_batch_that_cannot_be_settled_says_which_tasks_are_unknown(
    mysql_store: Store, through_proxy: Store, proxy: Proxy, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(through_proxy._writer._threads, "_size", 1)  # the server lets in no second connection
    rows = [new_row(16 + n % 4) for n in range(1500)]  # two chunks
    last = max(rows, key=lambda row: (BizId.of(row.biz_id).crc % 16, row.job_id))
    proxy.eat(b"%d" % last.job_id, refuse=True)

    with pytest.raises(PartialSubmit) as caught:
        insert_many(through_proxy, rows)

    assert proxy.stats.eaten == 1
    stored = [job_id for job_id in caught.value.job_ids if job_id is not None]
    unknown = caught.value.unknown
    assert (len(stored), len(unknown)) == (1000, 500)
    assert last.job_id in unknown
    assert len({*stored, *unknown}) == len(stored) + len(unknown)
    assert len(mysql_store.read(stored)) == len(stored)


def test_a_refused_connection_is_a_known_outcome(through_proxy: Store, proxy: Proxy, new_row: NewRow) -> None:
    insert(through_proxy, new_row())  # there are idle connections now
    proxy.close()

    with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{proxy.port}") as caught:
        insert(through_proxy, new_row())
    assert "password" not in str(caught.value).lower()
    with pytest.raises(StoreUnavailable):
        insert_many(through_proxy, [new_row()])


# --- in the caller's transaction ------------------------------------------------------------------------


@pytest.fixture
def engine(place: Any) -> Any:
    with engine_of(place.urls[0]) as engine:
        yield engine


@pytest.mark.parametrize(("charset", "session"), [
    ("latin1", "SET sql_mode = ''"),  # a strict one would refuse what it cannot store
    ("utf8", "SET sql_mode = ''"),
    ("gbk", "DO 0"),
    ("utf8mb4", "SET sql_mode = 'ORACLE,EMPTY_STRING_IS_NULL'"),
    ("utf8mb4", "SET NAMES latin1"),
    ("utf8mb4", "SET NAMES binary"),
    (
        "utf8mb4",
        "SET sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES,PIPES_AS_CONCAT', time_zone = '+09:00'",
    ),
])  # fmt: skip
def test_a_callers_character_set_changes_nothing_and_costs_no_transaction(
    mysql_store: Store, mysql_place: Any, new_row: NewRow, charset: str, session: str
) -> None:
    options: dict[str, Any] = {"charset": charset} if charset else {"use_unicode": False}
    engine = create_engine(mysql_place.urls[0], connect_args=options)
    content = Content("a/b", bytes(range(256)) + b"\xbf'\\")
    body = {"body_length": len(content.data), "body_sha256": content.fingerprint()}
    row = new_row("é🕰'\\", attribute='{"a":"é日🕰\\\\%s"}', dedup_key=f"{session} {charset} 🕰'\\", **body)
    other = new_row()
    with engine.connect() as connection:
        joined(mysql_store, connection, Submission(other))
        connection.exec_driver_sql(session)
        for attempt in range(2):
            again = row._replace(job_id=row.job_id + attempt)
            found = joined(mysql_store, connection, Submission(again, content))
            assert found == row.job_id
        with pytest.raises(DedupConflict, match="another attribute"):
            joined(mysql_store, connection, Submission(row._replace(attribute='{"a":"é日?"}')))
        connection.commit()
    engine.dispose()
    assert mysql_store.get(row.job_id) == row
    assert mysql_store.get(other.job_id) == other
    assert mysql_store.body_of(row) == content


@pytest.mark.parametrize("change", ["cancel", "cancel_by_biz", "reschedule"])
def test_a_change_on_sqlite_says_who_was_first_whenever_a_worker_ends_the_task(
    tmp_path: Path, change: str
) -> None:
    """sqlite3 begins a transaction at the first write: a read before it does not keep a row as it is."""
    settings = Settings(database_urls=[f"sqlite:///{tmp_path / 'toc.db'}"], tables=4)
    migrator(settings).upgrade()
    answers = set()
    with (
        TimeoutCenter(settings) as center,
        engine_of(settings.need_database_urls()[0]) as engine,
        closing(sqlite3.connect(tmp_path / "toc.db", timeout=0, isolation_level=None)) as worker,
    ):
        center.store.topics.create(Topic("order.close", 1, 4))
        for moment in range(8):
            job_id = center.submit("order.close", biz_id=moment, delay=3600)
            table = task_tables(settings)[table_of_job(job_id, settings.tables)]
            seen: list[int] = []
            ended: list[int] = []

            def statement(
                *_: Any, seen: list[int] = seen, ended: list[int] = ended, moment: int = moment,
                end: str = f"UPDATE {table} SET status=2 WHERE job_id={job_id}",
            ) -> None:  # fmt: skip
                seen.append(1)
                if len(seen) == moment + 1:
                    with suppress(sqlite3.OperationalError):  # the file is locked: the caller was first
                        ended.append(worker.execute(end).rowcount)

            event.listen(engine, "before_cursor_execute", statement)
            with engine.begin() as connection:
                changed: Change[Any]
                if change == "cancel":
                    changed = center.cancel(job_id, connection=connection)
                elif change == "cancel_by_biz":
                    changed = center.cancel_by_biz("order.close", moment, connection=connection)
                else:
                    changed = center.reschedule(job_id, delay=7200, connection=connection)
            event.remove(engine, "before_cursor_execute", statement)
            outcome = changed.outcome
            answers.add((bool(ended), outcome.get(job_id) if isinstance(outcome, dict) else outcome))
    outcomes: Any = RescheduleOutcome if change == "reschedule" else CancelOutcome
    done = outcomes["RESCHEDULED" if change == "reschedule" else "CANCELLED"]
    assert answers == {(True, outcomes.TOO_LATE), (False, done)}


def test_the_callers_connection_is_accepted_after_a_failover_behind_the_servers_name(
    mysql_store: Store, mysql_place: Any, new_row: NewRow
) -> None:
    def submit() -> None:
        with engine_of(mysql_place.urls[0]) as engine, engine.connect() as connection:
            joined(mysql_store, connection, Submission(new_row()))
            connection.commit()

    submit()
    with raw(mysql_place.root_url) as connection:
        usual = connection.exec_driver_sql("SELECT @@GLOBAL.server_id").scalar_one()
        connection.exec_driver_sql(f"SET GLOBAL server_id = {usual + 1}")
        mysql_store.close()  # a failover ends connections
        try:
            submit()
        finally:
            connection.exec_driver_sql(f"SET GLOBAL server_id = {usual}")


def test_an_error_in_the_callers_transaction_does_not_show_the_attribute(
    mysql_store: Store, mysql_place: Any, new_row: NewRow
) -> None:
    engine = create_engine(mysql_place.urls[0])
    row = new_row(attribute='{"card":"canary-4111"}', dedup_key="k")
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        with pytest.raises(StoreUnavailable) as caught:
            joined(mysql_store, connection, Submission(row))
    engine.dispose()
    assert "canary" not in "".join(traceback.format_exception(caught.value))


def test_ids_of_a_process_stay_unique_when_its_clock_stands_still() -> None:
    ids = JobIds(StandingClock(1_800_000_000_000))
    made = [ids.make(7) for _ in range(10_000)]
    assert len(set(made)) == len(made)


def test_a_clock_that_was_far_ahead_for_a_moment_is_followed_back(place: Any, new_row: NewRow) -> None:
    clock = StandingClock(7_300_000_000_000)  # in 2201, of which no id fits its column
    ids = JobIds(clock)
    with closing(place.open(clock=clock)) as store:
        rows = [new_row(biz_id=n) for n in range(4)]
        insert_many(store, rows)
        assert ids.make(7) >= 1 << 64
        store.cancel_many([rows[0].job_id])
        clock.now = 1_800_000_000_000
        assert created_ms(ids.make(7)) == clock.now
        for row in rows[1:]:
            store.cancel_many([row.job_id])
        stamps = [row.next_time for row in store.read([row.job_id for row in rows[1:]]).values()]
    assert sorted(stamps) == [clock.now, clock.now + 1, clock.now + 2]


# Batches over many tasks: each guard's answer is named, and nothing else changes.


@pytest.mark.parametrize("day", [-1, 0])
def test_before_2020_ids_are_as_valid(day: int) -> None:
    clock = StandingClock(JOB_ID_EPOCH_MS + day * 86_400_000)
    ids = JobIds(clock)
    assert all(valid_job_id(ids.make(0)) for _ in range(5000))
    clock.now = 1_800_000_000_000
    ids.make(0)
    clock.now = 0
    assert all(valid_job_id(ids.make(0)) for _ in range(5000))


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
    assert store.reschedule(row.job_id, T0 + 6, lambda _: T0 + 7)[0]
    found = known(store.get(row.job_id))
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
            assert first.at <= second.at == known(store.get(row.job_id)).gmt_modified  # whole milliseconds
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


def test_what_receivers_answered_is_added_to_the_histories_of_tasks(store: Store, new_row: NewRow) -> None:
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


def test_a_new_deadline_that_forgets_a_crash_remembers_there_was_one(store: Store, new_row: NewRow) -> None:
    crashed, fresh = new_row(crashes=1), new_row()
    insert_many(store, [crashed, fresh])

    for row in (crashed, fresh):
        assert store.reschedule(row.job_id, T0)[0]

    after = store.read([crashed.job_id, fresh.job_id])
    assert after[crashed.job_id].last_error == TRIED_BEFORE
    assert after[fresh.job_id].last_error is None


def test_a_begun_try_is_noted_where_no_error_is_and_on_no_ended_row(store: Store, new_row: NewRow) -> None:
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
