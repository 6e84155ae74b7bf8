"""Fault 50: whatever dies or hangs, each occurrence of a schedule is one task; the others are on time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.compressed import NEW_YEAR, SECONDS_OF_YEAR
from harness.cron_oracle import oracle
from harness.system import System

from toc import TaskStatus, TimeoutCenter
from toc.dev.local.process import until
from toc.dev.local.servers import MariaDB, RedisServer
from toc.model.clock import to_ms
from toc.model.errors import TocError
from toc.model.schedule import Definition, new_state
from toc.model.sharding import crc32

ZONES = (
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Africa/Casablanca",
    "America/Santiago",
    "Pacific/Apia",
    "America/New_York",
    "Europe/Berlin",
    "Pacific/Chatham",
    "Antarctica/Troll",
    "America/St_Johns",
)
EXPRESSIONS = ("30 2 * * *", "0 */6 * * *", "15 0,1,13 * * 1-5", "*/30 0,2 * * 0", "45 1 1,15 * *")
QUARTER = timedelta(minutes=15)
YEAR_TAKES = 45.0
"""Seconds."""


def test_a_year_of_schedules_in_ten_zones_with_processes_that_die(
    build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    """Five processes, 200 ms apart, of which three are killed in a loop; Redis is flushed."""
    line = verdict(50, "schedules over a year, members killed", f"a year in {YEAR_TAKES:.0f} s")
    system = build(clean_redis.url)
    wanted: dict[str, list[int]] = {}
    for zone in ZONES:
        for number, expression in enumerate(EXPRESSIONS):
            name = f"{zone.replace('/', '.')}-{number}"
            wanted[name] = [
                to_ms(at)
                for at in oracle(expression, zone, NEW_YEAR, NEW_YEAR + timedelta(days=365), step=QUARTER)
            ]
            schedule(system, name, cron=expression, zone=zone)
    for number in range(5):
        name, period = f"every-{number}", timedelta(hours=5 + number)
        schedule(system, name, every=period, anchor=NEW_YEAR)
        count = SECONDS_OF_YEAR // int(period.total_seconds())
        wanted[name] = [to_ms(NEW_YEAR + period * number) for number in range(1, count + 1)]
    kills, flushes = year(system, clean_redis, begin=time.time() + 2.0)
    ends = to_ms(NEW_YEAR) + SECONDS_OF_YEAR * 1000
    names = list(wanted)
    with TimeoutCenter(system.settings) as center:
        found = {name: center.find(biz_id=name) for name in names}
        stored = center.store.schedules.named(names)[0]
    for name, expected in wanted.items():
        made = [to_ms(task.scheduled_for) for task in found[name] if task.scheduled_for]
        assert len(made) == len(found[name])
        twice = [nominal for nominal, count in Counter(made).items() if count > 1]
        assert not twice, f"{name}: {twice}"
        assert sorted(nominal for nominal in made if nominal <= ends) == expected, name
        state = stored[name].state
        assert (state.fired, state.skipped, state.missed) == (len(made), 0, 0)
    total = sum(map(len, wanted.values()))
    line.tasks = total
    line.prove(kills > 10 and flushes, f"{kills} processes killed, Redis flushed {flushes} times")
    print(f"{total} occurrences of {len(names)} schedules; {line.proof}")


def schedule(system: System, name: str, **options: object) -> None:
    """Create a schedule that begins with the year: any stop is within its window."""
    definition = Definition(
        name, "test.sync", overlap="allow", window=timedelta(days=3660), **options  # type: ignore[arg-type]
    )  # fmt: skip
    state = new_state(definition, crc32(name), to_ms(NEW_YEAR))
    system.center.store.schedules.create(definition, state)


def year(system: System, redis: RedisServer, begin: float) -> tuple[int, int]:
    """Let the year pass. Returns how many processes were killed and how often Redis was flushed."""
    dice = random.Random(50)
    kills = flushes = 0
    running: list[subprocess.Popen[str]] = []

    def start(number: int) -> subprocess.Popen[str]:
        skew = (number - 2) * 0.1  # so that the outermost are 400 ms apart
        words = [sys.executable, "-m", "fault.kit.compressed", str(begin), str(YEAR_TAKES), str(skew)]
        return subprocess.Popen(words, env=system.env, stdout=subprocess.PIPE, text=True)

    def left() -> dict[str, float]:
        """The schedules that have not come to the end of the year, and how many days they lack."""
        ends = to_ms(NEW_YEAR) + SECONDS_OF_YEAR * 1000
        nexts = {one.name: one.state.next_time or 0 for one in system.center.store.schedules.page()}
        return {name: (ends - next_) / 86_400_000 for name, next_ in nexts.items() if next_ <= ends}

    try:
        running += [start(number) for number in range(5)]
        while time.time() < begin + YEAR_TAKES:
            time.sleep(dice.uniform(0.1, 0.6))
            number = dice.randrange(3)
            running[number].kill()
            assert running[number].wait() == -signal.SIGKILL
            kills += 1
            running[number].stdout.close()  # type: ignore[union-attr]
            running[number] = start(number)
            if dice.random() < 0.1:
                redis.call("FLUSHALL")
                flushes += 1
        assert until(lambda: not left(), 60), f"the year is over, and these lag behind by days: {left()}"
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]
    return kills, flushes


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[MariaDB, MariaDB]]:
    """Two servers of the task table; each goes on after the test whatever happens."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(MariaDB(tmp_path / name, buffer_pool="64M")) for name in ("first", "second")
        )
        yield first, second
        second.resume()


