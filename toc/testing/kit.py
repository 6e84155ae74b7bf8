"""The kit: an application's tasks in its tests, without a server, on a clock that the test moves."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from functools import cache
from typing import Any, Self, cast

from typing_extensions import TypedDict, Unpack

from toc.config import Settings
from toc.index.queues import NoIndex
from toc.model.catalog import TopicCatalog
from toc.model.clock import Duration, from_ms, seconds_of, span, to_ms
from toc.model.errors import InvalidInput, UnknownTopic
from toc.model.task import Task, TaskStatus
from toc.model.topic import NEW_SLOTS, Topic, unknown_topic
from toc.sdk.async_client import AsyncTimeoutCenter
from toc.sdk.client import TimeoutCenter, stand_in
from toc.sdk.parts import StandIn
from toc.sdk.submission import RowMaker, instant_ms
from toc.store.memory import MemoryDatabase
from toc.store.store import Store
from toc.testing.clock import VirtualClock
from toc.testing.running import KitError, Running, new_type
from toc.testing.transactions import Transactions

URL = "sqlite:////toc.testing"
"""Names the database in memory, which nothing opens by it."""
TOLERANCE = timedelta(seconds=1)
"""How far a due time may be off that is given as a time: columns of whole seconds cut the rest."""
__tracebackhide__ = True  # what fails is a line of the test, which pytest then shows
MAX_SHOWN = 5
"""Most tasks that a failure shows."""


class Like(TypedDict, total=False):
    """How a test describes a task. What is not named may be anything. ``attribute``: items that it must
    have, or the payload of its handler."""

    biz_id: int | str | None
    due_in: Duration | None
    due_at: datetime | None
    attribute: object
    body: bytes | None


class Expected:
    """A task as a test describes it. ``tolerance``: how far the due time of a task may be off."""

    def __init__(self, topic: str, like: Like, tolerance: Callable[[Task], timedelta]) -> None:
        self.topic, self.tolerance = topic, tolerance
        self.like: dict[str, Any] = {name: value for name, value in like.items() if value is not None}
        if "due_in" in self.like:
            self.like["due_in"] = timedelta(seconds=seconds_of(self.like["due_in"]))
        if "due_at" in self.like:
            instant_ms(self.like["due_at"], "due_at")  # raises, as for an action_time

    def differences(self, task: Task, now: datetime) -> list[str]:
        """How a task differs, each as a sentence; empty if it does not."""
        like = self.like
        found = [] if task.topic == self.topic else [f"its topic is {task.topic!r}"]
        plain = [name for name in ("biz_id", "body") if name in like and getattr(task, name) != like[name]]
        found += [f"its {name} is {getattr(task, name)!r}" for name in plain]
        due = now + like["due_in"] if "due_in" in like else like.get("due_at")
        if due is not None and abs(task.action_time - due) > self.tolerance(task):
            apart = _shown(abs(task.action_time - due))
            found.append(f"it is due {apart} {'later' if task.action_time > due else 'earlier'}")
        for key, value in like.get("attribute", {}).items():
            if key not in task.attribute:
                found.append(f"its attribute has no {key!r}")
            elif task.attribute[key] != value:
                found.append(f"its attribute has {key!r}: {task.attribute[key]!r}")
        return found

    def __str__(self) -> str:
        named = ("biz_id", "attribute", "body")
        parts = [repr(self.topic), *(f"{name}={self.like[name]!r}" for name in named if name in self.like)]
        if "due_in" in self.like:
            parts.append(f"due in {_shown(self.like['due_in'])}")
        elif "due_at" in self.like:
            parts.append(f"due at {self.like['due_at'].isoformat()}")
        return ", ".join(parts)


def nearest_first(expected: Expected, tasks: Iterable[Task], now: datetime) -> str:
    """What there is instead, the least different first."""
    found = sorted(
        ((expected.differences(task, now), task) for task in tasks),
        key=lambda one: (one[1].topic != expected.topic, len(one[0]), one[1].job_id),
    )
    if not found:
        return "no task was submitted at all"
    lines = [
        f"    {describe(task, now)}: {'; '.join(differs) or f'it is {task.status.name.lower()}'}"
        for differs, task in found[:MAX_SHOWN]
    ]
    more = [f"    and {len(found) - MAX_SHOWN} more"] if len(found) > MAX_SHOWN else []
    return "\n".join(["submitted instead, the nearest first:", *lines, *more])


def describe(task: Task, now: datetime) -> str:
    """A task in one line."""
    wait = task.action_time - now
    due = f"due in {_shown(wait)}" if wait >= timedelta(0) else f"due {_shown(-wait)} ago"
    return f"{task.topic} biz_id={task.biz_id!r} {task.status.name.lower()}, {due}, {task.attribute!r}"


def _shown(duration: timedelta) -> str:
    """From a minute on in whole seconds."""
    seconds = duration.total_seconds()
    return span(seconds if seconds < 60 else round(seconds))


class _Intake(RowMaker):
    """Notes which due times (ms) are ``given`` as times, which the application has computed by itself."""

    def __init__(self, clock: VirtualClock, settings: Settings, given: set[int]) -> None:
        super().__init__(clock, settings.max_delay, settings.max_body, settings.allow)
        self.given = given

    def _due(self, topic: Any, delay: object, action_time: object, *more: Any, **how: Any) -> int:
        due = super()._due(topic, delay, action_time, *more, **how)
        if action_time is not None:
            self.given.add(due)
        return due


class Toc:
    """The timeout center of one test. Made by the pytest fixture ``toc``, or as a context manager.

    While it is open, every TimeoutCenter of the process uses it: tasks are rows of a database in memory, and
    time stands still until the test moves it. There is a topic for every registered handler; ``topic`` makes
    others, or changes one. An exception that a handler raises fails its try as in production, and is raised
    by the call that ran it; ``Retry`` and ``Dead`` are not.
    """

    def __init__(self) -> None:
        self._clock, self._database, self._store, self._transactions, queues = _parts()
        self._running = running = Running(self._store, self._database, self._clock)
        self.center = running.center
        """A center of the test's own, such as to submit and cancel by hand."""
        if self.center.stands_in is not None:
            raise KitError("another Toc of this process is open: close it first, or use it here too")
        self._clock.restart()
        self._database.empty()
        self._asked = Counter[str]()
        """By topic, the faults that the test has asked for."""
        settings = _settings(*sorted((name, os.environ[name]) for name in os.environ if name[:4] == "TOC_"))
        catalog = _Catalog(running.topics, self._clock)
        self._intake = _Intake(self._clock, settings, running.given)
        self._transactions.follow(self.center)
        of = self._transactions.of
        stand_in(StandIn(settings, self._clock, self._store, queues, catalog, self._intake, of))

    def close(self) -> None:
        """Give the centers their own settings and servers back, and forget all tasks. Call it once."""
        stand_in(None, gone=[self.center])
        self._transactions.follow(None)
        self._running.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        self.close()
        running = self._running
        for topic, asked in self._asked.items() if kind is None else ():
            if running.failures[topic] + len(running.kills[topic]) == asked:
                raise AssertionError(f"no try of {topic!r} has met the faults that the test had asked for")

    # --- what there is

    @property
    def now(self) -> datetime:
        """The time that it is for tasks, aware UTC."""
        return self._clock.now

    def use(self, *centers: TimeoutCenter | AsyncTimeoutCenter) -> None:
        """Have the topics, handlers and schedules of these centers only, as others of the process may handle
        the same topics."""
        self._running.chosen = tuple(
            one.sync if isinstance(one, AsyncTimeoutCenter) else one for one in centers
        )

    def topic(self, name: str, **policies: Any) -> Topic:
        """Make a topic, or give it other policies (fields of Topic). Raises InvalidTopic."""
        known = {topic.name: topic for topic in self._running.topics()}
        if name in known:
            topic = self._store.topics.alter(name, **policies)
        else:
            topic = Topic(name, new_type(known.values()), **{"slot_amount": NEW_SLOTS, **policies})
            self._store.topics.create(topic)
        self.center.catalog.refresh()
        return topic

    def tasks(
        self,
        topic: str | None = None,
        *,
        biz_id: int | str | None = None,
        status: TaskStatus | str | None = None,
    ) -> list[Task]:
        """All tasks, or those of a topic, a biz_id or a status, the first due first. "dead" is a status, too.

        Raises InvalidInput for another name, UnknownTopic.
        """
        wanted = _status(status)
        if topic is not None:
            self.center.catalog.get(topic)
        job_ids = self._database.job_ids()
        rows = self._store.read(job_ids)
        return [
            task
            for task in (self.center._task(rows[job_id]) for job_id in job_ids)
            if (topic is None or task.topic == topic)
            and (biz_id is None or task.biz_id == biz_id)
            and (wanted is None or task.status == wanted)
        ]

    def assert_submitted(
        self, topic: str, *, status: TaskStatus | str | None = TaskStatus.PENDING, **like: Unpack[Like]
    ) -> Task:
        """Return the first task that is so. Raises AssertionError, which shows what there is instead.

        ``due_in`` counts from ``now``; ``attribute`` are items that it must have among others. A ``status``
        of None is any.
        """
        expected = self._expected(topic, like)
        for task in self.tasks(status=status):
            if not expected.differences(task, self.now):
                return task
        raise AssertionError(f"no task {expected}; {nearest_first(expected, self.tasks(), self.now)}")

    def refute_submitted(
        self, topic: str, *, status: TaskStatus | str | None = TaskStatus.PENDING, **like: Unpack[Like]
    ) -> None:
        """Raise AssertionError, which shows it, if there is a task that is so."""
        expected = self._expected(topic, like)
        for task in self.tasks(status=status):
            if not expected.differences(task, self.now):
                raise AssertionError(f"there is a task {expected}: {describe(task, self.now)}")

    # --- time

    def advance(self, duration: Duration) -> int:
        """Let this time pass: run what comes due on the way, in the order of due times, the clock standing at
        each. Returns how many times a handler was called.

        Raises what a handler raises, at the time of that try; then call it again for the rest.
        """
        return self._running.run(round(seconds_of(duration) * 1000))

    async def aadvance(self, duration: Duration) -> int:
        """Do as ``advance``, and await handlers that are coroutines in the running event loop."""
        return await self._running.arun(round(seconds_of(duration) * 1000))

    def run_due(self) -> int:
        """Run what is due now. Returns how many times a handler was called."""
        return self._running.run(0)

    async def arun_due(self) -> int:
        """Do as ``run_due``, and await handlers that are coroutines."""
        return await self._running.arun(0)

    def run(self, handler: Callable[..., Any] | str, *payload: Any, **fields: Any) -> Task:
        """Submit a task, run this handler (or that of a topic) with it alone, and return the task as it is
        then.

        A typed handler takes its payload. ``fields`` are those of ``submit``, such as ``attribute``; the
        ``biz_id`` is 1 otherwise. Raises what the handler raises.
        """
        job_id = self._one(handler, payload, fields)
        self._running.run(1, job_id)
        return cast(Task, self.center.get(job_id))

    async def arun(self, handler: Callable[..., Any] | str, *payload: Any, **fields: Any) -> Task:
        """Do as ``run``, and await a handler that is a coroutine."""
        job_id = self._one(handler, payload, fields)
        await self._running.arun(1, job_id)
        return cast(Task, self.center.get(job_id))

    def _one(
        self, handler: Callable[..., Any] | str, payload: tuple[Any, ...], fields: dict[str, Any]
    ) -> int:
        """Submit the task of ``run``."""
        topic, made_of = self._handler(handler)
        if payload:
            fields |= made_of.fields(*payload)
        due = from_ms(self._clock.now_ms() + 1)
        return self.center.submit(topic, action_time=due, **{"biz_id": 1, **fields})

    def _handler(self, handler: Callable[..., Any] | str) -> tuple[str, Any]:
        """Return the topic and what the application holds, of a handler or that of a topic."""
        made_of = {name: one.made_of for name, one in self._running.handlers().items()}
        topics = [name for name, one in made_of.items() if handler in (name, one, one.function)]
        if len(topics) != 1:
            raise InvalidInput(f"{handler!r} is not the handler of one topic but of {topics or 'none'}")
        return topics[0], made_of[topics[0]]

    # --- faults

    def fail(self, topic: str, *, times: int = 1) -> None:
        """Let the next tries of this topic fail without calling the handler. A test without any fails at its
        end."""
        self._asked[topic] += times
        self._running.failures[self.center.catalog.get(topic).name] += times

    def kill_worker(self, *, before: str | None = None, after: str | None = None, times: int = 1) -> None:
        """Kill the worker at the next calls of this topic's handler: before the call, or after it and before
        its outcome is written. Another worker takes over at once. A test without any call fails at its end.
        """
        if (before is None) == (after is None):
            raise InvalidInput("give before= or after=, the name of a topic")
        topic = self.center.catalog.get(before or after or "").name
        self._asked[topic] += times
        self._running.kills[topic] += [before is None] * times

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

    def lose_reply(self) -> AbstractContextManager[None]:
        """The next write is stored and its answer is lost: a submit raises SubmitUnknown. In a transaction of
        the application nothing is stored: StoreUnavailable. What is returned may stand in a ``with``, at
        whose end it is over in any case."""
        self.center.catalog.refresh()  # which makes topics
        self._database.loses_reply = True
        return self._reply_lost()

    @contextmanager
    def _reply_lost(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._database.loses_reply, self._database.refuses = False, 0
            self._store.close()

    # --- inside

    def _expected(self, topic: str, like: Like) -> Expected:
        self.center.catalog.get(topic)
        if not isinstance(given := like.get("attribute") or {}, Mapping):  # a payload, as ``run`` takes
            like = {**like, "attribute": None, **self._handler(topic)[1].fields(given)}
        often = "due_at" in like or self._clock.runs

        def tolerance(task: Task) -> timedelta:
            if often or to_ms(task.action_time) in self._intake.given:
                return TOLERANCE + timedelta(milliseconds=self._clock.lag_ms)
            return timedelta(0)

        return Expected(topic, like, tolerance)


class _Catalog(TopicCatalog):
    """Reads the topics where it is asked: no server can hang here."""

    def unknown(self, name: str) -> UnknownTopic:
        """Return the error for a name that is none."""
        do = f"import the module of its handler, which is not registered, or call toc.topic({name!r})"
        return unknown_topic(name, self.known(), do)

    def read_through(self) -> dict[str, Topic]:
        """Read the topic table for a topic that is not known."""
        return self.refresh()

    def _refresh_soon(self) -> None:
        self.refresh()


@cache
def _parts() -> tuple[VirtualClock, MemoryDatabase, Store, Transactions, NoIndex]:
    """What all tests of a process use in turn: making a Store takes longer than a test."""
    clock = VirtualClock()
    database = MemoryDatabase(clock)
    store = Store([URL], databases=1, tables=1, clock=clock, server=database, indexed=False)
    return clock, database, store, Transactions(database.reach), NoIndex()


@cache
def _settings(*_environment: tuple[str, str]) -> Settings:
    return Settings(database_urls=[URL], databases=1, tables=1, redis_url=None, zookeeper=None)


def _status(status: TaskStatus | str | None) -> TaskStatus | None:
    if not isinstance(status, str):
        return status
    try:
        return TaskStatus[status.upper()]
    except KeyError:
        names = ", ".join(one.name.lower() for one in TaskStatus)
        raise InvalidInput(f"status {status!r} is none of {names}", "status") from None
