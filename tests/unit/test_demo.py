"""The demo's verdict: each departure from what the orders say turns it."""

from __future__ import annotations

import pytest

from toc.dev.demo.orders import CLOSE, CONFIRM, Deadline
from toc.dev.demo.report import Observed, judge
from toc.model.task import CancelOutcome, TaskStatus

DUE_MS = 1_000_000
DUE_NS = DUE_MS * 1_000_000
LATE_NS = DUE_NS + 2_400_000
RIGHT = {2: [LATE_NS], 3: [DUE_NS]}


def seen() -> list[Observed]:
    """An order paid in time, one paid late, one delivered: what is seen of each when all is right."""
    paid = Deadline("paid", CLOSE, 0, 1, 0.5, fires=False)
    late = Deadline("late", CLOSE, 0, 1, 1.5, fires=True)
    delivered = Deadline("delivered", CONFIRM, 0, 1, None, fires=True)
    asked, answered = DUE_NS - 150_000_000, DUE_NS - 120_000_000
    return [
        Observed(paid, DUE_MS, 1, asked, answered, CancelOutcome.CANCELLED, TaskStatus.CANCELLED),
        Observed(late, DUE_MS, 2, DUE_NS + 1, DUE_NS + 2, CancelOutcome.TOO_LATE, TaskStatus.PROCESSED),
        Observed(delivered, DUE_MS, 3, status=TaskStatus.PROCESSED),
    ]


def test_a_run_exactly_as_the_orders_say_is_right() -> None:
    report = judge(seen(), RIGHT, orders=3)
    assert report["right"], report["problems"]
    assert (report["submitted"], report["cancelled"], report["fired"]) == (3, 1, 2)


@pytest.mark.parametrize(
    ("which", "change", "starts", "counted"),
    [
        (0, {"status": TaskStatus.PENDING}, RIGHT, "lost"),
        (0, {"status": TaskStatus.PROCESSED}, RIGHT, "wrong"),
        (0, {"cancel_outcome": CancelOutcome.MAY_HAVE_STARTED}, RIGHT, "wrong"),
        (0, {"cancel_issued_ns": DUE_NS}, RIGHT, "driver_faults"),
        (0, {"job_id": None}, RIGHT, "driver_faults"),
        (1, {"cancel_outcome": CancelOutcome.CANCELLED}, RIGHT, "handled_after_cancel"),
        (2, {"status": TaskStatus.DEAD}, RIGHT, "wrong"),
        (2, {"error": "submit: no"}, RIGHT, "driver_faults"),
        (2, {}, {2: [LATE_NS], 3: [DUE_NS - 1]}, "early"),
        (2, {}, {2: [LATE_NS], 3: [DUE_NS, LATE_NS]}, "duplicates"),
        (2, {}, {2: [LATE_NS]}, "lost"),
        (0, {}, RIGHT | {1: [DUE_NS]}, "handled_after_cancel"),
    ],
)
def test_what_is_seen_otherwise_makes_it_wrong(
    which: int, change: dict[str, object], starts: dict[int, list[int]], counted: str
) -> None:
    observed = seen()
    for name, value in change.items():
        setattr(observed[which], name, value)
    report = judge(observed, starts, orders=3)
    assert not report["right"]
    assert report[counted] == 1
