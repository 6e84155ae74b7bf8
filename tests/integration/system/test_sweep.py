"""The sweep against real servers, its schedule run by hand on a clock that the test sets forward."""

import time
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import structlog
from harness.metrics import taken
from harness.rows import insert, insert_many, known
from harness.system import System, buried

from benchmarks.local import RedisServer
from toc import NewTask, Topic
from toc.maintenance.dead_entries import PASS_SECONDS, DeadQueueCheck
from toc.maintenance.sweep import Sweep, SweepCounts
from toc.maintenance.sweeper import (
    CRAWL_ROWS,
    DEAD,
    EDGE,
    LOST,
    MOST_REST,
    OVERDUE,
    REST_BUSY,
    ROWS_PER_STEP,
    SOON,
    Pass,
    Round,
    Sweeper,
)
from toc.model.clock import Clock
from toc.model.errors import SchemaBehind
from toc.model.pull import LEASE_ENDED
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Delivery, Slot
from toc.observe.metrics import EXPIRED_TASKS, ROWS_WITHOUT_TOPIC, SWEEP_ADDED, TRIES
from toc.sdk.submission import RowMaker
from toc.store.records.cluster import Horizon
from toc.store.tasks.pulls import HandOut


class FastClock(Clock):
    """A clock that a test sets forward instead of sleeping.

    It stands still meanwhile, whatever the machine does; only that a step takes some time is seen.
    """

    STEP = 0.002

    def __init__(self) -> None:
        self.ahead = 0.0
        self._began_ms = super().now_ms()

    def now_ms(self) -> int:
        return self._began_ms + int(self.ahead * 1000)

    def monotonic(self) -> float:
        self.ahead += self.STEP
        return self.ahead


class Bench:
    """A sweep over all tables of a system, each step of which is recorded."""

    def __init__(self, system: System, clock: Clock | None = None) -> None:
        system.create_topics()
        self.center = system.center
        self.clock = clock or FastClock()
        self.sweep = Sweep(self.center.store, self.center.queues, self.center.catalog, self.clock)
        self.added: list[int] = []
        self.steps: list[tuple[float, float]] = []
        """When each step began and ended that had rows to compare with the index."""
        self._rows = RowMaker(
            self.center.clock, self.center.settings.max_delay, self.center.settings.max_body
        )
        add = self.sweep.add

        def spy(rows: Any) -> SweepCounts:
            if rows:
                self.added.append(len(rows))
            return add(rows)

        self.sweep.add = spy  # type: ignore[method-assign]
        self.busy = False
        tables = frozenset(range(system.settings.tables))
        self.sweeper = Sweeper(self.sweep, lambda: tables, lambda: self.busy)

    def run(self, seconds: float) -> None:
        """Every step that comes within so many seconds."""
        assert isinstance(self.clock, FastClock)
        until = self.clock.monotonic() + seconds
        while (now := self.clock.monotonic()) < until:
            self.step(max(0.0, until - now))

    def step(self, most: float = inf) -> float:
        """One step, and its rest of ``most`` seconds at the most; returns how long it wants to rest."""
        assert isinstance(self.clock, FastClock)
        began, before = self.clock.ahead, len(self.added)
        pause = self.sweeper.run_once()
        if len(self.added) > before:
            self.steps.append((began, self.clock.ahead))
        self.clock.ahead += min(pause, most)
        return pause

    def bound(self, seconds: int) -> None:
        """Give the index this horizon."""
        self.center.store.identity.set_horizon(Horizon(seconds, "a test", 0))
        self.center.catalog.refresh()

    def slots(self) -> list[Slot]:
        return [slot for topic in self.center.catalog.known().values() for slot in topic.slots()]

    def reached(self, job_ids: list[int]) -> set[int]:
        """Those that the horizon has reached."""
        until = self.clock.now_ms() + self.sweep.horizon_ms()
        return {row.job_id for row in self.center.store.read(job_ids).values() if row.next_time <= until}

    def settled(self) -> None:
        """The passes over tables that are new here have ended."""
        self.run(3)
        self.added.clear()

    def store(self, *tasks: NewTask) -> list[int]:
        """Write rows alone, as one whose writer dies before it reaches Redis."""
        return insert_many(self.center.store, [self.row(task) for task in tasks])

    def row(self, task: NewTask) -> TaskRow:
        """The row of a task, its delay counted by the clock of the sweep."""
        row = self._rows.submission(task, self.center.catalog.get).row
        due = row.action_time + self.clock.now_ms() - Clock().now_ms()
        return row._replace(action_time=due, next_time=due)

    def indexed(self, job_ids: list[int]) -> set[int]:
        """Which of these stand in a StoreQueue, by Redis."""
        slots: dict[str, list[int]] = {}
        for row in self.center.store.read(job_ids).values():
            slots.setdefault(self.key(row), []).append(row.job_id)
        found: set[int] = set()
        for key, ids in slots.items():
            scores = self.ask("ZMSCORE", key, *ids)
            found |= {job_id for job_id, score in zip(ids, scores, strict=True) if score is not None}
        return found

    def score(self, row: TaskRow) -> float | None:
        reply = self.ask("ZSCORE", self.key(row), row.job_id)
        return None if reply is None else float(reply)

    def key(self, row: TaskRow) -> str:
        topic = known(self.center.catalog.of_type(row.biz_type))
        return self.center.queues.keys(topic.slot(row.slot_crc, row.slot_amount)).store

    def ask(self, *words: str | int) -> Any:
        node = self.center.queues.nodes.masters()[0]
        wire = node.take()
        reply = wire.ask(*words)
        node.give(wire)
        return reply


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.getfixturevalue(getattr(request, "param", "system")))


