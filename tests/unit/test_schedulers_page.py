"""What docs/from-schedulers.md shows of toc can be run as it stands."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from toc import Retry, Task, TimeoutCenter
from toc.model.declaration import Policies
from toc.sdk.schedules import Schedules
from toc.testing import Toc

PAGE = (Path(__file__).parents[2] / "docs/from-schedulers.md").read_text()
CELLS = [row.split(" | ")[-1] for row in PAGE.splitlines() if row.startswith("| ")]
CODE = [code for cell in CELLS for code in re.findall(r"`([^`]+)`", cell)]


class Celery:
    """Stands for a task of Celery's."""

    def __init__(self) -> None:
        self.applied: list[tuple[tuple[Any, ...], str]] = []

    def apply_async(self, args: tuple[Any, ...], *, task_id: str) -> None:
        self.applied.append((args, task_id))


@pytest.fixture
def names(toc: Toc) -> dict[str, Any]:
    """What the page takes for granted."""
    center = TimeoutCenter()
    center.topic("order.close", slots=4)
    toc.use(center)
    job_id = center.submit("order.close", biz_id=1, delay="1h")
    return {
        "center": center,
        "job_id": job_id,
        "when": toc.now + timedelta(hours=1),
        "Retry": Retry,
        "Task": Task,
    }


def test_a_handler_hands_over_to_celery(toc: Toc, names: dict[str, Any]) -> None:
    names["close_order"] = celery = Celery()
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, names)
    job_id = names["center"].submit("order.close", biz_id=42, delay="30m")
    toc.advance("30m")
    assert celery.applied == [((42,), f"close-{job_id}")]


@pytest.mark.parametrize("code", [code for code in CODE if re.match(r"center\.|@center\.|raise ", code)])
def test_what_stands_for_another_call_is_one_of_ours(names: dict[str, Any], code: str) -> None:
    if code.startswith("@"):
        eval(code[1:], names)(lambda _task: None)
    elif code.startswith("raise"):
        with pytest.raises(Retry):
            exec(code, names)
    else:
        eval(code, names)


def test_what_stands_for_an_option_is_one_of_ours(names: dict[str, Any]) -> None:
    options = [code for code in CODE if re.match(r"\w+=", code)]
    assert len(options) > 8
    submit, create = (
        set(inspect.signature(of).parameters) for of in (TimeoutCenter.submit, Schedules.create)
    )
    for option in options:
        name, _, value = option.partition("=")
        assert name in submit | create | set(Policies.__annotations__), option
        if value and name in create - {"topic"}:
            names["more"] = {} if name in ("cron", "every") else {"every": 3600}
            eval(f"center.schedules.create({name!r}, topic='order.close', {option}, **more)", names)
