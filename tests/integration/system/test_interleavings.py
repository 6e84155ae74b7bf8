"""Orders of events that were wrong once, step by step on real servers. The model in model/ found most of it.

The loops of two workers are run by hand here, in the order that each trace wants.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harness.system import System

from toc import CancelOutcome, RescheduleOutcome, Task, TaskStatus, TimeoutCenter
from toc.clock import Clock
from toc.errors import StoreUnavailable
from toc.local.process import until
from toc.local.servers import RedisServer
from toc.queue.messages import CancelReply
from toc.queue.scores import store_score
from toc.store.batch import Failure, Guard
from toc.task import TaskRow, TryRow
from toc.topic import Backoff, Slot
from toc.worker.entry import NO_FENCE, Entry, Held
from toc.worker.fallback import OWNED_SECONDS
from toc.worker.leases import LEASE_AFTER_SECONDS
from toc.worker.link import Link
from toc.worker.process import Worker
from toc.worker.watch import OUT_SECONDS

TOPIC = "test.sync"
SLOT = Slot(TOPIC, 0)


class PausedClock(Clock):
    """The machine's clocks, as a process sees them that slept for a while."""

    def __init__(self) -> None:
        self.slept = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.slept


class Hands:
    """A worker whose loops run when the test says so."""

    def __init__(self, system: System, redis: RedisServer, name: str) -> None:
        self.clock = PausedClock()
        self._center = TimeoutCenter(system.settings, clock=self.clock)
        self._center.handler(TOPIC)(self._handle)
        self._center.catalog.refresh()
        self.store, self.queues, self._redis = self._center.store, self._center.queues, redis
        here, there = socket.socketpair()
        there.close()
        self._link = Link(here)
        self._worker = worker = Worker(self._center, name, self._link, app="unused:center", threads=1)
        self.inflight, self.finisher, self.poller = worker.inflight, worker.finisher, worker.poller
        self.dispatcher, self.keeper, self.reclaimer = worker.dispatcher, worker.keeper, worker.reclaimer
        self.leases, self.book = worker.lease_keeper, worker.book
        self.book.want([SLOT])
        self.book.claim_missing()
        self.runs: list[Task] = []
        self.fails = False
        self._go_on = threading.Event()
        self._started = False

    def _handle(self, task: Task) -> None:
        self.runs.append(task)
        assert self._go_on.wait(30)
        if self.fails:
            raise RuntimeError("as the test wants")

    def take(self) -> None:
        """Prepare what is due, and check it."""
        self.poller.look_at(SLOT, 0)
        self.poller.run_once()

    def start(self) -> None:
        """Let waiting tries start."""
        if not self._started:
            self._started = True
            self.dispatcher.start()

    def start_and_wait(self) -> None:
        """Let one try start, and see it running."""
        before = len(self.runs)
        self.start()
        assert until(lambda: len(self.runs) > before, 10), "no try has started"

    def end(self, *, fails: bool = False) -> None:
        """Let the running try end; its end is not written yet."""
        self.fails = fails
        self._go_on.set()
        assert until(lambda: self.finisher.backlog > 0, 10), "no try has ended"
        self._go_on.clear()

    def finish(self) -> None:
        """Write and move what has ended."""
        self.finisher.run_once()
        self.finisher.run_once()

    def sleep(self) -> None:
        """Be paused for much longer than prepare_timeout: nobody has kept alive what is held."""
        self.clock.slept += 1000
        for job_id, score in self.snapshot().items():
            self._redis.call("ZADD", self.queues.keys(SLOT).prepare, f"{score - 1_000_000:.17g}", job_id)

    def snapshot(self) -> dict[str, float]:
        """What is prepared, as a snapshot of Redis remembers it."""
        entries = self._redis.call("ZRANGE", self.queues.keys(SLOT).prepare, "0", "-1", "WITHSCORES")
        assert isinstance(entries, list)
        return {str(job_id): float(score) for job_id, score in zip(entries[::2], entries[1::2], strict=True)}

    def restore(self, snapshot: dict[str, float]) -> None:
        """Redis comes back with a snapshot so old that everything in it has timed out."""
        keys = self.queues.keys(SLOT)
        self._redis.call("DEL", keys.store, keys.prepare)
        for job_id, score in snapshot.items():
            self._redis.call("ZADD", keys.prepare, f"{score - 1_000_000:.17g}", job_id)

    def forget(self) -> None:
        """Hold nothing any more, as if another process took its place."""
        self.inflight.depart(self.inflight.snapshot())
        self.inflight.arrived()

    def reclaim(self) -> None:
        """Look for what others have left."""
        self.reclaimer.look_now()
        self.reclaimer.run_once()

    def lose_daemon(self) -> None:
        """Let the main thread see that the daemon is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._worker._wake_receiver, selectors.EVENT_READ)
            self._worker._serve(selector, lambda: self._link.closed)

    def stand_still(self, seconds: float) -> None:
        """Be stopped for a while, as the main thread sees it."""
        turns = iter((False, True))
        with _Stopped(self.clock, seconds) as selector:
            self._worker._serve(selector, lambda: next(turns))

    def miss_redis(self) -> None:
        """Find that it is out of reach."""
        self._worker.watch.run_once()
        self.clock.slept += OUT_SECONDS
        self._worker.watch.run_once()

    def take_without_redis(self) -> None:
        """Take by leases what is due, where Redis is out of reach."""
        self._worker.fallback.run_once()

    def close(self) -> None:
        self._go_on.set()
        self.dispatcher.close()
        for end in (self._link, self._worker._wake_receiver, self._worker._wake_sender):
            end.close()
        self._center.close()


class _Stopped(selectors.DefaultSelector):
    """The process is stopped while it waits."""

    def __init__(self, clock: PausedClock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: ARG002
        self._clock.slept += self._seconds
        return []


@pytest.fixture
def hands(system: System, clean_redis: RedisServer) -> Iterator[tuple[Hands, Hands]]:
    """Two workers that own the same slot."""
    system.create_topics(slots=1, retries=3, backoff=Backoff.IMMEDIATE)
    system.center.catalog.refresh()
    pair = Hands(system, clean_redis, "a:1"), Hands(system, clean_redis, "b:1")
    yield pair
    for one in pair:
        one.close()


def finish_while_cancelling(system: System, worker: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancel that has written its row finds that the worker finishes before it asks the index."""
    ask = system.center.queues.cancel

    def finished_meanwhile(slot: Slot, asked: int) -> CancelReply:
        worker.finish()
        return ask(slot, asked)

    monkeypatch.setattr(system.center.queues, "cancel", finished_meanwhile)


