"""Handlers that write a span for each try. Wrapped at start, so untraced processes pay nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from toc.model.handler import Handler
from toc.observe.tracing import Tracing
from toc.worker.run.handler_calls import check_done, per_task


def traced(handler: Handler, tracing: Tracing) -> Handler:
    """The handler, wrapped so that each try of a traced task runs under a span."""
    return surrounded(handler, tracing.trying if handler.batch is None else tracing.trying_many)


def surrounded(handler: Handler, span: Callable[[Any], AbstractContextManager[Any]]) -> Handler:
    """The handler, wrapped so that each call is within a context, which gets what the handler gets. For a
    batch it gives a function that is told the errors by job_id."""
    inner = handler.call
    call: Callable[..., Any]
    if handler.is_async:

        async def call(given: Any) -> Any:
            with span(given) as failed:
                return _checked(await inner(given), given, failed)

    else:

        def call(given: Any) -> Any:
            with span(given) as failed:
                return _checked(inner(given), given, failed)

    return replace(handler, call=call)


def _checked(outcome: Any, given: Any, failed: Callable[..., None] | None) -> Any:
    """Return what a handler returned. ``failed`` tells which tasks of a batch have failed."""
    check_done(outcome)
    if failed is not None:
        failed(per_task(outcome, given))
    return outcome
