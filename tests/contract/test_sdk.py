"""The SDK from many threads, after a fork, in the caller's transaction, and without Redis."""

import multiprocessing
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from contract.system import Contract
from harness.patience import in_a_moment
from harness.rows import known
from harness.tables import engine_of

import toc
from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, NewTask, TimeoutCenter
from toc.model import errors

CONTRACT = """CancelOutcome Dead DedupConflict NewTask Retry Settings SubmitUnknown Task TaskStatus
TimeoutCenter WrongShardConnection"""


def test_the_names_of_the_contract_are_importable() -> None:
    assert {*CONTRACT.split()} <= {*toc.__all__}


def test_fifty_threads_share_one_center(idle: Contract) -> None:
    center = idle.center
    center.submit("c.plain", biz_id=1, delay=3600)  # the topics are known
    found: list[list[int]] = [[] for _ in range(50)]
    failed: list[BaseException] = []
    start = threading.Barrier(50)

    def work(n: int) -> None:
        try:
            start.wait(60)
            for k in range(20):
                job_id = center.submit("c.plain", biz_id=n * 100 + k, delay=3600, attribute={"n": n})
                found[n].append(job_id)
                assert known(center.get(job_id)).attribute == {"n": n}
                if k % 2:
                    assert center.cancel(job_id) is CancelOutcome.CANCELLED
            found[n] += center.submit_many([NewTask("c.plain", n, delay=3600) for _ in range(20)])
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed[:3]
    ids = [job_id for part in found for job_id in part]
    assert len(ids) == len(set(ids)) == 50 * 40


def _in_child(center: TimeoutCenter, n: int, pipe: Any) -> None:
    try:
        job_ids = [center.submit("c.plain", biz_id=n * 1000 + k, delay=3600) for k in range(50)]
        outcome = center.cancel(job_ids[0])
        pipe.send((job_ids, outcome.name, [center.get(job_id) is not None for job_id in job_ids]))
    except BaseException as exc:
        pipe.send(exc)
        raise
    finally:
        pipe.close()


def test_children_of_a_process_whose_threads_submit_go_on_and_share_no_id_and_no_connection(
    either: Contract,
) -> None:
    center = either.center
    center.submit("c.plain", biz_id=1, delay=3600)  # everything is connected before the fork
    fork, stop = multiprocessing.get_context("fork"), threading.Event()
    ids: list[int] = []

    def busy() -> None:
        while not stop.is_set():
            ids.append(center.submit("c.plain", biz_id=3, delay=3600))

    threads = [threading.Thread(target=busy) for _ in range(8)]
    for thread in threads:
        thread.start()
    running = []
    try:
        for n in range(1, 9):
            mine, theirs = fork.Pipe()
            child = fork.Process(target=_in_child, args=(center, n, theirs))
            child.start()
            theirs.close()
            running.append((child, mine))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for child, mine in running:
        assert mine.poll(120), "a child waits for a lock"
        answer = mine.recv()
        assert not isinstance(answer, BaseException), answer
        job_ids, outcome, seen = answer
        assert outcome == "CANCELLED"
        assert all(seen)
        ids += job_ids
        child.join(60)
        assert child.exitcode == 0
        mine.close()
    assert len(set(ids)) == len(ids) > 400
    for job_id in ids[::25]:
        assert either.row(job_id)["job_id"] == job_id


# --- connection=


def test_a_connection_to_another_server_is_refused(either: Contract, tmp_path: Path) -> None:
    before = either.rows()
    with (
        engine_of(f"sqlite:///{tmp_path}/other.db") as engine,
        engine.connect() as connection,
        pytest.raises(errors.WrongShardConnection),
    ):
        either.center.submit("c.plain", biz_id=1, delay=9, connection=connection)
    for bad in ("connection", 5, sqlite3.connect(":memory:")):
        with pytest.raises(errors.TocError):
            either.center.submit("c.plain", biz_id=1, delay=9, connection=bad)  # type: ignore[arg-type]
    assert either.rows() == before


# --- without Redis


@pytest.fixture
def fragile(tmp_path: Path, mariadb: MariaDB, database_prefix: str) -> Iterator[tuple[Contract, RedisServer]]:
    """A system whose Redis is there to be killed."""
    with RedisServer(tmp_path / "redis") as own:
        one = Contract(tmp_path, own, mariadb, database_prefix)
        try:
            one.create_topics(["c.plain"])
            yield one, own
        finally:
            one.stop()


