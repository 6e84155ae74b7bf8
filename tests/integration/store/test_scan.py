"""Pages of the task tables by next_time, and what an operator's filters mean, row by row."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from harness.rows import NewRow, insert_many, known
from integration.store.conftest import Reads

from toc.model.sharding import BizId
from toc.model.task import TaskRow, TaskStatus
from toc.model.verdict import Failure
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks import batch, scan, select
from toc.store.tasks.batch import SlotTasks
from toc.store.tasks.scan import DueRow, Position, of_types
from toc.store.tasks.select import Selection

# Pages of the task tables by next_time: complete, in order, and no more read than is returned.

T0 = 1_900_000_000_000


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
    buried = known(fresh_store.get(dead.job_id))
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
    mysql_store: Store, new_row: NewRow, sent: list[str], reads: Reads
) -> None:
    """With thousands of rows that share an instant, and as many ended ones."""
    rows = [new_row(biz_id=77, action_time=T0 + 77) for _ in range(4000)]
    insert_many(mysql_store, rows)
    mysql_store.finish([(row.job_id, 0) for row in rows[:1000]])
    (table,) = {row.job_id >> 12 & 15 for row in rows}
    sent.clear()
    mysql_store.scans.scan([table], {}, T0, T0 + 100, 10)
    mysql_store.scans.page({table: due(rows[2500]).position}, T0 + 100, 10)
    probe, page = sent
    assert reads(table, probe) <= 2
    assert reads(table, page) <= 12


def test_a_search_among_overdue_rows_reads_few_of_them(
    mysql_store: Store, new_row: NewRow, sent: list[str], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of a backlog is leased: what is asked of a row is asked of the first rows alone."""
    rows = [
        new_row(biz_id=78, biz_type=biz_type, action_time=T0 - 9) for biz_type in (7, 8) for _ in range(3000)
    ]
    insert_many(mysql_store, [*rows, last := new_row(biz_id=78, biz_type=9, action_time=T0 - 1)])
    (table,) = {row.job_id >> 12 & 15 for row in rows}
    held, few = mysql_store.leases.held(), {"tables": 1, "each": 20}
    for types, most in (((7, 8), 22), ((9,), 2)):
        sent.clear()
        found = mysql_store.scans.overdue(T0, of_types(types), held, **few)
        assert (found.rows, found.more, found.failed) == ([], types == (7, 8), {})
        assert reads(table, sent[-1]) <= most
    assert mysql_store.scans.overdue(T0, of_types([9]), "crashes=0").rows == [due(last)]
    assert mysql_store.scans.overdue(T0, of_types([]), "crashes=0").rows == []
    monkeypatch.setattr(scan, "ENTRIES_READ", 50 * 16, raising=False)
    sent.clear()
    found = mysql_store.scans.overdue(T0, of_types([9]), "crashes=0")
    assert (found.rows, found.more) == ([], True)
    assert max(reads(table, statement) for statement in sent) < 80, "behind the backlog of others"
    assert mysql_store.scans.overdue(T0, of_types([7]), "crashes=0").rows == [*map(due, rows[:50])]


