"""Group commit for asyncio: submits and reads in flight share round trips, for each server by itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from toc.failpoint import failpoint
from toc.model.catalog import REFRESH_SECONDS
from toc.model.errors import (
    InvalidInput,
    SchemaBehind,
    StoreUnavailable,
    SubmitUnknown,
    TocError,
    UnknownTopic,
)
from toc.model.task import NewTask, Put, Request, Submission, TaskRow
from toc.model.topic import Topic, check_topic_name
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.sdk.server_batcher import APART, ServerBatcher, Settle, ask_each, one_each
from toc.sdk.submission import check_job_id
from toc.store.tasks.plan import Stored

log = get_logger(__name__)


class Batcher:
    """Submits and reads tasks for many coroutines of one event loop, on which it is made. Close it.

    Every call raises what TimeoutCenter's does, and Busy.
    """

    def __init__(self, center: TimeoutCenter) -> None:
        self.center = center
        self._loop = asyncio.get_running_loop()
        self._submits = one_each(center, "submit", self._store, _given_up)
        self._reads = one_each(center, "read", self._read, _not_read)
        self._batchers: list[ServerBatcher[Any, Any]] = [*self._submits, *self._reads]
        self._topics_thread = ThreadPoolExecutor(1, "toc-topics")
        self._reading_topics: Future[Any] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def keep_topics(self) -> asyncio.Task[None]:
        """Keep the topics fresh, so that no call has to wait for them. Only ``close`` may end what is
        returned.

        The owner of the Batcher must watch it: nothing else notices if it ends earlier.
        """
        self._keeping = self._loop.create_task(self._keep_topics())
        return self._keeping

    # --- submit

    async def put(self, task: NewTask, *, by_dialect: bool = False) -> Put:
        """Do as ``TimeoutCenter.put``. Its outcome is what the rows tell; the index is not waited for."""
        one = await self.checked(task, by_dialect=by_dialect)
        return one if isinstance(one, Put) else await self.store(one)

    async def store(self, one: Submission) -> Put:
        """Store what ``checked`` returned."""
        if self.center.tracing is None:
            return await self._batcher_of(one).ask(one, one.row.size)
        (outcome,) = await self.store_each([one])
        if not isinstance(outcome, Put):
            raise outcome
        return outcome

    async def store_each(self, tasks: Sequence[Submission]) -> list[Put | TocError]:
        """Store what ``checked`` returned, each for itself. Returns their outcomes."""
        began = time.time_ns()
        outcomes: list[Put | TocError] = await ask_each(
            [(self._batcher_of(one), one, one.row.size) for one in tasks]
        )
        if (tracing := self.center.tracing) is not None:
            tracing.submitted(
                began,
                [
                    (outcome.job_id, one.topic, None)
                    if isinstance(outcome, Put)
                    else (one.row.job_id, one.topic, outcome)
                    for one, outcome in zip(tasks, outcomes, strict=True)
                ],
            )
        return outcomes

    async def checked(
        self,
        task: NewTask,
        *,
        request: Request | None = None,
        topic: Topic | None = None,
        by_dialect: bool = False,
    ) -> Submission | Put:
        """Return what a task's submit writes, or the answer that its request got before.

        ``topic`` takes the place of the task's topic, for one that is yet to be created. ``by_dialect`` says
        that a protocol of another queue asks. Raises InvalidInput.
        """
        try:
            topic = topic or await self.topic(task.topic)
            one = self.center._intake.submission(
                task, lambda _name: topic, by_dialect=by_dialect, request=request
            )
            if task.target is not None and not self.center.targets.serves(task.target, task.topic):
                check = partial(self.center.targets.check_usable, task.target, task.topic)
                await asyncio.wrap_future(self._topics_thread.submit(check))
        except InvalidInput as exc:
            if request is None and task.dedup_key is None:
                raise
            before = partial(self.center._before, task, request, exc, topic, by_dialect=by_dialect)
            return await asyncio.wrap_future(self.center.store.soon(before))
        return one

    async def claim(self, request: Request) -> None:
        """Claim the name of a request for many tasks, whose parts are stored next. Raises RequestReused."""
        store = self.center.store
        await asyncio.wrap_future(store.soon(partial(store.requests.claim, request)))

    # --- look up

    async def get(self, job_id: int) -> TaskRow | None:
        """Return the row of a task, or None."""
        batcher = self._reads[self.center.store.server_of(check_job_id(job_id))]
        row: TaskRow | None = await batcher.ask(job_id, 0)
        return row

    async def topic(self, name: str) -> Topic:
        """Return a topic. Raises InvalidTopic, UnknownTopic."""
        topic = self.center.catalog.known().get(name)
        if topic is None:
            check_topic_name(name)
            await self.read_topics()
            topic = self.center.catalog.known().get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {name!r}", name)
        return topic

    async def read_topics(self) -> None:
        """Read the topic table. Calls at the same time share the next read. Raises StoreUnavailable."""
        reading = self._reading_topics
        if reading is None or reading.running() or reading.done():  # it may have missed a new topic
            reading = self._reading_topics = self._topics_thread.submit(self.center.catalog.read_through)
        await asyncio.shield(asyncio.wrap_future(reading))

    # --- the end

    async def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeping
        while not all(batcher.idle for batcher in self._batchers):
            await asyncio.sleep(0.01)
        self.end_threads()

    def end_threads(self) -> None:
        """End the threads after the work begun, as when the event loop has ended."""
        for batcher in self._batchers:
            batcher.close()
        self._topics_thread.shutdown()

    # --- inside

    async def _keep_topics(self) -> None:
        """Keep the view of the topics, and of the targets, fresh, so that no call has to wait for it."""
        while True:
            with contextlib.suppress(StoreUnavailable, SchemaBehind):
                await self.read_topics()
                await asyncio.wrap_future(self._topics_thread.submit(self.center.targets.refresh))
            await asyncio.sleep(REFRESH_SECONDS / 2)

    def _batcher_of(self, one: Submission) -> ServerBatcher[Submission, Put]:
        return self._submits[self.center.store.server_of(one.row.job_id)]

    def _store(self, tasks: Sequence[Submission], answer: Settle) -> None:
        outcomes = self.center.store.put_each(tasks)  # [rule: row-first]
        failpoint("batch.rows-stored")
        answer([APART if one is None else one.put if isinstance(one, Stored) else one for one in outcomes])
        try:
            self.center._indexing.apply([one for one in outcomes if isinstance(one, Stored)])
        except Exception as exc:  # nobody waits for this thread any more
            log.warning("submit_not_indexed", tasks=len(tasks), error=str(exc), exc_info=exc)

    def _read(self, job_ids: Sequence[int], answer: Settle) -> None:
        found = self.center.store.read_each(job_ids)
        answer([found.unanswered.get(job_id) or found.get(job_id) for job_id in job_ids])


def _given_up(one: Submission) -> TocError:
    return SubmitUnknown(one.row.job_id)


def _not_read(_job_id: int) -> TocError:
    return StoreUnavailable("the database server does not answer")
