"""Fault 57: tasks cancelled in a caller's transaction that stays open over their times."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import TOPICS, Load
from harness.system import System
from sqlalchemy import Engine, create_engine

from benchmarks.local import MariaDB
from toc import CancelOutcome, NewTask

RATE = 50


@pytest.mark.parametrize(
    ("seconds", "count"), [(3, 100), pytest.param(60, 1000, marks=pytest.mark.slow)], ids=["3 s", "60 s"]
)
@pytest.mark.parametrize("indexed", [True, False], ids=["", "the database alone"])
def test_others_in_the_same_tables_are_not_late(
    build: Build, mariadb: MariaDB, verdict: Verdict, seconds: int, count: int, indexed: bool
) -> None:
    where = "" if indexed else ", the database alone"
    line = verdict(57, "tasks cancelled in a caller's open transaction", f"{count:,} for {seconds} s{where}")
    system = build(index=indexed)
    client = system.client
    daemon = system.start()
    engine = create_engine(mariadb.url)
    ahead = 5 + 4 * count * took_one(system, engine)  # by then all are cancelled
    soon = 0.3 if indexed else 2.0  # without an index, rows are read once a second
    held = client.submit_many(
        [
            NewTask(TOPICS[n % len(TOPICS)], n, ahead + seconds * n / count, attribute={"fail": n % 7 == 0})
            for n in range(count)
        ]
    )
    try:
        with (
            Load(client, rate=RATE, ahead=(soon, soon), cancel=0.0, fail=0.1) as load,
            engine.connect() as connection,
            client.cancelled_with(connection, held) as outcomes,
        ):
            cancelled = time.time()
            load.more(RATE)
            due = system.row(held[-1]).action_time / 1000
            system.wait(lambda: time.time() > due, "all would have been due", ahead + seconds)
            others = load.job_ids[:]
            began = time.monotonic()
            system.wait(lambda: not system.pending(others), "those of others are written meanwhile", 30)
            behind = time.monotonic() - began
            if indexed:
                system.wait(lambda: "rows_not_written" in daemon.told(), "a row could not be written", 30)
            started = {event.job_id for event in system.history() if event.event == "start"} & set(held)
            unwritten = len(system.pending(held))
            connection.commit()
    finally:
        engine.dispose()
    late = system.late(load.job_ids)
    # Where the row alone answers: what was cancelled before anybody could have read it as due soon.
    in_time = {job_id for job_id in held if system.row(job_id).action_time / 1000 > cancelled + 2}
    line.prove(
        len(started) > count // 2 if indexed else len(in_time) > count // 10 and not started & in_time,
        f"{len(started):,} of {count:,} had started, none could be written; of others {late}, the last "
        f"written after {behind:.1f} s; outcomes {dict(Counter(outcome.value for outcome in outcomes))}",
    )
    assert not load.errors
    line.within(behind, 3)  # a failed try of others, and its next one
    line.on_time(late, p99=10, most=100)
    told = dict(zip(held, outcomes, strict=True))
    assert set(outcomes) <= {CancelOutcome.CANCELLED, CancelOutcome.MAY_HAVE_STARTED}
    assert unwritten == count
    assert all(told[job_id] is CancelOutcome.MAY_HAVE_STARTED for job_id in started)
    line.judge(system, within=6)
    ran = {event.job_id for event in system.history() if event.event == "start"} & set(held)
    assert {job_id for job_id in held if told[job_id] is CancelOutcome.CANCELLED} & ran == set()


def took_one(system: System, engine: Engine) -> float:
    """Seconds that a cancel in a transaction takes here, now."""
    job_ids = system.client.submit_many([NewTask("test.sync", n, 3600) for n in range(10)])
    began = time.monotonic()
    with engine.connect() as connection:
        for job_id in job_ids:
            system.center.cancel(job_id, connection=connection)
        connection.rollback()
    return (time.monotonic() - began) / len(job_ids)
