"""Tells a developer what becomes of each task: a line for each step, and the tracebacks of handlers.

For ``toc dev`` alone: unlike the log, it quotes errors, which may quote a task.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import TocError, UnreadableTask
from toc.model.handler import Handler
from toc.model.raised import Postponed, raised
from toc.model.sharding import first_job_id
from toc.model.task import Dead, Retry, Task
from toc.store.store import Store
from toc.worker.run.traced import surrounded

_OURS = f"{Path(__file__).parents[2]}/"
LOOK_SECONDS = 0.25
MOST = 50
"""Rows of each table that one look reads."""
LATE_MS = 5000
"""How long a row may take to be stored after its job_id was made."""
AGAIN_MS = 5000
"""When a task runs again whose handler was left at a breakpoint."""


class Submissions:
    """Tells of each task that any program submits, before its start is told: looks for new rows.

    Of a crowd it tells the last of each look; the others are told when they start.
    """

    def __init__(self, store: Store, catalog: TopicCatalog, clock: Clock) -> None:
        self._store, self._catalog, self._clock = store, catalog, clock
        self._lock = threading.Lock()
        self._after = first_job_id(clock.now_ms())
        """Tasks up to this job_id are told, or were there before."""
        self._told: set[int] = set()
        """Those after it that are told."""

    def watch(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._watch, name="toc-told", daemon=True).start()

    def tell(self, task: Task) -> None:
        """Tell of it, unless it was told."""
        with self._lock:
            if task.job_id > self._after and task.job_id not in self._told:
                self._told.add(task.job_id)
                due, now = task.action_time.astimezone(), datetime.now().astimezone()
                when = f"{due:%H:%M:%S}" if due.date() == now.date() else f"{due:%Y-%m-%d %H:%M:%S}"
                _tell("submitted", task, f"due {when}, job_id {task.job_id}")

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            with suppress(TocError):
                self._look()

    def _look(self) -> None:
        before = first_job_id(self._clock.now_ms() - LATE_MS)
        for row in self._store.selections.submitted(self._after, MOST):
            topic = self._catalog.of_type(row.biz_type)
            if topic is not None:
                with suppress(UnreadableTask):
                    self.tell(row.to_task(topic.name))
        with self._lock:
            self._after = max(self._after, before)
            self._told = {job_id for job_id in self._told if job_id > self._after}


def told(handler: Handler, submissions: Submissions) -> Handler:
    """The handler, wrapped so that each try is told. One that is left at a breakpoint uses up nothing."""
    return surrounded(handler, partial(_trying if handler.batch is None else _trying_many, submissions))


def tell_ready(topics: Iterable[str]) -> None:
    """Tell that handlers of these topics are ready, and what to do next."""
    first, *others = sorted(topics)
    _write(
        f"ready: {', '.join((first, *others))}\n"
        f"  try it, after the export above: toc submit {first} --biz-id 1 --delay 5s\n"
    )


def tell_death(task: Task, reason: str) -> None:
    """Tell that a task is dead: a hook ``on_dead``."""
    _tell("dead", task, f"{reason}; `toc dead redrive {task.job_id}` runs it again")


@contextmanager
def _trying(submissions: Submissions, task: Task) -> Iterator[None]:
    with _trying_many(submissions, [task]):
        yield


@contextmanager
def _trying_many(
    submissions: Submissions, tasks: Sequence[Task]
) -> Iterator[Callable[[Mapping[int, BaseException | None]], None]]:
    for task in tasks:
        submissions.tell(task)
        late = (datetime.now(UTC) - task.action_time).total_seconds()
        when = f"{_duration(late)} late" if task.attempt == 1 else f"try {task.attempt}"
        _tell("started", task, f"{when}, job_id {task.job_id}")
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
            if (error := errors.get(task.job_id)) is None:
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
    return "".join(traceback.format_exception(type(error), error, own or error.__traceback__))


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _tell(step: str, task: Task, how: str) -> None:
    now = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
    _write(f"{now} {step:<10} {task.topic} {task.biz_id}: {how}\n")


def _write(text: str) -> None:
    sys.stderr.write(text)  # one write: other threads and processes write too
    sys.stderr.flush()
