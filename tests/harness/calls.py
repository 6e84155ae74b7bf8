"""An application whose history tells which calls of its handlers ran at once, batches too.

A task's attribute says how long its call takes (``sleep``, the longest of a batch).
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from toc import Task, TimeoutCenter

TOPICS = ("call.thread", "call.batch", "call.coroutine", "call.batches")

center = TimeoutCenter()


@cache
def _file() -> int:
    path = f"{os.environ['TOC_TEST_HISTORY']}/calls-{os.getpid()}"
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


@contextmanager
def _call(tasks: Sequence[Task]) -> Iterator[float]:
    os.write(_file(), f"{time.monotonic_ns()} 1 {tasks[0].topic} {len(tasks)}\n".encode())
    yield max(task.attribute.get("sleep", 0) for task in tasks)
    os.write(_file(), f"{time.monotonic_ns()} -1 {tasks[0].topic} {len(tasks)}\n".encode())


@center.handler("call.thread")
def in_a_thread(task: Task) -> None:
    with _call([task]) as seconds:
        time.sleep(seconds)


@center.handler("call.batch", batch=5)
def a_batch_in_a_thread(tasks: list[Task]) -> None:
    with _call(tasks) as seconds:
        time.sleep(seconds)


@center.handler("call.coroutine")
async def a_coroutine(task: Task) -> None:
    with _call([task]) as seconds:
        await asyncio.sleep(seconds)


@center.handler("call.batches", batch=5)
async def a_batch_in_a_coroutine(tasks: list[Task]) -> None:
    with _call(tasks) as seconds:
        await asyncio.sleep(seconds)


def most_at_once(directory: Path, topic: str) -> tuple[int, int]:
    """The most calls of a topic that ran at once in one process so far, and how many have begun in all."""
    most = begun = 0
    for path in directory.glob("calls-*"):
        lines = [line.split() for line in path.read_text().split("\n")[:-1]]
        changes = [int(line[1]) for line in sorted(lines, key=lambda line: int(line[0])) if line[2] == topic]
        running = 0
        for change in changes:
            running += change
            most = max(most, running)
            begun += change == 1
    return most, begun
