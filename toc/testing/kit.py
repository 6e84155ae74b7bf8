"""The kit: an application's tasks in its tests, without a server, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Self

from toc.config import Settings
from toc.maintenance.scheduler import Scheduler
from toc.maintenance.sweep import Sweep
from toc.model.catalog import TopicCatalog
from toc.model.clock import from_ms
from toc.model.duration import seconds_of
from toc.model.errors import DuplicateHandler, InvalidInput, TocError
from toc.model.handler import Handler
from toc.model.task import Dead, Retry, Task, TaskStatus
from toc.model.topic import Topic
from toc.sdk.changes import Changes
from toc.sdk.client import StandIn, TimeoutCenter, all_centers, open_queues, stand_in
from toc.sdk.indexing import Indexing
from toc.store.memory import MemoryDatabase
from toc.store.store import Store
from toc.testing.clock import VirtualClock
from toc.testing.expected import Expected, describe, nearest_first
from toc.testing.transactions import Transactions
from toc.testing.worker import Call, Worker

MAX_CALLS = 10_000
"""Most handler calls of one ``advance``: a task that submits itself again for ever ends there."""
SLOTS = 4
URL = "sqlite:////toc.testing"
"""Names the database in memory, which nothing opens by it."""
Duration = timedelta | float | str
"""A timedelta, seconds, or a text such as ``"30m"`` or ``"7d"``."""


Outcome = tuple[bool, Any]
"""Whether a handler returned, and what it returned or raised."""
Steps = Generator[Call, Outcome, int]
ROUNDED_MS = 1
"""A delay begins in the running millisecond, so its task is due this much later: who lets 30 minutes go by
means it, too."""
MAX_IDLE = 1000
"""Most turns without a call."""


class InjectedFailure(Exception):
    """A try failed because the test had asked for it (``fail``)."""


class TooManyCalls(TocError):
    """One ``advance`` has called handlers more often than a test can mean."""


class NeedsAwait(TocError):
    """A handler is a coroutine and the test's event loop runs: use ``await toc.aadvance(...)``."""


