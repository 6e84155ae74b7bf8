"""The demo's oracle, its compressed clock, and its verdict."""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from toc.dev.demo.history import History
from toc.dev.demo.orders import (
    CLOSE,
    CONFIRM,
    MIN_MARGIN,
    Deadline,
    Order,
    plan,
    read_orders,
    synthetic_orders,
)
from toc.dev.demo.report import RACE_SECONDS, Observed, Report, judge
from toc.model.errors import InvalidInput
from toc.model.task import CancelOutcome, Dead, Task, TaskStatus

HEADER = "order_id,status,purchased_at,approved_at,shipped_at,delivered_at,estimated_delivery\n"


def write(path: Path, *lines: str) -> Path:
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return path


def test_orders_are_read_with_payment_and_delivery(tmp_path: Path) -> None:
    path = write(
        tmp_path / "orders.csv",
        "a,delivered,2016-10-04 14:00:00,2016-10-04 14:30:00,,2016-10-11 14:46:49,",
        "b,canceled,2016-10-04 14:00:00,,,,",
        "c,shipped,2016-10-04 14:00:00,2016-10-04 14:30:01,,,",
    )
    assert read_orders(path) == [Order("a", 1800.0, True), Order("b", None, False), Order("c", 1801.0, False)]


def test_a_file_of_a_spreadsheet_that_begins_with_a_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(HEADER + "b,canceled,2016-10-04 14:00:00,,,,\n", encoding="utf-8-sig")
    assert read_orders(path) == [Order("b", None, False)]


