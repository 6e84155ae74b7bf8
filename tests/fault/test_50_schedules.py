"""Fault 50: whatever dies or hangs, each occurrence of a schedule is one task; the others are on time."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import pytest
from fault.conftest import Case, Servers
from fault.kit.compressed import NEW_YEAR, SECONDS_OF_YEAR
from harness.cron_oracle import oracle
from harness.patience import until
from harness.rows import known
from harness.system import Lateness, System

from benchmarks.local import RedisServer
from toc import TaskStatus, TimeoutCenter, TocError
from toc.model.clock import to_ms
from toc.model.schedule import Definition
from toc.model.schedule_state import new_state
from toc.model.sharding import crc32

ZONES = (
    *("Australia/Lord_Howe", "Europe/Dublin", "Africa/Casablanca", "America/Santiago", "Pacific/Apia"),
    *("America/New_York", "Europe/Berlin", "Pacific/Chatham", "Antarctica/Troll", "America/St_Johns"),
)
EXPRESSIONS = ("30 2 * * *", "0 */6 * * *", "15 0,1,13 * * 1-5", "*/30 0,2 * * 0", "45 1 1,15 * *")
OF_CRONSIM = {
    ("Australia/Lord_Howe", "0 */6 * * *"),
    ("Australia/Lord_Howe", "*/30 0,2 * * 0"),
    ("America/Santiago", "*/30 0,2 * * 0"),
}
"""Where clocks move by half an hour, or at midnight, cronsim leaves one of these out or makes one more."""
QUARTER = timedelta(minutes=15)
YEAR_TAKES = 45.0
"""Seconds."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_year_of_schedules_in_ten_zones_with_processes_that_die(case: Case) -> None:
    """Five processes, 200 ms apart, of which three are killed in a loop; Redis is flushed."""
    line, system = case.begin(50, "schedules over a year, members killed", f"a year in {YEAR_TAKES:.0f} s")
    wanted: dict[str, list[int]] = {}
    pairs = [(zone, *one) for zone in ZONES for one in enumerate(EXPRESSIONS)]
    for zone, number, expression in pairs:
        if (zone, expression) not in OF_CRONSIM:
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
    kills, flushes = year(system, case.redis)
    ends = to_ms(NEW_YEAR) + SECONDS_OF_YEAR * 1000
    names = list(wanted)
    with TimeoutCenter(system.settings) as center:
        found = {name: center.find(biz_id=name) for name in names}
        stored = {name: center.store.schedules.get(name) for name in names}
    for name, expected in wanted.items():
        made = [to_ms(task.scheduled_for) for task in found[name] if task.scheduled_for]
        assert len(made) == len(found[name])
        twice = [nominal for nominal, count in Counter(made).items() if count > 1]
        assert not twice, f"{name}: {twice}"
        assert sorted(nominal for nominal in made if nominal <= ends) == expected, name
        state = known(stored[name]).state
        assert (state.fired, state.skipped, state.missed) == (len(made), 0, 0)
    total = sum(map(len, wanted.values()))
    line.tasks = total
    line.prove(kills > 10 and flushes, f"{kills} processes killed, Redis flushed {flushes} times")


def schedule(system: System, name: str, **options: object) -> None:
    """Create a schedule that begins with the year: any stop is within its window."""
    definition = Definition(
        name, "test.sync", overlap="allow", window=timedelta(days=3660), **options  # type: ignore[arg-type]
    )  # fmt: skip
    state = new_state(definition, crc32(name), to_ms(NEW_YEAR))
    system.center.store.schedules.create(definition, state)