def submit_due(system: System) -> int:
    job_id = system.center.submit(TOPIC, biz_id=1, delay=0.02)
    due = row_of(system, job_id).action_time
    assert until(lambda: system.center.clock.now_ms() > due, 5)
    return job_id


def row_of(system: System, job_id: int) -> TaskRow:
    row = system.center.store.get(job_id)
    assert row is not None
    return row


def test_a_worker_that_slept_before_the_start_does_not_start_what_another_has(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    sleeper, other = hands
    job_id = submit_due(system)
    sleeper.take()
    sleeper.sleep()
    other.reclaim()
    other.take()
    other.start_and_wait()
    sleeper.start()
    assert until(lambda: sleeper.inflight.get(job_id) is None, 5)
    other.end()
    other.finish()
    assert (sleeper.runs, len(other.runs)) == ([], 1)
    assert row_of(system, job_id).status == TaskStatus.PROCESSED


def test_what_was_let_go_after_a_pause_and_nobody_has_taken_runs_uncharged(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    sleeper, _ = hands
    job_id = submit_due(system)
    sleeper.take()
    sleeper.sleep()
    sleeper.start()
    assert until(lambda: sleeper.inflight.get(job_id) is None, 5)
    sleeper.poller.run_once()
    assert until(lambda: len(sleeper.runs) == 1, 5)
    sleeper.end()
    sleeper.finish()
    row = row_of(system, job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PROCESSED, 0, 0)


def test_a_late_failure_does_not_touch_a_newer_try_whatever_tries_the_entry_carried(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    sleeper, other = hands
    job_id = submit_due(system)
    due = row_of(system, job_id).action_time
    other.take()
    other.start_and_wait()
    other.end(fails=True)
    other.finish()
    # The index forgets it, and a sweep that had read the row before that adds the entry as it was then: it
    # says that no try was used.
    system.center.queues.cancel(SLOT, job_id)
    system.center.queues.add({SLOT: [(job_id, store_score(due, 3, 0))]})
    sleeper.take()
    sleeper.start_and_wait()
    sleeper.sleep()
    other.reclaim()
    other.take()
    before = row_of(system, job_id)
    sleeper.end(fails=True)
    sleeper.finish()
    after = row_of(system, job_id)
    assert (after.attempts, after.crashes) == (before.attempts, before.crashes) == (1, 1)
    assert other.inflight.get(job_id) is not None


def test_what_was_kept_alive_since_it_was_listed_is_not_taken_away(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, other = hands
    job_id = submit_due(system)
    sleeper.take()
    sleeper.sleep()
    write = other.store.crash

    def wakes_up(items: Any) -> Any:
        sleeper.keeper.run_once()
        return write(items)

    monkeypatch.setattr(other.store, "crash", wakes_up)
    other.reclaim()
    other.take()
    assert other.inflight.get(job_id) is None
    sleeper.start()  # it has slept too long to trust what it had read of the row
    assert until(lambda: sleeper.inflight.get(job_id) is None, 5)
    sleeper.poller.run_once()
    assert until(lambda: len(sleeper.runs) == 1, 5)
    sleeper.end()
    sleeper.finish()
    assert row_of(system, job_id).status == TaskStatus.PROCESSED


def test_of_two_owners_the_slower_one_does_not_charge_the_next_try_for_the_crash_of_this_one(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = hands
    job_id = submit_due(system)
    quick.take()
    quick.forget()
    quick.sleep()
    read = slow.store.read_tries

    def reclaimed_meanwhile(job_ids: Any) -> Any:
        quick.reclaim()
        quick.take()
        return read(job_ids)

    slow.book.dead = frozenset({"a:1"})  # the process that has just let go is known to be dead
    monkeypatch.setattr(slow.store, "read_tries", reclaimed_meanwhile)
    slow.reclaim()
    assert (row_of(system, job_id).attempts, row_of(system, job_id).crashes) == (1, 1)
    quick.start_and_wait()
    quick.end(fails=True)
    quick.finish()
    assert (row_of(system, job_id).attempts, row_of(system, job_id).crashes) == (2, 0)


def test_a_move_that_is_under_way_does_not_take_away_the_same_id_taken_anew(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper, other = hands
    job_id = submit_due(system)
    for _ in range(2):  # both tries that may be charged: from now on the fence stays the same
        sleeper.take()
        sleeper.forget()
        sleeper.sleep()
        other.reclaim()
    sleeper.take()
    sleeper.start_and_wait()
    sleeper.sleep()
    other.reclaim()
    sleeper.end(fails=True)
    rollback = sleeper.queues.rollback

    def taken_meanwhile(entries: Any) -> Any:
        sleeper.take()
        return rollback(entries)

    with monkeypatch.context() as patch:
        patch.setattr(sleeper.queues, "rollback", taken_meanwhile)
        sleeper.finish()
    assert sleeper.inflight.get(job_id) is None
    other.take()
    sleeper.take()
    assert (other.inflight.get(job_id) is None) != (sleeper.inflight.get(job_id) is None)


def test_what_a_move_takes_away_while_it_is_adopted_is_not_held(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    worker.end(fails=True)
    rollback, extend = worker.queues.rollback, worker.queues.extend
    moved: list[Any] = []

    def looks_for_it_meanwhile(entries: Any) -> Any:
        def moved_meanwhile(asked: Any) -> Any:
            standing = extend(asked)
            moved.append(rollback(entries))
            worker.inflight.arrived()
            return standing

        with monkeypatch.context() as patch:
            patch.setattr(worker.queues, "extend", moved_meanwhile)
            worker.poller.look_for([SLOT])
            worker.poller.run_once()
        return moved[0] if moved else rollback(entries)

    with monkeypatch.context() as patch:
        patch.setattr(worker.queues, "rollback", looks_for_it_meanwhile)
        worker.finish()
    other.take()
    assert other.inflight.get(job_id) is not None, "it was rolled back, and is due"
    assert worker.inflight.get(job_id) is None


def test_an_id_that_waits_for_the_clock_twice_runs_once(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    due = row_of(system, job_id).action_time
    with monkeypatch.context() as patch:
        patch.setattr(worker.clock, "now_ms", lambda: due - 50)
        for _ in range(2):
            worker.take()
            entry = worker.inflight.get(job_id)
            assert entry is not None
            worker.poller.run_once()
            worker.queues.rollback({SLOT: [(job_id, entry.fence, float(due))]})  # by whoever took it for lost
        worker.take()
    worker.poller.run_once()
    worker.start_and_wait()
    worker.end()
    worker.finish()
    assert len(worker.runs) == 1
    assert row_of(system, job_id).status == TaskStatus.PROCESSED


def test_an_entry_that_is_taken_again_before_it_has_started_is_checked_again(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    sleeper, other = hands
    job_id = submit_due(system)
    due = row_of(system, job_id).action_time
    sleeper.take()
    sleeper.sleep()
    other.reclaim()
    later = datetime.now(UTC) + timedelta(minutes=5)
    system.center.reschedule(job_id, action_time=later)
    assert system.center.cancel(job_id) is not CancelOutcome.UNKNOWN
    system.center.queues.add({SLOT: [(job_id, float(due))]})  # by a sweep that had read the row before
    sleeper.take()
    sleeper.start()
    sleeper.finish()
    assert until(lambda: sleeper.inflight.get(job_id) is None, 5)
    assert sleeper.runs == []


def test_a_second_cancel_is_honest_when_the_first_broke_off_and_the_handler_has_run(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    system.center.store.cancel(job_id)  # and here its process dies
    worker.end()
    finish_while_cancelling(system, worker, monkeypatch)
    assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_second_cancel_is_honest_when_the_first_broke_off_and_the_index_is_out_of_reach(
    system: System, hands: tuple[Hands, Hands], clean_redis: RedisServer
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    system.center.store.cancel(job_id)  # and here its process dies
    with out_of_reach(clean_redis):
        assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_far_ahead_admits_a_run_for_an_older_deadline_when_the_index_is_out_of_reach(
    system: System, hands: tuple[Hands, Hands], clean_redis: RedisServer
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    worker.take()  # it may start at any time
    system.center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(minutes=5))
    with out_of_reach(clean_redis):
        assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_knows_of_a_run_for_an_older_deadline_that_has_ended(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    later = datetime.now(UTC) + timedelta(minutes=5)
    assert system.center.reschedule(job_id, action_time=later) is RescheduleOutcome.MAY_HAVE_STARTED
    worker.end()
    worker.finish()
    row = row_of(system, job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_under_way_knows_of_a_run_for_an_older_deadline_that_ends_meanwhile(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    system.center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(minutes=5))
    worker.end()
    finish_while_cancelling(system, worker, monkeypatch)
    assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_of_what_was_taken_and_moved_before_it_started_is_sure(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    worker, _ = hands
    job_id = system.center.submit(TOPIC, biz_id=1, delay=300)
    system.center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(minutes=6))
    worker.take()
    assert system.center.cancel(job_id) is CancelOutcome.CANCELLED
    assert system.center.cancel(job_id) is CancelOutcome.CANCELLED


def test_a_cancel_knows_of_tries_that_a_redrive_or_a_new_deadline_has_given_back(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    worker, _ = hands
    worker.start()
    failed = submit_due(system)
    _fail(worker, 1)
    later = datetime.now(UTC) + timedelta(minutes=5)
    assert system.center.reschedule(failed, action_time=later) is RescheduleOutcome.MAY_HAVE_STARTED
    redriven = submit_due(system)
    _fail(worker, 2)
    kill(system, row_of(system, redriven))
    assert system.center.store.redrive([redriven], system.center.clock.now_ms() + 60_000)
    for job_id in (failed, redriven):
        assert (row_of(system, job_id).attempts, row_of(system, job_id).crashes) == (0, 0)
        assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
        assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_knows_of_a_try_that_was_stopped_and_given_back_uncharged(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    worker, _ = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    worker.finisher.give_back_running([e for e in worker.inflight.snapshot() if worker.inflight.settle(e)])
    worker.finish()
    row = row_of(system, job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED


def test_a_cancel_knows_of_a_run_for_an_older_deadline_whose_worker_fell_silent(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    worker, other = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    later = datetime.now(UTC) + timedelta(minutes=5)
    assert system.center.reschedule(job_id, action_time=later) is RescheduleOutcome.MAY_HAVE_STARTED
    worker.sleep()
    other.reclaim()
    row = row_of(system, job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0), (
        "charged to the new deadline"
    )
    assert system.center.cancel(job_id) is CancelOutcome.MAY_HAVE_STARTED
    worker.end()  # awake again


def test_a_lease_that_is_asked_for_while_the_failure_is_written_is_not_given(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = hands
    job_id = submit_due(system)
    worker.take()
    worker.start_and_wait()
    worker.end(fails=True)
    take = worker.store.leases.take

    def written_first(*asked: Any) -> set[int]:
        monkeypatch.undo()
        worker.finish()
        return take(*asked)

    monkeypatch.setattr(worker.store.leases, "take", written_first)
    worker.clock.slept += LEASE_AFTER_SECONDS
    worker.leases.run_once()
    assert row_of(system, job_id).attempts == 1
    assert other.store.leases.take({job_id: 30}) == {job_id}, "the failed try has left a lease"


def test_a_lease_that_is_asked_for_while_the_entry_is_given_back_is_given_up(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, other = hands
    job_id = submit_due(system)
    worker.take()
    take = worker.store.leases.take

    def gone_first(*asked: Any) -> set[int]:
        monkeypatch.undo()
        worker.finisher.give_back(worker.inflight.snapshot())
        worker.finish()
        return take(*asked)

    monkeypatch.setattr(worker.store.leases, "take", gone_first)
    worker.clock.slept += LEASE_AFTER_SECONDS
    worker.leases.run_once()
    worker.leases.run_once()
    assert other.store.leases.take({job_id: 30}) == {job_id}, "nothing runs, and there is a lease"


def _fail(worker: Hands, runs: int) -> None:
    """Take what is due and let it fail; it is the so-many-th run."""
    worker.take()
    assert until(lambda: len(worker.runs) == runs, 10), "no try has started"
    worker.end(fails=True)
    worker.finish()


def kill(system: System, row: TaskRow) -> None:
    """Make a task dead, as its last failure does."""
    last = Failure(
        row.job_id, row.version, row.attempts, row.crashes, row.attempts + 1, 0, row.next_time, "the last"
    )
    assert system.center.store.die([last]) == {row.job_id: Guard.APPLIED}


@contextmanager
def out_of_reach(server: RedisServer) -> Iterator[None]:
    """The server does not answer."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


def test_what_fell_silent_is_looked_for_each_second_until_it_times_out(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    """Not at every peek alone, which would cost up to five seconds more."""
    silent, other = hands
    job_id = submit_due(system)
    silent.take()
    other.reclaim()
    assert silent.inflight.get(job_id), "it was not timed out yet"
    silent.sleep()
    other.reclaimer.run_once()
    row = system.center.store.get(job_id)
    assert row is not None
    assert row.crashes == 1


def test_an_old_snapshot_that_tells_of_a_try_for_a_former_deadline_costs_one_try(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    """Nothing tells its entry from one whose worker has fallen silent; the new deadline has begun anew."""
    worker, other = hands
    job_id = submit_due(system)
    worker.take()
    old = worker.snapshot()
    worker.start_and_wait()
    worker.end(fails=True)
    worker.finish()
    assert row_of(system, job_id).attempts == 1
    due = datetime.now(UTC) + timedelta(seconds=0.3)
    assert system.center.reschedule(job_id, action_time=due) is RescheduleOutcome.MAY_HAVE_STARTED
    assert until(lambda: datetime.now(UTC) > due + timedelta(seconds=0.01), 5)
    for crashes in (1, 2):  # the second time the row shows that its first try is paid for
        other.restore(old)
        other.reclaim()
        row = row_of(system, job_id)
        assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 1, crashes)
    other.take()
    other.start_and_wait()
    other.end()
    other.finish()
    assert row_of(system, job_id).status == TaskStatus.PROCESSED


def test_what_waited_for_its_row_does_not_start_beside_who_has_leased_it_since(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MySQL was away between prepare and row check; meanwhile the slot went to a worker that has no Redis."""
    first, second = hands
    job_id = submit_due(system)
    read = first.store.read_tries
    calls = iter(("away", "back"))

    def read_tries(job_ids: list[int]) -> dict[int, TryRow]:
        if next(calls) == "away":
            first.clock.slept += 3
            raise StoreUnavailable("away")
        rows = read(job_ids)
        assert second.store.leases.take({job_id: 30}) == {job_id}
        return rows

    monkeypatch.setattr(first.store, "read_tries", read_tries)
    first.take()
    first.start()
    assert until(lambda: first.inflight.get(job_id) is None, 10), "it is let go"
    assert not first.runs


def test_what_waits_long_for_its_row_starts_all_the_same(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read takes longer than an entry may be old that starts without a lease."""
    first, second = hands
    job_id = submit_due(system)
    read = first.store.read_tries

    def read_tries(job_ids: list[int]) -> dict[int, TryRow]:
        rows = read(job_ids)
        first.clock.slept += 2
        return rows

    monkeypatch.setattr(first.store, "read_tries", read_tries)
    first.take()
    first.start_and_wait()
    assert second.store.read_tries([job_id])[job_id].lease > 0
    first.end()
    first.finish()
    assert row_of(system, job_id).status == TaskStatus.PROCESSED


def test_only_who_has_owned_the_slot_for_long_takes_a_first_lease_without_redis(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    """What it holds without lease and fence stands in a slot that may be another's by now."""
    first, second = hands
    job_id = submit_due(system)
    topic = system.center.catalog.get(TOPIC)
    handler = first._center.handlers[TOPIC]
    entry = Entry(job_id, SLOT, NO_FENCE, topic, handler, 0, first.clock.monotonic() - 5)
    entry.checked = True
    assert first.inflight.hold_if_free(entry)
    first._worker.lease_keeper.run_once()
    assert second.store.read_tries([job_id])[job_id].lease == 0


def test_a_lease_that_was_given_up_is_asked_for_anew(system: System, hands: tuple[Hands, Hands]) -> None:
    """The id may be taken anew before its move begins; then it is asked for as for any other."""
    first, second = hands
    job_id = submit_due(system)
    first.take()
    entry = first.inflight.get(job_id)
    assert entry is not None
    assert first._worker.lease_keeper.take([entry]) == [entry]
    first.finisher._release([entry])
    assert second.store.read_tries([job_id])[job_id].lease == 0
    again = Entry(job_id, SLOT, entry.fence, entry.topic, entry.handler, 0, first.clock.monotonic() - 5)
    assert first.inflight.hold(again) is Held.NEW
    again.row, again.checked = entry.row, True
    first._worker.lease_keeper.run_once()
    assert second.store.read_tries([job_id])[job_id].lease > 0


def test_a_worker_without_its_daemon_starts_nothing_without_a_lease(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    """Another owns the slot as well by now, and takes what has no lease once it has lost Redis."""
    orphan, owner = hands
    job_id = submit_due(system)
    orphan.take()
    orphan.lose_daemon()
    orphan.start()
    assert until(lambda: orphan.inflight.get(job_id) is None, 10), "what had no lease yet is let go"
    orphan.take()
    assert until(lambda: len(orphan.runs) == 1, 10), "it is taken again, with a lease"
    assert owner.store.leases.take({job_id: 30}) == set()
    orphan.end()
    orphan.finish()
    assert row_of(system, job_id).status == TaskStatus.PROCESSED


def test_a_worker_without_its_daemon_starts_nothing_that_another_has_leased(
    system: System, hands: tuple[Hands, Hands], monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan, owner = hands
    orphan.lose_daemon()
    job_id = submit_due(system)
    read = orphan.store.read_tries

    def leased_since(job_ids: list[int]) -> dict[int, TryRow]:
        monkeypatch.undo()
        rows = read(job_ids)
        assert owner.store.leases.take({job_id: 30}) == {job_id}
        return rows

    monkeypatch.setattr(orphan.store, "read_tries", leased_since)
    orphan.take()
    orphan.start()
    assert until(lambda: orphan.inflight.get(job_id) is None, 10), "it is let go"
    assert not orphan.runs


def test_a_worker_without_its_daemon_takes_nothing_without_redis(
    system: System, hands: tuple[Hands, Hands], clean_redis: RedisServer
) -> None:
    """Another owns the slot as well by now: with Redis back, it may have begun what has no lease yet."""
    orphan, owner = hands
    job_id = submit_due(system)
    orphan.lose_daemon()
    with out_of_reach(clean_redis):
        for worker in (orphan, owner):
            worker.miss_redis()
            worker.take_without_redis()
        assert orphan.inflight.get(job_id) is None
        assert owner.inflight.get(job_id) is not None


def test_a_worker_that_stood_still_waits_whether_its_slots_are_still_its_own(
    system: System, hands: tuple[Hands, Hands], clean_redis: RedisServer
) -> None:
    """Others may have had them for seconds, with Redis back."""
    sleeper, other = hands
    job_id = submit_due(system)
    with out_of_reach(clean_redis):
        sleeper.miss_redis()
        sleeper.stand_still(3)
        sleeper.take_without_redis()
        assert sleeper.inflight.get(job_id) is None
        sleeper.clock.slept += OWNED_SECONDS
        sleeper.take_without_redis()
        assert sleeper.inflight.get(job_id) is not None
    assert other.store.leases.take({job_id: 30}) == set()


def test_a_worker_that_waits_for_a_second_has_not_stood_still(
    system: System, hands: tuple[Hands, Hands]
) -> None:
    worker, other = hands
    job_id = submit_due(system)
    worker.stand_still(1.1)
    worker.take()
    worker.start_and_wait()
    assert other.store.leases.take({job_id: 30}) == {job_id}, "it runs for a moment only"
    worker.end()
    worker.finish()