def test_exactly_thirty_minutes_is_in_time() -> None:
    assert [Order("o", paid, False).closes for paid in (0.0, 1799.0, 1800.0, 1801.0, None)] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no column approved_at, delivered_at, order_id, purchased_at"),
        (HEADER, "no orders"),
        (HEADER + "a,x,yesterday,,,,\n", "line 2"),
        (HEADER + ",x,2016-10-04 14:00:00,,,,\n", "order_id is empty"),
        (HEADER + "a\n", "line 2"),
        ("", "no column"),
    ],
)
def test_a_wrong_file_is_refused_with_a_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "orders.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=says):
        read_orders(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_orders(tmp_path / "none.csv")


def test_made_up_orders_repeat_for_a_seed_and_hold_every_case() -> None:
    orders = synthetic_orders(1000, 7)
    assert orders == synthetic_orders(1000, 7)
    assert orders != synthetic_orders(1000, 8)
    assert {order.paid_after for order in orders} >= {None, 1795.0, 1799.0, 1800.0, 1801.0, 1805.0}
    assert 300 < sum(order.closes for order in orders) < 600
    assert sum(order.delivered for order in orders) > 400


@pytest.mark.parametrize("speed", [1.0, 10.0, 60.0])
def test_deadlines_are_compressed_and_payments_keep_their_side_of_it(speed: float) -> None:
    length = 30.0 / speed
    paid = [0.0, 600.0, 1799.0, 1800.0, 1801.0, 1e6, None]
    orders = [Order(str(number), after, True) for number, after in enumerate(paid)]
    made = plan(orders, speed)
    for deadline in made.deadlines:
        assert deadline.due_at - deadline.submit_at == pytest.approx(length)
    closes = {int(d.order_id): d for d in made.deadlines if d.topic == CLOSE}
    offsets = [
        None if d.cancel_at is None else d.cancel_at - d.submit_at
        for d in (closes[number] for number in range(len(paid)))
    ]
    assert offsets[0] == 0
    assert offsets[1] == pytest.approx(min(length / 3, length - MIN_MARGIN))
    assert offsets[2:4] == [pytest.approx(length - MIN_MARGIN)] * 2
    assert offsets[4] == pytest.approx(length + MIN_MARGIN)
    assert offsets[5] == pytest.approx(length + max(10.0 / speed, MIN_MARGIN))
    assert offsets[6] is None
    assert [closes[number].fires for number in range(len(paid))] == [False] * 4 + [True] * 3
    assert made.stretched == 3
    assert sum(d.topic == CONFIRM and d.fires and d.cancel_at is None for d in made.deadlines) == len(paid)
    assert made.seconds >= max(max(d.due_at, d.cancel_at or 0) for d in made.deadlines)


def test_more_orders_make_a_run_longer_not_denser() -> None:
    made = plan([Order(str(number), 60.0, True) for number in range(20_000)], 10)
    times = [d.submit_at for d in made.deadlines] + [
        d.cancel_at for d in made.deadlines if d.cancel_at is not None
    ]
    assert max(Counter(map(int, times)).values()) <= 350


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf"), 61.0])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(InvalidInput, match="--speed"):
        plan([Order("a", None, False)], speed)


def test_the_history_is_read_on_and_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    history = History(tmp_path)
    path = tmp_path / "1.txt"
    path.write_bytes(b"5 1000\n6 20")
    history.read()
    assert history.starts == {5: [1000]}
    with path.open("ab") as file:
        file.write(b"00\n5 3000\n")
    (tmp_path / "2.txt").write_bytes(b"7 1\n")
    history.read()
    assert history.starts == {5: [1000, 3000], 6: [2000], 7: [1]}


# --- the verdict: each departure from what the orders say turns it ------------------------------------------

DUE_MS = 1_000_000
DUE_NS = DUE_MS * 1_000_000
LATE_NS = DUE_NS + 2_400_000


def cancelled() -> Observed:
    deadline = Deadline("paid", CLOSE, 0, 1, 0.5, fires=False)
    asked, answered = DUE_NS - 150_000_000, DUE_NS - 120_000_000
    return Observed(deadline, DUE_MS, 1, asked, answered, CancelOutcome.CANCELLED, TaskStatus.CANCELLED)


def late_payment() -> Observed:
    deadline = Deadline("late", CLOSE, 0, 1, 1.5, fires=True)
    asked, answered = DUE_NS + 1, DUE_NS + 2
    return Observed(deadline, DUE_MS, 2, asked, answered, CancelOutcome.TOO_LATE, TaskStatus.PROCESSED)


def confirmed() -> Observed:
    return Observed(
        Deadline("delivered", CONFIRM, 0, 1, None, fires=True), DUE_MS, 3, status=TaskStatus.PROCESSED
    )


RIGHT_STARTS = {2: [LATE_NS], 3: [DUE_NS]}


def verdict(*observed: Observed, starts: dict[int, list[int]]) -> Report:
    return judge(observed, starts, {}, orders=3, stretched=0)


def test_a_run_exactly_as_the_orders_say_is_right() -> None:
    report = verdict(cancelled(), late_payment(), confirmed(), starts=RIGHT_STARTS)
    assert report.right, report.problems
    assert (report.submitted, report.cancelled, report.fired) == (3, 1, 2)
    assert report.lateness_seconds == {"p50": 0.0024, "p99": 0.0024, "max": 0.0024}, (
        "the report shows tenths of ms"
    )


def test_a_task_that_ran_again_because_its_worker_died_is_counted_apart_and_right() -> None:
    starts = RIGHT_STARTS | {3: [DUE_NS, LATE_NS]}
    seen = [cancelled(), late_payment(), confirmed()]
    report = judge(seen, starts, {3: 1}, orders=3, stretched=0)
    assert report.right, report.problems
    assert (report.run_again, report.duplicates) == (1, 0)


CANCELLED, MAY_HAVE_STARTED = CancelOutcome.CANCELLED, CancelOutcome.MAY_HAVE_STARTED
TOO_LATE, UNKNOWN = CancelOutcome.TOO_LATE, CancelOutcome.UNKNOWN
PROCESSED_ROW, CANCELLED_ROW = TaskStatus.PROCESSED, TaskStatus.CANCELLED


def met(seen: Observed, answer: CancelOutcome, status: TaskStatus) -> Observed:
    """As it is when the machine was slow: its cancel was under way when the deadline passed."""
    if not seen.deadline.fires:
        seen.cancel_issued_ns = DUE_NS - 1
    seen.cancel_answered_ns = DUE_NS + 5
    seen.cancel_outcome, seen.status = answer, status
    return seen


@pytest.mark.parametrize(
    ("which", "answer", "status", "began"),
    [
        (cancelled, MAY_HAVE_STARTED, CANCELLED_ROW, True),
        (cancelled, MAY_HAVE_STARTED, CANCELLED_ROW, False),
        (cancelled, TOO_LATE, PROCESSED_ROW, True),
        (late_payment, MAY_HAVE_STARTED, CANCELLED_ROW, True),
        (late_payment, MAY_HAVE_STARTED, CANCELLED_ROW, False),
        (late_payment, CANCELLED, CANCELLED_ROW, False),
    ],
)
def test_a_cancel_that_met_its_deadline_may_come_out_the_other_way_and_is_counted(
    which: Callable[[], Observed], answer: CancelOutcome, status: TaskStatus, began: bool
) -> None:
    seen = met(which(), answer, status)
    assert seen.job_id is not None
    report = verdict(seen, starts={seen.job_id: [LATE_NS]} if began else {})
    assert report.right, report.problems
    assert report.raced == 1


@pytest.mark.parametrize(
    ("which", "answer", "status", "began", "counted"),
    [
        (cancelled, CANCELLED, CANCELLED_ROW, True, "handled_after_cancel"),
        (cancelled, MAY_HAVE_STARTED, PROCESSED_ROW, True, "wrong"),
        (cancelled, MAY_HAVE_STARTED, TaskStatus.PENDING, False, "lost"),
        (cancelled, TOO_LATE, PROCESSED_ROW, False, "lost"),
        (cancelled, TOO_LATE, CANCELLED_ROW, True, "wrong"),
        (cancelled, UNKNOWN, CANCELLED_ROW, False, "wrong"),
        (late_payment, CANCELLED, CANCELLED_ROW, True, "handled_after_cancel"),
        (late_payment, CANCELLED, PROCESSED_ROW, True, "handled_after_cancel"),
        (late_payment, MAY_HAVE_STARTED, PROCESSED_ROW, True, "wrong"),
        (late_payment, UNKNOWN, PROCESSED_ROW, True, "wrong"),
    ],
)
def test_what_a_cancel_that_met_its_deadline_answered_must_be_true(
    which: Callable[[], Observed], answer: CancelOutcome, status: TaskStatus, began: bool, counted: str
) -> None:
    seen = met(which(), answer, status)
    assert seen.job_id is not None
    report = verdict(seen, starts={seen.job_id: [LATE_NS]} if began else {})
    assert not report.right
    assert getattr(report, counted) == 1
    assert report.raced == 0


def test_long_after_its_deadline_a_task_that_was_not_handled_is_lost_whatever_the_cancel_answers() -> None:
    seen = met(late_payment(), CANCELLED, CANCELLED_ROW)
    seen.cancel_issued_ns = DUE_NS + int(RACE_SECONDS * 1e9)
    seen.cancel_answered_ns = seen.cancel_issued_ns + 1
    report = verdict(seen, starts={})
    assert (report.lost, report.wrong, report.raced) == (1, 1, 0)


def test_a_driver_that_came_too_late_hides_no_handler_after_a_cancel() -> None:
    seen = cancelled()
    seen.cancel_issued_ns = seen.cancel_answered_ns = DUE_NS + 1
    report = verdict(seen, starts={1: [LATE_NS]})
    assert (report.driver_faults, report.handled_after_cancel) == (1, 1)


@pytest.mark.parametrize(
    ("which", "change", "counted"),
    [
        (0, {"status": TaskStatus.PENDING}, "lost"),
        (0, {"status": None}, "lost"),
        (0, {"status": TaskStatus.PROCESSED}, "wrong"),
        (0, {"cancel_outcome": CancelOutcome.MAY_HAVE_STARTED}, "wrong"),
        (0, {"cancel_outcome": None}, "wrong"),
        (0, {"cancel_issued_ns": DUE_NS}, "driver_faults"),
        (0, {"cancel_issued_ns": None}, "driver_faults"),
        (0, {"job_id": None}, "driver_faults"),
        (1, {"status": TaskStatus.CANCELLED}, "wrong"),
        (1, {"cancel_outcome": CancelOutcome.CANCELLED}, "handled_after_cancel"),
        (1, {"cancel_outcome": CancelOutcome.MAY_HAVE_STARTED}, "wrong"),
        (2, {"status": TaskStatus.DEAD}, "wrong"),
        (2, {"status": TaskStatus.PENDING}, "lost"),
        (2, {"error": "submit: no"}, "driver_faults"),
    ],
)
def test_what_is_seen_otherwise_makes_it_wrong(which: int, change: dict[str, object], counted: str) -> None:
    seen = [cancelled(), late_payment(), confirmed()]
    for name, value in change.items():
        setattr(seen[which], name, value)
    report = verdict(*seen, starts=RIGHT_STARTS)
    assert not report.right
    assert getattr(report, counted) == 1
    assert len(report.problems) >= 1


@pytest.mark.parametrize(
    ("starts", "counted"),
    [
        ({2: [LATE_NS], 3: [DUE_NS - 1]}, "early"),
        ({2: [LATE_NS], 3: [DUE_NS, LATE_NS]}, "duplicates"),
        ({2: [LATE_NS]}, "lost"),
        (RIGHT_STARTS | {1: [DUE_NS]}, "handled_after_cancel"),
    ],
)
def test_starts_that_should_not_be_or_are_missing_make_it_wrong(
    starts: dict[int, list[int]], counted: str
) -> None:
    report = verdict(cancelled(), late_payment(), confirmed(), starts=starts)
    assert not report.right
    assert getattr(report, counted) == 1


def test_who_practises_may_ask_a_handler_for_trouble_that_a_redrive_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOC_DEMO_HISTORY", str(tmp_path / "starts"))
    monkeypatch.delitem(sys.modules, "toc.dev.demo.app", raising=False)
    app = importlib.import_module("toc.dev.demo.app")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    asked = {"die": "connection refused", "take": 20}
    task = Task(7, CLOSE, 1, 990_001, TaskStatus.PENDING, datetime.now(UTC), asked, 1, 0)
    for handle in (app.close_unpaid, app.confirm_receipt):
        with pytest.raises(Dead, match="connection refused"):
            handle(task)
        assert slept == []
        handle(task._replace(version=1))  # as a redrive leaves it
        assert slept == [20]
        handle(task._replace(attribute={}))
        slept.clear()
    history = History(tmp_path / "starts")
    history.read()
    assert len(history.starts[7]) == 6
    app.center.close()
    monkeypatch.delitem(sys.modules, "toc.dev.demo.app")