def year(system: System, redis: RedisServer) -> tuple[int, int]:
    """Let the year pass, which begins once all processes are there. Only those that work are killed.

    It waits for whoever is 60 days behind: of more than 1,000 late occurrences not all are made. Returns how
    many processes were killed and how often Redis was flushed.
    """
    dice = random.Random(50)
    kills = flushes = 0
    running: list[subprocess.Popen[str]] = []
    most = system.directory / "seconds-of-the-year"

    def allow(days_left: float) -> None:
        """Let 60 days pass from where the last schedule is, and a day after the year for all."""
        passed = SECONDS_OF_YEAR - days_left * 86_400
        written = most.with_suffix(".new")
        written.write_text(str(min(passed + 60 * 86_400, SECONDS_OF_YEAR + 86_400)))
        written.replace(most)

    def start(number: int) -> subprocess.Popen[str]:
        skew = (number - 2) * 0.1  # so that the outermost are 400 ms apart
        words = [sys.executable, "-m", "fault.kit.compressed", str(YEAR_TAKES), str(skew), str(most)]
        return subprocess.Popen(
            words, env=system.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(process: subprocess.Popen[str]) -> None:
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()

    def work(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write(f"{begin}\n")
        process.stdin.flush()

    def left() -> dict[str, float]:
        """The schedules that have not come to the end of the year, and how many days they lack."""
        ends = to_ms(NEW_YEAR) + SECONDS_OF_YEAR * 1000
        nexts = {one.name: one.state.next_time or 0 for one in system.center.store.schedules.page()}
        return {name: (ends - next_) / 86_400_000 for name, next_ in nexts.items() if next_ <= ends}

    try:
        allow(365)
        running += [start(number) for number in range(5)]
        begin = time.time() + 5.0
        for process in running:
            work(process)
        end = time.monotonic() + 700
        while (behind := left()) or kills <= 10:
            assert time.monotonic() < end, f"these lag behind by days: {behind}"
            allow(max(behind.values(), default=0))
            time.sleep(dice.uniform(0.1, 0.6))
            number = dice.randrange(3)
            running[number].kill()
            assert running[number].wait() == -signal.SIGKILL
            kills += 1
            close(running[number])
            running[number] = start(number)
            work(running[number])
            if kills % 5 == 0:
                redis.call("FLUSHALL")
                flushes += 1
    finally:
        for process in running:
            process.kill()
            process.wait()
            close(process)
    return kills, flushes


@pytest.mark.slow
def test_a_server_that_hangs_stops_its_own_schedules(servers: Servers, case: Case) -> None:
    """Five processes of daemons, of which three are killed; Redis is flushed; a server hangs, then dies."""
    line = case.verdict(50, "schedules, a MySQL server hangs over three occurrences, and is killed")
    system = case.build(database_urls=[server.url for server in servers], topic_prepare_timeout=5)
    daemons = [system.start("host-a", processes=3), system.start("host-b", processes=2)]
    names = [f"each-second-{number}" for number in range(16)]
    sick = {name for name in names if system.center.store.tables_of_server()[1].count(crc32(name) % 8)}
    assert 4 <= len(sick) <= 12
    for name in names:
        system.center.schedules.create(name, topic="test.sync", every=1, overlap="allow")
    kills = 0
    for _ in range(2):
        for pid in daemons[0].workers():
            os.kill(pid, signal.SIGKILL)
            kills += 1
            time.sleep(0.3)
        system.wait(lambda: len(daemons[0].workers()) == 3, "they are replaced", 30)
    case.redis.call("FLUSHALL")
    before = time.time()
    servers[1].pause()
    time.sleep(5)
    servers[1].resume()
    after = time.time()
    time.sleep(1)
    servers[1].kill()
    servers[1].start()
    ran = each_second_once(system, names, least=8)
    late = Lateness(
        1000 * (started - nominal)
        for name in set(names) - sick
        for nominal, started in ran[name]
        if before < nominal < after
    )
    hung = sum(
        before < nominal < after - 1 and started > after - 0.5
        for name in sick
        for nominal, started in ran[name]
    )
    line.tasks = sum(map(len, ran.values()))
    line.prove(
        kills > 5 and hung >= 3 * len(sick),
        f"{kills} processes killed; {hung} occurrences of {len(sick)} schedules waited for their server; of "
        f"those of the others {late}",
    )
    line.on_time(late, most=500)


def each_second_once(
    system: System, names: Sequence[str], *, least: int
) -> dict[str, list[tuple[float, float]]]:
    """Pause schedules that fire each second, and let their tasks run. Asserts that each second was one task,
    and each task ran. Returns the nominal time and the first start of all (s), by schedule."""
    for name in names:
        assert until(lambda name=name: bool(paused(system, name)), 60)  # type: ignore[misc]
    tasks = {
        name: [task for task in system.center.find(biz_id=name) if task.status is not TaskStatus.CANCELLED]
        for name in names
    }
    job_ids = [task.job_id for some in tasks.values() for task in some]
    system.wait(lambda: not system.pending(job_ids), "all have run", 60)
    starts: dict[int, float] = {}
    for event in system.history():
        if event.event == "start":
            starts.setdefault(event.job_id, event.at / 1e9)
    ran = {}
    for name, some in tasks.items():
        nominals = sorted(task.scheduled_for for task in some if task.scheduled_for)
        assert len(nominals) == len(some) >= least
        assert {later - sooner for sooner, later in pairwise(nominals)} == {timedelta(seconds=1)}, name
        assert all(task.job_id in starts for task in some), "each has run"
        ran[name] = [
            (task.scheduled_for.timestamp(), starts[task.job_id]) for task in some if task.scheduled_for
        ]
    return ran


def paused(system: System, name: str) -> bool:
    try:
        return system.center.schedules.pause(name).paused
    except TocError:  # its server is not counted as back yet
        return False
