"""What a test's time runs: the worker, topics and schedules of the application, one call after the other."""

import asyncio
import secrets
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from toc.maintenance.scheduler import Scheduler
from toc.maintenance.sweep import Sweep
from toc.model.errors import DuplicateHandler
from toc.model.handler import Handler
from toc.model.task import Dead, Retry
from toc.model.topic import Topic
from toc.sdk.client import TimeoutCenter, all_centers
from toc.store.memory import MemoryDatabase
from toc.store.store import Store
from toc.testing.clock import VirtualClock
from toc.testing.worker import Call, Worker

MAX_CALLS = 10_000
"""Most handler calls of one run: a task that submits itself again for ever ends there."""
FIRST_TYPE = 10**9
MAX_IDLE = 1000
"""Most turns without a call at one instant."""
Outcome = tuple[bool, Any]
"""Whether a handler returned, and what it returned or raised."""


_made: dict[tuple[str, ...], tuple[list[Any], list[Topic]]] = {}
"""The rows of topics, and these: most tests of a process begin with the same."""


class InjectedFailure(Exception):
    """A try failed because the test had asked for it (``fail``)."""


class KitError(Exception):
    """What a test asks for cannot be."""


class TooManyCalls(KitError):
    """One ``advance`` has called handlers more often than a test can mean."""


class NeedsAwait(KitError):
    """A handler is a coroutine and the test's event loop runs: use ``await toc.aadvance(...)``."""


Steps = Generator[Call, Any, int]
"""Yields the calls that are due, and takes the Outcome of each."""


