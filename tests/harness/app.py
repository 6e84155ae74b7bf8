"""The application that test daemons run. Each start and end of a handler is one line of the history.

A task's attribute says what its handler does: ``fail`` tries fail, each ``sleep`` seconds long; ``die`` tries
kill the process, and so do those whose numbers are in ``die_at``; ``dead`` tries raise Dead. ``until``
names a file for which a try waits; on a thread, ``hold`` is how many seconds the first try keeps the
interpreter from all other threads. ``sha`` is the hash of content type and body that every try must see; else
the task is dead.
"""

import asyncio
import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from harness.history import History
from toc import Dead, Retry, Task, TimeoutCenter

center = TimeoutCenter()
history = History(Path(os.environ["TOC_TEST_HISTORY"]))


@contextmanager
def recorded(task: Task, broken_off: Callable[[BaseException], bool] = lambda _: False) -> Iterator[None]:
    """The block is a try of this task. ``broken_off`` tells errors of which the task is innocent."""
    history.started(task)
    try:
        yield
    except BaseException as exc:
        history.ended(task, "die" if broken_off(exc) else "dead" if isinstance(exc, Dead) else "raise")
        raise
    history.ended(task, "ok")


def after_sleep(task: Task) -> None:
    """What the task's attribute asks for, once its handler has slept."""
    content = f"{task.content_type}:".encode() + (task.body or b"")
    if "sha" in task.attribute and hashlib.sha256(content).hexdigest() != task.attribute["sha"]:
        raise Dead("that is not its body")
    if task.attempt <= task.attribute.get("die", 0) or task.attempt in task.attribute.get("die_at", ()):
        history.ended(task, "die")
        os.kill(os.getpid(), signal.SIGKILL)
    if task.attempt <= task.attribute.get("fail", 0):
        if "retry_after" in task.attribute:
            raise Retry(after=timedelta(seconds=task.attribute["retry_after"]))
        raise RuntimeError(f"attempt {task.attempt} fails as asked")
    if task.attempt <= task.attribute.get("dead", 0):
        raise Dead("as asked")


@center.handler("test.sync")
def on_thread(task: Task) -> None:
    with recorded(task):
        time.sleep(task.attribute.get("sleep", 0))
        if task.attempt == 1 and "hold" in task.attribute:
            ctypes.PyDLL(None).sleep(task.attribute["hold"])  # which does not let go of the interpreter
        while "until" in task.attribute and not Path(task.attribute["until"]).exists():
            time.sleep(0.02)
        after_sleep(task)


async def slept(task: Task) -> None:
    """Sleep, and wait, as the task's attribute says."""
    await asyncio.sleep(task.attribute.get("sleep", 0))
    while "until" in task.attribute and not Path(task.attribute["until"]).exists():
        await asyncio.sleep(0.1)


@center.handler("test.async")
async def on_event_loop(task: Task) -> None:
    with recorded(task):
        await slept(task)
        after_sleep(task)


@center.handler("test.batch", batch=50)
def in_batches(tasks: list[Task]) -> dict[int, BaseException | None]:
    outcome: dict[int, BaseException | None] = {}
    for task in tasks:
        try:
            with recorded(task):
                after_sleep(task)
        except Exception as exc:
            outcome[task.job_id] = exc
    return outcome


@center.handler("test.doomed")
def always_fails(task: Task) -> None:
    with recorded(task):
        raise RuntimeError(f"attempt {task.attempt} fails as always")
