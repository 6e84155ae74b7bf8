"""Pages of the task tables by next_time: complete, in order, and no more read than is returned."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pymysql
import pytest
from harness.rows import insert_many
from sqlalchemy.engine import make_url

from toc.model.task import TaskRow, TaskStatus
from toc.model.verdict import Failure
from toc.store.servers.mysql import MySqlServer
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks.scan import DueRow, Position

T0 = 1_900_000_000_000
NewRow = Callable[..., TaskRow]


@pytest.fixture
def tables(fresh_store: Store) -> list[int]:
    return [table for part in fresh_store.tables_of_server() for table in part]


def pages(store: Store, tables: list[int], limit: int, **options: Any) -> Iterator[list[DueRow]]:
    starts = dict.fromkeys(tables, Position(T0))
    while starts:
        found = store.scans.page(starts, T0 + 1_000_000, limit, **options)
        yield from found.values()
        starts = {table: page[-1].position for table, page in found.items() if len(page) == limit}


def due(row: TaskRow) -> DueRow:
    return DueRow(row.job_id, row.biz_type, row.next_time, row.attempts, row.slot_crc, row.slot_amount)


def test_page_after_page_brings_every_pending_row_once_however_many_share_an_instant(
    fresh_store: Store, new_row: NewRow, tables: list[int]
) -> None:
    dice = random.Random(3)
    rows = [new_row(action_time=T0 + dice.choice((5, 5, 5, 6, dice.randrange(900)))) for _ in range(400)]
    insert_many(fresh_store, rows)
    fresh_store.finish([(row.job_id, 0) for row in rows[:50]])
    found = [row for page in pages(fresh_store, tables, 7) for row in page]
    assert sorted(found) == sorted(map(due, rows[50:]))
    for page in pages(fresh_store, tables, 7):
        assert page == sorted(page, key=lambda row: row.position)


def test_a_page_ends_before_its_end_and_holds_one_status_alone(
    fresh_store: Store, new_row: NewRow, tables: list[int]
) -> None:
    early, inside, late = (new_row(action_time=T0 + at) for at in (-1, 99, 100))
    dead = new_row(action_time=T0 + 50)
    insert_many(fresh_store, [early, inside, late, dead])
    fresh_store.die([Failure(dead.job_id, 0, 0, 0, 1, 0, 0, "boom")])
    starts = dict.fromkeys(tables, Position(T0))
    found = fresh_store.scans.page(starts, T0 + 100, 10)
    assert [row for page in found.values() for row in page] == [due(inside)]
    buried = fresh_store.get(dead.job_id)
    assert buried is not None
    starts = dict.fromkeys(tables, Position(0))
    dead_pages = fresh_store.scans.scan([], starts, 0, T0, 10, status=TaskStatus.DEAD).pages
    assert [row for page in dead_pages.values() for row in page] == [due(buried)]


def test_a_look_tells_which_quiet_tables_stir_and_the_ids_of_busy_ones(
    fresh_store: Store, new_row: NewRow, tables: list[int]
) -> None:
    rows = [new_row(action_time=T0 + n) for n in range(200)]
    ended, retried = new_row(action_time=T0 + 50), new_row(action_time=T0 - 9)
    insert_many(fresh_store, [*rows, ended, retried])
    fresh_store.finish([(ended.job_id, 0)])
    fresh_store.fail([Failure(retried.job_id, 0, 0, 0, 1, 0, T0 + 60, "boom")])
    start = Position(T0 + 20)

    looked = fresh_store.scans.scan([], dict.fromkeys(tables, start), T0 + 20, T0 + 100, 1000)
    everything = {table: page for table, page in looked.pages.items() if page}
    assert sorted(place.next_time for page in everything.values() for place in page) == sorted(
        [*range(T0 + 20, T0 + 100), T0 + 60]
    )
    quiet = fresh_store.scans.scan(tables, {}, T0 + 20, T0 + 100, 1000)
    assert (sorted(quiet.with_due_rows), quiet.pages) == (sorted(everything), {})
    for limits in ((T0 - 100, T0), (T0 + 200, T0 + 300)):
        assert fresh_store.scans.scan(tables, {}, *limits, 1000) == ([], {}, {})
    (table, places), *_ = everything.items()
    others = [other for other in tables if other != table]
    mixed = fresh_store.scans.scan(others, {table: places[0].position}, T0 + 20, T0 + 100, 2)
    assert sorted(mixed.with_due_rows) == sorted(everything.keys() - {table})
    assert mixed.pages == {table: places[1:3]}


def test_the_server_reads_no_more_than_it_returns(
    mysql_place: Any, mysql_store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the counters of the server: with thousands of rows that share an instant, and as many ended ones."""
    rows = [new_row(biz_id=77, action_time=T0 + 77) for _ in range(4000)]
    insert_many(mysql_store, rows)
    mysql_store.finish([(row.job_id, 0) for row in rows[:1000]])
    (table,) = {row.job_id >> 12 & 15 for row in rows}
    # Which way the server goes depends on what it knows of the table, and that it counts in its own time.
    with _connected(mysql_place) as connection, connection.cursor() as cursor:
        database = f"{mysql_place.prefix}{table % mysql_place.databases}"
        cursor.execute(f"ANALYZE TABLE {database}.timeout_task_{table:04d}")
    sent: list[str] = []
    run = MySqlServer.run

    def spy(self: MySqlServer, statements: Any, **options: Any) -> Any:
        sent.extend(statement.sql for statement in statements)
        return run(self, statements, **options)

    monkeypatch.setattr(MySqlServer, "run", spy)
    middle = due(rows[2500]).position
    mysql_store.scans.scan([table], {}, T0, T0 + 100, 10)
    mysql_store.scans.page({table: middle}, T0 + 100, 10)
    probe, page = sent
    assert _reads(mysql_place, probe) <= 2
    assert _reads(mysql_place, page) <= 12
    assert "filesort" not in _extra(mysql_place, page)


