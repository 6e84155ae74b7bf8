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
from toc.model.task import CancelOutcome, Task, TaskStatus
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
    """Submit orders that are to be paid within ``seconds``, pay some, and return the report.

    It takes twice as long, as orders come one after the other.
    """
    chance = random.Random(1)  # noqa: S311 - made-up orders, nothing to guard
    steps: list[tuple[float, int, bool]] = []
    """When which order comes or, the last, is paid."""
    for number in range(count):
        at = seconds * number / count
        steps.append((at, number, False))
        if chance.random() < PAID:
            steps.append((at + chance.uniform(0.0, seconds), number, True))
    job_ids: dict[int, int] = {}
    paid: dict[int, CancelOutcome] = {}
    begin = time.monotonic()

    def wait_until(at: float) -> None:
        while (now := time.monotonic() - begin) < at:
            done = f"{len(job_ids)} of {count} submitted, {len(paid)} paid, {len(starts)} closed"
            tell(min(now / (2 * seconds), 1.0), done)
            time.sleep(min(at - now, 0.25))

    for at, number, pays in sorted(steps):
        wait_until(at)
        if pays:
            paid[job_ids[number]] = center.cancel(job_ids[number])
        else:
            job_ids[number] = center.submit(CLOSE, biz_id=f"demo-{number:05d}", delay=seconds)
    wait_until(2 * seconds)
    end = time.monotonic() + UNFINISHED_SECONDS
    while True:
        tasks = {job_id: center.get(job_id) for job_id in job_ids.values()}
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
