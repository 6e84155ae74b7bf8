"""Faults 14 and 19 to 21: clocks that are apart; changes at the due instant, sweeps,
slot_amount that grows."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from zoneinfo import ZoneInfo

import pytest
from fault.conftest import Case
from fault.kit.load import TOPICS, Load, in_another_process, tasks
from fault.kit.servers import ClockFile, ShiftedRedis
from harness.final import read_final
from harness.history import Client, lines
from harness.system import System
from harness.threads import at_once

from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus
from toc.model.clock import from_ms
from toc.operate import admin
from toc.store.servers.server import Statement
from toc.store.tasks.select import Selection

# Fault 14: clocks that are apart, that are set while servers run, and that change to winter time.

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
    ("whose", "seconds"), [("Redis", -30), ("Redis", 30), ("worker", -30), ("worker", 30)]
)
def test_a_clock_set_while_it_runs_makes_nothing_early_and_nothing_late_once_it_is_right(
    case: Case, launch: Shifted, whose: str, seconds: int
) -> None:
    line = case.verdict(14, "clock set while it runs", f"{whose} {seconds:+} s")
    redis = launch(ShiftedRedis)
    own = ClockFile(case.path / "clock")
    clock = redis.clock if whose == "Redis" else own
    system = case.build(redis.url, topic_prepare_timeout=3)
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


def test_a_clock_that_is_behind_is_named_also_where_few_tasks_are_due(case: Case) -> None:
    """Nothing is taken before this clock calls it due, so nothing is given back either."""
    clock = ClockFile(case.path / "clock")
    clock.shift(-3)
    system = case.build()
    daemon = system.start(processes=1, env=clock.python_env)
    job_id = system.client.submit("test.sync", biz_id=1, delay=timedelta(seconds=1))
    system.wait(lambda: not system.pending([job_id]), "it has run", SETTLE)
    told = daemon.events("clock_behind_redis")
    assert told
    # By less than it is, where it was asked a while after Redis's.
    assert all(0 < line["milliseconds"] < 3100 for line in told)


@pytest.mark.slow
def test_what_has_expired_by_all_clocks_but_its_database_servers_is_asked_about_now_and_then(
    case: Case, launch: Shifted
) -> None:
    redis, own = launch(ShiftedRedis), ClockFile(case.path / "clock")
    system = case.build(redis.url, topic_prepare_timeout=3)
    system.start(env=own.python_env, processes=1)
    now, count = datetime.now(UTC), 3
    job_ids = [
        system.client.submit(
            "test.sync",
            biz_id=n,
            action_time=now + timedelta(seconds=3600),
            expires_at=now + timedelta(seconds=3601),
        )
        for n in range(count)
    ]
    redis.clock.shift(7200)
    own.shift(7200)
    time.sleep(5)  # which the loops have to begin
    before, began = written(system), time.monotonic()
    time.sleep(5)
    asked = (written(system) - before) / (time.monotonic() - began)
    assert asked < 5 * count, f"{asked:.0f} UPDATEs a second for {count} tasks"
    assert len(system.pending(job_ids)) == count


def written(system: System) -> int:
    """How many UPDATEs the database server has done."""
    question = Statement("SHOW GLOBAL STATUS LIKE 'Com_update'")
    return int(system.center.store._shards.servers[0].run([question])[0].rows[0][1])


@pytest.mark.slow
def test_the_hour_that_the_clocks_show_twice_is_like_any_other(case: Case, launch: Shifted) -> None:
    line = case.verdict(14, "change to winter time")
    zone = ZoneInfo("Europe/Berlin")
    change = datetime(2025, 10, 26, 1, tzinfo=UTC).timestamp()
    local = [datetime.fromtimestamp(change + seconds, zone).hour for seconds in (-1, 0)]
    assert local == [2, 2]  # from 02:59:59 to 02:00:00
    redis = launch(ShiftedRedis)
    clock = redis.clock  # Redis, the worker and the application share it
    env = {**clock.python_env, "TZ": zone.key}
    system = case.build(redis.url)
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


# Faults 19 to 21: changes at the due instant, sweeps beside all that ends a task, slot_amount that grows.

# Fault 19: cancel and reschedule at the due instant: an honest answer, whatever it is.

COUNT = 10_000
THREADS = 8
WINDOW = 0.05
"""Calls come at the due time, so many seconds before or after."""


@pytest.mark.slow
def test_who_cancels_or_moves_a_task_as_it_comes_due_gets_the_truth(case: Case) -> None:
    line, system = case.begin(19, "cancel or reschedule at the due instant", f"{COUNT:,} at due ± 50 ms")
    system.start()
    said: list[tuple[int, CancelOutcome | RescheduleOutcome]] = []
    submitted, rate = 0, 400.0
    while (left := COUNT - len(said)) > 0:  # a busy machine lets some of the instants pass by
        assert submitted <= 5 * COUNT, f"{submitted:,} tasks, but only {len(said):,} calls in time"
        biz_ids = range(submitted, submitted + max(left, COUNT // 10))
        met = _meet(system, biz_ids, rate)
        rate = max(rate * len(met) / len(biz_ids), 100.0)
        submitted += len(biz_ids)
        said += met
    answers = Counter(f"{_op(outcome)} {outcome.value}" for _, outcome in said)
    cancelled = {job_id: outcome for job_id, outcome in said if isinstance(outcome, CancelOutcome)}
    seen = [
        answers[f"cancel {CancelOutcome.CANCELLED.value}"],
        answers[f"cancel {CancelOutcome.TOO_LATE.value}"],
        answers[f"reschedule {RescheduleOutcome.RESCHEDULED.value}"],
        answers[f"reschedule {RescheduleOutcome.TOO_LATE.value}"],
    ]
    line.prove(
        min(seen) >= 3,
        f"{len(said):,} calls; "
        + ", ".join(f"{answer} {number:,}" for answer, number in sorted(answers.items())),
    )
    line.judge(system, within=10)
    ran = {event.job_id for event in system.history() if event.event == "start"}
    for job_id, outcome in cancelled.items():
        assert (job_id in ran) or outcome is not CancelOutcome.TOO_LATE


def _meet(system: System, biz_ids: range, rate: float) -> list[tuple[int, CancelOutcome | RescheduleOutcome]]:
    """Submit a task for each, ``rate`` of them due in a second, and cancel or move each as it comes due; but
    leave it alone if we are too late for that ourselves. Returns the answers by job_id.
    """
    count = len(biz_ids)
    begin = datetime.now(UTC) + timedelta(seconds=2 + count / 3000)
    tasks = [
        NewTask("test.async", biz_id, action_time=begin + timedelta(seconds=(biz_id - biz_ids[0]) / rate))
        for biz_id in biz_ids
    ]
    job_ids = system.client.submit_many(tasks)
    rows = system.center.store.read(job_ids)
    dice = random.Random(count)
    plan = sorted(
        (rows[job_id].action_time / 1000 + dice.uniform(-WINDOW, WINDOW), job_id) for job_id in job_ids
    )
    said: list[tuple[int, CancelOutcome | RescheduleOutcome]] = []

    def work(part: list[tuple[float, int]]) -> None:
        for at, job_id in part:
            time.sleep(max(0.0, at - time.time()))
            if time.time() <= rows[job_id].action_time / 1000 + WINDOW:
                said.append(
                    (job_id, system.client.cancel(job_id) if job_id % 3 else _move(system.client, job_id))
                )

    at_once(partial(work, plan[n::THREADS]) for n in range(THREADS))
    return said


def _op(outcome: CancelOutcome | RescheduleOutcome) -> str:
    return "cancel" if isinstance(outcome, CancelOutcome) else "reschedule"


def _move(client: Client, job_id: int) -> RescheduleOutcome:
    later = from_ms(client.center.clock.now_ms() + 500)
    return client.reschedule(job_id, action_time=later)


# Fault 20: the sweep meets consume, death, redrive and purge: no second run, no revival, no loss.

SECONDS = 60


@pytest.mark.slow
def test_sweeps_without_pause_double_nothing_and_revive_nothing(case: Case) -> None:
    line = case.verdict(
        20, "sweep meets consume, death, redrive, purge", f"{SECONDS} s of each without pause"
    )
    system = case.build(topic_retries=2, topic_backoff_base=0.05)
    system.start(processes=2)
    counts: Counter[str] = Counter()
    center, client = system.center, system.client

    def sweep() -> None:
        counts["rows swept"] += admin.refill(center).rows

    def operate() -> None:
        """Dead tasks are redriven or purged, a few of them only looked at."""
        dead = center.store.selections.page(Selection(TaskStatus.DEAD), None, 50, newest=True).rows
        for row in dead[10:20]:
            system.recorder.seen(row)
        counts["redriven"] += len(client.redrive([row.job_id for row in dead[:5]]))
        purged = [row.job_id for row in dead[5:10]]
        client.purge_dead(purged)
        counts["purged"] += len(purged)

    def enough() -> bool:
        return counts["rows swept"] > 5_000 and counts["redriven"] >= 5 and counts["purged"] >= 5

    client.submit_many(tasks(1500, ahead=(1.5, SECONDS), fail=0.3))
    doomed = [NewTask("test.doomed", n, 0.3 + SECONDS * n / 400) for n in range(400)]
    client.submit_many(doomed)
    over = threading.Event()

    def again(step: Callable[[], None]) -> None:
        while not over.is_set():
            step()

    with Load(client, rate=100, fail=0.2), ThreadPoolExecutor(3) as threads:
        running = [threads.submit(again, step) for step in (sweep, sweep, operate)]
        time.sleep(SECONDS)
        system.wait(lambda: any(one.done() for one in running) or enough(), "each has met the others", 60)
        over.set()
        for one in running:
            one.result()

    def without_rows() -> set[int]:
        """A sweep that read a dead row before its purge adds its entry again, until the next check."""
        final = read_final(center)
        return set(final.index) - {row.job_id for row in final.rows}

    system.wait(lambda: not without_rows(), "dead queues were checked", 120)
    line.prove(enough(), ", ".join(f"{number:,} {what}" for what, number in sorted(counts.items())))
    line.judge(system, within=5)


# Fault 21: slot_amount grows while tasks are submitted, cancelled and run.

AMOUNTS = (8, 16)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["clean_redis", "clean_cluster"], ids=["one Redis", "Redis Cluster"])
def test_slots_doubled_under_load_lose_and_double_nothing(
    case: Case, index: str, request: pytest.FixtureRequest
) -> None:
    line = case.verdict(21, "slot_amount raised while live", f"4, 8, 16 slots, {request.node.callspec.id}")
    system = case.build(request.getfixturevalue(index).url, hosts=True, slots=4)
    for host in ("host-a", "host-b"):
        system.start(host, processes=1)
    topics = system.center.store.topics
    far = system.client.submit_many(tasks(500, ahead=(8.0, 16.0), first=500_000))
    with Load(system.client, rate=120, ahead=(0.2, 4.0)) as load:
        for amount in AMOUNTS:
            load.more(500)  # submitters learn of it within two seconds
            with system.recorder.fault("move", note=f"{amount} slots"):
                for topic in TOPICS:
                    topics.alter(topic, slot_amount=amount)
        load.more(500)  # submitters learn of it within two seconds
    rows = system.center.store.read([*load.job_ids, *far])
    stamped = {amount: sum(row.slot_amount == amount for row in rows.values()) for amount in (4, 8, 16)}
    line.prove(
        all(count > 100 for count in stamped.values()),
        "tasks stamped with " + ", ".join(f"{amount} slots: {count}" for amount, count in stamped.items()),
    )
    judged = line.judge(system, within=10)
    assert not judged.duplicates
    assert not load.errors
