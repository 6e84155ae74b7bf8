"""Every try has the body of its task as its row was checked, or does not begin."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from harness.hands import Pair, in_five_minutes, submit_due
from harness.patience import PATIENCE, until
from harness.system import System
from harness.tables import raw

from toc import NewTask, TaskStatus
from toc.model.errors import BodyGone
from toc.worker.entry import LOST


def test_each_try_has_its_body_whatever_dies_moves_or_fails_and_the_purge_leaves_none(system: System) -> None:
    system.create_topics(slots=2, backoff_base=0.1)
    system.start(processes=2)
    rng, center = random.Random(7), system.center
    tasks = []
    for n in range(120):
        topic = ("test.sync", "test.async", "test.batch")[n % 3]
        body = rng.randbytes(rng.choice((0, 1, 300, 70_000)))
        attribute = {"sha": hashlib.sha256(b"x/y:" + body).hexdigest(), "fail": n % 2}
        tasks.append(NewTask(topic, n, 1.5, None, attribute, body=body, content_type="x/y"))
    # One brings down every process that runs it but the one in which it runs alone.
    body = rng.randbytes(900_000)
    attribute = {"sha": hashlib.sha256(b"x/y:" + body).hexdigest(), "die": 3}
    tasks.append(NewTask("test.sync", 777, 1.5, None, attribute, body=body, content_type="x/y"))
    without = [NewTask("test.sync", n, 1.5) for n in range(10)]
    job_ids = center.submit_many([*tasks, *without])
    for job_id in job_ids[:40:2]:
        center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(seconds=1))
    system.wait(lambda: not system.pending(job_ids), "all have ended", 60)
    rows = center.store.read(job_ids)
    assert {
        (row.status, row.last_error) for row in rows.values() if row.status != TaskStatus.PROCESSED
    } == set()
    assert rows[job_ids[120]].crashes >= 3, "it ran alone"

    seen = center.get(job_ids[5])
    assert seen is not None
    assert seen.body_length == len(tasks[5].body or b"")
    assert str(tasks[5].body) not in repr(seen)
    assert (seen.body, seen.content_type) == (tasks[5].body, "x/y")
    assert pickle.loads(pickle.dumps(seen)) == seen == center.find(biz_id=5)[0]
    plain = center.get(job_ids[-1])
    assert plain is not None
    assert (plain.body, plain.content_type, plain.body_length) == (None, None, None)
    late = center.get(job_ids[6])
    sizes = {row.job_id: -1 if row.body_length is None else row.body_length for row in rows.values()}
    assert center.store.delete_ended(sizes) == len(job_ids)
    assert late is not None
    with pytest.raises(BodyGone):
        _ = late.body
    assert bodies(system) == 0


def bodies(system: System) -> int:
    """How many there are."""
    names = (f"{system.settings.database_prefix}{n % 2}.timeout_body_{n:04d}" for n in range(8))
    with raw(system.settings) as connection:
        return sum(connection.exec_driver_sql(f"SELECT COUNT(*) FROM {name}").scalar_one() for name in names)


def test_a_try_whose_task_was_given_a_new_deadline_meanwhile_does_not_begin_and_is_not_charged(
    system: System, hands: Pair
) -> None:
    worker, other = hands
    job_id = submit_due(system, b"body")
    worker.take()
    system.center.reschedule(job_id, action_time=in_five_minutes())
    worker.start()
    worker.await_gone(job_id)
    row = system.row(job_id)
    assert (worker.runs, row.status, row.attempts, row.crashes) == ([], TaskStatus.PENDING, 0, 0)

    system.center.store.reschedule(job_id, system.center.clock.now_ms())
    system.center.index([job_id])
    other.begin()
    assert other.runs[0].body == b"body"
    other.end_well(job_id)


def test_a_try_whose_body_cannot_be_read_now_is_put_away_uncharged(system: System, hands: Pair) -> None:
    worker, _ = hands
    job_id = submit_due(system, b"body")
    worker.take()
    with locked_body(system, job_id):
        worker.start()
        worker.await_gone(job_id)
        assert worker.runs == []

    def runs() -> bool:
        worker.take()
        return bool(worker.runs)

    assert until(runs, PATIENCE)
    worker.end_and_finish()
    row = system.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PROCESSED, 0, 0)


@contextmanager
def locked_body(system: System, job_id: int) -> Iterator[None]:
    """The row of a task can be read, its body cannot."""
    table = (job_id >> 12 & 1023) % 8
    name = f"{system.settings.database_prefix}{table % 2}.timeout_body_{table:04d}"
    with raw(system.settings) as connection:
        connection.exec_driver_sql(f"LOCK TABLES {name} WRITE")
        yield
        connection.exec_driver_sql("UNLOCK TABLES")


def test_a_try_that_was_lost_while_its_body_was_read_does_not_begin(system: System, hands: Pair) -> None:
    worker, _ = hands
    job_id = submit_due(system, b"body")
    worker.take()
    entry = worker.held(job_id)
    with locked_body(system, job_id):
        worker.start()
        entry.kept = LOST  # a heartbeat finds that another worker has the entry
    worker.await_gone(job_id)
    assert (worker.runs, system.row(job_id).attempts) == ([], 0)