@pytest.mark.parametrize("plan", [SOON, OVERDUE, EDGE, DEAD, *LOST])
def test_no_rest_after_a_step_that_stood_still_is_longer_than_its_period(bench: Bench, plan: Pass) -> None:
    """It has kept no core busy all the time."""
    one, now = Round(plan, bench.sweep, 0.0), bench.clock.monotonic()
    one.rest(now - 9.0, max(plan.rest, REST_BUSY))
    assert one.at < now + max(plan.every, MOST_REST) + 0.1


def test_no_rest_of_the_check_of_dead_queues_is_longer_than_its_period(bench: Bench) -> None:
    def seen() -> dict[Slot, int]:
        assert isinstance(bench.clock, FastClock)
        bench.clock.ahead += 9.0
        return dict.fromkeys(bench.slots(), 1)

    check = DeadQueueCheck(bench.center.store, bench.center.queues, bench.clock, seen)
    assert check.run_once() <= PASS_SECONDS


def test_a_row_that_is_due_soon_is_indexed_within_a_second_of_its_commit(bench: Bench) -> None:
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=1.5) for n in range(20)))
    late = bench.store(*(NewTask("test.sync", n, delay=60) for n in range(20)))
    bench.run(SOON.every + 0.1)
    assert bench.indexed(job_ids + late) == set(job_ids)


def test_a_transaction_may_commit_seconds_after_the_time_of_its_row(bench: Bench) -> None:
    bench.settled()
    bench.center.store.topics.alter("test.sync", topic_type="instant")
    bench.center.catalog.refresh()
    row = bench.row(NewTask("test.sync", 1))
    bench.run(3)
    job_id = insert(bench.center.store, row)
    bench.run(SOON.every + 0.1)
    assert bench.indexed([job_id]) == {job_id}


def test_an_entry_that_stands_too_late_is_moved_and_one_that_stands_is_not_added_again(bench: Bench) -> None:
    bench.settled()
    late, well = (bench.row(NewTask("test.sync", n, delay=1.5)) for n in range(2))
    for row, by in ((late, 60_000), (well, 0)):
        insert(bench.center.store, row)
        bench.ask("ZADD", bench.key(row), row.next_time + by, row.job_id)
    taken(SWEEP_ADDED.of("store"))
    bench.run(SOON.every + 0.1)
    assert [bench.score(late), bench.score(well)] == [late.next_time, well.next_time]
    assert taken(SWEEP_ADDED.of("store")) == 1


def test_a_row_whose_time_changed_is_asked_for_again(bench: Bench) -> None:
    bench.settled()
    (job_id,) = bench.store(NewTask("test.sync", 1, delay=2.0))
    bench.run(1.6 * SOON.every)
    assert bench.indexed([job_id]) == {job_id}
    sooner = bench.clock.now_ms() + 100
    bench.center.store.reschedule(job_id, sooner)
    bench.run(SOON.every + 0.1)
    assert bench.score(known(bench.center.store.get(job_id))) == sooner


def test_a_burst_of_one_instant_is_indexed_to_the_last_in_small_steps(bench: Bench) -> None:
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", 7, delay=1.0) for _ in range(3000)))
    rows = bench.center.store.read(job_ids)
    assert len({job_id >> 12 & 7 for job_id in job_ids}) == 1
    assert len({row.next_time for row in rows.values()}) < 100
    bench.run(4)
    assert bench.indexed(job_ids) == set(job_ids)
    assert max(bench.added) <= ROWS_PER_STEP


def test_overdue_rows_come_back_within_seconds_however_old(bench: Bench) -> None:
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=1.0) for n in range(900)))
    old = [row._replace(next_time=n) for n, row in enumerate(bench.center.store.read(job_ids).values())]
    for row in old[:300]:
        bench.center.store.reschedule(row.job_id, row.next_time + 1)
    bench.run(12)
    assert bench.indexed(job_ids) == set(job_ids)


