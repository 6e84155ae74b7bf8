"""What a replay of orders is told, and what it has confirmed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness.replay import CLOSE, CONFIRM
from toc.dev.demo import orders as demo

REAL_ORDERS = Path(
    os.environ.get("TOC_TEST_ORDERS", Path(__file__).parents[3] / "shared/data/orders_2016_2017.csv")
)
"""Real orders, which are not part of this repository: looked for beside the checkout."""
TOPICS = {demo.CLOSE: CLOSE, demo.CONFIRM: CONFIRM}


ASK_SECONDS = 0.1
"""A cancel that is asked for so long before the deadline is in time."""


def raced(plan: demo.Plan, began: float, history: Path) -> set[tuple[str, str]]:
    """The deadlines that may end either way: on a busy machine their cancel was asked for too late."""
    asked = {(one["order"], one["topic"]): one["at"] for one in lines(history) if one["what"] == "asked"}
    due = {(one.order_id, TOPICS[one.topic]): began + one.due_at for one in plan.deadlines if not one.fires}
    found = {key for key, at in due.items() if asked[key] > at - ASK_SECONDS}
    assert len(found) < len(due) / 2, "the producer could not keep up"
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """What a program has confirmed; it may have been killed in the middle of a line."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_plan(plan: demo.Plan, path: Path, began: float) -> None:
    """Write a plan as the producer reads it. Its times count from ``began`` (seconds since 1970)."""
    deadlines = [
        {
            "order": one.order_id,
            "topic": TOPICS[one.topic],
            "submit_at": one.submit_at,
            "due_at": one.due_at,
            "cancel_at": one.cancel_at,
        }
        for one in plan.deadlines
    ]
    path.write_text(json.dumps({"began": began, "deadlines": deadlines}))
