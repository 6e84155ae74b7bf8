"""Fault 14: clocks that are apart, that are set while servers run, and that change to winter time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, in_another_process, tasks
from fault.kit.servers import ClockFile, ShiftedRedis
from harness.final import read_final
from harness.history import lines
from harness.system import System

from toc import TaskStatus

Shifted = Callable[[type[ShiftedRedis]], ShiftedRedis]
SETTLE = 22
"""What was put back by a wrong clock stands too late in the index once it is right. The sweep mends that: it
looks every 5 s at what is overdue, but not at what it found in the index up to 10 s ago. That makes 15 s, and
the looks themselves on a busy machine."""


def most_ahead(system: System) -> float:
    """How far ahead of the true time the clock of a handler's process was at most, in seconds."""
    true = time.time() - time.monotonic()
    starts = [line for line in lines(system.history_directory) if line["e"] == "start"]
    ahead: list[float] = [(line["wall"] - line["mono"]) / 1e9 - true for line in starts]
    return max(ahead)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whose", "seconds"),
    [("Redis", -30), ("Redis", 30), ("worker", -30), ("worker", 30)],
)
def test_a_clock_set_while_it_runs_makes_nothing_early_and_nothing_late_once_it_is_right(
    build: Build, launch: Shifted, tmp_path: Path, verdict: Verdict, whose: str, seconds: int
) -> None:
    line = verdict(14, "clock set while it runs", f"{whose} {seconds:+} s")
    redis = launch(ShiftedRedis)
    own = ClockFile(tmp_path / "clock")
    clock = redis.clock if whose == "Redis" else own
    system = build(redis.url, topic_prepare_timeout=3)
    daemon = system.start(env=own.python_env)
    system.client.submit_many(tasks(300, ahead=(0.5, 4.0), fail=0.1))
    with Load(system.client, rate=80, ahead=(0.2, 1.0)) as load:
        load.more(40)
        with system.recorder.fault("clock"):
            clock.shift(seconds)
            load.more(120)
            skew = redis.now() - time.time()
            clock.shift(0)
        load.more(40)
    # What failed while the clock was ahead waits for its second try by that clock; the checker compares the
    # wall clocks of both. What was decided or had ended just before the clock was set, the new one dates:
    # a start looks early, a second try late.
    but = {("worker", -30): "E", ("worker", 30): "T"}.get((whose, seconds), "")
    judged = line.judge(system, within=SETTLE, retries_within=45, hold=35, but=but)
    assert sum(judged.breaches[letter] for letter in but) <= 8, "more than there are threads"
    if whose == "Redis":
        line.prove(abs(skew - seconds) < 1, f"Redis's clock was {skew:+.1f} s off")
    elif seconds > 0:
        line.prove(most_ahead(system) > 29, f"handlers saw clocks {most_ahead(system):+.1f} s off")
    behind = daemon.log.read_text().count("clock_behind_redis")
    if (whose, seconds) == ("Redis", 30):
        line.prove(behind, f"clock_behind_redis told {behind} times")
    elif (whose, seconds) == ("worker", -30):  # told of what was under way just then, if there was any
        waited = sum(late > 200 for late in system.late(load.job_ids))
        line.prove(waited > 40, f"{waited} tasks waited until the clock was right")
    else:
        assert not behind
    assert judged.counts["processed"] > 400


def test_a_clock_that_is_behind_is_named_also_where_few_tasks_are_due(build: Build, tmp_path: Path) -> None:
    """Nothing is taken before this clock calls it due, so nothing is given back either."""
    clock = ClockFile(tmp_path / "clock")
    clock.shift(-3)
    system = build()
    daemon = system.start(processes=1, env=clock.python_env)
    job_id = system.client.submit("test.sync", biz_id=1, delay=timedelta(seconds=1))
    system.wait(lambda: not system.pending([job_id]), "it has run", SETTLE)
    told = daemon.events("clock_behind_redis")
    assert told
    # By less than it is, where it was asked a while after Redis's.
    assert all(0 < line["milliseconds"] < 3100 for line in told)


@pytest.mark.slow
def test_a_host_whose_clock_is_an_hour_ahead_ends_no_task_as_expired(
    build: Build, tmp_path: Path, verdict: Verdict
) -> None:
    """Neither those that are due in a while nor those that are due meanwhile."""
    line = verdict(14, "clock an hour ahead, tasks that expire", "for 6 s")
    clock = ClockFile(tmp_path / "clock")
    system = build(topic_prepare_timeout=3)
    daemon = system.start(env=clock.python_env)
    now = datetime.now(UTC)
    job_ids = [
        system.client.submit(
            "test.sync",
            biz_id=n,
            action_time=now + timedelta(seconds=2 + n / 2),
            expires_at=now + timedelta(minutes=10),
        )
        for n in range(20)
    ]
    clock.shift(3600)
    time.sleep(6)  # the sweep looks every 5 s at what is overdue
    clock.shift(0)
    system.wait(lambda: not system.pending(job_ids), "all have ended", SETTLE)
    assert {row.status for row in system.center.store.read(job_ids).values()} == {TaskStatus.PROCESSED}
    assert not daemon.events("task_expired")
    line.prove(system.late(job_ids)[-1] > 1000, "some waited until the clock was right")
    line.judge(system, within=SETTLE, hold=35)


@pytest.mark.slow
def test_the_hour_that_the_clocks_show_twice_is_like_any_other(
    build: Build, launch: Shifted, verdict: Verdict
) -> None:
    line = verdict(14, "change to winter time")
    zone = ZoneInfo("Europe/Berlin")
    change = datetime(2025, 10, 26, 1, tzinfo=UTC).timestamp()
    local = [datetime.fromtimestamp(change + seconds, zone).hour for seconds in (-1, 0)]
    assert local == [2, 2]  # from 02:59:59 to 02:00:00
    redis = launch(ShiftedRedis)
    clock = redis.clock  # Redis, the worker and the application share it
    env = {**clock.python_env, "TZ": zone.key}
    system = build(redis.url)
    clock.shift(change - 3600 - time.time())
    system.start(env=env)
    clock.shift(change - 6 - time.time())
    done = in_another_process(system, [{"do": "submit_many", "count": 600, "ahead": [2.0, 10.0]}], env=env)
    assert done.returncode == 0, done.stderr
    rows = list(read_final(system.center).rows)
    before = sum(row.action_time < change * 1000 for row in rows)
    line.prove(
        before > 30 and len(rows) - before > 30,
        f"{before} tasks were due before the change, {len(rows) - before} after it",
    )
    line.judge(system, within=1)
