"""The application of the demo: a topic whose handler records that it started."""

from __future__ import annotations

import time
from collections import defaultdict

from toc.model.task import Task
from toc.sdk.client import TimeoutCenter

CLOSE = "demo.order.close"

center = TimeoutCenter()

starts: defaultdict[int, list[float]] = defaultdict(list)
"""By job_id, the times at which handlers of this process started."""


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that was not paid in time."""
    starts[task.job_id].append(time.time())
