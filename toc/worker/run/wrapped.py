"""Handlers that are wrapped at start, so that others pay nothing: in spans of traces; and to tell a developer
what becomes of each task, a line for each step, and the tracebacks of handlers.

The latter is for ``toc dev`` alone: unlike the log, it quotes errors, which may quote a task.
"""

import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from toc.model.handler import Handler
from toc.model.raised import Postponed, raised
from toc.model.task import Dead, Retry, Task
from toc.observe.tracing import Tracing
from toc.worker.run.handler_calls import errors_of

_OURS = f"{Path(__file__).parents[2]}/"
AGAIN_MS = 5000
"""When a task runs again whose handler was left at a breakpoint."""


def surrounded(
    handler: Handler, within: Callable[[Sequence[Task]], AbstractContextManager[Callable[..., None]]]
) -> Handler:
    """The handler, wrapped so that each call is within a context of its tasks. That gives a function that is
    told the errors by job_id."""
    inner, batched = handler.call, handler.batch is not None
    call: Callable[..., Any]

    def checked(outcome: Any, given: Any, failed: Callable[..., None]) -> Any:
        failed(errors_of(outcome, given if batched else None))
        return outcome

    if handler.is_async:

        async def call(given: Any) -> Any:
            with within(given if batched else [given]) as failed:
                return checked(await inner(given), given, failed)

    else:

        def call(given: Any) -> Any:
            with within(given if batched else [given]) as failed:
                return checked(inner(given), given, failed)

    return replace(handler, call=call)


def traced(handlers: dict[str, Handler], tracing: Tracing | None) -> dict[str, Handler]:
    """The handlers, each try of which is a span if tries are traced."""
    if tracing is None:
        return handlers
    return {
        topic: surrounded(one, partial(tracing.trying, current=one.batch is None))
        for topic, one in handlers.items()
    }


def told(handler: Handler, *, limited: bool) -> Handler:
    """The handler, wrapped so that each try is told, and ``limited`` by max_runtime or not. One that is left
    at a breakpoint uses up nothing."""
    one = surrounded(handler, _trying)
    return replace(one, limited=limited, overran=_overran)


_running: dict[int, Task] = {}
"""By job_id, the tasks whose handler runs and whose try has not failed meanwhile."""


def _overran(job_id: int, why: str, stack: str) -> None:
    if (task := _running.pop(job_id, None)) is not None:
        _tell("failed", task, f"try {task.attempt}: {why}" + f"\n  it runs {stack}" * bool(stack))


def tell_ready(handlers: Mapping[str, Handler]) -> None:
    """Tell that these are ready, and what to do next: submit a task, best one that needs no payload."""
    typed = {topic: one.made_of is not None and one.made_of.typed for topic, one in handlers.items()}
    first = min(typed, key=lambda topic: (typed[topic], topic))
    how = f"toc submit {first} --biz-id 1 --delay 5s" + " --attribute JSON" * typed[first]
    _write(f"ready: {', '.join(sorted(handlers))}\n  try it, after the export above: {how}\n")


def tell_death(task: Task, reason: str) -> None:
    """Tell that a task is dead: a hook ``on_dead``."""
    _tell("dead", task, f"{reason}; `toc dead redrive {task.job_id}` runs it again")


@contextmanager
def _trying(tasks: Sequence[Task]) -> Iterator[Callable[[Mapping[int, BaseException | None]], None]]:
    for task in tasks:
        late = (datetime.now(UTC) - task.action_time).total_seconds()
        when = f"{_duration(late)} late" if task.attempt == 1 else f"try {task.attempt}"
        _running[task.job_id] = task
        _tell("started", task, f"{when}, job_id {task.job_id}", at_once=True)
    began = time.monotonic()
    errors: dict[int, BaseException | None] = {}
    try:
        yield errors.update
    except BdbQuit:
        errors.update(dict.fromkeys((task.job_id for task in tasks), _left()))
        raise _left() from None
    except BaseException as exc:
        errors.update(dict.fromkeys((task.job_id for task in tasks), exc))
        raise
    finally:
        took = _duration(time.monotonic() - began)
        for task in tasks:
            error = errors.get(task.job_id)
            if _running.pop(task.job_id, None) is None:
                _tell("ended", task, f"after {took}, when its try had failed: this counts for nothing")
            elif error is None:
                _tell("processed", task, f"in {took}")
            elif isinstance(error, Postponed):
                _tell("given back", task, f"after {took}: {error}")
            else:
                _tell("failed", task, f"try {task.attempt}, after {took}: {raised(error).text}")
                if not isinstance(error, (Dead, Retry)):
                    _write(_trace(error))


def _left() -> Postponed:
    return Postponed(time.time_ns() // 1_000_000 + AGAIN_MS, "left at a breakpoint; it runs again in 5 s")


def _trace(error: BaseException) -> str:
    """Its traceback, without toc's own frames at the top."""
    own: TracebackType | None = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename.startswith(_OURS):
        own = own.tb_next
    return "".join(traceback.format_exception(type(error), error, own))


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _tell(step: str, task: Task, how: str, *, at_once: bool = False) -> None:
    """Write a line: ``at_once`` also if the handler then ends its process."""
    now = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
    to = sys.__stderr__ if at_once and sys.__stderr__ is not None else sys.stderr
    with suppress(OSError):  # a terminal that is gone
        _write(f"{now} {step:<10} {task.topic} {task.biz_id}: {how}\n", to)


def _write(text: str, to: TextIO | None = None) -> None:
    to = to or sys.stderr
    to.write(text)  # one write: other threads and processes write too
    to.flush()
