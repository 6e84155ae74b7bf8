"""lmstfy's API: jobs are tasks of topics ``lmstfy.namespace.queue``, whose biz_id is the job's id."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from toc.dialects import lmstfy_wire as wire
from toc.dialects.dialect_tasks import MAX_TOPICS, DialectTasks
from toc.dialects.lmstfy_replies import (
    id_of,
    job_of,
    refusal,
    reply,
    secret_of,
)
from toc.dialects.lmstfy_tasks import DEDUP_KEY, NAME, ascending, task_of, template_of, topic_of
from toc.dialects.lmstfy_wire import Call, Query, Refused, Route
from toc.dialects.port import ALL, LONG, Dialect, Reply, Request
from toc.model.access import Access, Token
from toc.model.errors import (
    BodyGone,
    IndexUnavailable,
    InvalidBizId,
    TocError,
    UnreadableTask,
)
from toc.model.pull import MAX_TTR_SECONDS, AckOutcome
from toc.model.task import Submission, TaskRow, TaskStatus
from toc.model.topic import Template
from toc.operate import bulk
from toc.pull.handed_out import HandedOut
from toc.sdk.submission import LATEST_MS
from toc.store.tasks.select import Selection

MAX_BYTES = 16 << 20
"""Most bytes of a bulk publish."""
MAX_HOLD_SECONDS = 600.0
"""Longest wait of a consumer."""
PAGE = 500

RATED = {
    **dict.fromkeys((Call.PUBLISH, Call.BULK, Call.REPUBLISH), "produce"),
    Call.CONSUME: "consume",
}
"""The calls that count against a token's rate, and the word for each of them in a refusal."""


class QueueRequest(NamedTuple):
    """A request for a call on one queue. A consumer may name several queues in one request."""

    where: Route
    query: Query
    request: Request
    tasks: DialectTasks
    topic: str