def test_tables_that_are_new_here_are_swept_to_the_horizon_at_once_and_no_further(bench: Bench) -> None:
    job_ids = bench.store(*(NewTask("test.sync", n, delay=3600) for n in range(500)))
    beyond = bench.store(*(NewTask("test.sync", n, delay=90_000) for n in range(50)))
    bench.run(3)
    assert bench.indexed(job_ids + beyond) == set(job_ids)


def test_what_comes_inside_a_short_horizon_is_indexed_in_time(bench: Bench) -> None:
    """The pass over all rows may come late for it; the look at what is due soon does not."""
    bench.center.store.topics.alter("test.sync", horizon=60)
    bench.center.catalog.refresh()
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=70) for n in range(100)))
    bench.run(5)
    assert bench.indexed(job_ids) == set()
    bench.run(64.7)
    assert bench.indexed(job_ids) == set(job_ids)


def test_what_was_committed_late_is_found_every_half_hour(bench: Bench) -> None:
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=36_000) for n in range(500)))
    bench.run(600)
    part = len(bench.indexed(job_ids))
    assert 0 < part < 500, "spread over its period"
    bench.run(3000)
    assert bench.indexed(job_ids) == set(job_ids)


def test_what_the_horizon_reaches_is_read_once_and_indexed_within_seconds(bench: Bench) -> None:
    bench.bound(600)
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=600 + n / 10) for n in range(1200)))
    bench.added.clear()
    for _ in range(5):
        bench.run(20)
        reached = bench.reached(job_ids)
        missing = reached - bench.indexed(job_ids)
        assert len(missing) <= 130, "what was reached in the last 12 seconds, and a little"
    assert 900 < len(reached) < 1100
    assert sum(bench.added) < 1.3 * len(job_ids)


def test_a_longer_horizon_is_read_once_and_a_shorter_one_again_from_there(bench: Bench) -> None:
    bench.bound(600)
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=620 + n) for n in range(500)))
    bench.added.clear()
    bench.bound(1200)
    bench.run(30)
    assert bench.indexed(job_ids) == set(job_ids)
    assert sum(bench.added) == len(job_ids)
    bench.bound(800)
    bench.run(15)
    assert bench.center.queues.trim(bench.slots(), bench.clock.now_ms() + 800_000) > 250
    bench.added.clear()
    bench.bound(1200)
    bench.run(30)
    assert bench.indexed(job_ids) == set(job_ids)
    assert 250 < sum(bench.added) < 350


def test_a_longer_horizon_waits_until_submitters_know_it(bench: Bench) -> None:
    """One that does not leaves to the sweep what it stores beyond the shorter one."""
    bench.bound(600)
    bench.settled()
    bench.bound(1200)
    bench.run(5)
    job_ids = bench.store(*(NewTask("test.sync", n, delay=900) for n in range(50)))
    bench.run(20)
    assert bench.indexed(job_ids) == set(job_ids)


def test_the_passes_ahead_leave_live_tasks_alone(bench: Bench) -> None:
    """They read few rows at once, rest much longer than they work, and come to their end nevertheless."""
    bench.bound(600)
    bench.settled()
    assert isinstance(bench.clock, FastClock)
    job_ids = bench.store(*(NewTask("test.sync", 7, delay=605) for _ in range(1000)))
    bench.steps.clear()
    while sum(bench.added) < len(job_ids):
        bench.run(0.1)
    assert bench.indexed(job_ids) == set(job_ids)
    assert max(bench.added) <= CRAWL_ROWS
    assert len(bench.steps) >= len(job_ids) / CRAWL_ROWS
    rests = [(later[0] - ended) / (ended - began) for (began, ended), later in pairwise(bench.steps)]
    assert min(rests) > 30 / 5  # not 19, as the clock of this test goes on with each look at it


def test_what_the_horizon_reached_while_its_table_did_not_answer_is_indexed_in_time(bench: Bench) -> None:
    """The pass over all rows may come late for it; the look at what is due soon does not."""
    bench.bound(600)
    bench.settled()
    job_ids = bench.store(*(NewTask("test.sync", n, delay=605) for n in range(100)))
    scan, broken = bench.sweep.scans.scan, SchemaBehind("a table is missing")

    def fails(quiet: Any, busy: Any, from_ms: int, *more: Any, **others: Any) -> Any:
        return scan((), {}, from_ms, *more, **others)._replace(failed=dict.fromkeys([*quiet, *busy], broken))

    bench.sweep.scans.scan = fails  # type: ignore[method-assign]
    bench.run(30)
    bench.sweep.scans.scan = scan  # type: ignore[method-assign]
    assert bench.indexed(job_ids) == set()
    bench.run(574.7)
    assert bench.indexed(job_ids) == set(job_ids)


