"""The application of the demo: two topics whose handlers write down that they started, and nothing else.

A worker runs it with ``toc worker --app toc.demo.app:center``.
"""

from __future__ import annotations

import time

from toc.client import TimeoutCenter
from toc.demo.history import HistoryWriter
from toc.demo.orders import CLOSE, CONFIRM
from toc.task import Task

center = TimeoutCenter()
_history = HistoryWriter()


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that was not paid in time."""
    _history.append(task.job_id, time.time_ns())


@center.handler(CONFIRM)
def confirm_receipt(task: Task) -> None:
    """Confirm the receipt of an order that was delivered a week ago."""
    _history.append(task.job_id, time.time_ns())