def test_a_submit_that_is_repeated_after_its_time_is_the_task_that_it_was(idle: Contract) -> None:
    center = idle.center
    job_id = in_a_moment(lambda at: center.submit("c.plain", biz_id=71, action_time=at, dedup_key="late"))
    task = known(center.get(job_id))
    idle.wait(lambda: idle.now() > task.action_time, "its time has passed")
    again = NewTask("c.plain", 71, action_time=task.action_time, dedup_key="late")
    assert center.put(again).job_id == job_id
    new = NewTask("c.plain", 72, delay=3600)
    first, other, same = center.submit_many([again, new, again])
    assert (first, same) == (job_id, job_id)
    assert idle.status(other) == 0
    with pytest.raises(errors.TaskExists):
        center.put(again._replace(on_conflict="error"))
    with pytest.raises(errors.DedupConflict):
        center.put(again._replace(attribute={"another": 1}))

    with pytest.raises(errors.NotInFuture):
        center.put(again._replace(on_conflict="replace", body=b"another"))
    with pytest.raises(errors.NotInFuture):
        center.put(again._replace(dedup_key="nobody's"))
    with pytest.raises(errors.NotInFuture):
        center.submit_many([again, new._replace(biz_id=73), again._replace(dedup_key="nobody's")])
    assert [one.job_id for one in center.find(biz_id=71)] == [job_id]
    assert center.find(biz_id=73) == [], "all are checked before any is written"


def test_a_submit_that_is_repeated_too_near_its_end_is_the_task_that_it_was(idle: Contract) -> None:
    center = idle.center
    task = NewTask(
        "c.plain", 74, delay=60, dedup_key="ends", expires_at=datetime.now(UTC) + timedelta(hours=1)
    )
    job_id = center.put(task).job_id
    assert center.put(task._replace(delay=7200)).job_id == job_id
    with pytest.raises(errors.InvalidExpiry):
        center.put(task._replace(delay=7200, dedup_key="nobody's"))


def test_without_redis_submit_and_cancel_answer_by_the_row(fragile: tuple[Contract, RedisServer]) -> None:
    contract, server = fragile
    center = contract.center
    known = center.submit("c.plain", biz_id=1, delay=3600)
    cancelled = center.submit("c.plain", biz_id=1, delay=1.0)
    assert center.cancel(cancelled) is CancelOutcome.CANCELLED
    server.kill()
    acknowledged = center.submit("c.plain", biz_id=2, delay=3600)
    assert len(center.submit_many([NewTask("c.plain", n, delay=3600) for n in range(50)])) == 50
    assert contract.status(acknowledged) == 0
    assert center.cancel(known) is CancelOutcome.CANCELLED
    assert contract.status(known) == 3
    due_at_once = center.submit("c.plain", biz_id=3, delay=0.02)
    contract.wait(lambda: datetime.now(UTC) >= _action_time(center, due_at_once), "it is due")
    assert center.cancel(due_at_once) is CancelOutcome.MAY_HAVE_STARTED
    assert center.cancel(due_at_once) is CancelOutcome.MAY_HAVE_STARTED
    later = center.submit("c.plain", biz_id=4, delay=3600)
    moved = center.reschedule(later, action_time=datetime.now(UTC) + timedelta(hours=2))
    assert moved.name == "RESCHEDULED"
    contract.wait(lambda: datetime.now(UTC) >= _action_time(center, cancelled), "it would be due")
    assert center.cancel(cancelled) is CancelOutcome.CANCELLED, "it was never tried, and was told so"
    assert contract.row(cancelled)["attempts"] == 0
    server.start()


def _action_time(center: TimeoutCenter, job_id: int) -> datetime:
    return known(center.get(job_id)).action_time


def test_an_overdue_task_that_nobody_took_can_still_be_cancelled_for_sure(contract: Contract) -> None:
    """One that stands in the PrepareQueue cannot; and what a cancel has said once it says again."""
    submit, cancel = contract.center.submit, contract.center.cancel
    again = submit("c.plain", biz_id=5, delay=0.3)
    assert cancel(again) is CancelOutcome.CANCELLED
    overdue = submit("c.plain", biz_id=1, delay=0.02)
    ahead = submit("c.plain", biz_id=2, delay=3600)
    taken = submit("c.plain", biz_id=3, delay=0.02)
    due = max(_action_time(contract.center, job_id) for job_id in (again, taken))
    contract.wait(lambda: datetime.now(UTC) > due + timedelta(milliseconds=5), "they are due")
    for job_id, biz in ((again, b"5"), (ahead, b"2"), (taken, b"3")):
        slot = f"c.plain_{zlib.crc32(biz) % 4}"
        contract.redis.zrem(slot, str(job_id))
        contract.redis.zadd(f"prepare_{{{slot}}}", {str(job_id): int(time.time()) * 1000 + 16.5})
    for _ in range(2):
        assert cancel(again) is cancel(overdue) is cancel(ahead) is CancelOutcome.CANCELLED
        assert cancel(taken) is CancelOutcome.MAY_HAVE_STARTED


def test_without_a_redis_url_nothing_is_changed(contract: Contract) -> None:
    job_id = contract.center.submit("c.plain", biz_id=7, delay=3600)
    before = contract.row(job_id)
    with TimeoutCenter(contract.settings.model_copy(update={"redis_url": None})) as center:
        for change in (
            lambda: center.submit("c.plain", biz_id=7, delay=3600),
            lambda: center.cancel(job_id),
            lambda: center.cancel_by_biz("c.plain", biz_id=7),
            lambda: center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(hours=2)),
        ):
            with pytest.raises(errors.ConfigError):
                change()
    assert contract.row(job_id) == before
    assert contract.center.cancel(job_id) is CancelOutcome.CANCELLED
