"""What ``toc demo`` runs: made-up orders on a real stack, each with the outcome that it must have.

An order that is not paid in time must be closed, once and not early; one whose cancel was answered CANCELLED
never.
"""

import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toc.config import Settings
from toc.dev.local import embedded_stack, only_config, write_config
from toc.model.errors import Unavailable
from toc.model.task import CancelOutcome, NewTask, Task, TaskStatus
from toc.model.topic import Topic
from toc.operate.admin import migrator
from toc.sdk.client import TimeoutCenter

CLOSE = "demo.order.close"
PAID = 0.75
"""The part of the orders that are paid in time."""
READY_SECONDS = 60.0
UNFINISHED_SECONDS = 20.0
"""Seconds after the last deadline after which unfinished tasks count as lost."""

Tell = Callable[[float, str], None]
"""Gets the part that is done, and what was done by then."""

center = TimeoutCenter()

starts: defaultdict[int, list[float]] = defaultdict(list)
"""By job_id, the times at which handlers of this process started."""


@center.handler(CLOSE)
def close_unpaid(task: Task) -> None:
    """Close an order that was not paid in time."""
    starts[task.job_id].append(time.time())


@contextmanager
def embedded() -> Iterator[None]:
    """Run a private Redis, SQLite and the worker within the block.

    All files are in a temporary directory, which is removed at the end. Raises Unavailable if the worker is
    not ready in time.
    """
    with (
        tempfile.TemporaryDirectory(prefix="toc-demo-") as name,
        embedded_stack(Path(name), redis=True) as settings,
        only_config(write_config(Path(name) / "toc.toml", settings)),
    ):
        migrator(Settings()).upgrade()
        with center:
            center.store.topics.create(Topic(CLOSE, 1, 8))
            with center.worker() as worker:
                if not worker.ready.wait(READY_SECONDS):
                    raise Unavailable(
                        f"the worker was not ready within {READY_SECONDS:g} s; is the machine busy?"
                    )
                yield


def play(count: int, seconds: float, tell: Tell) -> dict[str, Any]:
    """Submit orders that are to be paid within ``seconds`` at most, pay some, and return the report."""
    chance = random.Random(1)  # noqa: S311 - made-up orders, nothing to guard
    delays = [seconds * chance.uniform(0.5, 1.0) for _ in range(count)]
    begin = time.monotonic()
    job_ids = center.submit_many(NewTask(CLOSE, f"demo-{n:05d}", delay) for n, delay in enumerate(delays))
    payments = sorted(zip([chance.uniform(0.0, one) for one in delays], job_ids, strict=True))
    paid: dict[int, CancelOutcome] = {}

    def wait_until(at: float) -> None:
        while (now := time.monotonic() - begin) < at:
            tell(now / seconds, f"{count} submitted, {len(paid)} paid, {len(starts)} closed")
            time.sleep(min(at - now, 0.25))

    for at, job_id in payments:
        if chance.random() < PAID:
            wait_until(at)
            paid[job_id] = center.cancel(job_id)
    wait_until(seconds)
    end = time.monotonic() + UNFINISHED_SECONDS
    while True:
        tasks = {job_id: center.get(job_id) for job_id in job_ids}
        pending = any(task is not None and task.status is TaskStatus.PENDING for task in tasks.values())
        if not pending or time.monotonic() > end:
            return judge(tasks, paid)
        time.sleep(0.25)


def judge(tasks: Mapping[int, Task | None], paid: Mapping[int, CancelOutcome]) -> dict[str, Any]:
    """Compare the answers to the cancels of what was paid with the times at which handlers started.

    The report is ``right`` only if every task came out as it must.
    """
    wrong: Counter[str] = Counter(early=0, lost=0, duplicates=0, handled_after_cancel=0)
    late: list[float] = []
    for job_id, task in tasks.items():
        began, outcome = starts.get(job_id, ()), paid.get(job_id)
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
        "submitted": len(tasks),
        "cancelled": sum(outcome is CancelOutcome.CANCELLED for outcome in paid.values()),
        "fired": len(late),
        **wrong,
        "lateness_seconds": {
            name: round(late[min(len(late) - 1, int(part * len(late)))], 6) if late else 0.0
            for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "right": not any(wrong.values()),
    }
