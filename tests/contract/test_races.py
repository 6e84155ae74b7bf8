"""What must hold while calls race with workers: nothing early, lost, doubled, or run after its cancel."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from contract.system import Contract
from sqlalchemy import create_engine

from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, NewTask
from toc.model import errors

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def ms(instant: datetime) -> int:
    return (instant.replace(tzinfo=UTC) - EPOCH) // timedelta(milliseconds=1)


@pytest.fixture(scope="module")
def pair(contract: Contract) -> Contract:
    """One host of two processes."""
    contract.start(processes=2)
    return contract


def _starts(contract: Contract) -> dict[int, list[dict[str, int]]]:
    found: dict[int, list[dict[str, int]]] = {}
    for line in contract.history():
        found.setdefault(line["job_id"], []).append(line)
    return found


def test_a_cancel_that_races_with_the_due_time_tells_the_truth(pair: Contract) -> None:
    for first in range(0, 3000, 600):
        if len(_race_of_cancels(pair, first)) >= 2:
            return
    raise AssertionError("no race was one")


def _race_of_cancels(pair: Contract, first: int) -> Counter[CancelOutcome]:
    """Cancels 600 tasks as they come due; how many cancels came out in which way."""
    due = datetime.now(UTC) + timedelta(seconds=3)
    tasks = [
        NewTask("c.plain", first + n, action_time=due + timedelta(milliseconds=2 * n)) for n in range(600)
    ]
    job_ids = pair.center.submit_many(tasks)
    outcomes: dict[int, CancelOutcome] = {}

    def cancel(part: int) -> None:
        for n in range(part, 600, 8):
            when = tasks[n].action_time
            assert when is not None
            wait = (when - datetime.now(UTC)).total_seconds() + random.uniform(-0.01, 0.01)
            if wait > 0:
                time.sleep(wait)
            outcomes[job_ids[n]] = pair.center.cancel(job_ids[n])

    threads = [threading.Thread(target=cancel, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 600
    pair.wait(lambda: not any(pair.keys().values()), "the index is empty")
    starts = _starts(pair)
    for job_id, outcome in outcomes.items():
        runs = len(starts.get(job_id, []))
        status = pair.status(job_id)
        assert runs <= 1
        match outcome:
            case CancelOutcome.CANCELLED:
                assert (runs, status) == (0, 3)
            case CancelOutcome.MAY_HAVE_STARTED:
                assert status == 3
            case CancelOutcome.TOO_LATE:
                assert (runs, status) == (1, 2)
        assert pair.center.cancel(job_id) is outcome, "asking again gives the same answer"
    return Counter(outcomes.values())


def test_a_reschedule_that_races_with_the_due_time_loses_nothing_and_is_never_early(pair: Contract) -> None:
    due = datetime.now(UTC) + timedelta(seconds=3)
    tasks = [
        NewTask("c.plain", 9000 + n, action_time=due + timedelta(milliseconds=3 * n)) for n in range(300)
    ]
    job_ids = pair.center.submit_many(tasks)
    outcomes = {}
    for n, job_id in enumerate(job_ids):
        when = tasks[n].action_time
        assert when is not None
        wait = (when - datetime.now(UTC)).total_seconds() + random.uniform(-0.003, 0.003)
        if wait > 0:
            time.sleep(wait)
        outcomes[job_id] = _move(pair, job_id)
    pair.wait(lambda: all(pair.status(job_id) == 2 for job_id in job_ids), "all have run")
    starts = _starts(pair)
    for job_id in job_ids:
        runs = starts[job_id]
        row = pair.row(job_id)
        last = runs[-1]
        assert last["version"] == row["version"]
        assert last["at"] / 1e6 >= ms(row["action_time"])
        assert row["attempts"] == 0
        expected = {"RESCHEDULED": (1,), "TOO_LATE": (1,), "MAY_HAVE_STARTED": (1, 2)}[outcomes[job_id]]
        assert len(runs) in expected, (outcomes[job_id], runs)
        assert len({run["version"] for run in runs}) == len(runs), "one version ran twice"


def _move(contract: Contract, job_id: int) -> str:
    """Reschedule a task to a moment ahead; a busy machine may take longer to ask than the moment is."""
    while True:
        new = datetime.now(UTC) + timedelta(milliseconds=random.choice([20, 300]))
        try:
            return contract.center.reschedule(job_id, action_time=new).name
        except errors.NotInFuture:  # nothing was written
            continue


def test_more_slots_under_load_lose_and_double_nothing(pair: Contract) -> None:
    job_ids = []
    for n in range(200):
        job_ids.append(pair.center.submit("c.plain", biz_id=20_000 + n, delay=0.5 + n / 40))
        if n == 60:
            assert pair.toc("topic", "alter", "c.plain", "--slots", "16").returncode == 0
    job_ids += [pair.center.submit("c.plain", biz_id=30_000 + n, delay=0.5) for n in range(100)]
    pair.wait(lambda: all(pair.status(job_id) == 2 for job_id in job_ids), "all have run")
    starts = _starts(pair)
    assert all(len(starts[job_id]) == 1 for job_id in job_ids)


def test_a_long_handler_is_kept_alive_under_one_fence_and_runs_once(pair: Contract) -> None:
    job_id = pair.center.submit("c.silent", biz_id=1, delay=0.05, attribute={"gate": "long"})
    key = "prepare_{c.silent_0}"
    first = pair.wait(lambda: pair.redis.zscore(key, str(job_id)), "it is prepared")
    assert first is not None

    def later() -> float:
        score = pair.redis.zscore(key, str(job_id))
        assert score is not None, "it fell out of the PrepareQueue"
        return score if score - first >= 5000 else 0.0

    assert pair.wait(later, "it was kept alive past its timeout of 3 s") % 1000 == first % 1000
    assert len(pair.history(job_id)) == 1
    pair.open_gate("long")
    pair.wait(lambda: pair.status(job_id) == 2, "it ends")
    assert pair.row(job_id)["attempts"] == 0


def test_ten_thousand_tasks_of_one_instant_start_once_each_and_cancelled_ones_do_not(pair: Contract) -> None:
    for ahead in (6, 20, 80):  # all must be written, and some cancelled, before they are due
        due = datetime.now(UTC) + timedelta(seconds=ahead)
        job_ids = pair.center.submit_many(
            [NewTask("c.async", 40_000 + n, action_time=due) for n in range(10_000)]
        )
        cancelled = job_ids[::100]
        outcomes = {pair.center.cancel(job_id) for job_id in cancelled}
        if datetime.now(UTC) < due:
            break
    assert outcomes == {CancelOutcome.CANCELLED}
    pair.wait(lambda: not any(pair.keys().values()), "all are handled")
    starts = _starts(pair)
    at = [starts[job_id][0]["at"] / 1e6 - ms(due) for job_id in job_ids if job_id not in set(cancelled)]
    assert not any(job_id in starts for job_id in cancelled)
    assert min(at) >= 0
    assert all(len(starts[job_id]) == 1 for job_id in job_ids if job_id in starts)


def test_rows_of_the_callers_transaction_are_indexed_and_run_once_it_has_committed(pair: Contract) -> None:
    engine = create_engine(pair.settings.need_database_urls()[0])
    try:
        with engine.begin() as connection:
            now = pair.center.submit("c.now", biz_id=1, connection=connection)
            soon = pair.center.submit("c.plain", biz_id=1, delay=1.8, connection=connection)
        for job_id in (now, soon):
            (start,) = pair.wait(lambda job_id=job_id: pair.history(job_id), "it runs")  # type: ignore[misc]
            assert start["at"] / 1e6 >= ms(pair.row(job_id)["action_time"])
    finally:
        engine.dispose()


def test_an_overdue_task_that_nobody_took_can_still_be_cancelled_for_sure(
    tmp_path: Path, mariadb: MariaDB, database_prefix: str
) -> None:
    with RedisServer(tmp_path / "redis") as own:
        idle = Contract(tmp_path, own, mariadb, database_prefix)
        try:
            idle.create_topics()
            overdue = idle.center.submit("c.plain", biz_id=1, delay=0.02)
            ahead = idle.center.submit("c.plain", biz_id=2, delay=3600)
            taken = idle.center.submit("c.plain", biz_id=3, delay=0.02)
            idle.wait(lambda: time.time() * 1000 > ms(idle.row(taken)["action_time"]) + 2, "they are due")
            for job_id, biz in ((ahead, b"2"), (taken, b"3")):
                slot = f"c.plain_{zlib.crc32(biz) % 4}"
                idle.redis.zrem(slot, str(job_id))
                idle.redis.zadd(f"prepare_{{{slot}}}", {str(job_id): int(time.time()) * 1000 + 16.5})
            assert idle.center.cancel(overdue) is CancelOutcome.CANCELLED
            assert idle.center.cancel(ahead) is CancelOutcome.CANCELLED
            assert idle.center.cancel(taken) is CancelOutcome.MAY_HAVE_STARTED
            assert idle.center.cancel(taken) is CancelOutcome.MAY_HAVE_STARTED
            assert idle.center.cancel(overdue) is CancelOutcome.CANCELLED
        finally:
            idle.stop()


@pytest.fixture(autouse=True)
def _daemons_live_on(contract: Contract) -> Iterator[None]:
    yield
    assert all(daemon.poll() is None for daemon in contract.daemons)
