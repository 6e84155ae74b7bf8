"""toc, a low-latency timeout center: durable deadlines that fire within milliseconds.

::

    center = TimeoutCenter()

    @center.handler("order.close")
    def close_unpaid(task: Task) -> None: ...

    center.submit("order.close", biz_id=42, delay=timedelta(minutes=30), attribute={"reason": "unpaid"})
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from toc.model.errors import (
    DedupConflict,
    InvalidInput,
    NotCommitted,
    SubmitUnknown,
    TocError,
    Unavailable,
    WrongShardConnection,
)

if TYPE_CHECKING:
    from toc.config import Settings
    from toc.model.task import CancelOutcome, Dead, NewTask, RescheduleOutcome, Retry, Task, TaskStatus
    from toc.model.topic import Topic
    from toc.sdk.async_client import AsyncTimeoutCenter
    from toc.sdk.changes import Change
    from toc.sdk.client import TimeoutCenter

__all__ = [
    "AsyncTimeoutCenter",
    "CancelOutcome",
    "Change",
    "Dead",
    "DedupConflict",
    "InvalidInput",
    "NewTask",
    "NotCommitted",
    "RescheduleOutcome",
    "Retry",
    "Settings",
    "SubmitUnknown",
    "Task",
    "TaskStatus",
    "TimeoutCenter",
    "TocError",
    "Topic",
    "Unavailable",
    "WrongShardConnection",
]

_MODULES = {
    "AsyncTimeoutCenter": "toc.sdk.async_client",
    "Change": "toc.sdk.changes",
    "TimeoutCenter": "toc.sdk.client",
    "Settings": "toc.config",
    "Topic": "toc.model.topic",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the command line imports this package too, and must answer --help and completion
    # without loading the drivers.
    if name not in __all__:
        raise AttributeError(f"module 'toc' has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "toc.model.task")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
