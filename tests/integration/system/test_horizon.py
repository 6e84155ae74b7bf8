"""What is later than a topic's horizon waits in MySQL alone;
the horizon follows what is pending and the memory."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import structlog
from harness import forks
from harness.rows import insert_many, known
from harness.system import System
from harness.tables import raw
from integration.system.test_sweep import Bench, FastClock

from benchmarks.local import RedisServer
from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus
from toc.index.messages import Prepared, PrepareRequest
from toc.maintenance.due_walk import DueWalk
from toc.maintenance.horizon import HorizonKeeper
from toc.maintenance.sweep import MAX_AHEAD_MS
from toc.model.access import Action, Role, Token
from toc.model.horizon import LEAST, Budget
from toc.model.topic import Slot
from toc.model.verdict import beyond_horizon
from toc.operate import doctor
from toc.operate.operation import Doing
from toc.operate.topics import show_topic

# Tasks due later than their topic's horizon wait in MySQL alone, and every change knows it.

HOUR = 3600


@pytest.fixture
def running(system: System) -> System:
    system.create_topics(horizon=HOUR)
    system.start()
    return system


def entry_count(system: System) -> int:
    """How many entries of the topic there are in Redis."""
    return sum(peek.store + peek.prepared + peek.dead for peek in system.peeks("test.sync"))


def test_a_retry_beyond_the_horizon_leaves_redis_and_keeps_its_row(running: System) -> None:
    job_id = running.center.submit(
        "test.sync", biz_id=1, delay=0.1, attribute={"fail": 1, "retry_after": 2 * HOUR}
    )
    running.wait(lambda: running.row(job_id).attempts == 1, "it has failed", 10)
    running.wait(lambda: entry_count(running) == 0, "it has left Redis", 5)
    assert running.row(job_id).status == TaskStatus.PENDING
    sooner = datetime.now(UTC) + timedelta(seconds=1)
    assert running.center.reschedule(job_id, action_time=sooner) is RescheduleOutcome.MAY_HAVE_STARTED
    # A new deadline has all its tries, of which the first fails as asked.
    running.wait(lambda: len(running.starts(job_id)) == 2, "it runs at its new time", 5)


def test_reschedule_goes_over_the_horizon_both_ways(running: System) -> None:
    center = running.center
    job_id = center.submit("test.sync", biz_id=1, delay=HOUR / 2)
    assert entry_count(running) == 1
    far, near = (datetime.now(UTC) + timedelta(hours=hours) for hours in (2, 0.6))
    assert center.reschedule(job_id, action_time=far) is RescheduleOutcome.RESCHEDULED
    assert entry_count(running) == 0
    assert [task.job_id for task in center.find(biz_id=1)] == [job_id]
    assert center.reschedule(job_id, action_time=near) is RescheduleOutcome.RESCHEDULED
    assert entry_count(running) == 1
    assert center.reschedule(job_id, action_time=far) is RescheduleOutcome.RESCHEDULED
    soon = datetime.now(UTC) + timedelta(seconds=1)
    assert center.reschedule(job_id, action_time=soon) is RescheduleOutcome.RESCHEDULED
    running.wait(lambda: running.row(job_id).status == TaskStatus.PROCESSED, "it has run", 5)
    assert len(running.starts(job_id)) == 1


def test_what_lies_beyond_the_horizon_can_be_cancelled_and_is_not_brought_in_by_a_refill(
    running: System, clean_redis: RedisServer
) -> None:
    center = running.center
    far = center.submit_many([NewTask("test.sync", n, 2 * HOUR) for n in range(20)])
    near = center.submit_many([NewTask("test.sync", n, HOUR / 2) for n in range(20)])
    assert entry_count(running) == 20
    assert center.cancel(far[0]) is CancelOutcome.CANCELLED
    assert center.cancel(far[0]) is CancelOutcome.CANCELLED
    # A loss amid the first filling may show in no key; then they come back with the pass over the window.
    running.wait(running.whole, "the first generation is recorded", 15)
    clean_redis.call("FLUSHALL")
    running.wait(lambda: entry_count(running) == len(near), "what lies inside is back", 10)
    assert {running.row(job_id).status for job_id in far[1:]} == {TaskStatus.PENDING}


# The horizon follows what is pending and the memory there is: on a real Redis, over the real sweep.

BUDGET = Budget(60)
TICK = 2.0
MEMORY = 1_200_000
"""Bytes of the budget for entries."""
REMOVE = "for _, key in ipairs(KEYS) do redis.call('ZREMRANGEBYSCORE', key, '-inf', ARGV[1]) end"


@pytest.fixture
def redis(clean_redis: RedisServer) -> Iterator[RedisServer]:
    yield clean_redis
    clean_redis.call("CONFIG", "SET", "maxmemory", 0)


def used(redis: RedisServer) -> int:
    lines = str(redis.call("INFO", "memory")).split()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("used_memory:"))


def allow(redis: RedisServer, beside: int) -> int:
    """Give Redis so much memory that the budget is what it uses now and so many bytes. Returns the budget."""
    budget = used(redis) + beside
    redis.call("CONFIG", "SET", "maxmemory", budget * 100 // BUDGET.percent)
    return budget


class Run:
    """Virtual time: tasks are submitted, come due and end; the real sweep, walk and keeper do their work."""

    def __init__(self, system: System, redis: RedisServer) -> None:
        self.bench = Bench(system)
        self.redis = redis
        self.center = self.bench.center
        assert isinstance(self.bench.clock, FastClock)
        self.clock = self.bench.clock
        self.keeper = HorizonKeeper(self.center.store, self.center.queues, self.clock, BUDGET)
        tables = frozenset(range(system.settings.tables))
        self.walk = DueWalk(self.center.store, self.center.catalog, self.clock, lambda: tables)
        self._walk_at = 0.0
        self.budget = allow(redis, MEMORY)
        self.random = random.Random(9)
        self.waiting: list[tuple[int, int, str]] = []
        """When each pending task is due (ms), its id, and its StoreQueue."""
        self.highest = 0.0
        self.horizons: list[int] = []
        self.ticks = 0

    @property
    def horizon(self) -> int:
        return self.bench.sweep.horizon_ms() // 1000

    def submit(self, delays: list[float]) -> None:
        """As the SDK does: rows first, then the entries of what the horizon reaches, as far as known."""
        rows = [
            self.bench.row(NewTask("test.sync", self.random.randrange(1 << 40), delay)) for delay in delays
        ]
        ids = insert_many(self.center.store, rows)
        now = self.clock.now_ms()
        entries: dict[Slot, list[tuple[int, float]]] = {}
        for job_id, row in zip(ids, rows, strict=True):
            topic = known(self.center.catalog.known_type(row.biz_type))
            slot = topic.slot(row.slot_crc, row.slot_amount)
            self.waiting.append((row.next_time, job_id, self.center.queues.keys(slot).store))
            if not beyond_horizon(topic, row.next_time, now):
                entries.setdefault(slot, []).append((job_id, float(row.next_time)))
        self.center.queues.add(entries)

    def tick(self, delays: list[float]) -> None:
        """Two seconds: a submitter and the sweep know the horizon of the tick before."""
        if delays:
            self.submit(delays)
        self.bench.run(TICK)
        while self._walk_at <= self.clock.ahead:
            self._walk_at = self.clock.ahead + self.walk.run_once()
        self.center.catalog.refresh()
        self.keeper.look()
        self.horizons.append(self.horizon)
        self.highest = max(self.highest, used(self.redis) / self.budget)
        assert self.highest <= 1.1, f"{self.highest:.2f} of the budget at {self.clock.ahead:.0f} s"
        self.ticks += 1
        if self.ticks % 5 == 0:
            self._soon_is_indexed()
        self._end()

    def _soon_is_indexed(self) -> None:
        """What is due within half a minute stands in the index."""
        soon: dict[str, list[int]] = {}
        now = self.clock.now_ms()
        for due, job_id, key in self.waiting:
            if now <= due <= now + MAX_AHEAD_MS:
                soon.setdefault(key, []).append(job_id)
        for key, ids in soon.items():
            assert None not in self.bench.ask("ZMSCORE", key, *ids), f"at {self.clock.ahead:.0f} s"

    def _end(self) -> None:
        """What is due ends: its entries and rows."""
        now = self.clock.now_ms()
        due = [job_id for at, job_id, _ in self.waiting if at < now]
        if due:
            keys = {self.center.queues.keys(slot).store for slot in self.bench.slots()}
            self.redis.call("EVAL", REMOVE, len(keys), *keys, f"({now}")
            self.center.store.finish((job_id, 0) for job_id in due)
            self.waiting = [one for one in self.waiting if one[0] >= now]


@pytest.mark.chaos
def test_from_10_to_100_000_a_second_and_back_and_a_burst_at_nine(tmp_path: Path, redis: RedisServer) -> None:
    system = System(tmp_path, database_urls=[f"sqlite:///{tmp_path}/rows.db"], redis_url=redis.url, tables=2)
    run = Run(system, redis)
    up, nine, down, end = 30, 480, 600, 1000
    reached = []

    while (second := run.clock.ahead) < end + 200:
        delays = [run.random.uniform(60, 600) for _ in range(int(up <= second < down) * 80)]
        if not delays and second < end - 600 and run.random.random() < 0.01:
            delays = [600.0]
        if 150 <= second < 300:
            delays += [nine - second] * 30
        run.tick(delays)
        reached.append(second + run.horizon >= nine)
    print(
        f"at most {run.highest:.3f} of the budget",
        [len(list(same)) for _, same in groupby(reached)],
        sorted(set(run.horizons)),
    )
    assert run.horizons[0] == 86_400
    assert min(run.horizons) >= LEAST
    assert min(run.horizons) < 300
    assert run.horizons[-1] == 86_400
    assert not run.waiting
    system.center.close()


def test_two_daemons_keep_within_less_memory_and_all_run_in_time(system: System, redis: RedisServer) -> None:
    system.create_topics()
    for host in ("host-a", "host-b"):
        system.start(host, processes=1)
    center, slots = system.center, system.slots()
    center.submit_many([NewTask("test.sync", n, 3600 + n) for n in range(10_000)])
    near = center.submit_many([NewTask("test.sync", n, 10 + n / 20) for n in range(600)])
    held = scheduled(system)
    assert held == 10_600
    before = used(redis)
    budget = before - 500_000
    redis.call("CONFIG", "SET", "maxmemory", budget * 100 // BUDGET.percent)
    system.wait(lambda: scheduled(system) < held - 2000, "entries are removed", 60)
    system.wait(lambda: used(redis) <= budget, "it is within its budget", 60)
    bound = center.store.identity.horizon()
    assert LEAST <= bound.seconds < 3600 + 10_000
    assert "of its budget" in bound.why
    assert center.catalog.refresh()["test.sync"].horizon == bound.seconds
    now = center.clock.now_ms()
    beyond = [now + 1000 * (bound.seconds + seconds) for seconds in (60, 1200)]
    center.submit_many([NewTask("test.sync", n, bound.seconds + 600) for n in range(50)])
    assert center.queues.standing(slots, *beyond) == 0, "submitters know it"
    system.wait(lambda: not system.pending(near), "all have run", 90)
    assert not system.not_run_once(near)


@pytest.fixture
def kept(system: System) -> HorizonKeeper:
    """A keeper that a test lets look, of an index with 5,000 entries over ten hours and some of each kind."""
    system.create_topics(retries=1)
    center = system.center
    slot = center.catalog.get("test.sync").slot(0)
    center.queues.add({slot: [(number, 1.0) for number in range(1, 31)]})
    (taken,) = center.queues.prepare([PrepareRequest(slot, 20, 1, 7)]).values()
    assert isinstance(taken, Prepared)
    center.queues.bury({slot: [(job_id, fence, 5) for job_id, fence in taken.entries[:10]]})
    center.submit_many([NewTask("test.sync", n, 10 + 7.2 * n) for n in range(5000)])
    return HorizonKeeper(center.store, center.queues, center.clock, BUDGET)


def entries(system: System, redis: RedisServer) -> dict[str, dict[str, float]]:
    """What stands in each kind of queue: id -> score."""
    found: dict[str, dict[str, float]] = {"store": {}, "prepare": {}, "dead": {}}
    for slot in system.center.catalog.get("test.sync").slots():
        for kind, of_kind in found.items():
            key = getattr(system.center.queues.keys(slot), kind)
            flat: Any = redis.call("ZRANGE", key, 0, -1, "WITHSCORES")
            of_kind |= {f"{slot} {job_id}": float(score) for job_id, score in batched(flat)}
    return found


def batched(flat: list[str]) -> list[tuple[str, str]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def test_only_the_farthest_are_removed_and_nothing_due_taken_or_dead(
    system: System, redis: RedisServer, kept: HorizonKeeper
) -> None:
    before = entries(system, redis)
    assert [len(before[kind]) for kind in ("store", "prepare", "dead")] == [5010, 10, 10]
    assert kept.look() is None, "there is no maxmemory"
    budget = allow(redis, -200_000)
    choice = kept.look()
    after = entries(system, redis)
    assert choice is not None
    assert used(redis) <= budget
    assert (after["prepare"], after["dead"]) == (before["prepare"], before["dead"])
    removed = before["store"].keys() - after["store"].keys()
    assert 1000 < len(removed) < 4900
    assert max(after["store"].values()) <= min(before["store"][one] for one in removed)
    assert max(after["store"].values()) > system.center.clock.now_ms() + 1000 * (choice.seconds - 60)
    assert kept.look() is None


def test_operators_see_the_horizon_and_why(system: System, redis: RedisServer, kept: HorizonKeeper) -> None:
    def told() -> list[tuple[str, str]]:
        lines = doctor.examine(system.center)
        return [(line.level.value, line.what) for line in lines if "the horizon of" in line.what]

    assert told() == []
    allow(redis, -200_000)
    choice = known(kept.look())
    ((level, what),) = told()
    assert level == "note"
    assert f"the horizon of 4 topics is {choice.seconds} s: " in what
    assert "% of its budget" in what
    shown = json.loads(forks.run(["topic", "show", "test.sync", "--json"], env=system.env).stdout)
    assert (shown["horizon"], shown["horizon_in_force"]) == (86_400, choice.seconds)
    assert shown["horizon_why"] == choice.why
    for pattern, why in (("*", choice.why), ("test.*", "the memory of Redis bounds it")):
        token = Token("reader", frozenset({Role.READ}), (pattern,))
        doing = Doing(system.center, "reader", Action.READ_TOPICS, token)
        assert show_topic.perform(doing, {"topic": "test.sync"})["horizon_why"] == why
    assert shown["horizon_since"].endswith("Z")
    assert system.center.store.topics.get("test.sync") == replace(
        system.center.catalog.refresh()["test.sync"], horizon=86_400
    ), "the topic table says what it said"
    redis.call("CONFIG", "SET", "maxmemory", 1_000_000)
    choice = known(kept.look())
    assert choice.seconds == LEAST
    with structlog.testing.capture_logs() as logs:
        kept.look()
    assert logs == [], "nothing has changed"
    assert [level for level, _ in told()] == ["warn"]


def test_while_redis_is_away_the_horizon_stays_and_with_memory_it_grows_back(
    system: System, redis: RedisServer, kept: HorizonKeeper
) -> None:
    identity, queues = system.center.store.identity, system.center.queues
    allow(redis, -200_000)
    kept.look()
    bound = identity.horizon()
    assert bound.seconds
    queues.refuse("away")
    assert kept.run_once() > 0
    assert identity.horizon() == bound
    queues.refuse(None)
    redis.call("CONFIG", "SET", "maxmemory", 0)
    assert kept.look() is None, "everybody must have known the shorter one for a minute"
    identity.set_horizon(bound._replace(since=bound.since - 61_000))
    assert kept.look() is None, "what the index holds must have been counted"
    store, catalog, tables = system.center.store, system.center.catalog, system.settings.tables
    walk = DueWalk(store, catalog, system.center.clock, lambda: frozenset(range(tables)))
    while len(store.due_counts.kept(range(tables))) < tables or not all(
        len(counts) == 2 for counts in store.due_counts.kept(range(tables)).values()
    ):
        walk.run_once()
    HorizonKeeper(store, queues, system.center.clock, BUDGET).look()
    assert identity.horizon().seconds == 0


def test_one_of_many_looks(system: System) -> None:
    identity = system.center.store.identity
    assert [identity.may_look(60_000) for _ in range(3)] == [True, False, False]
    assert identity.may_look(0), "the last look was long ago"
    with raw(system.settings) as sql:  # by a clock that was an hour ahead
        sql.exec_driver_sql(
            f"UPDATE {system.settings.database_prefix}0.timeout_identity "
            "SET horizon_looked = horizon_looked + 3600000"
        )
    assert [identity.may_look(60_000) for _ in range(2)] == [True, False]


def scheduled(system: System) -> int:
    """How many entries stand in the StoreQueues."""
    return sum(peek.store for peek in system.peeks())