def test_a_server_that_hangs_stops_its_own_schedules_only(
    servers: tuple[MariaDB, MariaDB], build: Build, clean_redis: RedisServer, verdict: Verdict
) -> None:
    """Five processes of real daemons: three are killed in a loop, Redis is flushed, a server hangs."""
    line = verdict(50, "schedules, a MySQL server hangs over three occurrences")
    system = build(clean_redis.url, database_urls=[server.url for server in servers], topic_prepare_timeout=5)
    daemons = [system.start("host-a", processes=3), system.start("host-b", processes=2)]
    names = [f"each-second-{number}" for number in range(16)]
    sick = {name for name in names if system.center.store.tables_of_server()[1].count(crc32(name) % 8)}
    assert 4 <= len(sick) <= 12
    for name in names:
        system.center.schedules.create(name, topic="test.sync", every=1, overlap="allow")
    kills = 0

    def kill_some(seconds: float) -> None:
        nonlocal kills
        until_ = time.monotonic() + seconds
        while time.monotonic() < until_:
            for pid in daemons[0].workers()[:3]:
                os.kill(pid, signal.SIGKILL)
                kills += 1
                time.sleep(0.3)
            time.sleep(1.5)

    kill_some(4)
    clean_redis.call("FLUSHALL")
    kill_some(3)
    before = time.time()
    servers[1].pause()
    time.sleep(5)
    servers[1].resume()
    after = time.time()
    kill_some(3)
    for name in names:
        assert until(lambda name=name: bool(paused(system, name)), 20)  # type: ignore[misc]
    tasks = {name: system.center.find(biz_id=name) for name in names}
    job_ids = [
        task.job_id for some in tasks.values() for task in some if task.status is not TaskStatus.CANCELLED
    ]
    system.wait(lambda: not system.pending(job_ids), "all have run", 30)
    starts = defaultdict(list)
    for event in system.history():
        if event.event == "start":
            starts[event.job_id].append(event.at / 1e9)
    late_of_others = []
    for name, some in tasks.items():
        ran = sorted(
            (task for task in some if task.status is not TaskStatus.CANCELLED), key=lambda t: t.action_time
        )
        nominals = sorted(task.scheduled_for for task in ran if task.scheduled_for)
        assert len(nominals) == len(ran) >= 12
        assert {later - sooner for sooner, later in pairwise(nominals)} == {timedelta(seconds=1)}, name
        assert all(starts[task.job_id] for task in ran), "each has run"
        if name not in sick:
            late_of_others += [
                starts[task.job_id][0] - nominal.timestamp()
                for task, nominal in zip(ran, nominals, strict=True)
                if before < nominal.timestamp() < after
            ]
    hung = sum(
        before < (task.scheduled_for or datetime.now(UTC)).timestamp() < after - 1
        and min(starts[task.job_id]) > after - 0.5
        for name in sick
        for task in tasks[name]
        if starts[task.job_id]
    )
    line.tasks = len(job_ids)
    line.prove(
        kills > 5 and hung >= 3 * len(sick),
        f"{kills} processes killed; {hung} occurrences of {len(sick)} schedules waited for their server; "
        f"those of the others were at most {max(late_of_others) * 1000:.0f} ms late",
    )
    print(line.proof)
    assert max(late_of_others) < 0.5


def paused(system: System, name: str) -> bool:
    try:
        return system.center.schedules.pause(name).paused
    except TocError:  # its server is not counted as back yet
        return False