class Toc:
    """The timeout center of one test. Made by the pytest fixture ``toc``, or as a context manager.

    While it is open, every TimeoutCenter of the process uses it: tasks are rows of a database in memory, and
    time stands still until the test moves it. There is a topic for every registered handler; ``topic`` makes
    others, or changes one. An exception that a handler raises fails its try as in production, and is raised
    by the call that ran it; ``Retry`` and ``Dead`` are not.
    """

    def __init__(self) -> None:
        self._clock, self._database, self._store = _parts()
        self._clock.restart()
        self._database.empty()
        settings = _settings(*sorted(item for item in os.environ.items() if item[0].startswith("TOC_")))
        catalog = _Catalog(self._topics, self._clock)
        self.center = TimeoutCenter()
        """A center of the test's own, such as to submit and cancel by hand."""
        changes = Changes(lambda: self._store, Indexing(self.center), lambda: self._clock)
        self._transactions = Transactions(self._store, changes)
        queues = open_queues(settings)
        stand_in(StandIn(settings, self._clock, self._store, queues, catalog, self._transactions.of))
        self._chosen: tuple[TimeoutCenter, ...] = ()
        self._failures: Counter[str] = Counter()
        self._kills: defaultdict[str, list[bool]] = defaultdict(list)
        """By topic, for each of its next calls at which the worker is killed, whether that is after it."""
        self._lives: list[str] = []
        """The names of the workers so far. All but the last are dead."""
        self._worker: Worker | None = None
        self._runner: asyncio.Runner | None = None
        self._running = False

    def close(self) -> None:
        """Give the centers their own settings and servers back, and forget all tasks. May be called twice."""
        stand_in(None)
        self._transactions.close()
        self._end_worker()
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- what there is

    @property
    def now(self) -> datetime:
        """The time that it is for tasks, aware UTC."""
        return self._clock.now

    def use(self, *centers: TimeoutCenter) -> None:
        """Have the topics, handlers and schedules of these centers only, as others of the process may handle
        the same topics."""
        self._chosen = centers

    def topic(self, name: str, **policies: Any) -> Topic:
        """Make a topic, or give it other policies (fields of Topic). Raises InvalidTopic."""
        known = {topic.name: topic for topic in self._topics()}
        if name in known:
            topic = self._store.topics.alter(name, **policies)
        else:
            topic = Topic(name, _new_type(known.values()), **{"slot_amount": SLOTS, **policies})
            self._store.topics.create(topic)
        self.center.catalog.refresh()
        return topic

    def tasks(
        self, topic: str | None = None, *, biz_id: int | str | None = None, status: TaskStatus | None = None
    ) -> list[Task]:
        """All tasks, or those of a topic, a biz_id or a status, the first due first."""
        found = [self.center.get(job_id) for job_id in self._database.job_ids()]
        return [
            task
            for task in found
            if task is not None
            and (topic is None or task.topic == topic)
            and (biz_id is None or task.biz_id == biz_id)
            and (status is None or task.status == status)
        ]

    def assert_submitted(
        self,
        topic: str,
        *,
        biz_id: int | str | None = None,
        due_in: Duration | None = None,
        due_at: datetime | None = None,
        attribute: Mapping[str, Any] | None = None,
        body: bytes | None = None,
        status: TaskStatus | None = TaskStatus.PENDING,
    ) -> Task:
        """Return the first task that is so. Raises AssertionError, which shows what there is instead.

        ``due_in`` counts from ``now``; ``attribute`` are items that it must have among others. A ``status``
        of None is any.
        """
        expected = _expected(topic, biz_id, due_in, due_at, attribute, body)
        tasks = self.tasks(status=status)
        for task in tasks:
            if not expected.differences(task, self.now):
                return task
        raise AssertionError(f"no task {expected}; {nearest_first(expected, tasks, self.now)}")

    def refute_submitted(
        self,
        topic: str,
        *,
        biz_id: int | str | None = None,
        due_in: Duration | None = None,
        due_at: datetime | None = None,
        attribute: Mapping[str, Any] | None = None,
        body: bytes | None = None,
        status: TaskStatus | None = TaskStatus.PENDING,
    ) -> None:
        """Raise AssertionError, which shows it, if there is a task that is so."""
        expected = _expected(topic, biz_id, due_in, due_at, attribute, body)
        for task in self.tasks(status=status):
            if not expected.differences(task, self.now):
                raise AssertionError(f"there is a task {expected}: {describe(task, self.now)}")

    # --- time

    def advance(self, duration: Duration) -> int:
        """Let this time pass: run what comes due on the way, in the order of due times, the clock standing at
        each. Returns how many times a handler was called.

        Raises what a handler raises, at the time of that try; then call it again for the rest.
        """
        return self._drive(self._steps(self._after(duration)))

    async def aadvance(self, duration: Duration) -> int:
        """Do as ``advance``, and await handlers that are coroutines in the running event loop."""
        return await self._adrive(self._steps(self._after(duration)))

    def run_due(self) -> int:
        """Run what is due now. Returns how many times a handler was called."""
        return self._drive(self._steps(self._clock.now_ms() + ROUNDED_MS))

    async def arun_due(self) -> int:
        """Do as ``run_due``, and await handlers that are coroutines."""
        return await self._adrive(self._steps(self._clock.now_ms() + ROUNDED_MS))

    def run(self, handler: Callable[..., Any] | str, *, biz_id: int | str = 1, **fields: Any) -> Task:
        """Submit a task, run this handler (or that of a topic) with it alone, and return the task as it is
        then.

        ``fields`` are those of ``submit``, such as ``attribute``. Raises what the handler raises.
        """
        topics = [name for name, one in self._handlers().items() if handler in (name, one.call)]
        if len(topics) != 1:
            raise InvalidInput(f"{handler!r} is not the handler of one topic but of {topics or 'none'}")
        topic = topics[0]
        due = from_ms(self._clock.now_ms() + ROUNDED_MS)
        job_id = self.center.submit(topic, biz_id=biz_id, action_time=due, **fields)
        self._drive(self._steps(self._clock.now_ms() + ROUNDED_MS, only=job_id))
        task = self.center.get(job_id)
        assert task is not None  # noqa: S101 - it was just stored
        return task

    # --- faults

    def fail(self, topic: str, *, times: int = 1) -> None:
        """Let the next tries of this topic fail without calling the handler."""
        self._failures[topic] += times

    def kill_worker(self, *, before: str | None = None, after: str | None = None, times: int = 1) -> None:
        """Kill the worker at the next calls of this topic's handler: before the call, or after it and before
        its outcome is written. Another worker takes over at once."""
        if (before is None) == (after is None):
            raise InvalidInput("give before= or after=, the name of a topic")
        self._kills[before or after or ""] += [before is None] * times

    @contextmanager
    def database_away(self) -> Iterator[None]:
        """The database cannot be reached: calls raise StoreUnavailable, and nothing runs."""
        self.center.catalog.refresh()
        self._database.away = True
        try:
            yield
        finally:
            self._database.away = False
            self._store.close()  # else it counts as away until it was asked again

    @contextmanager
    def lose_reply(self) -> Iterator[None]:
        """The next write is stored, its answer is lost, and then the database is away: a submit raises
        SubmitUnknown."""
        self.center.catalog.refresh()  # which makes topics
        self._database.loses_replies = True
        try:
            yield
        finally:
            self._database.loses_replies = self._database.away = False
            self._store.close()

    # --- inside: topics and handlers

    def _handlers(self) -> dict[str, Handler]:
        found: dict[str, Handler] = {}
        for center in self._chosen or all_centers():
            for topic, handler in center.handlers.items():
                if topic in found:
                    raise DuplicateHandler(
                        f"two centers of this process handle {topic!r}: say which one the test means with "
                        "toc.use(center)"
                    )
                found[topic] = handler
        return found

    def _topics(self) -> list[Topic]:
        """The topics, after making those of handlers that are new."""
        topics = self._store.topics.list()
        names = {topic.name for topic in topics}
        for name in sorted(
            {name for center in self._chosen or all_centers() for name in center.handlers} - names
        ):
            topics.append(Topic(name, _new_type(topics), SLOTS))
            self._store.topics.create(topics[-1])
        return topics

    # --- inside: running

    def _after(self, duration: Duration) -> int:
        return self._clock.now_ms() + round(seconds_of(duration) * 1000) + ROUNDED_MS

    def _alive(self) -> Worker:
        """The worker, with the handlers that are registered by now."""
        handlers = self._handlers()
        worker = self._worker
        if worker is not None and worker.handlers != handlers and not worker.waits:
            self._end_worker()
        if self._worker is None:
            self._lives.append(f"toc-testing-{secrets.token_hex(4)}")
            self._store.leases.identify(self._lives[-1])
            self._store.leases.set_dead(self._lives[:-1])
            self._worker = Worker(self.center, self._clock, handlers)
        return self._worker

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _steps(self, until_ms: int, only: int | None = None) -> Steps:
        """Yield each call that is due until then. What is sent is whether it returned, and what."""
        called: Counter[str] = Counter()
        idle = 0
        self.center.catalog.refresh()
        self._declare()
        while True:
            worker = self._alive()
            if only is not None:
                self._clock.move_to(until_ms)
                worker.take_alone(only)
            elif not worker.waits:
                due = self._next_due(worker, until_ms)
                if due is None:
                    break
                self._clock.move_to(due)
                self._schedule()
                worker.take()
            for call in worker.calls():
                idle = -1
                topic = call.handler.topic
                kill = self._kills[topic].pop(0) if self._kills[topic] else None
                if kill is False:
                    self._end_worker()
                    break
                if self._failures[topic] > 0:
                    self._failures[topic] -= 1
                    worker.raised(call, InjectedFailure("the test had asked for it"))
                    continue
                called[topic] += 1
                if called.total() > MAX_CALLS:
                    most = called.most_common(1)[0][0]
                    raise TooManyCalls(
                        f"handlers were called {MAX_CALLS:,} times, that of {most!r} the most, and it is "
                        f"{self.now}: a task that submits itself again never ends"
                    )
                returned, outcome = yield call
                if kill:
                    self._end_worker()
                    break
                errors = worker.returned(call, outcome) if returned else worker.raised(call, outcome)
                worker.write()
                for error in errors:
                    if not isinstance(error, (Retry, Dead, InjectedFailure)):
                        raise error
            if only is not None:
                break
            idle += 1
            if idle > MAX_IDLE:
                raise TocError(
                    f"nothing could run in {MAX_IDLE} turns at {self.now}; there is {self.tasks()}"
                )
        self._clock.move_to(until_ms - ROUNDED_MS)
        return called.total()

    def _next_due(self, worker: Worker, until_ms: int) -> int | None:
        soonest, _ = self._store.schedules.soonest(self._store.tables)
        times = [worker.next_due(until_ms), *soonest.values()]
        return min((at for at in times if at is not None and at <= until_ms), default=None)

    def _declare(self) -> None:
        """Make the schedules that the application declares."""
        for center in self._chosen or all_centers():
            names = frozenset(declared.name for declared in center.schedules.declared)
            for error in center.schedules.reconcile(names).values() if names else ():
                raise error

    def _schedule(self) -> None:
        """Make the occurrences whose time has come."""
        catalog = self.center.catalog
        scheduler = Scheduler(
            self._store, catalog, Sweep(self._store, self.center.queues, catalog, self._clock)
        )
        scheduler.add(self._store.tables)
        for _ in ("learn when a schedule needs a step", "take it"):
            scheduler.run_once()

    def _drive(self, steps: Steps) -> int:
        if _loop_runs() and any(handler.is_async for handler in self._handlers().values()):
            raise NeedsAwait("a handler is a coroutine and an event loop runs here: await toc.aadvance(...)")
        with self._alone():
            return _last(steps, self._call)

    def _call(self, call: Call) -> Outcome:
        try:
            outcome = Context().run(call.handler.call, call.argument)
            if call.handler.is_async:
                if self._runner is None:
                    self._runner = asyncio.Runner()
                outcome = self._runner.run(outcome, context=Context())
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            return False, exc
        return True, outcome

    async def _adrive(self, steps: Steps) -> int:
        with self._alone():
            try:
                call = next(steps)
                while True:
                    call = steps.send(await _acall(call))
            except StopIteration as stop:
                return int(stop.value)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._running:
            raise TocError("a handler cannot move the time of the test that runs it")
        self._running = True
        try:
            yield
        finally:
            self._running = False


