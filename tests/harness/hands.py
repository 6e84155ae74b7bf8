"""Workers within the test's process, whose loops run when a test says so, in an order of its own.

The other way to have a system is ``harness.system``: daemons and their processes, as users run them.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from benchmarks.local import RedisServer
from harness.patience import PATIENCE, until
from harness.rows import known
from harness.system import System
from toc import Task, TaskStatus, TimeoutCenter
from toc.model.clock import Clock
from toc.model.topic import Slot
from toc.worker.control import ControlPipe
from toc.worker.entry import Entry
from toc.worker.index_watch import OUT_SECONDS
from toc.worker.lease_keeper import LEASE_AFTER_SECONDS
from toc.worker.worker import Worker

TURN_SECONDS = 5.0
"""How long a try may take to start before the poller turns again."""

TOPIC = "test.sync"
SLOT = Slot(TOPIC, 0)


class PausedClock(Clock):
    """The wall clock of the machine, and a monotonic one on which only what the test wants takes time.

    Else a machine that stands still for a second would be a worker that did, and take other steps.
    """

    def __init__(self) -> None:
        self._began = super().monotonic()
        self.slept = 0.0

    def monotonic(self) -> float:
        return self._began + self.slept


class WorkerAtRest:
    """What one worker process is made of, without its threads, its slots claimed. Its daemon is gone.

    Tests hold its stages by what these show to each other.
    """

    def __init__(self, center: TimeoutCenter, name: str, slots: Iterable[Slot]) -> None:
        self.center, self.store = center, center.store
        self.name = name
        here, there = socket.socketpair()
        there.close()
        self.link = ControlPipe(here)
        self.worker = worker = Worker(center, name, self.link, threads=1)
        self.inflight, self.inbox, self.queues = (
            worker.tools.inflight,
            worker.tools.inbox,
            worker.tools.queues,
        )
        self.finisher, self.poller, self.leases = worker.finisher, worker.poller, worker.leases
        self.dispatcher, self.adopter = worker.dispatcher, worker.adopter
        self.bodies, self.checker = worker.bodies, worker.checker
        """The worker's own, which is not that of the center: what a test replaces here, its stages call."""
        self.heartbeat, self.reclaimer, self.book = worker.heartbeat, worker.reclaimer, worker.book
        self.own(slots)

    def own(self, slots: Iterable[Slot]) -> None:
        """Claim these slots too."""
        self.book.want(slots)
        if self.book.incomplete:
            self.book.claim_missing()

    def entry(self, job_id: int, fence: float, *, held_seconds_ago: float = 0.0) -> Entry:
        """An entry of the task in ``SLOT``, as if it had been taken under this fence."""
        topic, handler = self.center.catalog.get(SLOT.topic), self.center.handlers[SLOT.topic]
        held = self.center.clock.monotonic() - held_seconds_ago
        return Entry(job_id, SLOT, fence, topic, handler, 0, held, kept=held)

    def turn(self) -> float:
        """Let the poller turn until every server has answered. Returns the seconds until something is due."""
        until_answered = time.monotonic() + PATIENCE
        seconds = self.poller.run_once()
        while not (self.poller.settled and self.checker.settled):
            assert time.monotonic() < until_answered, "a server does not answer"
            self.worker.tools.wake.clear()
            self.worker.tools.wake.sleep(min(seconds, 0.01))
            seconds = self.poller.run_once()
        return seconds

    def adopt(self) -> None:
        """Look for what is prepared and not held, and check it."""
        self.adopter.run_once()
        self.turn()

    def finish(self) -> None:
        """Write and move what has ended."""
        for flusher in 2 * self.finisher.flushers:
            flusher.run_once()

    def reclaim(self) -> None:
        """Look for what others have left."""
        self.reclaimer.look_now()
        self.reclaimer.run_once()

    def close(self) -> None:
        """Close what it holds open; the center is its maker's."""
        self.worker.close()


