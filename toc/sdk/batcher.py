"""Group commit for asyncio: submits and reads in flight share round trips.

Each database server has a lane of its own for submits and one for reads. What is asked while a batch is under
way waits and goes together in the next one, so a batch is as large as the load makes it, and nobody waits for
a timer. A batch is one round trip and one commit; each caller gets an outcome of his own.

    ask ─▶ waiting ─▶ batch under way (one per lane) ─▶ committed ─▶ answers ─▶ index
              ▲              │
              │              └── what cannot go with others goes by itself, beside the next batch
              └── refused at once while the server is away

A batch that its server does not answer in time no longer holds back the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from toc.failpoint import failpoint
from toc.model import features
from toc.model.catalog import REFRESH_SECONDS
from toc.model.errors import (
    Busy,
    InvalidBody,
    SchemaBehind,
    StoreUnavailable,
    SubmitUnknown,
    TocError,
    UnknownTopic,
)
from toc.model.task import NewTask, TaskRow
from toc.model.topic import Topic, check_topic_name
from toc.sdk.client import TimeoutCenter
from toc.sdk.submission import check_job_id, features_of

MOST_TOGETHER = 500
"""Most items of a batch."""
MOST_BYTES = 500_000
"""Most bytes of a batch, roughly. Escaped, that is still less than what any server accepts at once."""
MOST_WAITING = 5_000
"""Most items that wait in a lane; further ones are refused."""
MOST_WAITING_BYTES = 32 << 20
LARGE_BYTES = 100_000
"""A larger item goes by itself: the others of its batch would wait for it."""
PATIENCE_SECONDS = 0.05
"""A batch that takes longer no longer holds back the next one."""
AWAY_SECONDS = 1.0
"""If a batch takes longer, its server is examined. Without an answer to that, callers are refused."""
GIVE_UP_SECONDS = 10.0
"""Callers wait no longer than that for a batch. It may still be stored."""
UNDER_WAY = 4
"""Most batches of a lane under way, if its server is slow; also most items that go by themselves."""
ROW_BYTES = 300
"""Approximate bytes of a row without its attribute."""

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Answer = Callable[[Sequence[Any]], None]
"""Takes the outcome of each item of a batch: a result, a TocError, or APART."""
APART = object()
"""The outcome of an item that must go by itself."""


@dataclass(slots=True, eq=False)
class _Asked(Generic[Item]):
    item: Item
    size: int
    take: Callable[[Any], None]
    settled: bool = False


@dataclass(slots=True, eq=False)
class _Batch(Generic[Item]):
    asked: list[_Asked[Item]]
    alone: bool
    answered: threading.Event = field(default_factory=threading.Event)
    late: bool = False
    timer: asyncio.TimerHandle | None = None


class Lane(Generic[Item, Outcome]):
    """What many callers ask one server, in batches. For one event loop."""

    def __init__(
        self,
        name: str,
        *,
        together: Callable[[Sequence[Item], Answer], None],
        alone: Callable[[Item, Answer], None],
        given_up: Callable[[Item], TocError],
        away: Callable[[], StoreUnavailable | None],
        examine: Callable[[Callable[[float], bool]], None],
    ) -> None:
        """``together`` and ``alone`` run on a thread. They call the Answer once, and may then do more.

        ``away`` tells why callers are to be refused at once. ``examine`` looks at the server of a batch that
        is late; it gets a function that waits so many seconds for the answer and returns whether it came.
        """
        self._together = together
        self._alone = alone
        self._given_up = given_up
        self._away = away
        self._examine = examine
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(4 * UNDER_WAY, f"toc-{name}")
        self._waiting: deque[_Asked[Item]] = deque()
        self._apart: deque[_Asked[Item]] = deque()
        self._bytes = 0
        self._open: set[_Batch[Item]] = set()
        """Batches under way, not answered yet."""
        self._busy = 0
        """Threads at work: for batches under way, and for what follows the answers."""

    async def ask(self, item: Item, size: int) -> Outcome:
        """Return the outcome for the item. Raises it if it is an error; Busy if too much waits already."""
        self._admit(1, size)
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._add(item, size, partial(_resolve, future))
        self._pump()
        return await future

    async def ask_many(self, items: Sequence[tuple[Item, int]]) -> list[Outcome | TocError]:
        """Return the outcome of each item, given with its size. Raises StoreUnavailable or Busy for all."""
        self._admit(len(items), sum(size for _, size in items))
        outcomes: list[Any] = [None] * len(items)
        left = len(items)
        future: asyncio.Future[None] = self._loop.create_future()

        def take(index: int, outcome: Any) -> None:
            nonlocal left
            outcomes[index] = outcome
            left -= 1
            if not left and not future.done():
                future.set_result(None)

        for index, (item, size) in enumerate(items):
            self._add(item, size, partial(take, index))
        self._pump()
        await future
        return outcomes

    def _admit(self, count: int, size: int) -> None:
        if (error := self._away()) is not None:
            raise StoreUnavailable(str(error))
        waiting = len(self._waiting) + len(self._apart)
        if waiting and (waiting + count > MOST_WAITING or self._bytes + size > MOST_WAITING_BYTES):
            raise Busy("too many requests wait for a database server; try again in a moment")

    def _add(self, item: Item, size: int, take: Callable[[Any], None]) -> None:
        self._bytes += size
        (self._apart if size > LARGE_BYTES else self._waiting).append(_Asked(item, size, take))

    @property
    def idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not (self._waiting or self._apart or self._busy)

    def close(self) -> None:
        """End the threads after the work begun."""
        self._threads.shutdown()

    # --- on the event loop

    def _pump(self) -> None:
        """Start what can be started now."""
        while self._apart and sum(batch.alone for batch in self._open) < UNDER_WAY:
            self._start([self._apart.popleft()], alone=True)
        while self._waiting:
            together = [batch for batch in self._open if not batch.alone]
            if len(together) == UNDER_WAY or not all(batch.late for batch in together):
                return
            asked = [self._waiting.popleft()]
            size = asked[0].size
            while self._waiting and len(asked) < MOST_TOGETHER and size < MOST_BYTES:
                asked.append(self._waiting.popleft())
                size += asked[-1].size
            self._start(asked, alone=False)

    def _start(self, asked: list[_Asked[Item]], *, alone: bool) -> None:
        batch = _Batch(asked, alone)
        self._open.add(batch)
        self._busy += 1
        batch.timer = self._loop.call_later(PATIENCE_SECONDS, self._be_late, batch)
        self._threads.submit(self._run, batch)

    def _be_late(self, batch: _Batch[Item]) -> None:
        batch.late = True
        batch.timer = self._loop.call_later(AWAY_SECONDS - PATIENCE_SECONDS, self._be_very_late, batch)
        self._pump()

    def _be_very_late(self, batch: _Batch[Item]) -> None:
        batch.timer = self._loop.call_later(GIVE_UP_SECONDS - AWAY_SECONDS, self._give_up, batch)
        self._busy += 1

        def examine() -> None:
            with contextlib.suppress(TocError):
                self._examine(batch.answered.wait)
            self._loop.call_soon_threadsafe(self._examined)

        self._threads.submit(examine)

    def _examined(self) -> None:
        self._busy -= 1
        error = self._away()
        if error is None:
            return
        waiting = [*self._waiting, *self._apart]
        self._waiting.clear()
        self._apart.clear()
        for asked in waiting:
            self._settle(asked, StoreUnavailable(str(error)))

    def _give_up(self, batch: _Batch[Item]) -> None:
        for asked in batch.asked:
            self._settle(asked, self._given_up(asked.item))

    def _take(self, batch: _Batch[Item], outcomes: Sequence[Any]) -> None:
        """Give the callers of a batch their outcomes."""
        self._open.discard(batch)
        if batch.timer is not None:
            batch.timer.cancel()
        for asked, outcome in zip(batch.asked, outcomes, strict=True):
            if outcome is APART and not batch.alone:
                self._apart.append(asked)
            else:
                self._settle(asked, outcome)
        self._pump()

    def _settle(self, asked: _Asked[Item], outcome: Any) -> None:
        if not asked.settled:  # else it was given up
            asked.settled = True
            self._bytes -= asked.size
            asked.take(outcome)

    def _ended(self) -> None:
        self._busy -= 1

    # --- on a thread

    def _run(self, batch: _Batch[Item]) -> None:
        def answer(outcomes: Sequence[Any]) -> None:
            if not batch.answered.is_set():
                batch.answered.set()
                self._loop.call_soon_threadsafe(self._take, batch, outcomes)

        try:
            items = [asked.item for asked in batch.asked]
            if batch.alone:
                self._alone(items[0], answer)
            else:
                self._together(items, answer)
        except BaseException as exc:
            answer([exc] * len(batch.asked))
        finally:
            self._loop.call_soon_threadsafe(self._ended)


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # its caller is gone
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class Batcher:
    """Submits and reads tasks for many coroutines of one event loop, on which it is made. Close it.

    Every call raises what TimeoutCenter's does, and Busy.
    """

    def __init__(self, center: TimeoutCenter) -> None:
        self.center = center
        self._loop = asyncio.get_running_loop()
        store = center.store
        servers = range(len(store.tables_of_server()))
        self._submits = [self._submit_lane(server) for server in servers]
        self._reads = [self._read_lane(server) for server in servers]
        self._topics_thread = ThreadPoolExecutor(1, "toc-topics")
        self._reading_topics: asyncio.Future[Any] | None = None
        self._keeping = self._loop.create_task(self._keep_topics())

    # --- submit

    async def submit(self, task: NewTask) -> int:
        """Store a task and return its job_id."""
        row = await self.row(task)
        if (tracing := self.center.tracing) is None:
            return await self._submit(row)
        began = time.time_ns()
        try:
            job_id = await self._submit(row)
        except Exception as exc:
            tracing.submitted(began, [(row.job_id, task.topic, exc)])
            raise
        tracing.submitted(began, [(job_id, task.topic, None)])
        return job_id

    async def submit_each(self, tasks: Sequence[NewTask]) -> list[int | TocError]:
        """Store many tasks, each for itself. Returns the job_id or the error of each.

        All are checked before any is stored; raises InvalidInput for the first that is wrong.
        """
        rows = [await self.row(task) for task in tasks]
        return await self.submit_rows(rows, [task.topic for task in tasks])

    async def submit_rows(self, rows: Sequence[TaskRow], topics: Sequence[str]) -> list[int | TocError]:
        """Store rows that ``row`` has made, of these topics, each for itself. Returns their outcomes."""
        began = time.time_ns()
        outcomes: list[int | TocError] = [StoreUnavailable("not asked")] * len(rows)
        by_server: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            by_server.setdefault(self.center.store.server_of(row.job_id), []).append(index)

        async def store(server: int, part: list[int]) -> None:
            try:
                found = await self._submits[server].ask_many([(rows[n], _size(rows[n])) for n in part])
            except TocError as exc:
                found = [exc] * len(part)
            for index, outcome in zip(part, found, strict=True):
                outcomes[index] = outcome

        await asyncio.gather(*(store(server, part) for server, part in by_server.items()))
        if (tracing := self.center.tracing) is not None:
            tracing.submitted(
                began,
                [
                    (outcome, topic, None) if isinstance(outcome, int) else (row.job_id, topic, outcome)
                    for row, topic, outcome in zip(rows, topics, outcomes, strict=True)
                ],
            )
        return outcomes

    async def row(self, task: NewTask) -> TaskRow:
        """Return the row of a new task. Raises InvalidInput."""
        topic = await self.topic(task.topic)
        row = self.center._intake.row(task, lambda _name: topic)
        if row.body_sha256 is not None:
            raise InvalidBody("tasks with a body go by TimeoutCenter.submit, not in batches of many callers")
        for feature in features_of(row):
            if self.center.catalog.lacking.get(feature.value) != ():
                await self.read_topics()
                features.check(feature, self.center.catalog.lacking)
        return row

    async def _submit(self, row: TaskRow) -> int:
        return await self._submits[self.center.store.server_of(row.job_id)].ask(row, _size(row))

    # --- look up

    async def get(self, job_id: int) -> TaskRow | None:
        """Return the row of a task, or None."""
        lane = self._reads[self.center.store.server_of(check_job_id(job_id))]
        return await lane.ask(job_id, 0)

    async def topic(self, name: str) -> Topic:
        """Return a topic. Raises InvalidTopic, UnknownTopic."""
        topic = self.center.catalog.known().get(name)
        if topic is None:
            check_topic_name(name)
            await self.read_topics()
            topic = self.center.catalog.known().get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {name!r}")
        return topic

    async def read_topics(self) -> None:
        """Read the topic table, together with everybody who wants it read now. Raises StoreUnavailable."""
        reading = self._reading_topics
        if reading is None or reading.done():
            reading = self._loop.run_in_executor(self._topics_thread, self.center.catalog.refresh)
            self._reading_topics = reading
        await asyncio.shield(reading)

    # --- the end

    async def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping
        lanes: list[Lane[Any, Any]] = [*self._submits, *self._reads]
        while not all(lane.idle for lane in lanes):
            await asyncio.sleep(0.01)
        for lane in lanes:
            lane.close()
        self._topics_thread.shutdown()

    # --- inside

    async def _keep_topics(self) -> None:
        """Keep the view of the topics fresh, so that no call has to wait for it."""
        while True:
            with contextlib.suppress(StoreUnavailable, SchemaBehind):
                await self.read_topics()
            await asyncio.sleep(REFRESH_SECONDS / 2)

    def _submit_lane(self, server: int) -> Lane[TaskRow, int]:
        store = self.center.store
        return Lane(
            f"submit-{server}",
            together=self._insert,
            alone=self._insert_alone,
            given_up=lambda row: SubmitUnknown(row.job_id),
            away=partial(store.away, server),
            examine=partial(store.examine_server, server),
        )

    def _read_lane(self, server: int) -> Lane[int, TaskRow | None]:
        store = self.center.store
        return Lane(
            f"read-{server}",
            together=self._read,
            alone=lambda job_id, answer: self._read([job_id], answer),
            given_up=lambda _job_id: StoreUnavailable("the database server does not answer"),
            away=partial(store.away, server),
            examine=partial(store.examine_server, server),
        )

    def _insert(self, rows: Sequence[TaskRow], answer: Answer) -> None:
        outcomes = self.center.store.insert_each(rows)  # [rule: row-first]
        failpoint("batch.rows-stored")
        answer([APART if outcome is None else outcome for outcome in outcomes])
        stored = [
            (row, job_id) for row, job_id in zip(rows, outcomes, strict=True) if isinstance(job_id, int)
        ]
        if stored:
            self.center._index_stored(*zip(*stored, strict=True))

    def _insert_alone(self, row: TaskRow, answer: Answer) -> None:
        outcome = self.center.store.insert_alone(row)
        failpoint("batch.rows-stored")
        answer([outcome])
        if isinstance(outcome, int):
            self.center._index_stored([row], [outcome])

    def _read(self, job_ids: Sequence[int], answer: Answer) -> None:
        found = self.center.store.read_each(job_ids)
        answer([found.unanswered.get(job_id) or found.get(job_id) for job_id in job_ids])


def _size(row: TaskRow) -> int:
    """Return roughly how many bytes a row takes on its way."""
    return ROW_BYTES + len(row.attribute)
