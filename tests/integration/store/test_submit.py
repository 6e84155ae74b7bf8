"""Inserting: what is acknowledged is there, once."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from fault.kit.proxy import Proxy
from harness.clocks import StandingClock
from harness.rows import insert, insert_many
from harness.tables import engine_of, raw
from sqlalchemy import create_engine

from toc.model.errors import (
    DedupConflict,
    PartialSubmit,
    SchemaBehind,
    StoreUnavailable,
    SubmitUnknown,
)
from toc.model.sharding import JOB_ID_EPOCH_MS, BizId, JobIds, created_ms, valid_job_id
from toc.model.task import Content, Put, PutOutcome, Submission, TaskRow
from toc.store.store import Store
from toc.store.tasks.plan import Stored

NewRow = Callable[..., TaskRow]


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


def test_a_dedup_key_repeated_inside_one_call_is_found_before_anything_is_written(
    store: Store, new_row: NewRow
) -> None:
    first = new_row(dedup_key="close")
    same = new_row(first.biz_id, dedup_key="close")
    other = new_row(first.biz_id, dedup_key="close", attribute='{"x":1}')

    with pytest.raises(DedupConflict):
        insert_many(store, [new_row(), first, other])
    assert store.find(BizId.of(first.biz_id)) == []

    assert insert_many(store, [first, same]) == [first.job_id, first.job_id]
    assert store.find(BizId.of(first.biz_id)) == [first]


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
    mysql_store: Store,
    through_proxy: Store,
    proxy: Proxy,
    new_row: NewRow,
    monkeypatch: pytest.MonkeyPatch,
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


def test_a_refused_connection_is_no_unknown_outcome(
    through_proxy: Store, proxy: Proxy, new_row: NewRow
) -> None:
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


@pytest.mark.parametrize(
    ("charset", "session"),
    [
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
    ],
)
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
        mysql_store.callers.put(connection, Submission(other))
        connection.exec_driver_sql(session)
        for attempt in range(2):
            again = row._replace(job_id=row.job_id + attempt)
            found = mysql_store.callers.put(connection, Submission(again, content))
            assert found == row.job_id
        with pytest.raises(DedupConflict, match="another attribute"):
            mysql_store.callers.put(connection, Submission(row._replace(attribute='{"a":"é日?"}')))
        connection.commit()
    engine.dispose()
    assert mysql_store.get(row.job_id) == row
    assert mysql_store.get(other.job_id) == other
    assert mysql_store.body_of(row) == content


def test_a_row_whose_body_cannot_be_stored_is_not_there_when_the_caller_commits(
    store: Store, place: Any, engine: Any, new_row: NewRow
) -> None:
    content = Content("a/b", b"x")
    row = new_row(body_length=1, body_sha256=content.fingerprint())
    name = store._shards.body_names[store._shards.table_of(row.job_id)]
    with place.without(name), engine.connect() as connection:
        with pytest.raises(SchemaBehind):
            store.callers.put(connection, Submission(row, content))
        connection.commit()
    assert store.get(row.job_id) is None


def test_a_body_that_is_no_packet_is_refused_before_the_callers_transaction_is_lost(
    mysql_store: Store, mysql_place: Any, new_row: NewRow
) -> None:
    engine = create_engine(mysql_place.urls[0])
    kept = new_row()
    with engine.connect() as connection:
        most = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        content = Content("a/b", bytes(most // 2))
        body = {"body_length": len(content.data), "body_sha256": content.fingerprint()}
        mysql_store.callers.put(connection, Submission(kept))
        refused = new_row(**body)
        with pytest.raises(StoreUnavailable, match="max_allowed_packet"):
            mysql_store.callers.put(connection, Submission(refused, content))
        connection.commit()
    engine.dispose()
    assert mysql_store.read([kept.job_id, refused.job_id]) == {kept.job_id: kept}


def test_the_callers_connection_is_accepted_after_a_failover_behind_the_servers_name(
    mysql_store: Store, mysql_place: Any, new_row: NewRow
) -> None:
    def submit() -> None:
        with engine_of(mysql_place.urls[0]) as engine, engine.connect() as connection:
            mysql_store.callers.put(connection, Submission(new_row()))
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
            mysql_store.callers.put(connection, Submission(row))
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


@pytest.mark.parametrize("day", [-1, 0])
def test_before_2020_ids_are_as_valid(day: int) -> None:
    clock = StandingClock(JOB_ID_EPOCH_MS + day * 86_400_000)
    ids = JobIds(clock)
    assert all(valid_job_id(ids.make(0)) for _ in range(5000))
    clock.now = 1_800_000_000_000
    ids.make(0)
    clock.now = 0
    assert all(valid_job_id(ids.make(0)) for _ in range(5000))