class Hands(WorkerAtRest):
    """A worker that runs handlers, each of which ends when the test says so."""

    def __init__(self, system: System, redis: RedisServer, name: str) -> None:
        self._system, self._redis = system, redis
        self.clock = PausedClock()
        center = TimeoutCenter(system.settings, clock=self.clock)
        center.handler(TOPIC)(self._handle)
        center.catalog.refresh()
        super().__init__(center, name, [SLOT])
        self.runs: list[Task] = []
        self.fails = False
        self._go_on = threading.Event()
        self._started = False

    def _handle(self, task: Task) -> None:
        self.runs.append(task)
        assert self._go_on.wait(PATIENCE)
        if self.fails:
            raise RuntimeError("as the test wants")

    def take_one(self) -> int:
        """Take a task that has just become due; returns its job_id."""
        job_id = submit_due(self._system)
        self.take()
        return job_id

    def begin_one(self) -> int:
        """Take a task that has just become due and see it running; returns its job_id."""
        before = len(self.runs)
        job_id = self.take_one()
        self.start()
        self.await_runs(before + 1)
        return job_id

    def fail_one(self) -> int:
        """Let a task that has just become due fail; returns its job_id."""
        job_id = self.begin_one()
        self.end_and_finish(fails=True)
        return job_id

    def take(self) -> None:
        """Prepare what is due, and check it."""
        self.inbox.look_at(SLOT, 0)
        self.turn()

    def begin(self) -> None:
        """Take what is due, and see the first try running."""
        self.take()
        self.start_and_wait()

    def start(self) -> None:
        """Let waiting tries start."""
        if not self._started:
            self._started = True
            self.dispatcher.start()
            for loop in self.bodies.loops:
                loop.start()

    def start_and_wait(self) -> None:
        """Let the first try start, and see it running."""
        before = len(self.runs)
        self.start()
        self.await_runs(before + 1)

    def await_runs(self, number: int) -> None:
        """Wait until so many tries have started.

        After a while the poller turns again, as its loop would: a row may have been read too late, or over a
        connection that broke.
        """
        turns_again = time.monotonic() + TURN_SECONDS

        def started() -> bool:
            if len(self.runs) < number and time.monotonic() > turns_again:
                self.take()
            return len(self.runs) >= number

        assert until(started, PATIENCE), f"{len(self.runs)} of {number} have started"
        assert len(self.runs) == number

    def await_gone(self, job_id: int) -> None:
        """Wait until it holds the task no more: what was refused its start is given back."""

        def gone() -> bool:
            self.leases.look(0)
            self.finish()
            return self.inflight.get(job_id) is None

        assert until(gone, PATIENCE), "it is held"

    def end(self, *, fails: bool = False) -> None:
        """Let the running try end; its end is not written yet."""
        self.fails = fails
        self._go_on.set()
        assert until(lambda: self.finisher.backlog > 0, PATIENCE), "no try has ended"
        self._go_on.clear()

    def end_well(self, job_id: int) -> None:
        """Let the running try end, and see its task processed."""
        self.end_and_finish()
        assert self._system.row(job_id).status == TaskStatus.PROCESSED

    def end_and_finish(self, *, fails: bool = False) -> None:
        """Let the running try end, and write it."""
        self.end(fails=fails)
        self.finish()

    def held(self, job_id: int) -> Entry:
        """What it holds of the task."""
        return known(self.inflight.get(job_id))

    def ask_for_leases(self) -> None:
        """Be at work for so long that what runs gets leases."""
        self.clock.slept += LEASE_AFTER_SECONDS
        self.leases.loops[0].turn()

    def sleep(self) -> None:
        """Be paused for much longer than prepare_timeout: nobody has kept alive what is held."""
        self.clock.slept += 1000
        self.time_out()

    def time_out(self) -> None:
        """Let everything that is prepared in the slot be as old as if nobody had kept it alive."""
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
        self.inflight.arrived(self.inflight.depart(self.inflight.snapshot()))

    def lose_daemon(self) -> None:
        """Let the main thread see that the daemon is gone."""
        with selectors.DefaultSelector() as selector:
            self.worker.serve(selector, lambda: self.link.closed)

    def stand_still(self, seconds: float) -> None:
        """Be stopped for a while."""
        self.worker.beat.run_once()
        self.clock.slept += seconds
        self.worker.beat.run_once()

    def miss_redis(self) -> None:
        """Find that it is out of reach."""
        self.worker.watch.run_once()
        self.clock.slept += OUT_SECONDS
        self.worker.watch.run_once()

    def take_without_redis(self) -> None:
        """Take by leases what is due, where Redis is out of reach."""
        self.worker.rows.look_now()
        self.worker.rows.loops[0].turn()
        self.turn()

    def close(self) -> None:
        """End its threads and close all that it holds open."""
        self._go_on.set()
        for loop in self.bodies.loops:
            loop.stop()
        super().close()
        self.center.close()


class Pair:
    """Two workers that own one slot, and what they work on; unpacked, the two."""

    def __init__(self, system: System, redis: RedisServer, patch: pytest.MonkeyPatch) -> None:
        self.system, self.center, self.redis, self.patch = system, system.center, redis, patch
        self.row = system.row
        self._both = Hands(system, redis, "a:1"), Hands(system, redis, "b:1")

    def __iter__(self) -> Iterator[Hands]:
        return iter(self._both)

    def ran(self, job_id: int) -> bool:
        """Whether the task has been processed, at no cost of a try."""
        row = self.row(job_id)
        return (row.status, row.attempts, row.crashes) == (TaskStatus.PROCESSED, 0, 0)


def submit_due(system: System, body: bytes | None = None) -> int:
    """Submit a task; returns once it is due."""
    job_id = system.center.submit(TOPIC, biz_id=1, delay=0.02, body=body)
    due = system.row(job_id).action_time
    assert until(lambda: system.center.clock.now_ms() > due, PATIENCE)
    return job_id


def in_five_minutes() -> datetime:
    """A deadline that no test lives to see."""
    return datetime.now(UTC) + timedelta(minutes=5)


def meanwhile(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, *steps: Callable[[], object]
) -> None:
    """Whoever calls ``owner.name`` next finds that these steps were taken just before. Later calls do not."""
    call = getattr(owner, name)

    def first_the_steps(*asked: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, call)
        for step in steps:
            step()
        return call(*asked, **named)

    monkeypatch.setattr(owner, name, first_the_steps)


@contextmanager
def out_of_reach(server: RedisServer) -> Iterator[None]:
    """The server does not answer."""
    server.pause()
    try:
        yield
    finally:
        server.resume()
