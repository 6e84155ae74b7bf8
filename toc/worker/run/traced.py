"""Handlers that write a span for each try. Wrapped at start, so untraced processes pay nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toc.model.handler import Handler
from toc.model.task import Task
from toc.observe.tracing import Tracing
from toc.worker.run.handler_calls import check_done, per_task


def traced(handler: Handler, tracing: Tracing) -> Handler:
    """The handler, wrapped so that each try of a traced task runs under a span."""
    inner = handler.call
    call: Callable[..., Any]
    if handler.batch is None and handler.is_async:

        async def call(task: Task) -> Any:
            with tracing.trying(task):
                outcome = await inner(task)
                check_done(outcome)
                return outcome

    elif handler.batch is None:

        def call(task: Task) -> Any:
            with tracing.trying(task):
                outcome = inner(task)
                check_done(outcome)
                return outcome

    elif handler.is_async:

        async def call(tasks: list[Task]) -> Any:
            with tracing.trying_many(tasks) as failed:
                outcome = await inner(tasks)
                failed(per_task(outcome, tasks))
                return outcome

    else:

        def call(tasks: list[Task]) -> Any:
            with tracing.trying_many(tasks) as failed:
                outcome = inner(tasks)
                check_done(outcome)
                failed(per_task(outcome, tasks))
                return outcome

    return replace(handler, call=call)
