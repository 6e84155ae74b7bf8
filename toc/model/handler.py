"""What an application registers: one handler per topic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toc.model.errors import InvalidHandler
from toc.model.sharding import is_whole
from toc.model.topic import Delivery, Topic


@dataclass(frozen=True, slots=True)
class Handler:
    """The handler of one topic.

    ``batch`` is None for a handler of single tasks, else the largest list it takes. A handler that
    returns has processed its task; a handler that raises has failed the try. A batch handler may
    return a dict of job_id to exception (that task failed) or None (processed). Tasks not in the
    dict are processed. ``delivery`` is the delivery of the topics that it serves; it is HANDLER for
    handlers of applications. ``waiting_remotely`` returns how many tasks only wait for another server's
    answer, counted over all handlers that share this function. The process takes only a few tasks
    more than that number from Redis.
    """

    topic: str
    call: Callable[..., Any]
    batch: int | None
    is_async: bool
    delivery: Delivery = Delivery.HANDLER
    waiting_remotely: Callable[[], int] | None = None
    made_of: Any = None
    """What the application holds in its stead."""
    limited: bool = True
    """Whether max_runtime ends its tries; a developer at a breakpoint takes longer."""
    overran: Callable[..., None] | None = None
    """Told of a job_id whose try is over while the handler runs on, why, and the lines in which it is."""

    def serves(self, topic: Topic) -> bool:
        """Whether tasks of ``topic`` may start here: it is not paused, and they are delivered this way."""
        return not topic.paused and topic.delivery is self.delivery

    @classmethod
    def of(cls, topic: str, call: object, batch: int | None, arguments: int = 1) -> Handler:
        """Describe ``call``. Raises InvalidHandler if it cannot be called with so many arguments."""
        if not callable(call):
            raise InvalidHandler(f"the handler of {topic!r} is a {type(call).__name__}, not a function")
        if batch is not None and not is_whole(batch, 1, 1000):
            raise InvalidHandler(f"batch must be a whole number from 1 to 1000, not {batch!r}")
        try:
            inspect.signature(call).bind(*[None] * arguments)
        except TypeError as exc:
            takes, names = "a list of tasks" if batch else "a task", list(inspect.signature(call).parameters)
            do = f": annotate its payload, ({names[0]}: TYPE, task: Task)" if len(names) == 2 else ""
            raise InvalidHandler(
                f"the handler of {topic!r} must take {takes} as its only argument, or after its payload, but "
                f"is {getattr(call, '__name__', '')}{inspect.signature(call)}{do}"
            ) from exc
        except ValueError:
            pass  # built-ins may have no signature
        is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
            raise InvalidHandler(f"the handler of {topic!r} is a generator; it must return, not yield")
        return cls(topic, call, batch, is_async)
