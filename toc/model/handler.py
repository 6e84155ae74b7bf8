"""What an application registers: one handler per topic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toc.model.errors import InvalidHandler


@dataclass(frozen=True, slots=True)
class Handler:
    """The handler of one topic.

    ``batch`` is None for a handler of single tasks, else the largest list it takes. A handler that returns
    has processed its task; a handler that raises has failed the try. A batch handler may return a dict of
    job_id to exception (that task failed) or None (processed). Tasks not in the dict are processed.
    """

    topic: str
    call: Callable[..., Any]
    batch: int | None
    is_async: bool

    @classmethod
    def of(cls, topic: str, call: object, batch: int | None) -> Handler:
        """Describe ``call``. Raises InvalidHandler if it cannot be called with one argument."""
        if not callable(call):
            raise InvalidHandler(f"the handler of {topic!r} is a {type(call).__name__}, not a function")
        if batch is not None and (
            isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= 1000
        ):
            raise InvalidHandler(f"batch must be a whole number from 1 to 1000, not {batch!r}")
        try:
            inspect.signature(call).bind(None)
        except TypeError as exc:
            takes = "a list of tasks" if batch else "a task"
            raise InvalidHandler(f"the handler of {topic!r} must take {takes} as its only argument") from exc
        except ValueError:
            pass  # built-ins may have no signature
        is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise InvalidHandler(f"the handler of {topic!r} is a generator; it must return, not yield")
        return cls(topic, call, batch, is_async)
