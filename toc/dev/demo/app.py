"""The application of the demo: two topics whose handlers record that they started."""

from __future__ import annotations

import time
from collections import defaultdict

from toc.dev.demo.orders import CLOSE, CONFIRM
from toc.model.task import Task
from toc.sdk.client import TimeoutCenter

center = TimeoutCenter()

starts: defaultdict[int, list[int]] = defaultdict(list)
"""By job_id, the instants (ns) at which handlers of this process started."""


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that was not paid in time."""
    starts[task.job_id].append(time.time_ns())


@center.handler(CONFIRM)
def confirm_receipt(task: Task) -> None:
    """Confirm the receipt of an order that was delivered a week ago."""
    starts[task.job_id].append(time.time_ns())
