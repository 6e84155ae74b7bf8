"""The application that test daemons run. Each start and end of a handler is one line in a file per process.

A task's attribute says what its handler does: ``fail`` tries fail, each ``sleep`` seconds long; ``die`` tries
kill the process; ``dead`` raises Dead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import timedelta

from toc import Dead, Retry, Task, TimeoutCenter

center = TimeoutCenter()
_history = os.open(
    f"{os.environ['TOC_TEST_HISTORY']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
)


def record(event: str, task: Task) -> None:
    """One write per line: it is in the page cache, and so survives the death of this process."""
    os.write(_history, f"{event} {task.job_id} {task.attempt} {time.time_ns()} {os.getpid()}\n".encode())


def after_start(task: Task) -> None:
    if task.attempt <= task.attribute.get("die", 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if task.attempt <= task.attribute.get("fail", 0):
        if "retry_after" in task.attribute:
            raise Retry(after=timedelta(seconds=task.attribute["retry_after"]))
        raise RuntimeError(f"attempt {task.attempt} fails as asked")
    if task.attribute.get("dead"):
        raise Dead("as asked")


@center.handler("test.sync")
def on_thread(task: Task) -> None:
    record("start", task)
    time.sleep(task.attribute.get("sleep", 0))
    after_start(task)
    record("end", task)


@center.handler("test.async")
async def on_event_loop(task: Task) -> None:
    record("start", task)
    await asyncio.sleep(task.attribute.get("sleep", 0))
    after_start(task)
    record("end", task)


@center.handler("test.batch", batch=50)
def in_batches(tasks: list[Task]) -> dict[int, BaseException | None]:
    outcome: dict[int, BaseException | None] = {}
    for task in tasks:
        record("start", task)
        try:
            after_start(task)
        except Exception as exc:
            outcome[task.job_id] = exc
        else:
            record("end", task)
    return outcome


@center.handler("test.doomed")
def always_fails(task: Task) -> None:
    record("start", task)
    raise RuntimeError(f"attempt {task.attempt} fails as always")
