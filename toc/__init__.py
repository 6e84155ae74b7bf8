"""toc, a low-latency timeout center: durable deadlines that fire within milliseconds.

::

    center = TimeoutCenter()

    @center.handler("order.close")
    def close_unpaid(task: Task) -> None: ...

    center.submit("order.close", biz_id=42, delay=timedelta(minutes=30), attribute={"reason": "unpaid"})
"""

from toc.client import TimeoutCenter
from toc.config import Settings
from toc.errors import TocError
from toc.task import CancelOutcome, Dead, NewTask, RescheduleOutcome, Retry, Task, TaskStatus
from toc.topic import Topic

__all__ = [
    "CancelOutcome",
    "Dead",
    "NewTask",
    "RescheduleOutcome",
    "Retry",
    "Settings",
    "Task",
    "TaskStatus",
    "TimeoutCenter",
    "TocError",
    "Topic",
]
