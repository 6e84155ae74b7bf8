"""The application of the demo: two topics whose handlers record that they started.

A worker runs it with ``toc worker --app toc.dev.demo.app:center``. To practise, put trouble into a task's
attribute: with ``{"die": "connection refused"}`` the task dies with that error until it is redriven; with
``{"take": 20}`` it runs for 20 seconds.
"""

from __future__ import annotations

import time

from toc.dev.demo.history import HistoryWriter
from toc.dev.demo.orders import CLOSE, CONFIRM
from toc.model.task import Dead, Task
from toc.sdk.client import TimeoutCenter

center = TimeoutCenter()
_history = HistoryWriter()


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that was not paid in time."""
    _handle(task)


@center.handler(CONFIRM)
def confirm_receipt(task: Task) -> None:
    """Confirm the receipt of an order that was delivered a week ago."""
    _handle(task)


def _handle(task: Task) -> None:
    _history.append(task.job_id, time.time_ns())
    if "die" in task.attribute and task.version == 0:  # a redrive raises the version
        raise Dead(str(task.attribute["die"]))
    time.sleep(task.attribute.get("take", 0))
