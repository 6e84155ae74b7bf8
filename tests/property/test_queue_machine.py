"""Any order of steps against a small model: the real SDK, table, scripts, worker loops and sweep.

Two workers own every slot. Hypothesis chooses who does what next: submits, cancels, reschedules, takes that
are checked and wait, starts, ends, flushes, keep-alives, crashes, passes of the sweep; time passes, and the
index forgets. Workers are real but for their threads: each loop runs when it is told to. The clocks of the
server and of the workers stand still between two steps, so that every example can be repeated.

The model knows of each task: its row, the tries that run, and what callers were told. After every step each
row must be what the step may have made of it, and no id may stand in two places of the index. Every start is
judged when it happens. In the end time passes until everything has settled, and nothing may be left.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from fault.kit.servers import ShiftedRedis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from toc import CancelOutcome, Dead, RescheduleOutcome, Settings, Task, TaskStatus, TimeoutCenter, Topic
from toc.admin import redrive
from toc.clock import Clock, from_ms
from toc.local.server import MissingServer
from toc.store.migrate import Migrator
from toc.store.server import Statement
from toc.sweep import Crawl, Sweep
from toc.task import TaskRow, TryRow
from toc.topic import Backoff
from toc.worker.entry import Entry
from toc.worker.link import Link
from toc.worker.process import Worker

TABLES = 2
RETRIES = 2
PREPARE_TIMEOUT = 30
TOPIC = Topic("machine", 7, 2, retries=RETRIES, backoff=Backoff.IMMEDIATE, prepare_timeout=PREPARE_TIMEOUT)
WORKERS = st.integers(0, 1)


class FrozenClock(Clock):
    """Stands still until it is told to jump, for the workers and for the server alike."""

    def __init__(self, server: ShiftedRedis) -> None:
        self._server = server
        self._seconds = 1_900_000_000

    def jump(self, seconds: int) -> None:
        """Seconds later, at once and everywhere."""
        self._seconds += seconds
        path = self._server.clock.path
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{datetime.fromtimestamp(self._seconds, UTC):%Y-%m-%d %H:%M:%S}\n")
        fresh.replace(path)  # the server reads it at every look at its clock

    def now_ms(self) -> int:
        return self._seconds * 1000

    def time(self) -> float:
        return float(self._seconds)

    def monotonic(self) -> float:
        return float(self._seconds)


class Hand:
    """In place of the dispatcher: what it is given waits until the machine starts it."""

    def __init__(self) -> None:
        self.waiting: list[Entry] = []
        self.running: list[Entry] = []

    def room(self, topic: str) -> int:  # noqa: ARG002 - the dispatcher's signature
        return 100

    def want_room(self) -> None:
        pass

    def put(self, entries: Sequence[Entry]) -> None:
        self.waiting += entries


class Party:
    """One worker process with its loops at rest."""

    def __init__(self, center: TimeoutCenter, name: str, dead: frozenset[str]) -> None:
        self.name = name
        self.hand = Hand()
        self._sockets = socket.socketpair()
        self.worker = Worker(center, name, Link(self._sockets[0]), app="", threads=1)
        self.worker.poller.dispatcher = self.hand  # type: ignore[assignment]
        self.worker.finisher.loop.pause = lambda _: None  # type: ignore[assignment, method-assign]
        self.worker.book.dead = dead
        self.worker.book.want(TOPIC.slots())
        self.worker.book.claim_missing()
        self.reported: list[tuple[Entry, BaseException | None]] = []
        """What has ended and is not written yet."""

    def close(self) -> None:
        self.worker._wake_receiver.close()
        self.worker._wake_sender.close()
        for one in self._sockets:
            one.close()


@dataclass
class Known:
    """What the model knows of one task."""

    row: TaskRow
    told: set[CancelOutcome] = field(default_factory=set)
    moved_in_time: set[int] = field(default_factory=set)
    """Versions of which the caller was told that they have not run and never will."""
    ran: set[int] = field(default_factory=set)
    """Versions of which a try has started."""
    taken: bool = False
    """Whether a worker ever held it."""
    untold: bool = False
    """Whether the index has forgotten that a worker holds it: a cancel after its due time cannot know."""
    losses: int = 0
    """Times that it was held and lost, each of which may charge a try; also one after a reschedule."""


def holding(machine: Machine) -> list[int]:
    """The workers that hold something."""
    return [n for n, party in enumerate(machine.parties) if len(party.worker.inflight)]


def waiting(machine: Machine) -> list[int]:
    """The workers that hold something that has not begun."""
    return [n for n, party in enumerate(machine.parties) if party.hand.waiting]


def running(machine: Machine) -> list[int]:
    """The workers whose handlers run."""
    return [n for n, party in enumerate(machine.parties) if party.hand.running]


def unwritten(machine: Machine) -> list[int]:
    """The workers that have not written how tries ended."""
    return [n for n, party in enumerate(machine.parties) if party.reported]


class Machine(RuleBasedStateMachine):
    """The steps, the model, and what must hold after each."""

    center: ClassVar[TimeoutCenter]
    clock: ClassVar[FrozenClock]
    redis: ClassVar[Redis]

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[int, Known] = {}
        self.forgotten: list[Entry] = []
        """Held, and perhaps lost by the index."""
        self.snapshot: dict[bytes, bytes] | None = None
        self.made = 0
        self.dead: frozenset[str] = frozenset()
        self.parties: list[Party] = []

    @initialize()
    def begin(self) -> None:
        self.redis.flushdb()
        self.clock.jump(3600)  # no two examples share an instant
        shards = self.center.store._shards
        for name in shards.names:
            shards.servers[0].run([Statement(f"DELETE FROM {name}")])
        self.center._index_paused_until = float("-inf")
        self.parties = [self._party(), self._party()]
        self.submit([0.5, 0.5, 0.5, 19.5], indexed=True)

    def _party(self) -> Party:
        self.made += 1
        return Party(self.center, f"w{self.made}", self.dead)

    # --- callers

    @rule(
        delays=st.lists(st.sampled_from([0.5, 0.5, 19.5, 99.5]), min_size=1, max_size=4),
        indexed=st.booleans(),
    )
    def submit(self, delays: list[float], indexed: bool) -> None:
        """Also by an SDK that dies, or finds Redis down, after the row."""
        self.center._index_paused_until = float("-inf" if indexed else "inf")
        for delay in delays:
            job_id = self.center.submit(TOPIC.name, biz_id=len(self.tasks), delay=delay)
            self.tasks[job_id] = Known(self._row(job_id))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id, task = self._draw(data)
        before, now = task.row, self.clock.now_ms()
        outcome = self.center.cancel(job_id)
        if before.status in (TaskStatus.PROCESSED, TaskStatus.DEAD):
            assert outcome is CancelOutcome.TOO_LATE
            return
        if before.status == TaskStatus.CANCELLED:
            assert {outcome} == task.told
            return
        if outcome is CancelOutcome.CANCELLED:
            assert before.version not in task.ran or (task.untold and now >= before.action_time)
        else:
            assert outcome is CancelOutcome.MAY_HAVE_STARTED
            assert task.taken or now >= before.action_time or before.attempts or before.crashes
        task.told = {outcome}
        self._expect(task, status=TaskStatus.CANCELLED, at_least_tried=outcome is not CancelOutcome.CANCELLED)

    @rule(data=st.data(), delay=st.sampled_from([1.5, 49.5]))
    def reschedule(self, data: st.DataObject, delay: float) -> None:
        job_id, task = self._draw(data)
        before = task.row
        self.center._index_paused_until = float("-inf")
        later = self.clock.now_ms() + int(delay * 1000)
        outcome = self.center.reschedule(job_id, action_time=from_ms(later))
        if before.status != TaskStatus.PENDING:
            assert outcome is RescheduleOutcome.TOO_LATE
            return
        if outcome is RescheduleOutcome.RESCHEDULED:
            assert before.version not in task.ran
            task.moved_in_time.add(before.version)
        else:
            assert outcome is RescheduleOutcome.MAY_HAVE_STARTED
        after = self._row(job_id)
        assert (after.action_time, after.next_time, after.version) == (later, later, before.version + 1)
        assert (after.status, after.attempts, after.crashes) == (TaskStatus.PENDING, 0, 0)
        task.row = after

    @precondition(lambda self: any(t.row.status == TaskStatus.DEAD for t in self.tasks.values()))
    @rule()
    def redrive_all(self) -> None:
        dead = [job_id for job_id, t in self.tasks.items() if t.row.status == TaskStatus.DEAD]
        redrive(self.center.store, self.center.queues, [TOPIC], dead, now_ms=self.clock.now_ms)
        for job_id in dead:
            before, after = self.tasks[job_id].row, self._row(job_id)
            assert (after.status, after.version) == (TaskStatus.PENDING, before.version + 1)
            assert (after.attempts, after.crashes) == (0, 0)
            self.tasks[job_id].row = after

    # --- workers

    @rule(number=WORKERS, seconds=st.sampled_from([0, 2, 2, 25]), started=st.booleans())
    def work(self, number: int, seconds: int, started: bool) -> None:
        """What happens most: time passes, and what has come due is taken and begins."""
        self.time_passes(seconds)
        self.take(number)
        if started:
            self.start(number)

    def take(self, number: int) -> None:
        """Prepare what is due and check its rows."""
        party = self.parties[number]
        party.worker.poller.look_at(None, 0)
        party.worker.poller.run_once()
        for entry in party.worker.inflight.snapshot():
            self.tasks[entry.job_id].taken = True
        for entry in party.hand.waiting:
            assert entry.row.next_time <= self.clock.now_ms()

    @precondition(lambda self: bool(waiting(self)))
    @rule(data=st.data())
    def start_what_waits(self, data: st.DataObject) -> None:
        self.start(data.draw(st.sampled_from(waiting(self))))

    def start(self, number: int) -> None:
        """The handlers of everything that waits begin to run."""
        party = self.parties[number]
        while party.hand.waiting:
            self._started(party, party.hand.waiting.pop(0))

    def _started(self, party: Party, entry: Entry) -> None:
        task = self.tasks[entry.job_id]
        version = entry.row.version
        answered = CancelOutcome.CANCELLED in task.told
        assert not answered or task.untold, "ran although its cancel was answered CANCELLED"
        assert version not in task.moved_in_time, "ran for a deadline that was moved in time"
        assert self.clock.now_ms() >= entry.row.action_time, "early"
        assert entry.row.attempts < RETRIES
        for other in self.parties:
            for running in other.hand.running:
                if running.job_id == entry.job_id:
                    assert other is not party, "one worker runs it twice"
                    assert self._may_be_elsewhere(running) or self._may_be_elsewhere(entry), "runs twice"
        entry.started = self.clock.monotonic()
        task.ran.add(version)
        party.hand.running.append(entry)

    def _may_be_elsewhere(self, entry: Entry) -> bool:
        """Whether another worker may have the id by now."""
        return entry in self.forgotten or self.clock.monotonic() - entry.kept > PREPARE_TIMEOUT

    @precondition(lambda self: bool(running(self)))
    @rule(data=st.data(), how=st.sampled_from(["ok", "fail", "fail", "dead"]), flushed=st.booleans())
    def end(self, data: st.DataObject, how: str, flushed: bool) -> None:
        number = data.draw(st.sampled_from(running(self)))
        party = self.parties[number]
        entry = party.hand.running.pop(data.draw(st.integers(0, len(party.hand.running) - 1)))
        error = {"ok": None, "fail": RuntimeError("as asked"), "dead": Dead("as asked")}[how]
        assert party.worker.inflight.settle(entry)
        party.worker.finisher.ended(entry, error)
        party.reported.append((entry, error))
        if flushed:
            self.flush(number)

    @precondition(lambda self: bool(unwritten(self)))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        self.flush(data.draw(st.sampled_from(unwritten(self))))

    def flush(self, number: int) -> None:
        """The finisher writes rows, then moves entries."""
        party = self.parties[number]
        reported, party.reported = party.reported, []
        for entry, error in sorted(reported, key=lambda pair: pair[1] is not None):  # successes first
            self._reported(self.tasks[entry.job_id], entry.row, error)
        while not party.worker.finisher.idle:
            party.worker.finisher.run_once()

    def _reported(self, task: Known, read: TryRow, error: BaseException | None) -> None:
        row = task.row
        if row.status == TaskStatus.CANCELLED:
            self._expect(task, at_least_tried=True)
        elif row.status != TaskStatus.PENDING or row.version != read.version:
            pass  # the row decides
        elif error is None:
            self._expect(task, status=TaskStatus.PROCESSED)
        elif (row.attempts, row.crashes) == (read.attempts, read.crashes):
            dead = isinstance(error, Dead) or read.attempts + 1 >= RETRIES
            status = TaskStatus.DEAD if dead else TaskStatus.PENDING
            self._expect(task, status=status, attempts=read.attempts + 1, crashes=0)

    @precondition(lambda self: bool(holding(self)))
    @rule(data=st.data())
    def keep_alive(self, data: st.DataObject) -> None:
        self._keep_alive(data.draw(st.sampled_from(holding(self))))

    def _keep_alive(self, number: int) -> None:
        self.parties[number].worker.keeper.run_once()

    @precondition(lambda self: bool(waiting(self)))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """What waits is given back, as when a slot moves or the worker stops."""
        number = data.draw(st.sampled_from(waiting(self)))
        party = self.parties[number]
        party.worker.finisher.give_back(party.hand.waiting + party.worker.poller.withdraw())
        party.hand.waiting = []
        self.flush(number)

    @rule(number=WORKERS)
    def reclaim(self, number: int) -> None:
        """Give back what timed out and what the dead have left."""
        reclaimer = self.parties[number].worker.reclaimer
        reclaimer.look_now()
        reclaimer.run_once()
        for job_id, task in self.tasks.items():
            before, after = task.row, self._row(job_id)
            if before.status == TaskStatus.CANCELLED:
                self._expect(task, at_least_tried=after.attempts > 0)
            elif _essence(after) != _essence(before):
                assert task.losses or self._held_too_long(job_id), "a try was charged that nobody lost"
                task.losses = max(task.losses - 1, 0)
                assert before.status == after.status == TaskStatus.PENDING
                assert after.version == before.version
                assert after.crashes == before.crashes + 1
                assert after.attempts in (before.attempts, before.attempts + 1)
                assert after.attempts < RETRIES, "the last try was charged for a crash"
                assert after.next_time >= after.action_time
                task.row = after

    def _held_too_long(self, job_id: int) -> bool:
        return any(
            entry.job_id == job_id and self._may_be_elsewhere(entry)
            for party in self.parties
            for entry in party.worker.inflight.snapshot()
        )

    @precondition(lambda self: bool(holding(self)))
    @rule(data=st.data(), alive=st.booleans(), started=st.booleans())
    def overtake(self, data: st.DataObject, alive: bool, started: bool) -> None:
        """A worker is paused for longer than prepare_timeout; the other goes on, and takes what it held."""
        number = data.draw(st.sampled_from(holding(self)))
        for seconds in (12, 12, 12):
            self.time_passes(seconds)
            if alive:
                self._keep_alive(1 - number)
        self.reclaim(1 - number)
        self.take(1 - number)
        if started:
            self.start(1 - number)

    @precondition(lambda self: bool(holding(self)))
    @rule(data=st.data(), known=st.booleans())
    def crash(self, data: st.DataObject, known: bool) -> None:
        """A worker dies with all that it holds; another takes its place. Its death is known or silent."""
        number = data.draw(st.sampled_from(holding(self)))
        party = self.parties[number]
        for entry in party.worker.inflight.snapshot():
            self.tasks[entry.job_id].losses += 1
        party.close()
        if known:
            self.dead |= {party.name}
        self.parties[number] = self._party()
        for other in self.parties:
            other.worker.book.dead = self.dead

    # --- the world

    @rule(seconds=st.sampled_from([1, 12, 40]))
    def time_passes(self, seconds: int) -> None:
        self.clock.jump(seconds)

    @rule()
    def remember(self) -> None:
        """A snapshot of the index."""
        self.snapshot = {key: self.redis.dump(key) for key in self.redis.scan_iter()}  # type: ignore[misc]

    @rule(
        what=st.sampled_from(["all", "store", "prepare", "prepare", "dead", "snapshot"]),
        swept=st.booleans(),
        by=WORKERS,
    )
    def lose(self, what: str, swept: bool, by: int) -> None:
        """The index forgets, and perhaps the sweep brings back what is due, and somebody takes it."""
        self.forget(what)
        if swept:
            self.sweep()
            self.take(by)
            self.start(by)

    def forget(self, what: str) -> None:
        """The index loses writes: all, those of one kind of queue, or all since the snapshot."""
        if what == "snapshot" and self.snapshot is None:
            return
        if what in ("all", "snapshot"):
            self.redis.flushdb()
        for key, dump in (self.snapshot or {}).items() if what == "snapshot" else ():
            self.redis.restore(key, 0, dump)
        if what not in ("all", "snapshot"):
            for slot in TOPIC.slots():
                self.redis.delete(getattr(self.center.queues.keys(slot), what))
        for party in self.parties:
            for entry in party.worker.inflight.snapshot():
                self.forgotten.append(entry)
                self.tasks[entry.job_id].losses += 1
                self.tasks[entry.job_id].untold = True

    @rule()
    def sweep(self) -> None:
        self._sweep()

    def _sweep(self) -> None:
        center = self.center
        passes = Sweep(center.store, center.queues, center.catalog, self.clock)
        until = self.clock.now_ms() + passes.horizon_ms()
        for status in (TaskStatus.PENDING, TaskStatus.DEAD):
            crawl = Crawl(passes, range(TABLES), from_ms=0, to_ms=until, status=status)
            while crawl.tables_left:
                crawl.step()

    # --- what must hold

    @invariant()
    def rows_are_what_the_steps_made_of_them(self) -> None:
        rows = self.center.store.read(list(self.tasks))
        for job_id, task in self.tasks.items():
            assert _essence(rows[job_id]) == _essence(task.row)
            task.row = rows[job_id]

    @invariant()
    def no_id_stands_in_two_places(self) -> None:
        for slot in TOPIC.slots() if self.tasks else ():
            keys = self.center.queues.keys(slot)
            stand = [
                {str(member, "ascii") for member in cast(list[bytes], self.redis.zrange(key, 0, -1))}
                for key in (keys.store, keys.prepare, keys.dead)
            ]
            assert len(set.union(*stand)) == sum(map(len, stand)), stand
            for member in set.union(*stand):
                row = self.tasks[int(member)].row
                assert TOPIC.slot(row.slot_crc, row.slot_amount) == slot

    def teardown(self) -> None:
        try:
            if self.parties:
                self._settle()
        finally:
            for party in self.parties:
                party.close()

    def _settle(self) -> None:
        """No more trouble: everything ends, soon, and the index agrees."""
        for _ in range(RETRIES + 3):
            self.time_passes(200)
            for number, party in enumerate(self.parties):
                self.start(number)
                while party.hand.running:
                    entry = party.hand.running.pop()
                    assert party.worker.inflight.settle(entry)
                    party.worker.finisher.ended(entry, None)
                    party.reported.append((entry, None))
                self.flush(number)
            for number in range(2):
                self.reclaim(number)
            self._sweep()
            for number in range(2):
                self.take(number)
        self.rows_are_what_the_steps_made_of_them()
        for job_id, task in self.tasks.items():
            assert task.row.status != TaskStatus.PENDING, f"lost: {task.row}"
            if task.row.status == TaskStatus.PROCESSED:
                assert task.row.version in task.ran
            slot = TOPIC.slot(task.row.slot_crc, task.row.slot_amount)
            keys = self.center.queues.keys(slot)
            places = [self.redis.zscore(key, str(job_id)) for key in (keys.store, keys.prepare, keys.dead)]
            dead = task.row.status == TaskStatus.DEAD
            assert [place is not None for place in places] == [False, False, dead], task.row

    # --- helpers

    def _draw(self, data: st.DataObject) -> tuple[int, Known]:
        number = data.draw(st.integers(0, len(self.tasks) - 1))
        return list(self.tasks.items())[number]

    def _row(self, job_id: int) -> TaskRow:
        row = self.center.store.get(job_id)
        assert row is not None, "an acknowledged row is gone"
        return row

    def _expect(self, task: Known, *, at_least_tried: bool = False, **changes: Any) -> None:
        """The row after the step that is under way."""
        row = task.row._replace(**changes)
        if at_least_tried:
            row = row._replace(attempts=max(row.attempts, 1))
        task.row = row


def _essence(row: TaskRow) -> tuple[int, ...]:
    """What of a row the model foretells."""
    return row.status, row.action_time, row.version, row.attempts, row.crashes


_SETTINGS = settings(
    stateful_step_count=60,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[Machine]]:
    server = ShiftedRedis(tmp_path / "redis", aof=False)
    server.clock.env["TZ"] = "UTC"
    clock = FrozenClock(server)
    try:
        clock.jump(0)
        server.start()
    except MissingServer as exc:
        pytest.fail(str(exc)) if os.environ.get("CI") else pytest.skip(str(exc))
    url = f"sqlite:///{tmp_path}/toc.db"
    Migrator([url], databases=1, tables=TABLES, prefix="toc_").upgrade()
    settings = Settings(
        database_urls=[url], databases=1, tables=TABLES, redis_url=server.url, max_crashes=100
    )  # nothing runs alone: that takes processes
    with server, Redis(port=server.port) as redis, TimeoutCenter(settings, clock=clock) as center:
        assert int(server.now()) == clock.time()
        center.store.topics.create(TOPIC)
        center.handler(TOPIC.name)(_never_called)
        center.catalog.refresh()
        yield type("Machine", (Machine,), {"center": center, "clock": clock, "redis": redis})


def _never_called(task: Task) -> None:
    raise AssertionError(task)


def test_any_order_of_steps_keeps_every_promise(machine: type[Machine]) -> None:
    """The same examples each time."""
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=100, derandomize=True))


@pytest.mark.slow
def test_any_order_of_steps_keeps_every_promise_whatever_is_drawn(machine: type[Machine]) -> None:
    """Others each time; a failure prints its steps."""
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=600))