def test_a_worker_whose_last_table_leaves_as_a_step_begins_takes_the_step(bench: Bench) -> None:
    tables = iter([frozenset({0})])
    assert Sweeper(bench.sweep, lambda: next(tables, frozenset()), lambda: False).run_once() >= 0


@pytest.mark.parametrize("bench", ["system", "alone"], indirect=True)
def test_pulled_tasks_whose_time_is_over_end_though_nobody_pulls(bench: Bench) -> None:
    topic, store = Topic("pulled", 99, 4, delivery=Delivery.PULL, retries=1), bench.center.store
    store.topics.create(topic)
    bench.center.catalog.refresh()
    bench.settled()
    now = Clock().now_ms()
    waiting, lapsed, expired = (
        bench.row(NewTask("pulled", n, delay=1.0))._replace(next_time=now - 60_000) for n in range(3)
    )
    insert_many(store, [waiting, lapsed, expired._replace(expires_at=now - 30_000)])
    store.pulls.hand_out([HandOut(lapsed.job_id, lapsed.biz_type, 1, 1, bytes(16))], now)
    counts = TRIES.of("pulled", "dead"), EXPIRED_TASKS.of("pulled")
    for count in counts:
        taken(count)
    with structlog.testing.capture_logs() as logs:
        bench.run(12)
    told = {(line["event"], line["job_id"], line.get("error")) for line in logs if "job_id" in line}
    assert told == {("task_dead", lapsed.job_id, LEASE_ENDED), ("task_expired", expired.job_id, None)}
    assert [taken(count) for count in counts] == [1, 1]
    rows = store.read([waiting.job_id, lapsed.job_id, expired.job_id])
    assert [rows[row.job_id].status for row in (waiting, lapsed, expired)] == [
        TaskStatus.PENDING,
        TaskStatus.DEAD,
        TaskStatus.CANCELLED,
    ]
    if bench.center.queues.present:
        assert bench.indexed([row.job_id for row in rows.values()]) == {waiting.job_id}
        assert buried(bench.center, topic.slots()) == {lapsed.job_id}


def test_a_biz_type_without_a_topic_is_logged_once_a_minute_and_holds_up_nothing(bench: Bench) -> None:
    bench.settled()
    lost = [bench.row(NewTask("test.sync", n, delay=1.0))._replace(biz_type=99) for n in range(300)]
    insert_many(bench.center.store, lost)
    job_ids = bench.store(NewTask("test.sync", 1, delay=1.0))
    taken(ROWS_WITHOUT_TOPIC.of())
    with structlog.testing.capture_logs() as logs:
        bench.run(30)
    assert [line["biz_type"] for line in logs if line["event"] == "no_topic_for_row"] == [99]
    assert taken(ROWS_WITHOUT_TOPIC.of()) == 1
    assert bench.indexed(job_ids) == set(job_ids)
    bench.center.store.topics.create(Topic("late", 99, 8))
    bench.center.catalog.refresh()
    for _ in range(10):  # a pass rests in proportion to what a step took: on a busy machine it takes longer
        bench.run(15)
        if len(bench.indexed([row.job_id for row in lost])) == 300:
            return
    raise AssertionError("not all are indexed")


def test_a_topic_that_another_process_has_just_created_counts_as_missing_nowhere(bench: Bench) -> None:
    bench.settled()
    taken(ROWS_WITHOUT_TOPIC.of())
    bench.center.store.topics.create(Topic("new", 99, 8))
    row = bench.row(NewTask("test.sync", 1, delay=1.0))._replace(biz_type=99)
    insert(bench.center.store, row)
    bench.run(5)
    assert bench.indexed([row.job_id]) == {row.job_id}
    assert not taken(ROWS_WITHOUT_TOPIC.of())


def test_no_row_counts_as_indexed_while_redis_is_out_of_reach(bench: Bench, clean_redis: RedisServer) -> None:
    bench.settled()
    clean_redis.kill()
    try:
        job_ids = bench.store(*(NewTask("test.sync", n, delay=1.0) for n in range(50)))
        with structlog.testing.capture_logs() as logs:
            bench.run(5)
        assert [line["event"] for line in logs].count("sweep_not_indexed") == 1
    finally:
        clean_redis.start()
    until, added = time.monotonic() + 60, 0.0
    taken(SWEEP_ADDED.of("store"))
    while added < 50:
        assert time.monotonic() < until
        bench.run(SOON.every)
        added += taken(SWEEP_ADDED.of("store"))
    assert bench.indexed(job_ids) == set(job_ids)
