"""Handlers of the contract tests. The attribute of a task says what its handler does.

``gate``: wait until a file of that name is there. ``raise``: one of the failures below, on every try, or on
the first ``times`` tries. Each start is a line in a file per process.
"""

import json
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from toc import Dead, Retry, Task, TimeoutCenter

center = TimeoutCenter()
around: ContextVar[list[int | str]] = ContextVar("around")
_directory = Path(os.environ["TOC_TEST_HISTORY"])
_history = os.open(_directory / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def record(task: Task, **more: object) -> None:
    line = {
        "job_id": task.job_id, "attempt": task.attempt, "at": time.time_ns(), "pid": os.getpid(),
        "action_time": task.action_time.isoformat(), "status": int(task.status), "biz_id": task.biz_id,
        "topic": task.topic, "version": task.version, "attribute": task.attribute,
    } | more  # fmt: skip
    os.write(_history, (json.dumps(line) + "\n").encode())


def behave(task: Task) -> None:
    wanted = task.attribute
    if "gate" in wanted:
        gate = _directory.parent / wanted["gate"]
        until = time.monotonic() + 60
        while not gate.exists() and time.monotonic() < until:
            time.sleep(0.005)
    if task.attempt > wanted.get("times", 99):
        return
    match wanted.get("raise"):
        case "error":
            raise ValueError(f"no {task.attempt}")
        case "retry":
            raise Retry(after=timedelta(seconds=wanted["after"]))
        case "dead":
            raise Dead("cannot ever work")
        case "dead without a reason":
            raise Dead
        case "exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt


def one(task: Task) -> None:
    record(task)
    behave(task)


async def one_async(task: Task) -> None:
    record(task)
    behave(task)


for name in ("c.plain", "c.now", "c.thrice", "c.once", "c.silent"):
    center.handler(name)(one)
center.handler("c.async")(one_async)


@dataclass
class Order:
    number: int
    note: str = ""


@center.middleware
def noted(tasks: list[Task]) -> Iterator[None]:
    token = around.set([task.biz_id for task in tasks])
    yield
    around.reset(token)


@center.on_dead
def died(task: Task, reason: str) -> None:
    if task.topic == "c.typed":  # of the others each line is a start
        record(task, reason=reason)


@center.handler("c.typed")
async def typed(order: Order, task: Task) -> Dead | None:
    record(task, number=order.number, note=len(order.note), around=around.get())
    return Dead("returned") if order.note == "dead" else None


@center.handler("c.batch", batch=20)
def batch(tasks: list[Task]) -> dict[int, BaseException | None]:
    report: dict[int, BaseException | None] = {}
    for task in tasks:
        record(task)
        try:
            behave(task)
        except Exception as exc:
            report[task.job_id] = exc
    return report


@center.handler("c.batch-whole", batch=20)
def batch_whole(tasks: list[Task]) -> None:
    for task in tasks:
        record(task)
    for task in tasks:
        behave(task)
