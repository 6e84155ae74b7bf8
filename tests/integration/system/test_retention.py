"""Purging by real daemons: it goes on beside traffic, and no one waits for it."""

from __future__ import annotations

import itertools
import time
from typing import Any

from harness.patience import PATIENCE
from harness.rows import insert_many
from harness.system import System

from toc import Task, TaskStatus
from toc.model.sharding import BizId, JobIds
from toc.model.task import TaskRow

DAY = 86_400_000
_OLD = itertools.count()


def _old(ids: JobIds, days: float, status: TaskStatus, biz_type: int = 1) -> TaskRow:
    """A row that ended so many days ago."""
    biz = BizId.of(next(_OLD))
    at = int(time.time() * 1000 - days * DAY)
    fields: dict[str, Any] = {
        **dict.fromkeys(TaskRow._fields, 0),
        **dict.fromkeys(("biz_key", "dedup_key", "last_error", "body_length", "body_sha256")),
        **dict.fromkeys(("action_time", "next_time", "gmt_create", "gmt_modified"), at),
    }
    return TaskRow(**fields)._replace(
        job_id=ids.make(biz.crc),
        biz_id=biz.number,
        biz_type=biz_type,
        status=int(status),
        attribute="{}",
        slot_crc=biz.crc,
        slot_amount=8,
    )


def test_daemons_purge_what_is_old_enough_while_tasks_run(system: System) -> None:
    system.create_topics(retention=3 * 86_400)
    ids = JobIds(system.center.clock)
    finished = (TaskStatus.PROCESSED, TaskStatus.CANCELLED)
    old = [_old(ids, 3.01, finished[n % 10 == 0]) for n in range(6000)]
    kept = [
        *[_old(ids, 2.99, status) for status in finished],
        *[_old(ids, 100, TaskStatus.DEAD) for _ in range(5)],
        *[_old(ids, 100, TaskStatus.PROCESSED, biz_type=99) for _ in range(5)],
    ]
    store = system.center.store
    for first in range(0, len(old), 1000):
        insert_many(store, old[first : first + 1000])
    insert_many(store, kept)
    system.start(processes=2)
    ran: list[int] = []
    left = {row.job_id for row in old}
    until = time.monotonic() + PATIENCE
    while left and time.monotonic() < until:
        job_id = system.center.submit("test.sync", biz_id=len(ran), delay=0.1)
        system.wait(lambda: _status(system.center.get(job_id)) == 2, "it has run", 5)  # noqa: B023
        ran.append(job_id)
        if len(ran) % 10 == 0:
            left &= set(store.read(left))
    assert not left, f"{len(left)} are left after two minutes\n{system.logs()}"
    assert set(store.read(row.job_id for row in kept)) == {row.job_id for row in kept}


def _status(task: Task | None) -> int:
    assert task is not None
    return int(task.status)