def test_what_slots_hold_is_counted_of_few_rows(
    mysql_store: Store, new_row: NewRow, sent: list[str], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each table the first pending and dead rows, and it is said that there are more."""
    monkeypatch.setattr(batch, "SLOT_ROWS", 1)
    rows = [new_row(biz_id=79, biz_type=79, status=n % 2 * 4, action_time=n + 1) for n in range(3000)]
    insert_many(mysql_store, rows)
    (table,) = {row.job_id >> 12 & 15 for row in rows}
    sent.clear()
    slot = 79, rows[0].slot_crc % 16
    found, more = mysql_store.count_by_slot(17, ahead=True)
    assert (found[slot], more) == (SlotTasks(pending=16, held=0, due=9, dead=16, first=1), True)
    (statement,) = [text for text in sent if f"timeout_task_{table:04d}" in text]
    assert reads(table, statement) < 200
    found, more = mysql_store.count_by_slot(T0, ahead=False)
    assert (found[slot], more) == (SlotTasks(1500, 0, 1500, 1500, 1), False)


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


# What an operator's filters mean, row by row.

DEAD = int(TaskStatus.DEAD)


@pytest.fixture
def rows(fresh_store: Store, new_row: NewRow) -> list[TaskRow]:
    """Twelve dead rows of two types, one second apart, and some that are not dead."""
    dead = [
        new_row(
            status=DEAD,
            biz_type=7 + n % 2,
            biz_id=None if n else "order-é",
            next_time=T0 + n * 1000,
            last_error=f"Error {n}: 100%_'\\ é" if n % 3 == 0 else "other" if n % 3 == 1 else None,
        )
        for n in range(12)
    ]
    others = [
        new_row(status=status, next_time=T0 + 500, last_error="Error")
        for status in (0, 2, 3)
        for _ in range(3)
    ]
    insert_many(fresh_store, dead + others)
    return dead


def _both(store: Store, **filters: Any) -> list[int]:
    """The ids that are shown, newest first; the same must be gathered."""
    wanted = Selection(TaskStatus.DEAD, **filters)
    (shown,) = _pages(store, wanted, 1000, back=True)
    assert sorted(store.selections.ids(wanted)) == sorted(shown)
    return shown


@pytest.mark.parametrize(("filters", "meant"), [
    ({}, range(12)), ({"biz_types": [7]}, range(0, 12, 2)), ({"since": T0 + 3000}, range(3, 12)),
    ({"before": T0 + 3000}, range(3)),
    ({"since": T0 + 2000, "before": T0 + 5000, "biz_types": [8]}, (3,)),
    ({"error": "Error"}, (0, 3, 6, 9)), ({"error": "error"}, ()),
    ({"error": "9: 100%_'\\ é"}, (9,)), ({"error": "%"}, (0, 3, 6, 9)), ({"error": "100_"}, ()),
    ({"error": "\0"}, ()), ({"biz": BizId.of("order-é")}, (0,)),
    ({"biz": BizId.of("order-é"), "biz_types": [8]}, ()),
    ({"biz": BizId.of("order-é"), "error": "é", "before": T0 + 1}, (0,)),
    ({"biz": BizId.of(5)}, ()),
])  # fmt: skip
def test_a_selection_means_the_rows_that_meet_every_filter(
    fresh_store: Store, rows: list[TaskRow], filters: dict[str, Any], meant: Any
) -> None:
    assert _both(fresh_store, **filters) == [rows[n].job_id for n in reversed(meant)]


def test_the_newest_of_many_tables_come_first(fresh_store: Store, rows: list[TaskRow]) -> None:
    wanted = Selection(TaskStatus.DEAD)
    assert fresh_store.selections.page(wanted, None, 5, newest=True).rows == rows[:6:-1]
    assert fresh_store.selections.page(wanted, None, 100, newest=True) == (rows[::-1], None)
    nobody = replace(wanted, biz_types=[])
    assert fresh_store.selections.page(nobody, None, 5, newest=True) == ([], None), "who may see no topic"


def test_all_ids_are_gathered_however_many_died_in_one_instant(
    fresh_store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "PAGE_ROWS", 500)
    many = [new_row(status=DEAD, next_time=T0, biz_id=1, biz_type=7 if n % 100 else 8) for n in range(2700)]
    few = [new_row(status=DEAD, next_time=T0 + 1, biz_id=n) for n in range(2, 50)]
    insert_many(fresh_store, [*many, *few])
    found = fresh_store.selections.ids(Selection(TaskStatus.DEAD, biz_types=[7]))
    assert sorted(found) == sorted(row.job_id for row in many + few if row.biz_type == 7)
    assert len(fresh_store.selections.ids(Selection(TaskStatus.DEAD, biz_types=[8]))) == 27


def test_ids_of_a_small_topic_are_gathered_without_the_rows_of_others(
    mysql_store: Store, new_row: NewRow, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "PAGE_ROWS", 500)
    insert_many(mysql_store, [new_row(biz_id=1, biz_type=70) for _ in range(1500)])
    insert_many(mysql_store, [last := new_row(biz_id=1, biz_type=71)])
    sent.clear()
    wanted = Selection(TaskStatus.PENDING, biz_types=[71])
    assert list(mysql_store.selections.ids(wanted)) == [last.job_id]
    assert mysql_store.selections.count(replace(wanted, held=True)) == 0
    assert len(sent) == 2 * 16, "each table is asked once, in a time of its own"


def _pages(store: Store, wanted: Selection, limit: int, *, back: bool = False) -> list[list[int]]:
    """The ids on each page, to the last."""
    pages, place = [], None
    while True:
        page = store.selections.page(wanted, place, limit, newest=back)
        pages.append([row.job_id for row in page.rows])
        if (place := page.next) is None:
            return pages


def test_a_page_is_full_while_tasks_are_left_wherever_they_are(fresh_store: Store, new_row: NewRow) -> None:
    spread = [new_row(biz_id=n, next_time=T0 + n) for n in range(130)]
    heap = [new_row(biz_id=1, next_time=T0 + 3 * n) for n in range(100)]
    insert_many(fresh_store, [*spread, *heap])
    in_order = [row.job_id for row in sorted(spread + heap, key=lambda row: (row.next_time, row.job_id))]
    for limit in (1, 7, 100, 1000):
        for back, ids in ((False, in_order), (True, in_order[::-1])):
            assert _pages(fresh_store, Selection(TaskStatus.PENDING), limit, back=back) == [
                ids[first : first + limit] for first in range(0, len(ids), limit)
            ]


def test_tasks_of_one_table_and_of_one_biz_id_fill_their_pages(fresh_store: Store, new_row: NewRow) -> None:
    heap = [new_row(biz_id=1, biz_type=8, next_time=T0 + n) for n in range(250)]
    others = [new_row(biz_id=n, next_time=T0 + n) for n in range(100)]
    insert_many(fresh_store, [*heap, *others])
    by_time = [row.job_id for row in heap]
    for wanted, ids in (
        (Selection(TaskStatus.PENDING, biz_types=[8]), by_time),
        (Selection(None, biz=BizId.of(1), biz_types=[8]), sorted(by_time)),
    ):
        assert _pages(fresh_store, wanted, 100) == [ids[:100], ids[100:200], ids[200:]]


def test_a_page_reads_a_bounded_number_of_rows_and_the_next_goes_on_there(
    fresh_store: Store, new_row: NewRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_row(biz_id=3, biz_type=8, next_time=T0 - 1)
    others = [new_row(biz_id=n % 9, next_time=T0 + n) for n in range(900)]
    last = new_row(biz_id=3, biz_type=8, next_time=T0 + 901)
    insert_many(fresh_store, [first, *others, last])
    assert _pages(fresh_store, Selection(TaskStatus.PENDING, biz_types=[9]), 10) == [[]]
    monkeypatch.setattr(select, "PAGE_ROWS", 200)
    for back, ends in ((False, [first, last]), (True, [last, first])):
        pages = _pages(fresh_store, Selection(TaskStatus.PENDING, biz_types=[8]), 10, back=back)
        assert [job_id for page in pages for job_id in page] == [row.job_id for row in ends]
        assert 900 / (4 * 64 + 200) <= len(pages) < 12
