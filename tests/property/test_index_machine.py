"""Any order of steps against a small model: the real SDK, table, scripts, worker loops and sweep.

Two workers own every slot. Hypothesis chooses who does what next: submits, cancels, reschedules, takes that
are checked and wait, starts, ends, flushes, keep-alives, crashes, passes of the sweep; time passes, and the
index forgets. Workers are real but for their threads: each loop runs when it is told to, and may be held up
halfway, at the failpoints, where another step comes in between or the worker dies. The clocks of the server
and of the workers stand still between two steps, so that every example can be repeated.

The model knows of each task: its row, the tries that run, and what callers were told. After every step each
row must be what the step may have made of it, and no id may stand in two places of the index. Every start is
judged when it happens. In the end time passes until everything has settled, and nothing may be left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from harness import secured
from harness.hands import WorkerAtRest
from harness.patience import PATIENCE
from harness.scripts import SCRIPTS, rewrite
from harness.tables import raw, task_tables
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from property.broken import WITHOUT
from redis import Redis
from sqlalchemy import Connection

from benchmarks.local import RedisServer
from toc import CancelOutcome, Dead, RescheduleOutcome, Settings, Task, TaskStatus, TimeoutCenter, Topic
from toc.index import queues
from toc.maintenance import sweeper
from toc.maintenance.sweep import Sweep
from toc.model.clock import Clock, from_ms
from toc.model.raised import Raised, raised
from toc.model.task import TaskRow
from toc.model.topic import Backoff
from toc.operate.bulk_jobs import redrive
from toc.sdk import client
from toc.store.migrate import Migrator
from toc.store.servers.health import Health
from toc.worker import reclaim
from toc.worker import worker as worker_module
from toc.worker.entry import Entry
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.settle import finish
from toc.worker.take import poll

TABLES = 2
RETRIES = 2
PREPARE_TIMEOUT = 30
TOPIC = Topic("machine", 7, 2, retries=RETRIES, backoff=Backoff.IMMEDIATE, prepare_timeout=PREPARE_TIMEOUT)
FAILED = raised(RuntimeError("as asked"))
WORKERS = st.integers(0, 1)
LATE = st.sampled_from(["", "ok", "fail"])


class FrozenClock(Clock):
    """Stands still until it is told to jump, for the workers and for the server alike.

    The scripts read a key where they would ask the server for its time.
    """

    KEY = "now"

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._seconds = 1_900_000_000

    @staticmethod
    def install(patch: pytest.MonkeyPatch) -> None:
        """Have the scripts obey."""
        told = 0
        for script in SCRIPTS.values():
            now = f"({{redis.call('GET', '{FrozenClock.KEY}'), '0'}})"
            source = script.source.replace("redis.call('TIME')", now)
            told += source != script.source
            rewrite(script, source, patch)
        assert told >= 5, "the scripts ask for the time in another way now"

    def jump(self, seconds: int) -> None:
        """Seconds later, at once and everywhere."""
        self._seconds += seconds
        self._redis.set(self.KEY, self._seconds)

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
        self.event_loop = SimpleNamespace(outrun=lambda _now: ())

    def follow_topics(self) -> float:
        """The catalog is as the machine has made it."""
        return 60.0

    def room(self, topic: str) -> int:  # noqa: ARG002 - the dispatcher's signature
        return 100

    def want_room(self, topic: str) -> None:
        """There is room again at the next look."""

    def put(self, entries: Sequence[Entry]) -> None:
        self.waiting += entries

    def close(self) -> None:
        """Nothing runs by itself."""


class Party(WorkerAtRest):
    """One worker process with its loops at rest, and a hand instead of its threads."""

    def __init__(self, center: TimeoutCenter, name: str, dead: frozenset[str]) -> None:
        self.hand = Hand()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker_module, "Dispatcher", lambda *_: self.hand)
            super().__init__(center, name, TOPIC.slots())
        self.book.dead = dead
        self.reported: list[tuple[Entry, Raised | None]] = []
        """What has ended and is not written yet."""


@dataclass
class Known:
    """What the model knows of one task."""

    row: TaskRow
    told: set[CancelOutcome] = field(default_factory=set)
    moved_in_time: set[int] = field(default_factory=set)
    """Versions of which the caller was told that they have not run and never will."""
    ran: set[int] = field(default_factory=set)
    """Versions of which a try has started."""
    newest: Entry | None = None
    """The try that started last."""
    taken: bool = False
    """Whether a worker ever held it."""
    untold: bool = False
    """Whether the index has forgotten that a worker holds it: a cancel after its due time cannot know."""
    said_again: bool = False
    """Whether an old snapshot of the index has said that a worker holds it, or may make one take it although
    it is cancelled: a later cancel may believe it."""
    losses: int = 0
    """Times that it was held and lost, or that an old entry said so again, each of which may charge a try;
    also one after a reschedule."""


def holding(machine: Machine) -> list[int]:
    """The workers that hold something."""
    return [n for n, party in enumerate(machine.parties) if len(party.inflight)]


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

    current: ClassVar[Machine]
    center: ClassVar[TimeoutCenter]
    clock: ClassVar[FrozenClock]
    redis: ClassVar[Redis]
    tables: ClassVar[Connection]

    def __init__(self) -> None:
        super().__init__()
        self.tasks: dict[int, Known] = {}
        self.forgotten: list[Entry] = []
        """Held, and perhaps lost by the index."""
        self.snapshot: dict[bytes, bytes] | None = None
        self.made = 0
        self.dead: frozenset[str] = frozenset()
        self.parties: list[Party] = []
        self.at: dict[str, Callable[[], None]] = {}
        """What comes in between at the failpoint of this name, once."""
        self.busy: set[tuple[str, int]] = set()
        """Loops that are held up: the same loop does nothing else meanwhile."""

    @initialize()
    def begin(self) -> None:
        Machine.current = self
        self.redis.flushdb()
        self.clock.jump(3600)  # no two examples share an instant
        for name in task_tables(self.center.settings):
            self.tables.exec_driver_sql(f"DELETE FROM {name}")
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
        """Also by an SDK that dies after the row."""
        for delay in delays:
            biz_id = len(self.tasks)
            with self._meanwhile("submit.row-stored", None if indexed else self._killed), suppress(Killed):
                self.center.submit(TOPIC.name, biz_id=biz_id, delay=delay)
            (task,) = self.center.find(biz_id=biz_id, topic=TOPIC.name)
            self.tasks[task.job_id] = Known(self._row(task.job_id))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._cancel(self._draw(data), self._draw_step(data))

    @precondition(lambda self: bool(running(self)))
    @rule(data=st.data(), moved=st.booleans(), fails=st.booleans())
    def change_while_it_ends(self, data: st.DataObject, moved: bool, fails: bool) -> None:
        """Its try ends, and is written, between the row and the index of a cancel or a reschedule."""
        number = data.draw(st.sampled_from(running(self)))
        job_id = data.draw(st.sampled_from(self.parties[number].hand.running)).job_id
        step = partial(self.end_all, number, FAILED if fails else None)
        if moved:
            self._reschedule(job_id, step, 49.5)
        else:
            self._cancel(job_id, step)

    def _cancel(self, job_id: int, meanwhile: Callable[[], None] | None) -> None:
        task = self.tasks[job_id]
        before, now = task.row, self.clock.now_ms()

        def row_written() -> None:
            if before.status == TaskStatus.PENDING:
                self._expect(task, status=TaskStatus.CANCELLED)

        with self._meanwhile("cancel.row-written", meanwhile, known=row_written):
            outcome = self.center.cancel(job_id)
        if before.status in (TaskStatus.PROCESSED, TaskStatus.DEAD):
            assert outcome is CancelOutcome.TOO_LATE
            return
        if before.status == TaskStatus.CANCELLED:
            # Of a try that the index had lost, the row tells once it has ended.
            doubted = task.said_again and outcome is CancelOutcome.MAY_HAVE_STARTED
            assert {outcome} == task.told or (task.untold and task.ran) or doubted
            if doubted:  # and marked, so that it stays the answer
                task.told.add(outcome)
                self._expect(task, at_least_tried=True)
            return
        if outcome is CancelOutcome.CANCELLED:
            assert not task.ran or task.untold, "cancelled means never run, for no former deadline either"
        else:
            assert outcome is CancelOutcome.MAY_HAVE_STARTED
            tried = before.attempts or before.crashes or before.last_error is not None
            assert task.taken or now >= before.action_time or tried
        task.told = {outcome}
        self._expect(task, status=TaskStatus.CANCELLED, at_least_tried=outcome is not CancelOutcome.CANCELLED)

    @rule(data=st.data(), delay=st.sampled_from([1.5, 49.5]))
    def reschedule(self, data: st.DataObject, delay: float) -> None:
        live = [entry.job_id for party in self.parties for entry in party.hand.running]
        rather = bool(live) and data.draw(st.booleans())
        job_id = data.draw(st.sampled_from(live)) if rather else self._draw(data)
        self._reschedule(job_id, self._draw_step(data), delay)

    def _reschedule(self, job_id: int, meanwhile: Callable[[], None] | None, delay: float) -> None:
        task = self.tasks[job_id]
        before = task.row
        later = self.clock.now_ms() + int(delay * 1000)

        def row_written() -> None:
            if before.status == TaskStatus.PENDING:
                after = self._row(job_id)
                assert after.action_time == after.next_time == later
                assert after.version == before.version + 1
                assert (after.status, after.attempts, after.crashes) == (TaskStatus.PENDING, 0, 0)
                task.row = after

        with self._meanwhile("reschedule.row-written", meanwhile, known=row_written):
            outcome = self.center.reschedule(job_id, action_time=from_ms(later))
        if before.status != TaskStatus.PENDING:
            assert outcome is RescheduleOutcome.TOO_LATE
            return
        if outcome is RescheduleOutcome.RESCHEDULED:
            assert before.version not in task.ran
            task.moved_in_time.add(before.version)
        else:
            assert outcome is RescheduleOutcome.MAY_HAVE_STARTED

    @precondition(lambda self: bool(self._dead()))
    @rule()
    def redrive_all(self) -> None:
        self._redrive(self._dead())

    def _redrive(self, dead: Sequence[int]) -> None:
        redrive(self.center, dead)
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

    @rule(number=WORKERS, data=st.data())
    def take_slowly(self, number: int, data: st.DataObject) -> None:
        """Another step comes between prepare and the row check, perhaps the worker's death."""
        known = data.draw(st.sampled_from([None, None, None, False, True]))
        step = self._draw_step(data) if known is None else self._killed
        try:
            with self._meanwhile("poll.taken", step):
                self.take(number)
        except Killed:
            self._die(number, known=bool(known))

    def take(self, number: int) -> None:
        """Prepare what is due and check its rows."""
        party = self.parties[number]
        if ("poll", number) in self.busy:
            return
        before = list(party.hand.waiting)
        for slot in party.book.owned:
            party.inbox.look_at(slot, 0)
        with self._held_up("poll", number):
            party.adopt()
        for entry in party.inflight.snapshot():
            self.tasks[entry.job_id].taken = True
        for entry in party.hand.waiting:
            if entry not in before:
                row = self.tasks[entry.job_id].row
                assert row.status == TaskStatus.PENDING, "checked, and yet not pending"
                assert entry.row.next_time <= self.clock.now_ms()
                assert row.action_time <= self.clock.now_ms()

    @precondition(lambda self: bool(waiting(self)))
    @rule(data=st.data())
    def start_what_waits(self, data: st.DataObject) -> None:
        self.start(data.draw(st.sampled_from(waiting(self))))

    def start(self, number: int) -> None:
        """The handlers of everything that waits begin to run."""
        party = self.parties[number]
        inflight = party.inflight
        while party.hand.waiting:
            entry = party.hand.waiting.pop(0)
            if inflight.start(entry, self.clock.monotonic()):
                self._started(party, entry)
            elif inflight.get(entry.job_id) is entry:  # refused, as it was not kept alive in time
                self.tasks[entry.job_id].losses += 1
        party.finisher.give_back(inflight.refused(self.clock.monotonic()))

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
                    # Who runs it was paused, or the index has lost what it held. That the one which starts
                    # now was paused explains nothing: it must look.
                    assert self._may_be_elsewhere(running) or entry in self.forgotten, "runs twice"
        task.ran.add(version)
        task.newest = entry
        party.hand.running.append(entry)

    def _may_be_elsewhere(self, entry: Entry) -> bool:
        """Whether another worker may have the id by now."""
        return entry in self.forgotten or self.clock.monotonic() - entry.kept > PREPARE_TIMEOUT

    @precondition(lambda self: bool(running(self)))
    @rule(
        data=st.data(),
        how=st.sampled_from(["ok", "fail", "fail", "dead"]),
        every=st.booleans(),
        flushed=st.booleans(),
    )
    def end(self, data: st.DataObject, how: str, every: bool, flushed: bool) -> None:
        number = data.draw(st.sampled_from(running(self)))
        party = self.parties[number]
        chosen = data.draw(st.integers(0, len(party.hand.running) - 1))
        ending = [entry for n, entry in enumerate(party.hand.running) if every or n == chosen]
        error = {"ok": None, "fail": FAILED, "dead": raised(Dead("as asked"))}[how]
        for entry in ending:
            party.hand.running.remove(entry)
            assert party.inflight.settle(entry)
            party.finisher.ended(entry, error)
            party.reported.append((entry, error))
        if flushed:
            self.flush(number)

    @precondition(lambda self: bool(unwritten(self)))
    @rule(data=st.data())
    def write_slowly(self, data: st.DataObject) -> None:
        """Another step comes between the rows and the moves, perhaps the worker's death."""
        number = data.draw(st.sampled_from(unwritten(self)))
        known = data.draw(st.sampled_from([None, None, None, False, True]))
        step = self._draw_step(data) if known is None else self._killed
        try:
            with self._meanwhile("finish.rows-written", step):
                self.flush(number)
        except Killed:
            self._die(number, known=bool(known))

    def flush(self, number: int) -> None:
        """The finisher writes rows, then moves entries."""
        party = self.parties[number]
        if ("finish", number) in self.busy:
            return
        with self._held_up("finish", number):
            while party.reported or not party.finisher.idle:  # more may end meanwhile
                reported, party.reported = party.reported, []
                for entry, error in sorted(reported, key=lambda pair: pair[1] is not None):  # successes first
                    self._reported(self.tasks[entry.job_id], entry, error)
                for flusher in party.finisher.flushers:
                    flusher.run_once()

    def _reported(self, task: Known, entry: Entry, error: Raised | None) -> None:
        row, read = task.row, entry.row
        if row.status == TaskStatus.CANCELLED:
            self._expect(task, at_least_tried=True)
        elif row.status != TaskStatus.PENDING or row.version != read.version:
            pass  # the row decides
        elif error is None:
            self._expect(task, status=TaskStatus.PROCESSED)
        elif (row.attempts, row.crashes) == (read.attempts, read.crashes):
            assert task.newest is not None
            explained = entry in self.forgotten or task.newest in self.forgotten
            assert task.newest is entry or explained, "a stale failure wins"
            dead = error.dead or read.attempts + 1 >= RETRIES
            status = TaskStatus.DEAD if dead else TaskStatus.PENDING
            self._expect(task, status=status, attempts=read.attempts + 1, crashes=0)

    @precondition(lambda self: bool(holding(self)))
    @rule(data=st.data())
    def keep_alive(self, data: st.DataObject) -> None:
        self._keep_alive(data.draw(st.sampled_from(holding(self))))

    def _keep_alive(self, number: int) -> None:
        self.parties[number].heartbeat.run_once()

    @precondition(lambda self: bool(waiting(self)))
    @rule(data=st.data(), lost=st.booleans())
    def give_back(self, data: st.DataObject, lost: bool) -> None:
        """What waits is given back, as when a slot moves or the worker stops.

        The reply may be lost: then the script is sent once more, and what it gave back the first time may
        have been taken meanwhile, under the same fence if by the same worker.
        """
        number = data.draw(st.sampled_from(waiting(self)))
        party = self.parties[number]
        party.finisher.give_back(party.hand.waiting + party.worker.tools.early.withdraw())
        party.hand.waiting = []
        if not lost:
            self.flush(number)
            return
        with self._rollback_sent_twice(lambda: self.take(number)):
            self.flush(number)
        for n in (number, 1 - number):
            self._take_and_start(n)

    @contextmanager
    def _rollback_sent_twice(self, between: Callable[[], None]) -> Iterator[None]:
        queues = self.center.queues
        rollback = queues.rollback

        def twice(entries: Any) -> Any:
            queues.rollback = rollback  # type: ignore[method-assign]
            queues.rollback(entries)
            between()
            return queues.rollback(entries)

        queues.rollback = twice  # type: ignore[method-assign]
        try:
            yield
        finally:
            queues.rollback = rollback  # type: ignore[method-assign]

    @rule(number=WORKERS, data=st.data())
    def reclaim_slowly(self, number: int, data: st.DataObject) -> None:
        """Another step comes between the rows and the moves."""
        self.reclaim(number, self._draw_step(data))

    def reclaim(self, number: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Give back what timed out and what the dead have left."""
        if ("reclaim", number) in self.busy:
            return
        between = self._meanwhile("reclaim.rows-written", meanwhile, known=self._charged)
        with self._held_up("reclaim", number), between:
            self.parties[number].reclaim()

    def _charged(self) -> None:
        """What reclaim may have made of rows."""
        rows = self.center.store.read(list(self.tasks))
        for job_id, task in self.tasks.items():
            before, after = task.row, rows[job_id]
            if before.status == TaskStatus.CANCELLED:
                self._expect(task, at_least_tried=after.attempts > 0)
            elif _essence(after) != _essence(before):
                # One that has written rows and moved nothing yet leaves entries that another finds as well.
                twice = {("reclaim", 0), ("reclaim", 1)} <= self.busy
                lost = task.losses or self._held_too_long(job_id)
                assert lost or twice, "a try was charged that nobody lost"
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
            for entry in party.inflight.snapshot()
        )

    @precondition(lambda self: bool(holding(self)))
    @rule(data=st.data(), awake=st.booleans(), started=st.booleans(), late=LATE)
    def overtake(self, data: st.DataObject, awake: bool, started: bool, late: str) -> None:
        """A worker is paused for longer than prepare_timeout; the other goes on, and takes what it held.

        It may wake up just when the other has listed what it holds, or when its tries run there.
        """
        number = data.draw(st.sampled_from(holding(self)))
        self._overtake(1 - number, started=started, awake=awake)
        if late:
            self.end_all(number, FAILED if late == "fail" else None)

    def _overtake(self, by: int, *, started: bool = True, awake: bool = False) -> None:
        for seconds in (12, 12, 12):
            self.time_passes(seconds)
            self._keep_alive(by)
        self.reclaim(by, (lambda: self._keep_alive(1 - by)) if awake else None)
        self.take(by)
        if started:
            self.start(by)

    @precondition(lambda self: bool(holding(self)))
    @rule(data=st.data(), known=st.booleans())
    def crash(self, data: st.DataObject, known: bool) -> None:
        """A worker dies with all that it holds; another takes its place. Its death is known or silent."""
        self._die(data.draw(st.sampled_from(holding(self))), known=known)

    def _die(self, number: int, *, known: bool) -> None:
        party = self.parties[number]
        for entry in party.inflight.snapshot():
            self.tasks[entry.job_id].losses += 1
            self.tasks[entry.job_id].taken = True
        party.close()
        if known:
            self.dead |= {party.name}
        self.parties[number] = self._party()
        for other in self.parties:
            other.book.dead = self.dead

    # --- the world

    @rule(seconds=st.sampled_from([1, 12, 40]))
    def time_passes(self, seconds: int) -> None:
        self.clock.jump(seconds)

    @rule()
    def remember(self) -> None:
        """A snapshot of the index."""
        keys = (key for key in self.redis.scan_iter() if key != FrozenClock.KEY.encode())
        self.snapshot = {key: self.redis.dump(key) for key in keys}  # type: ignore[misc]

    @rule(
        what=st.sampled_from(["all", "store", "prepare", "dead", "dead", "snapshot"]),
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
        for job_id, task in self.tasks.items():
            task.untold = task.untold or self._prepared(job_id)  # perhaps by who is dead, and not known to be
        if what in ("all", "snapshot"):
            self.redis.flushdb()
            self.clock.jump(0)
        for key, dump in (self.snapshot or {}).items() if what == "snapshot" else ():
            self.redis.restore(key, 0, dump)
        if what == "snapshot":
            # An old DeadQueue entry of what is dead no more says too much until the next death, and harms
            # nothing else; nobody looks for it.
            dead = set(self._dead())
            gone = [job_id for job_id in self.tasks if job_id not in dead]
            for slot in TOPIC.slots() if gone else ():
                self.redis.zrem(self.center.queues.keys(slot).dead, *gone)
            # An old PrepareQueue entry says that somebody has the task. Its try may have ended since; but
            # nothing tells it from one whose worker has fallen silent, and it may cost a try as that does:
            # where a redrive or a new deadline has begun anew, the row does not show that it is paid for.
            held = {entry.job_id for party in self.parties for entry in party.inflight.snapshot()}
            for job_id, task in self.tasks.items():
                said = self._prepared(job_id)
                # An old StoreQueue entry of what is cancelled is taken, and dropped once its row is read.
                # Until then nothing tells it from a try for a former deadline; nor later, if its worker dies.
                stored = task.row.status == TaskStatus.CANCELLED and self._stands(job_id, "store")
                task.said_again |= said or stored
                task.losses += said and job_id not in held  # what is held counts below
        if what not in ("all", "snapshot"):
            for slot in TOPIC.slots():
                self.redis.delete(getattr(self.center.queues.keys(slot), what))
        for party in self.parties:
            for entry in party.inflight.snapshot():
                self.forgotten.append(entry)
                self.tasks[entry.job_id].losses += 1
                self.tasks[entry.job_id].untold = True

    @rule(data=st.data())
    def sweep_slowly(self, data: st.DataObject) -> None:
        """Another step comes between the rows that are read and the index.

        No redrive: the sweep would give a DeadQueue entry back to what is dead no more. It says too much
        about that task until its next death, and harms nothing else.
        """
        with self._meanwhile("sweep.rows-read", self._draw_step(data, redrive=False)):
            self.sweep()

    def sweep(self) -> None:
        """All tables, up to the horizon, and the dead."""
        center = self.center
        sweep = Sweep(center.store, center.queues, center.catalog, self.clock)
        for each in sweeper.restore_rounds(sweep, range(TABLES)):
            while each.left:
                each.step()

    # --- what must hold

    @invariant()
    def rows_are_what_the_steps_made_of_them(self) -> None:
        rows = self.center.store.read(list(self.tasks))
        for job_id, task in self.tasks.items():
            assert _essence(rows[job_id]) == _essence(task.row)
            task.row = rows[job_id]

    @invariant()
    def rows_tell_of_tries_that_nothing_else_tells_of(self) -> None:
        """A cancel goes by it. Not where the index has forgotten who held it: nobody else knew."""
        for job_id, task in self.tasks.items():
            row = task.row
            if not task.ran or task.untold or row.attempts or row.crashes or row.last_error is not None:
                continue
            held = any(party.inflight.get(job_id) for party in self.parties)
            reported = any(entry.job_id == job_id for party in self.parties for entry, _ in party.reported)
            told = row.status == TaskStatus.PROCESSED or held or reported or self._prepared(job_id)
            assert told, f"it has run, and nothing shows it: {row}"

    def _prepared(self, job_id: int) -> bool:
        return self._stands(job_id, "prepare")

    def _stands(self, job_id: int, queue: str) -> bool:
        row = self.tasks[job_id].row
        keys = self.center.queues.keys(TOPIC.slot(row.slot_crc, row.slot_amount))
        return self.redis.zscore(getattr(keys, queue), str(job_id)) is not None

    @invariant()
    def no_id_stands_in_two_places(self) -> None:
        if not self.tasks:
            return
        slots = TOPIC.slots()
        with self.redis.pipeline(transaction=False) as asked:
            for keys in map(self.center.queues.keys, slots):
                for key in (keys.store, keys.prepare, keys.dead):
                    asked.zrange(key, 0, -1)
            found = [{str(member, "ascii") for member in members} for members in asked.execute()]
        for slot, stand in zip(slots, zip(found[::3], found[1::3], found[2::3], strict=True), strict=True):
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
        for _ in range(2 * RETRIES + 6):
            self.time_passes(200)
            for number in range(2):
                self.end_all(number)  # what waits is too old to start: it is let go
                self.reclaim(number)
            self.sweep()
            for number in range(2):
                self.take(number)
                self.end_all(number)
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

    def end_all(self, number: int, error: Raised | None = None) -> None:
        """Whatever waits or runs there ends so, and is written."""
        self.start(number)
        party = self.parties[number]
        while party.hand.running:
            entry = party.hand.running.pop()
            assert party.inflight.settle(entry)
            party.finisher.ended(entry, error)
            party.reported.append((entry, error))
        self.flush(number)

    # --- helpers

    @contextmanager
    def _meanwhile(
        self, name: str, step: Callable[[], None] | None, *, known: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """What comes in between at a failpoint; the model first learns what was written until there."""

        def reached() -> None:
            if known is not None:
                known()
            if step is not None:
                step()

        self.at[name] = reached
        try:
            yield
        finally:
            self.at.pop(name, None)

    def reached(self, name: str) -> None:
        """In place of the product's failpoint."""
        step = self.at.pop(name, None)
        if step is not None:
            step()

    def _killed(self) -> None:
        raise Killed

    @contextmanager
    def _held_up(self, loop: str, number: int) -> Iterator[None]:
        self.busy.add((loop, number))
        try:
            yield
        finally:
            self.busy.remove((loop, number))

    def _draw_step(self, data: st.DataObject, *, redrive: bool = True) -> Callable[[], None] | None:
        """Something that may happen while another step is held up.

        A redrive is of what is dead by now. Between the row of a death and its entry, a redrive would leave a
        DeadQueue entry beside that of the StoreQueue until the check of the DeadQueue, which is not modelled.
        """
        steps: list[Callable[[], None] | None] = [None]
        for n in range(2):
            steps.append(partial(self._overtake, n))
            steps.append(partial(self._take_and_start, n))
            if len(self.parties[n].inflight):
                steps.append(partial(self._keep_alive, n))
            if self.parties[n].hand.waiting:
                steps.append(partial(self.start, n))
            if self.parties[n].hand.running:
                error = data.draw(st.sampled_from([None, FAILED]))
                steps += [partial(self.end_all, n, error)] * 2
            if redrive and self._dead():
                steps += [partial(self._redrive_and_take, n, self._dead())] * 4
        return data.draw(st.sampled_from(steps))

    def _dead(self) -> list[int]:
        return [job_id for job_id, task in self.tasks.items() if task.row.status == TaskStatus.DEAD]

    def _redrive_and_take(self, number: int, dead: Sequence[int]) -> None:
        self._redrive(dead)
        self._take_and_start(number)

    def _take_and_start(self, number: int) -> None:
        self.take(number)
        self.start(number)

    def _draw(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(list(self.tasks)))

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


class Killed(BaseException):
    """The worker whose step is under way dies here."""


def _essence(row: TaskRow) -> tuple[int, ...]:
    """What of a row the model foretells."""
    return row.status, row.action_time, row.version, row.attempts, row.crashes


_SETTINGS = settings(
    max_examples=60,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(params=["mariadb", pytest.param("sqlite", marks=pytest.mark.slow)])
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, clean_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[type[Machine]]:
    FrozenClock.install(monkeypatch)
    # Leases are for life without Redis (spec/leases.pml); here both workers share one store, and one name.
    monkeypatch.setattr(LeaseKeeper, "uncovered", lambda *_: [])
    # A busy machine is no server that is away: what it draws would no more follow from the steps before.
    monkeypatch.setattr(Health, "patience", PATIENCE)
    monkeypatch.setattr(queues, "LONGEST", queues.LONGEST._replace(read=PATIENCE))
    for pause in ("GATHER_SECONDS", "GATHER_BUSY_SECONDS"):
        monkeypatch.setattr(finish, pause, 0.0)
    for module in (client, finish, poll, reclaim, sweeper):
        monkeypatch.setattr(module, "failpoint", lambda name: Machine.current.reached(name))
    url, prefix = f"sqlite:///{tmp_path}/toc.db", "toc_"
    if request.param == "mariadb":
        url, prefix = request.getfixturevalue("mariadb").url, request.getfixturevalue("database_prefix")
    how = Settings(
        database_urls=[url],
        databases=1,
        tables=TABLES,
        database_prefix=prefix,
        redis_url=clean_redis.url,
        read_timeout=PATIENCE,
        max_crashes=100,  # nothing runs alone, as that takes processes
    )
    Migrator([secured.migrating(url)], databases=1, tables=TABLES, prefix=prefix).upgrade()
    with (
        Redis(port=clean_redis.port) as redis,
        TimeoutCenter(how, clock=FrozenClock(redis)) as center,
        raw(how) as tables,
    ):
        center.store.topics.create(TOPIC)
        center.handler(TOPIC.name)(_never_called)
        center.catalog.refresh()
        yield type(
            "Machine", (Machine,), {"center": center, "clock": center.clock, "redis": redis, "tables": tables}
        )


def _never_called(task: Task) -> None:
    raise AssertionError(task)


def _ends_after_a_cancel_that_saw_nothing(machine: type[Machine]) -> None:
    """The index has lost what runs; its cancel answers so; then its try ends well."""
    one = machine()
    one.begin()
    try:
        one.work(0, 2, True)
        job_id = one.parties[0].hand.running[0].job_id
        one.forget("all")
        one._cancel(job_id, None)
        one.end_all(0)
        one.rows_are_what_the_steps_made_of_them()
    finally:
        one.teardown()


RARE = {"mark-tried: cancelled": _ends_after_a_cancel_that_saw_nothing}
"""By guard, the example that needs it where only few of those that are drawn do."""


def test_any_order_of_steps_keeps_every_promise(machine: type[Machine]) -> None:
    """The same examples each time."""
    for example in RARE.values():
        example(machine)
    run_state_machine_as_test(machine, settings=_SETTINGS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_any_order_of_steps_keeps_every_promise_whatever_is_drawn(machine: type[Machine]) -> None:
    """Others each time; a failure prints its steps."""
    run_state_machine_as_test(machine, settings=settings(_SETTINGS, max_examples=600, derandomize=False))


@pytest.mark.slow
@pytest.mark.parametrize("guard", sorted(WITHOUT))
def test_without_a_guard_an_example_fails(
    guard: str, machine: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    WITHOUT[guard](monkeypatch)
    # More of them, for what is rare. The first that fails will do: it need not be the shortest.
    found = settings(_SETTINGS, max_examples=600, phases=[Phase.generate])
    example = RARE.get(guard, partial(run_state_machine_as_test, settings=found))
    with pytest.raises(AssertionError):
        example(machine)
