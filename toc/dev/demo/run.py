"""Makes up orders, pays some of them, and checks what became of each: an order that is not paid in time must
be closed, once and not early, and one whose cancel was answered CANCELLED never."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from types import ModuleType
from typing import Any

from toc.config import Settings
from toc.dev.local.embedded import EmbeddedStack, only_config, write_config
from toc.model.errors import Unavailable
from toc.model.task import CancelOutcome, Task, TaskStatus
from toc.model.topic import Topic
from toc.operate.admin import migrator

PAID = 0.75
"""The part of the orders that are paid in time."""
READY_SECONDS = 60.0
UNFINISHED_SECONDS = 20.0
"""Seconds after the last deadline after which unfinished tasks count as lost."""

Tell = Callable[[float, str], None]
"""Gets the part that is done, and what was done by then."""


@contextmanager
def embedded() -> Iterator[ModuleType]:
    """Run a private Redis, SQLite and the application, whose module is given.

    All files are in a temporary directory, which is removed at the end. Raises Unavailable if the worker is
    not ready in time.
    """
    with (
        tempfile.TemporaryDirectory(prefix="toc-demo-") as name,
        EmbeddedStack(Path(name), redis=True) as stack,
        only_config(write_config(Path(name) / "toc.toml", stack.settings)),
    ):
        migrator(Settings()).upgrade()
        from toc.dev.demo import app  # now, as its center reads the settings

        with app.center as center:
            center.store.topics.create(Topic(app.CLOSE, 1, 8))
            with center.worker() as worker:
                if not worker.ready.wait(READY_SECONDS):
                    raise Unavailable(
                        f"the worker was not ready within {READY_SECONDS:g} s; is the machine busy?"
                    )
                yield app


def play(app: ModuleType, count: int, seconds: float, tell: Tell) -> dict[str, Any]:
    """Submit orders that are to be paid within ``seconds``, pay some, and return the report.

    It takes twice as long, as orders come one after the other.
    """
    center, chance = app.center, random.Random(1)  # noqa: S311 - made-up orders, nothing to guard
    begin = time.monotonic()
    payments: list[tuple[float, int]] = []
    outcomes: dict[int, CancelOutcome | None] = {}

    def wait_until(at: float) -> None:
        while (now := time.monotonic() - begin) < at:
            cancelled = sum(outcome is not None for outcome in outcomes.values())
            done = f"{len(outcomes)} of {count} submitted, {cancelled} paid, {len(app.starts)} closed"
            tell(min(now / (2 * seconds), 1.0), done)
            time.sleep(min(at - now, 0.25))

    def pay_until(at: float) -> None:
        while payments and payments[0][0] <= at:
            due, job_id = heappop(payments)
            wait_until(due)
            outcomes[job_id] = center.cancel(job_id)

    for number in range(count):
        at = seconds * number / count
        pay_until(at)
        wait_until(at)
        job_id = center.submit(app.CLOSE, biz_id=f"demo-{number:05d}", delay=seconds)
        outcomes[job_id] = None
        if chance.random() < PAID:
            heappush(payments, (at + chance.uniform(0.0, seconds), job_id))
    pay_until(2 * seconds)
    wait_until(2 * seconds)
    end = time.monotonic() + UNFINISHED_SECONDS
    while True:
        tasks = {job_id: center.get(job_id) for job_id in outcomes}
        pending = any(task is not None and task.status is TaskStatus.PENDING for task in tasks.values())
        if not pending or time.monotonic() > end:
            return judge(outcomes, tasks, app.starts)
        time.sleep(0.25)


def judge(
    outcomes: Mapping[int, CancelOutcome | None],
    tasks: Mapping[int, Task | None],
    starts: Mapping[int, Sequence[float]],
) -> dict[str, Any]:
    """Compare the answers to cancels (None: it was not paid) with the times at which handlers started.

    The report is ``right`` only if every task came out as it must.
    """
    wrong: Counter[str] = Counter(early=0, lost=0, duplicates=0, handled_after_cancel=0)
    late: list[float] = []
    for job_id, outcome in outcomes.items():
        began, task = starts.get(job_id, ()), tasks[job_id]
        status = None if task is None else task.status
        if task is not None and began:
            late.append(began[0] - task.action_time.timestamp())
            wrong["early"] += late[-1] < 0
        wrong["duplicates"] += max(len(began) - 1, 0)
        if outcome is CancelOutcome.CANCELLED:
            wrong["handled_after_cancel"] += bool(began) or status is not TaskStatus.CANCELLED
        elif outcome is not CancelOutcome.MAY_HAVE_STARTED:  # it was not paid, or too late
            wrong["lost"] += not began or status is not TaskStatus.PROCESSED
    late.sort()
    return {
        "submitted": len(outcomes),
        "cancelled": sum(outcome is CancelOutcome.CANCELLED for outcome in outcomes.values()),
        "fired": len(late),
        **wrong,
        "lateness_seconds": {
            name: round(late[min(len(late) - 1, int(part * len(late)))], 6) if late else 0.0
            for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "right": not any(wrong.values()),
    }
