"""Fault 57: a task exists, and is as it is, exactly if and as the caller's committed transactions say so."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from fault.kit.proxy import Proxy
from fault.kit.transactions import TOPIC, metadata, ops
from harness import forks
from harness.system import System
from harness.tables import raw, task_tables
from sqlalchemy import create_engine, select
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask
from toc.model.task import TaskStatus

PROCESSES = 4
Running = tuple[forks.Forked, Path]
"""A program, and the file of what it prints."""


@pytest.mark.parametrize(
    ("count", "kills"),
    [(300, 6), pytest.param(100_000, 0, marks=[pytest.mark.chaos, pytest.mark.timeout(10_800)])],
    ids=["300", "100k"],
)
def test_a_task_exists_exactly_if_the_callers_rows_do(
    build: Build,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    verdict: Verdict,
    tmp_path: Path,
    count: int,
    kills: int,
) -> None:
    line = verdict(57, "random transactions of callers", f"{count:,}")
    system = build(clean_redis.url)
    engine = create_engine(make_url(mariadb.url).set(database=f"{system.settings.database_prefix}0"))
    metadata.create_all(engine)
    at = datetime.now(UTC) + timedelta(hours=3)
    shared = system.center.submit_many([NewTask(TOPIC, n, action_time=at) for n in range(6)])
    with engine.begin() as connection:
        for job_id in shared:
            connection.execute(ops.insert().values(tx="shared", job_id=job_id, op="submit", due=0))
    due = int(1000 * (time.time() + 7200))
    place = tmp_path / "said"
    try:
        with Proxy(mariadb.port) as proxy:
            proxy.eat(b"COMMIT", count=None, probability=0.02, quiet=0.02)
            url = engine.url.set(port=proxy.port).render_as_string(hide_password=False)
            for first in range(0, 10 * PROCESSES, PROCESSES):  # where they run in turn, they do not meet
                running = [
                    _program(system, place, url, first + seed, count // PROCESSES, due)
                    for seed in range(PROCESSES)
                ]
                for program in running:
                    _printed(program)
                eaten = proxy.stats.eaten
                if eaten and {"unknown", "rolled back"} <= _states(place).keys() and _failed(place):
                    break
        direct = engine.url.render_as_string(hide_password=False)
        last = _printed(_program(system, place, direct, -1, kills, due, "kill")).splitlines()[-1]
        at_lines = json.loads(last)
        with engine.connect() as connection:
            written = connection.execute(select(ops).order_by(ops.c.number)).all()
    finally:
        engine.dispose()
    said, states, deadlocks = _said(place), _states(place), _failed(place)
    line.prove(
        eaten
        and deadlocks
        and at_lines["killed"] == (kills or at_lines["lines"])
        and states["rolled back"]
        and states["unknown"],
        f"{dict(states)}, {deadlocks} deadlocks, {eaten} answers to COMMIT lost, killed at each of "
        f"{at_lines['killed']} of {at_lines['lines']} lines",
    )
    print(line.proof)
    assert states["committed"] > count // 4
    expected, rows = _replayed(written), _rows(system)
    _compare_transactions(said, written, expected)
    assert {one: row[:2] for one, row in rows.items()} == {one: task[:2] for one, task in expected.items()}
    moved = {one: at for one, (_, _, at) in expected.items() if at}
    assert {one: rows[one][2] for one in moved} == moved
    assert _indexed(clean_redis) <= set(rows)
    _run_all(system, {one for one, (status, *_) in rows.items() if status == TaskStatus.PENDING})


def _said(place: Path) -> list[dict[str, Any]]:
    """What the application has heard of each transaction."""
    return [json.loads(text) for text in place.read_text().splitlines()]


def _states(place: Path) -> Counter[str]:
    """In how many transactions it ended so."""
    return Counter(one["state"] for one in _said(place))


def _failed(place: Path) -> int:
    """How many were rolled back because they met another one's locks."""
    return sum(one.get("why") == "Transient" for one in _said(place))


def _program(system: System, place: Path, url: str, seed: int, count: int, due: int, *more: str) -> Running:
    """Starts it; what it prints is in the file."""
    out = place.with_suffix(f".{seed}")
    words = [str(place), url, str(seed), str(count), str(due), *more]
    streams = dict.fromkeys(("stdout", "stderr"), str(out))
    return forks.start(words, env=system.env, module="fault.kit.transactions", streams=streams), out


def _printed(program: Running) -> str:
    """Waits for its end, and returns what it has printed."""
    process, out = program
    code, text = process.wait(), out.read_text()
    assert code == 0, text
    return text


def _compare_transactions(
    said: list[dict[str, Any]], written: Any, expected: dict[int, tuple[int, int, int]]
) -> None:
    """Each was written whole or not at all, as its caller heard; outcomes that were told are so."""
    counts = Counter(op.tx for op in written)
    for one in said:
        if one["state"] == "committed":
            assert counts[one["tx"]] == one["ops"], one
        elif one["state"] != "unknown":
            assert counts[one["tx"]] == 0, one
        for job_id, op, outcome in one.get("told", []):
            if outcome in ("cancelled", "too_late"):  # by this transaction or another
                assert expected[job_id][0] == TaskStatus.CANCELLED, one
            elif outcome == "rescheduled" or (op, outcome) == ("cancel", "not committed"):
                assert bool(counts[one["tx"]]) is (outcome == "rescheduled"), one


def _replayed(written: Any) -> dict[int, tuple[int, int, int]]:
    """Status, version and time (0: its first) of each task that was submitted."""
    tasks: dict[int, tuple[int, int, int]] = {}
    for op in written:
        status, version, due = tasks.setdefault(op.job_id, (0, 0, 0))
        if op.op != "submit" and not status:
            tasks[op.job_id] = (3, version, due) if op.op == "cancel" else (0, version + 1, op.due)
    return tasks


def _rows(system: System) -> dict[int, tuple[int, int, int]]:
    """Status, version and time of each task that there is."""
    with raw(system.settings) as connection:
        return {
            job_id: (status, version, at)
            for name in task_tables(system.settings)
            for job_id, status, version, at in connection.exec_driver_sql(
                "SELECT job_id,status,version,TIMESTAMPDIFF(MICROSECOND,'1970-01-01',action_time) DIV 1000 "
                f"FROM {name}"
            )
        }


def _indexed(redis: RedisServer) -> set[int]:
    """The ids of all entries."""
    call: Any = redis.call
    return {int(one) for key in call("KEYS", "test.*_?") for one in call("ZRANGE", key, 0, -1)}


def _run_all(system: System, pending: set[int]) -> None:
    """Have everything come due now: what is pending runs once, and nothing else."""
    with raw(system.settings) as connection:
        for name in task_tables(system.settings):
            now = "UTC_TIMESTAMP(3)-INTERVAL 1 SECOND"
            connection.exec_driver_sql(f"UPDATE {name} SET action_time={now},next_time={now} WHERE status=0")
    system.start()
    system.wait(lambda: not system.pending(pending), "all have run", 60 + len(pending) / 200)
    starts = Counter(event.job_id for event in system.history() if event.event == "start")
    assert starts == dict.fromkeys(pending, 1)