class Lmstfy(Dialect):
    """The API of lmstfy, port 7777."""

    name: ClassVar[str] = NAME
    templates: ClassVar[tuple[Template, ...]] = ()
    largest: ClassVar[int] = MAX_BYTES
    guarded: ClassVar[bool] = False

    async def answer(self, request: Request) -> Reply:
        """Answer a request. Raises Refused for a mistake."""
        where = wire.route(request.method, request.path)
        if where is None:
            return reply({"error": "api not found"}, 404)
        topic = topic_of(where.namespace, where.queue)
        tasks = DialectTasks(self.service, NAME, (template_of(where.namespace),))
        on_queue = QueueRequest(where, Query(request.query), request, tasks, topic)
        do: Callable[[QueueRequest], Awaitable[Reply]] = getattr(self, f"_{where.call.name.lower()}")
        return await do(on_queue)

    def failed(self, request: Request, error: Exception) -> Reply:
        """Answer a mistake, or a failure, which clients repeat."""
        where = wire.route(request.method, request.path)
        name = "other" if where is None else where.call.name.lower()
        return refusal(error)._replace(name=name)

    def token(self, request: Request) -> Token | None:
        """Return the request's token, None if it needs none. Raises Refused unless it allows the request."""
        where = wire.route(request.method, request.path)
        if where is None:
            return None
        wire.check_names(where)
        pool, secret = wire.token(request.headers, Query(request.query))
        if pool != "default":
            raise Refused(404, "pool not found")
        right = where.call.right
        if right is None:
            return None
        if not secret:
            raise Refused(401, "token not found")
        token = self.service.book.find(secret_of(secret))
        queues = where.queue.split(",") if where.call is Call.CONSUME else [where.queue]
        if len(queues) > MAX_TOPICS:
            raise Refused(400, "invalid queue name(s)")
        topics = [topic_of(where.namespace, queue) for queue in queues]
        if token is None or not all(token.may(right, topic) is Access.ALLOWED for topic in topics):
            raise Refused(401, "invalid token")
        action = RATED.get(where.call)
        if action is not None and self.service.book.wait(token):
            words = f"token({token.name}) {action} reach the limit rate, please retry later"
            raise Refused(429, words, key="msg")
        return token

    # --- publish

    async def _publish(self, on_queue: QueueRequest) -> Reply:
        if on_queue.where.job_id:  # whatever else is wrong
            await self._end(on_queue)
        wanted = wire.publishing(on_queue.query)
        if len(on_queue.request.body) > wire.MAX_JOB_BYTES:
            raise Refused(413, "body too large")
        (job_id,) = await self._store(on_queue, wanted, [on_queue.request.body])
        return reply({"msg": "published", "job_id": job_id}, 201, on_queue.where.call)

    _republish = _publish

    async def _bulk(self, on_queue: QueueRequest) -> Reply:
        wanted = wire.publishing(on_queue.query)
        body = on_queue.request.body
        jobs = await self.service.parsed(body, partial(wire.bulk_jobs, body))
        job_ids = await self._store(on_queue, wanted, jobs)
        return reply({"msg": "published", "job_ids": job_ids}, 201, on_queue.where.call)

    async def _store(
        self, on_queue: QueueRequest, wanted: wire.Publishing, bodies: Sequence[bytes]
    ) -> list[str]:
        """Store jobs and return their ids. Consumers get them in this order."""
        versioned = (on_queue.request.header(wire.VERSION_HEADER) or "").upper() == "YES"
        attributes = wire.attributes(on_queue.request.headers, versioned=versioned)
        now = self.service.center.clock.now_ms()
        job_ids = ascending(wire.new_job_id(now, wanted.delay, versioned=versioned) for _ in bodies)
        tasks = [
            task_of(
                on_queue.where.namespace,
                on_queue.where.queue,
                job_id,
                body,
                due=now + 1000 * wanted.delay,
                expires_at=now + 1000 * wanted.ttl if wanted.ttl else 0,
                tries=wanted.tries,
                attributes=attributes,
                slot_basis=job_ids[0],
            )
            for job_id, body in zip(job_ids, bodies, strict=True)
        ]
        await on_queue.tasks.make_topic(tasks)
        batcher = self.service.batcher
        checked = [await batcher.checked(task, by_dialect=True) for task in tasks]
        for outcome in await batcher.store_each([one for one in checked if isinstance(one, Submission)]):
            if isinstance(outcome, TocError):
                raise outcome
        return [str(task.biz_id) for task in tasks]

    # --- consume

    async def _consume(self, on_queue: QueueRequest) -> Reply:
        namespace = on_queue.where.namespace
        wanted = wire.consuming(on_queue.where.queue, on_queue.query)
        queues = {topic_of(namespace, queue): queue for queue in wanted.queues}
        got = await self._pull(on_queue.tasks, list(queues), wanted)
        token = on_queue.request.token
        if token is not None and not self.service.book.in_force(token):
            self.service.pulls.release(got)  # it was revoked during the wait
            raise Refused(401, "invalid token")
        filled = await on_queue.tasks.bodies(got)
        now = self.service.center.clock.now_ms()
        jobs = [
            job_of(one.row, namespace, queues[one.task.topic], body, now) | {"msg": "new job"}
            for one, body in filled
        ]
        if not jobs:
            return reply({"msg": "no job available"}, 404, on_queue.where.call)
        answer = reply(jobs[0] if wanted.most == 1 else jobs, 200, on_queue.where.call)
        return answer._replace(handed=[one for one, _ in filled])

    async def _pull(
        self, tasks: DialectTasks, topics: Sequence[str], wanted: wire.Consuming
    ) -> list[HandedOut]:
        """Hand out jobs: as many as are ready, of all queues, as soon as one is."""
        ttr = float(min(max(wanted.ttr, 1), MAX_TTR_SECONDS))
        got = await tasks.pull(
            topics, ttr, wait=min(float(wanted.timeout), MAX_HOLD_SECONDS), most=wanted.most
        )
        try:
            while got and len(got) < wanted.most:
                more = await tasks.pull(topics, ttr, most=wanted.most - len(got))
                if not more:
                    break
                got = [*got, *more]
        except BaseException:
            self.service.pulls.release(got)
            raise
        places = {topic: place for place, topic in enumerate(topics)}
        return sorted(got, key=lambda one: (places[one.task.topic], one.order))

    async def _delete(self, on_queue: QueueRequest) -> Reply:
        await self._end(on_queue)
        return reply(None, 204, on_queue.where.call)

    async def _end(self, on_queue: QueueRequest) -> None:
        """End a job for good, whatever its state. Raises StoreUnavailable or IndexUnavailable."""
        for row in await self._rows(on_queue):
            if row.status == TaskStatus.PENDING:
                outcome = await on_queue.tasks.end(row)
                if outcome in (AckOutcome.NOT_HANDED_OUT, AckOutcome.REPLACED):
                    await on_queue.tasks.cancel(row)
            elif row.status == TaskStatus.DEAD:
                await self._purge([row])

    async def _purge(self, dead: Sequence[TaskRow]) -> int:
        """Delete dead jobs. Returns how many. Raises IndexUnavailable if some are left."""
        ids = [row.job_id for row in dead]
        counts = await self.service.within(LONG, partial(bulk.purge_dead, self.service.center, ids))
        if counts["left"]:
            raise IndexUnavailable(f"{counts['left']} dead jobs were not deleted")
        return counts["purged"]

    # --- look

    async def _peek(self, on_queue: QueueRequest) -> Reply:
        ready = await self._page(on_queue, TaskStatus.PENDING, 1)
        if not ready:
            raise Refused(404, "the queue is empty")
        return reply(await self._job(on_queue, ready[0]), 200, on_queue.where.call)

    async def _peek_job(self, on_queue: QueueRequest) -> Reply:
        now = self.service.center.clock.now_ms()
        for row in await self._rows(on_queue):
            dead = row.status == TaskStatus.DEAD
            if dead or (row.status == TaskStatus.PENDING and not 0 < row.expires_at < now):
                return reply(await self._job(on_queue, row), 200, on_queue.where.call)
        raise Refused(404, "job not found")

    async def _size(self, on_queue: QueueRequest) -> Reply:
        return await self._counted(on_queue, TaskStatus.PENDING)

    async def _dead_size(self, on_queue: QueueRequest) -> Reply:
        return await self._counted(on_queue, TaskStatus.DEAD)

    async def _counted(self, on_queue: QueueRequest, status: TaskStatus) -> Reply:
        size = await self._count(on_queue, status)
        return reply({**_names(on_queue), "size": size}, 200, on_queue.where.call)

    # --- many

    async def _destroy(self, on_queue: QueueRequest) -> Reply:
        """End the ready jobs of a queue. Those that wait for their time or are being worked on stay."""
        while ready := await self._page(on_queue, TaskStatus.PENDING, PAGE):
            ids = [row.job_id for row in ready]
            await self.service.within(LONG, partial(bulk.cancel, self.service.center, ids))
        return reply(None, 204, on_queue.where.call)

    async def _peek_dead(self, on_queue: QueueRequest) -> Reply:
        dead = await self._page(on_queue, TaskStatus.DEAD, 1)
        return reply(
            {
                **_names(on_queue),
                "deadletter_size": await self._count(on_queue, TaskStatus.DEAD) if dead else 0,
                "deadletter_head": id_of(dead[0]) if dead else "",
            },
            200,
            on_queue.where.call,
        )

    async def _respawn(self, on_queue: QueueRequest) -> Reply:
        limit, ttl = wire.limit(on_queue.query), wire.respawn_ttl(on_queue.query)
        center, count = self.service.center, 0
        while count < limit:
            dead = await self._page(on_queue, TaskStatus.DEAD, min(PAGE, limit - count))
            if not dead:
                break
            now = center.clock.now_ms()
            ids, ends = [row.job_id for row in dead], min(now + 1000 * ttl, LATEST_MS) if ttl else 0
            redrive = partial(bulk.redrive, center, ids, tries=1, expires_at=ends)
            done = await self.service.within(LONG, redrive)
            count += done["redriven"]
        return reply({"msg": "respawned", "count": count}, 200, on_queue.where.call)

    async def _delete_dead(self, on_queue: QueueRequest) -> Reply:
        left = wire.limit(on_queue.query)
        while left > 0:
            dead = await self._page(on_queue, TaskStatus.DEAD, min(PAGE, left))
            if not dead:
                break
            left -= len(dead)
            if not await self._purge(dead):  # others have just deleted or respawned them
                break
        return reply(None, 204, on_queue.where.call)

    # --- inside

    async def _rows(self, on_queue: QueueRequest) -> list[TaskRow]:
        """Return the tasks of the job that the path names, in the queue that it names: one, or none."""
        try:
            rows = await on_queue.tasks.find_own(on_queue.where.job_id, DEDUP_KEY)
        except InvalidBizId:
            return []
        return [
            row
            for row in rows
            if (topic := on_queue.tasks.topic_of(row)) is not None and topic.name == on_queue.topic
        ]

    async def _selection(self, on_queue: QueueRequest, status: TaskStatus) -> Selection | None:
        """Return what selects the ready or the dead jobs of a queue; None if there is no such queue."""
        topic = on_queue.tasks.topic_known(on_queue.topic)
        if topic is None:
            await self.service.batcher.read_topics()  # another process may just have created it
            topic = on_queue.tasks.topic_known(on_queue.topic)
        if topic is None:
            return None
        ready = status is TaskStatus.PENDING
        before = self.service.center.clock.now_ms() + 1 if ready else None
        return Selection(status, biz_types=[topic.biz_type], before=before, dedup_key=DEDUP_KEY)

    async def _page(self, on_queue: QueueRequest, status: TaskStatus, limit: int) -> list[TaskRow]:
        """Return at most ``limit`` ready or dead jobs of a queue, the first of them."""
        wanted = await self._selection(on_queue, status)
        if wanted is None:
            return []
        selections, cursor = self.service.center.store.selections, None
        while True:
            page = await self.service.within(ALL, partial(selections.page, wanted, cursor, limit))
            if page.rows or page.next is None:
                return page.rows
            cursor = page.next

    async def _count(self, on_queue: QueueRequest, status: TaskStatus) -> int:
        wanted = await self._selection(on_queue, status)
        if wanted is None:
            return 0
        return await self.service.within(ALL, partial(self.service.center.store.selections.count, wanted))

    async def _job(self, on_queue: QueueRequest, row: TaskRow) -> dict[str, Any]:
        now = self.service.center.clock.now_ms()
        try:
            expired = 0 < row.expires_at < now and row.status == TaskStatus.PENDING
            data = None if expired else await on_queue.tasks.body(row)
        except (BodyGone, UnreadableTask):
            data = None
        return job_of(row, on_queue.where.namespace, on_queue.where.queue, data, now)


def _names(on_queue: QueueRequest) -> dict[str, object]:
    return {"namespace": on_queue.where.namespace, "queue": on_queue.where.queue}
