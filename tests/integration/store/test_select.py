"""What an operator's filters mean, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness.rows import insert_many

from toc.model.sharding import BizId
from toc.model.task import TaskRow, TaskStatus
from toc.store.store import Store
from toc.store.tasks import select
from toc.store.tasks.select import Selection

NewRow = Callable[..., TaskRow]
T0 = 1_900_000_000_000
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


@pytest.mark.parametrize(
    ("filters", "meant"),
    [
        ({}, range(12)),
        ({"biz_types": [7]}, range(0, 12, 2)),
        ({"since": T0 + 3000}, range(3, 12)),
        ({"before": T0 + 3000}, range(3)),
        ({"since": T0 + 2000, "before": T0 + 5000, "biz_types": [8]}, (3,)),
        ({"error": "Error"}, (0, 3, 6, 9)),
        ({"error": "error"}, ()),
        ({"error": "9: 100%_'\\ é"}, (9,)),
        ({"error": "%"}, (0, 3, 6, 9)),
        ({"error": "100_"}, ()),
        ({"error": "\0"}, ()),
        ({"biz": BizId.of("order-é")}, (0,)),
        ({"biz": BizId.of("order-é"), "biz_types": [8]}, ()),
        ({"biz": BizId.of("order-é"), "error": "é", "before": T0 + 1}, (0,)),
        ({"biz": BizId.of(5)}, ()),
    ],
)
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


def _pages(store: Store, wanted: Selection, limit: int, *, back: bool = False) -> list[list[int]]:
    """The ids on each page, to the last."""
    pages, place = [], None
    while True:
        page = store.selections.page(wanted, place, limit, newest=back)
        pages.append([row.job_id for row in page.rows])
        if (place := page.next) is None:
            return pages


def test_a_page_is_full_while_tasks_are_left_however_they_lie_in_the_tables(
    fresh_store: Store, new_row: NewRow
) -> None:
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
