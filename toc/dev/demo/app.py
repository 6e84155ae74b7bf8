"""The application of the demo: two topics whose handlers record that they started.

``TOC_DEMO_HISTORY`` names the file of the record: a line ``job_id started_ns`` for each start.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from toc.dev.demo.orders import CLOSE, CONFIRM
from toc.model.task import Task
from toc.sdk.client import TimeoutCenter

center = TimeoutCenter()


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that was not paid in time."""
    _record(task)


@center.handler(CONFIRM)
def confirm_receipt(task: Task) -> None:
    """Confirm the receipt of an order that was delivered a week ago."""
    _record(task)


def _record(task: Task) -> None:
    started_ns = time.time_ns()
    if path := os.environ.get("TOC_DEMO_HISTORY"):
        with Path(path).open("ab", buffering=0) as history:  # one write: lines of others stay apart
            history.write(b"%d %d\n" % (task.job_id, started_ns))