class _Catalog(TopicCatalog):
    """Reads the topics where it is asked: no server can hang here."""

    def read_through(self) -> dict[str, Topic]:
        """Read the topic table for a topic that is not known."""
        return self.refresh()


@cache
def _parts() -> tuple[VirtualClock, MemoryDatabase, Store]:
    """What all tests of a process use in turn: making a Store takes longer than a test."""
    clock = VirtualClock()
    database = MemoryDatabase(clock)
    return clock, database, Store([URL], databases=1, tables=1, clock=clock, server=database, indexed=False)


@cache
def _settings(*_environment: tuple[str, str]) -> Settings:
    return Settings(database_urls=[URL], databases=1, tables=1, redis_url=None, zookeeper=None)


async def _acall(call: Call) -> Outcome:
    try:
        if call.handler.is_async:
            loop = asyncio.get_running_loop()
            outcome = await loop.create_task(call.handler.call(call.argument), context=Context())
        else:
            outcome = Context().run(call.handler.call, call.argument)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        return False, exc
    return True, outcome


def _last(steps: Steps, run: Callable[[Call], Outcome]) -> int:
    """Run all steps. Returns what they return."""
    try:
        call = next(steps)
        while True:
            call = steps.send(run(call))
    except StopIteration as stop:
        return int(stop.value)


def _new_type(topics: Iterable[Topic]) -> int:
    return max((topic.biz_type for topic in topics), default=0) + 1


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _expected(
    topic: str,
    biz_id: int | str | None,
    due_in: Duration | None,
    due_at: datetime | None,
    attribute: Mapping[str, Any] | None,
    body: bytes | None,
) -> Expected:
    wait = None if due_in is None else timedelta(seconds=seconds_of(due_in))
    return Expected(topic=topic, biz_id=biz_id, due_in=wait, due_at=due_at, attribute=attribute, body=body)