def _connected(place: Any) -> Any:
    url = make_url(place.root_url)
    return pymysql.connect(
        host=url.host, port=url.port or 3306, user=url.username, password=str(url.password), autocommit=True
    )


def _reads(place: Any, statement: str) -> int:
    with _connected(place) as connection, connection.cursor() as cursor:
        cursor.execute("FLUSH STATUS")
        cursor.execute(statement)
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(value) for _, value in cursor.fetchall())


def _extra(place: Any, statement: str) -> str:
    with _connected(place) as connection, connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN {statement}")
        return ";".join(str(row[-1]) for row in cursor.fetchall())


def test_a_row_in_a_table_that_its_job_id_does_not_name_is_told_and_holds_up_no_other(
    fresh_store: Store, new_row: NewRow, tables: list[int]
) -> None:
    rows = [new_row(action_time=T0 + at) for at in range(40)]
    insert_many(fresh_store, rows)
    shards = fresh_store._shards
    home = shards.table_of(rows[3].job_id)
    wrong = next(
        table for table in tables if table != home and shards.server_of[table] is shards.server_of[home]
    )
    row = f"{shards.names[home]} WHERE job_id={rows[3].job_id}"
    for text in (f"INSERT INTO {shards.names[wrong]} SELECT * FROM {row}", f"DELETE FROM {row}"):
        shards.server_of[home].run([Statement(text)])
    others = [due(row) for row in rows if row is not rows[3]]
    assert sorted(row for page in pages(fresh_store, tables, 2) for row in page) == sorted(others)
    alone = [row for page in pages(fresh_store, [wrong], 2) for row in page]
    assert alone == [row for row in others if shards.table_of(row.job_id) == wrong]
    starts = dict.fromkeys(tables, Position(T0))
    looked = fresh_store.scans.scan([], starts, T0, T0 + 1000, 100)
    assert sorted(place.job_id for page in looked.pages.values() for place in page) == sorted(
        row.job_id for row in others
    )