class Running:
    """Runs what is due until an instant, by one worker after the other. ``close`` it."""

    def __init__(self, store: Store, database: MemoryDatabase, clock: VirtualClock) -> None:
        self._store, self._database, self._clock = store, database, clock
        self.center = TimeoutCenter()
        """The center of the worker, and of the test itself."""
        self.chosen: tuple[TimeoutCenter, ...] = ()
        """The centers whose handlers run. Empty: all of the process."""
        self.failures: Counter[str] = Counter()
        """By topic, how many of its next tries fail without a call."""
        self.kills: defaultdict[str, list[bool]] = defaultdict(list)
        """By topic, for each of its next calls at which the worker is killed, whether that is after it."""
        self.given = set[int]()
        """Due times (ms) that the application has computed, from a clock that is ahead by ``lag_ms``."""
        self._topics: list[Topic] = []
        self._seen = 0
        """The number of ``topic_writes`` by which they are so."""
        self._lives: list[str] = []
        """The names of the workers so far. All but the last are dead."""
        self._worker: Worker | None = None
        # With a factory, for it unsets the event loop of the test's thread otherwise.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._running = False

    def close(self) -> None:
        """End its threads and its event loop."""
        self._end_worker()
        self._runner.close()

    def run(self, milliseconds: int, only: int | None = None) -> int:
        """Run what is due until that has passed, or one task. Returns how many times a handler was called."""
        if _loop_runs() and any(handler.is_async for handler in self.handlers().values()):
            raise NeedsAwait("a handler is a coroutine and an event loop runs here: await toc.aadvance(...)")
        try:
            self.arun(milliseconds, only).send(None)
        except StopIteration as stop:
            return int(stop.value)
        raise AssertionError("unreachable: it waits for nothing")

    async def arun(self, milliseconds: int, only: int | None = None) -> int:
        """Do as ``run``, and await handlers that are coroutines."""
        with self._alone():
            steps, outcome = self._steps(milliseconds, only), None
            try:
                while True:
                    outcome = await self._call(steps.send(outcome))
            except StopIteration as stop:
                return int(stop.value)

    # --- topics and handlers

    @property
    def _centers(self) -> Iterable[TimeoutCenter]:
        return self.chosen or all_centers()

    def handlers(self) -> dict[str, Handler]:
        """The handlers by topic. Raises DuplicateHandler."""
        found: dict[str, Handler] = {}
        for center in self._centers:
            for topic, handler in center.handlers.items():
                if topic in found:
                    raise DuplicateHandler(
                        f"two centers of this process handle {topic!r}: say which one the test means with "
                        "toc.use(center)"
                    )
                found[topic] = handler
        return found

    def topics(self) -> list[Topic]:
        """The topics, after making those that are handled or declared, and new."""
        if self._seen != self._database.topic_writes:
            self._topics = self._store.topics.list()
        declared = {one.name: one for center in self._centers for one in center.declared()}
        new = [declared[name] for name in sorted(declared.keys() - {topic.name for topic in self._topics})]
        key = () if self._topics else tuple(map(repr, new))
        if key in _made:  # as in the test before
            rows, self._topics = _made[key]
            self._database.add_topics(rows)
        else:
            for one in new:
                topic = one.topic(new_type(self._topics))
                self._store.topics.create(topic)
                self._topics = [*self._topics, topic]
            if key:
                _made[key] = self._database.topic_rows(), self._topics
        self._seen = self._database.topic_writes
        return self._topics

    # --- steps

    def _alive(self) -> Worker:
        """The worker, with the handlers that are registered by now."""
        handlers = self.handlers()
        worker = self._worker
        if worker is not None and worker.handlers != handlers and not worker.waits:
            self._end_worker()
        if self._worker is None:
            self._lives.append(f"toc-testing-{secrets.token_hex(4)}")
            self._store.leases.identify(self._lives[-1])
            self._store.leases.set_dead(self._lives[:-1])
            self._worker = Worker(self.center, handlers, self._died)
        return self._worker

    def _died(self, job_id: int, reason: str) -> None:
        for center in self._centers:
            center.hooks.died(job_id, reason)

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _steps(self, milliseconds: int, only: int | None) -> Steps:
        """Yield each call that is due until then. What is sent is whether it returned, and what."""
        called: Counter[str] = Counter()
        idle, until_ms = 0, self._clock.now_ms() + milliseconds
        if self._database.away:  # time passes, and nothing runs
            self._clock.move_to(until_ms)
            return 0
        self.center.catalog.refresh()
        self._declare()
        while True:
            worker = self._alive()
            if only is not None:
                self._clock.move_to(until_ms)
                worker.take_alone(only)
            elif not worker.waits:
                task, schedule = self._database.next_times(worker.serves())
                due = min(task, schedule)
                if due > until_ms + (self._clock.lag_ms if due in self.given else 0):
                    break
                if due > self._clock.now_ms():
                    idle = 0
                self._clock.move_to(due)
                if schedule == due:
                    self._schedule()
                worker.take()
            for call in worker.calls():
                idle = -1
                topic = call.handler.topic
                kill = self.kills[topic].pop(0) if self.kills[topic] else None
                if kill is False:
                    self._end_worker()
                    break
                if self.failures[topic] > 0:
                    self.failures[topic] -= 1
                    worker.raised(call, InjectedFailure("the test had asked for it"))
                    continue
                called[topic] += 1
                if called.total() > MAX_CALLS:
                    most = called.most_common(1)[0][0]
                    raise TooManyCalls(
                        f"handlers were called {MAX_CALLS:,} times, that of {most!r} the most, and it is "
                        f"{self._clock.now}: a task that submits itself again never ends; a schedule that "
                        f"fires often ends by toc.run_due() and center.schedules.pause(NAME)"
                    )
                returned, outcome = yield call
                if kill:
                    self._end_worker()
                    break
                errors = worker.returned(call, outcome) if returned else worker.raised(call, outcome)
                for error in errors:
                    if not isinstance(error, (Retry, Dead, InjectedFailure)):
                        worker.write()
                        raise error
            if only is not None:
                break
            idle += 1
            if idle > MAX_IDLE:
                raise KitError(f"nothing could run in {MAX_IDLE} turns at {self._clock.now}")
        self._clock.move_to(until_ms)
        return called.total()

    def _declare(self) -> None:
        """Make the schedules that the application declares."""
        for center in self._centers:
            names = frozenset(declared.name for declared in center.schedules.declared)
            for error in center.schedules.reconcile(names).values() if names else ():
                raise error

    def _schedule(self) -> None:
        """Make the occurrences whose time has come."""
        store, catalog, tables = self._store, self.center.catalog, frozenset(self._store.tables)
        sweep = Sweep(store, self.center.queues, catalog, self._clock)
        scheduler = Scheduler(store, catalog, sweep, lambda: tables)
        for _ in ("learn when a schedule needs a step", "take it"):
            scheduler.run_once()

    async def _call(self, call: Call) -> Outcome:
        try:
            outcome = Context().run(call.handler.call, call.argument)
            if call.handler.is_async and _loop_runs():
                outcome = await asyncio.get_running_loop().create_task(outcome, context=Context())
            elif call.handler.is_async:
                outcome = self._runner.run(outcome, context=Context())
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            return False, exc
        return True, outcome

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._running:
            raise KitError("a handler cannot move the time of the test that runs it")
        self._running = True
        try:
            yield
        finally:
            self._running = False


def new_type(topics: Iterable[Topic]) -> int:
    """A biz_type that none of these has, beyond those that applications name."""
    return max([FIRST_TYPE, *(topic.biz_type for topic in topics)]) + 1


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
