"""lmstfy's two ports. A job is a task of the topic ``lmstfy.namespace.queue``; its id is the biz_id.

The admin API lists queues, and makes tokens for namespaces, which are access tokens of toc.
"""

import asyncio
import re
import secrets
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

from toc.dialects import lmstfy_wire as wire
from toc.dialects.dialect_tasks import MAX_TOPICS, DialectTasks
from toc.dialects.lmstfy_wire import Query, Refused, prefix_of, reply, secret_of
from toc.dialects.port import ALL, BESIDE_BYTES, LONG, Dialect, Request
from toc.gateway.exchange import Answer
from toc.gateway.service import Service
from toc.model import errors
from toc.model.access import Access, Action, Role, Token
from toc.model.pull import MAX_TTR_SECONDS, AckOutcome
from toc.model.task import Submission, TaskRow, TaskStatus
from toc.model.topic import Template
from toc.operate import bulk_jobs as bulk
from toc.operate.audit import audited
from toc.operate.operation import Place
from toc.operate.tokens import LONGEST, create_token, revoke_token
from toc.pull.handed_out import HandedOut
from toc.sdk.submission import LATEST_MS
from toc.store.tasks.select import Selection

MAX_BYTES = 16 << 20
"""Most bytes of a bulk publish."""
MAX_HOLD_SECONDS = 600.0
"""Longest wait of a consumer."""
PAGE = 500

COUNTED = 100_000
"""About as many jobs are counted at most: whoever asks for a size needs no token."""
ROLES = frozenset({Role.PRODUCE, Role.CONSUME, Role.OPERATE})
"""What a token of lmstfy may do, on the queues of its namespace."""
SHORTEST_TOKEN = 20
EVERYWHERE_SECONDS = 1.0
"""Every gateway knows a new token after this many seconds."""
ENGINE = "redis"
"""lmstfy has several engines. This one is named as the engine of every pool."""
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_NO_PAGE = Answer(b"404 page not found", 404, "text/plain")
_UNAUTHORIZED = 401


class Lmstfy(Dialect):
    """The API of lmstfy, port 7777."""

    name: ClassVar[str] = wire.NAME
    templates: ClassVar[tuple[Template, ...]] = ()
    largest: ClassVar[int] = MAX_BYTES
    guarded: ClassVar[bool] = False

    async def answer(self, request: Request) -> Answer:
        """Answer a request. Raises Refused for a mistake."""
        where = wire.route(request.method, request.path)
        if where is None:
            return reply({"error": "api not found"}, 404)
        asked = QueueRequest(self.service, request, where)
        do: Callable[[], Awaitable[Answer]] = getattr(asked, where.call.name)
        return (await do())._replace(name=where.call.name)

    def failed(self, request: Request, error: Exception) -> Answer:
        """Answer a mistake, or a failure, which clients repeat."""
        where = wire.route(request.method, request.path)
        return wire.refusal(error)._replace(name="other" if where is None else where.call.name)

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
        if len(where.queues) > MAX_TOPICS:
            raise Refused(400, "invalid queue name(s)")
        topics = [wire.topic_of(where.namespace, queue) for queue in where.queues]
        if token is None or not all(token.may(right, topic) is Access.ALLOWED for topic in topics):
            raise Refused(401, "invalid token")
        if where.call.rated and self.service.book.wait(token):
            words = f"token({token.name}) {where.call.rated} reach the limit rate, please retry later"
            raise Refused(429, words, key="msg")
        return token


class QueueRequest:
    """A request on one queue, or of a consumer on several: each method answers a call."""

    def __init__(self, service: Service, request: Request, where: wire.Route) -> None:
        self._service = service
        self._request = request
        self._where = where
        self._query = Query(request.query)
        self._tasks = DialectTasks(service, wire.NAME, (wire.template_of(where.namespace),))
        self._topic = wire.topic_of(where.namespace, where.queue)
        self._names = {"namespace": where.namespace, "queue": where.queue}

    # --- publish

    async def publish(self) -> Answer:
        """Store a job, after the one that the path names has been ended."""
        if self._where.job_id:  # whatever else is wrong
            await self._end()
        wanted = wire.publishing(self._query)
        if len(self._request.body) > wire.MAX_JOB_BYTES:
            raise Refused(413, "body too large")
        (job_id,) = await self._store(wanted, [self._request.body])
        return reply({"msg": "published", "job_id": job_id}, 201)

    republish = publish

    async def bulk(self) -> Answer:
        """Store many jobs."""
        wanted = wire.publishing(self._query)
        body = self._request.body
        jobs = await self._service.parsed(body, partial(wire.bulk_jobs, body))
        return reply({"msg": "published", "job_ids": await self._store(wanted, jobs)}, 201)

    async def _store(self, wanted: wire.Publishing, bodies: Sequence[bytes]) -> list[str]:
        """Store jobs and return their ids. Consumers get them in this order."""
        versioned = (self._request.header(wire.VERSION_HEADER) or "").upper() == "YES"
        attributes = wire.attributes(self._request.headers, versioned=versioned)
        now = self._now()
        job_ids = wire.ascending(wire.new_job_id(now, wanted.delay, versioned=versioned) for _ in bodies)
        times = {"due": now + 1000 * wanted.delay, "expires_at": now + 1000 * wanted.ttl if wanted.ttl else 0}
        same: dict[str, Any] = {**self._names, **times, "tries": wanted.tries, "attributes": attributes}
        tasks = [
            wire.task_of(job_id=job_id, body=body, slot_basis=job_ids[0], **same)
            for job_id, body in zip(job_ids, bodies, strict=True)
        ]
        await self._tasks.make_topic(tasks)
        batcher, store = self._service.batcher, self._service.center.store
        checked = [one for task in tasks if isinstance(one := await batcher.checked(task), Submission)]
        for server in {store.server_of(one.row.job_id) for one in checked}:
            if (away := store.away(server)) is not None:
                raise away  # nothing was stored yet: clients repeat all, under new ids
        for outcome in await batcher.store_each(checked):
            if isinstance(outcome, errors.TocError):
                raise outcome
        return job_ids

    # --- consume

    async def consume(self) -> Answer:
        """Hand out jobs: as many as are ready, of all queues, as soon as one is."""
        number, book = self._query.number, self._service.book
        ttr = number("ttr", wire.DEFAULT_TTR, most=wire.U32)
        timeout = number("timeout", 0, most=wire.U32)
        most = number("count", 1, least=1, most=wire.MAX_AT_ONCE)
        queues = {wire.topic_of(self._where.namespace, queue): queue for queue in self._where.queues if queue}
        if not queues:
            raise Refused(400, "invalid queue name(s)")
        wait = min(float(timeout), MAX_HOLD_SECONDS)
        got = await self._pull(list(queues), float(min(max(ttr, 1), MAX_TTR_SECONDS)), wait, most)
        token = self._request.token
        if token is not None and not book.in_force(token):
            self._service.pulls.release(got)  # it was revoked during the wait
            raise Refused(401, "invalid token")
        filled = await self._tasks.bodies(got)
        now, namespace = self._now(), self._where.namespace
        jobs = [
            wire.job_of(one.row, namespace, queues[one.task.topic], body, now) | {"msg": "new job"}
            for one, body in filled
        ]
        if not jobs:
            return reply({"msg": "no job available"}, 404)
        return reply(jobs[0] if most == 1 else jobs)._replace(handed=[one for one, _ in filled])

    async def _pull(self, topics: Sequence[str], ttr: float, wait: float, most: int) -> list[HandedOut]:
        got = await self._tasks.pull(topics, ttr, wait=wait, most=most)
        try:
            while got and len(got) < most:
                more = await self._tasks.pull(topics, ttr, most=most - len(got))
                if not more:
                    break
                got = [*got, *more]
        except BaseException:
            self._service.pulls.release(got)
            raise
        places = {topic: place for place, topic in enumerate(topics)}
        return sorted(got, key=lambda one: (places[one.task.topic], one.order))

    async def delete(self) -> Answer:
        """End a job: it is done, or nobody wants it."""
        await self._end()
        return reply(None, 204)

    async def _end(self) -> None:
        """End a job for good, whatever its state. Raises Unavailable."""
        for row in await self._rows():
            if row.status == TaskStatus.PENDING:
                outcome = await self._tasks.end(row)
                if outcome in (AckOutcome.NOT_HANDED_OUT, AckOutcome.REPLACED):
                    await self._tasks.cancel(row)
            elif row.status == TaskStatus.DEAD:
                await self._change([row], bulk.purge_dead)

    async def _change(self, dead: Sequence[TaskRow], do: Callable[..., dict[str, int]]) -> dict[str, int]:
        """Delete or redrive dead jobs. Returns the counts. Raises Unavailable if some are left."""
        ids = [row.job_id for row in dead]
        counts = await self._service.within(LONG, partial(do, self._service.center, ids))
        if counts["left"]:
            raise errors.Unavailable(f"{counts['left']} dead jobs are left")
        return counts

    # --- look

    async def peek(self) -> Answer:
        """Show the first job that is ready."""
        ready = await self._page(TaskStatus.PENDING, 1)
        if not ready:
            raise Refused(404, "the queue is empty")
        return await self._shown(ready[0])

    async def peek_job(self) -> Answer:
        """Show a job."""
        for row in await self._rows():
            if row.status == TaskStatus.DEAD or (row.status == TaskStatus.PENDING and not self._expired(row)):
                return await self._shown(row)
        raise Refused(404, "job not found")

    async def size(self) -> Answer:
        """Count the jobs that are ready."""
        return reply({**self._names, "size": await self._count(TaskStatus.PENDING)})

    async def dead_size(self) -> Answer:
        """Count the dead letters."""
        return reply({**self._names, "size": await self._count(TaskStatus.DEAD)})

    # --- many

    async def destroy(self) -> Answer:
        """End the ready jobs of a queue. Those that wait for their time or are being worked on stay."""
        while ready := await self._page(TaskStatus.PENDING, PAGE):
            ids = [row.job_id for row in ready]
            await self._service.within(LONG, partial(bulk.cancel, self._service.center, ids))
        return reply(None, 204)

    async def peek_dead(self) -> Answer:
        """Count the dead letters, and show the first."""
        dead = await self._page(TaskStatus.DEAD, 1)
        size = await self._count(TaskStatus.DEAD) if dead else 0
        head = wire.id_of(dead[0]) if dead else ""
        return reply({**self._names, "deadletter_size": size, "deadletter_head": head})

    async def respawn(self) -> Answer:
        """Make dead letters ready again."""
        limit = self._limit()
        ttl = self._query.number("ttl", wire.DEFAULT_TTL, most=wire.I63, signed=True)
        count = 0
        while count < limit and (dead := await self._page(TaskStatus.DEAD, min(PAGE, limit - count))):
            ends = min(self._now() + 1000 * ttl, LATEST_MS) if ttl else 0
            count += (await self._change(dead, partial(bulk.redrive, tries=1, expires_at=ends)))["redriven"]
        return reply({"msg": "respawned", "count": count})

    async def delete_dead(self) -> Answer:
        """Delete dead letters."""
        left = self._limit()
        while left > 0 and (dead := await self._page(TaskStatus.DEAD, min(PAGE, left))):
            left -= len(dead)
            if not (await self._change(dead, bulk.purge_dead))["purged"]:  # others were faster
                break
        return reply(None, 204)

    # --- inside

    def _now(self) -> int:
        return self._service.center.clock.now_ms()

    def _limit(self) -> int:
        """Return how many dead letters are meant. Raises Refused."""
        return self._query.number("limit", 1, least=1, most=wire.I63, signed=True)

    def _expired(self, row: TaskRow) -> bool:
        return 0 < row.expires_at < self._now()

    async def _rows(self) -> list[TaskRow]:
        """Return the tasks of the job that the path names, in the queue that it names: one, or none."""
        try:
            rows = await self._tasks.find_own(self._where.job_id, wire.DEDUP_KEY)
        except errors.InvalidBizId:
            return []
        topics = ((row, self._tasks.topic_of(row)) for row in rows)
        return [row for row, topic in topics if topic is not None and topic.name == self._topic]

    async def _selection(self, status: TaskStatus) -> Selection | None:
        """Return what selects the ready or the dead jobs of a queue; None if there is no such queue."""
        if self._tasks.topic_known(self._topic) is None:
            await self._service.batcher.read_topics()  # another process may just have created it
        if (topic := self._tasks.topic_known(self._topic)) is None:
            return None
        before = self._now() + 1 if status is TaskStatus.PENDING else None
        return Selection(status, biz_types=[topic.biz_type], before=before, dedup_key=wire.DEDUP_KEY)

    async def _page(self, status: TaskStatus, limit: int) -> list[TaskRow]:
        """Return at most ``limit`` ready or dead jobs of a queue, the first of them."""
        wanted = await self._selection(status)
        if wanted is None:
            return []
        selections, cursor = self._service.center.store.selections, None
        while True:
            page = await self._service.within(ALL, partial(selections.page, wanted, cursor, limit))
            if page.rows or page.next is None:
                return page.rows
            cursor = page.next

    async def _count(self, status: TaskStatus) -> int:
        wanted = await self._selection(status)
        if wanted is None:
            return 0
        selections = self._service.center.store.selections
        return await self._service.within(ALL, partial(selections.count, wanted, COUNTED))

    async def _shown(self, row: TaskRow) -> Answer:
        data = None
        if row.status != TaskStatus.PENDING or not self._expired(row):
            with suppress(errors.BodyGone, errors.UnreadableTask):
                data = await self._tasks.body(row)
        return reply(wire.job_of(row, **self._names, data=data, now=self._now()))


class LmstfyAdmin(Dialect):
    """The admin API of lmstfy, port 7778. It needs basic auth: any user, and as the password an access token
    of the role admin, which grants no more than it has."""

    name: ClassVar[str] = "lmstfy-admin"
    templates: ClassVar[tuple[Template, ...]] = ()
    largest: ClassVar[int] = BESIDE_BYTES

    def token(self, request: Request) -> Token:
        """Return the administrator's token that a request carries. Raises Refused without a valid one."""
        kind, _, text = (request.header(b"authorization") or "").partition(" ")
        secret = ""
        with suppress(ValueError):
            secret = b64decode(text, validate=True).decode().partition(":")[2]
        token = self.service.book.find(secret) if kind.lower() == "basic" else None
        if token is None or token.may(Action.CHANGE_TOKENS) is not Access.ALLOWED:
            raise Refused(_UNAUTHORIZED, "unauthorized")
        return token

    async def answer(self, request: Request) -> Answer:
        """Answer a request. Raises Refused for a mistake."""
        giver, query = self.token(request), Query(request.query)
        engine = query.get("kind", ENGINE)
        match (request.method, *request.path.strip("/").split("/")):
            case ("GET", "version"):
                release = {"version": version("timeout-center"), "build_commit": "", "build_date": ""}
                return _render(release, "version")
            case ("GET", "pools"):
                return _render(["default"] if engine == ENGINE else [], "pools")
            case ("GET", "info"):
                there = engine == ENGINE and query.get("pool") in ("", "default")
                return self._info(giver) if there else reply(None)._replace(name="info")
            case ("GET", "token", namespace):
                return await self._list(namespace, query, giver)
            case ("POST", "token", namespace):
                return await self._create(namespace, query, request, giver)
            case ("DELETE", "token", namespace, text):
                return await self._delete(namespace, text, giver)
        return _NO_PAGE._replace(headers=reply(None, 404).headers)

    def failed(self, request: Request, error: Exception) -> Answer:  # noqa: ARG002 - its signature
        """Answer a mistake or a failure."""
        if isinstance(error, Refused) and error.status == _UNAUTHORIZED:
            answer, realm = reply(None, _UNAUTHORIZED), 'Basic realm="Authorization Required"'
            return answer._replace(headers={**answer.headers, "www-authenticate": realm})
        if isinstance(error, errors.NotGranted):
            error = Refused(403, str(error))
        return wire.refusal(error)

    # --- calls

    def _info(self, giver: Token) -> Answer:
        """List namespaces with their queues, those that the giver may see, as in the names of topics."""
        found: dict[str, list[str]] = {}
        for name in sorted(self.service.center.catalog.known()):
            if name.startswith(wire.PREFIX) and giver.may(Action.READ_TOPICS, name) is Access.ALLOWED:
                namespace, _, queue = name.removeprefix(wire.PREFIX).partition(".")
                found.setdefault(namespace, []).append(queue)
        answer = _render(found, "info")
        return answer._replace(content=answer.content + b"\n", media_type="text/plain; charset=utf-8")

    async def _list(self, namespace: str, query: Query, giver: Token) -> Answer:
        """List the names of the tokens of a namespace, each with what it is for."""
        _pool(query.get("pool"))
        now = self.service.center.clock.now_ms()
        mine = [one for one in await self._tokens(namespace) if one.lives(now) and giver.covers(one)]
        return _render({"tokens": {one.name: one.created_by.partition(": ")[2] for one in mine}}, "tokens")

    async def _create(self, namespace: str, query: Query, request: Request, giver: Token) -> Answer:
        form = Query(request.form)
        description = form.get("description") or query.get("description")
        given = form.get("token") or query.get("token")
        if not description:
            raise Refused(400, "invalid description")
        if given and len(given) < SHORTEST_TOKEN:
            raise Refused(400, "the user token was too short")
        if len(namespace.encode()) > wire.LONGEST_NAME:
            raise Refused(400, "the namespace name was too long")
        wire.check_namespace(namespace)
        pool = query.get("pool")
        if given:
            named, given = wire.split_token(given)
            pool = pool or (named if named != "default" else "")
        _pool(pool)
        if len(secret_of(given)) > LONGEST:
            raise Refused(400, "the user token was too long")
        make = partial(self._make, namespace, description, given, giver)
        try:
            secret = await self.service.within(Place.FIRST, make)
        except errors.NameTaken:
            raise Refused(400, "token has already existed") from None
        await asyncio.sleep(EVERYWHERE_SECONDS)
        token = given or secret
        return _render({"token": f"{pool}:{token}" if pool else token}, "create", 201)

    async def _delete(self, namespace: str, text: str, giver: Token) -> Answer:
        """Revoke a token of a namespace, given by itself or by its name."""
        pool, secret = wire.split_token(text)
        _pool(pool)
        token = self.service.book.find(secret_of(secret))
        name = token.name if token is not None else secret
        if any(one.name == name for one in await self._tokens(namespace)):
            with suppress(errors.UnknownToken):  # it allows more than the giver's, or was just revoked
                await self.service.within(Place.FIRST, partial(self._revoke, name, giver))
            await asyncio.sleep(EVERYWHERE_SECONDS)
        return reply(None, 204)._replace(name="delete")

    # --- inside

    async def _tokens(self, namespace: str) -> list[Token]:
        """Return the tokens of a namespace, also those that live no more."""
        every = await self.service.within(Place.FIRST, self.service.center.store.tokens.list)
        return [one for one in every if one.topics == (f"{prefix_of(namespace)}*",)]

    def _make(self, namespace: str, description: str, given: str, giver: Token) -> str:
        center = self.service.center
        words = _NO_NAME.sub("-", description).strip("-._")[:40]
        name = f"{words or wire.NAME}-{secrets.token_hex(4)}"
        with audited(center.store, giver.name, "token.create", name, namespace=namespace):
            topics, by = [f"{prefix_of(namespace)}*"], f"{giver.name}: {description}"[:128]
            secret = secret_of(given) if given else ""
            made = create_token(center, name, roles=ROLES, topics=topics, by=by, giver=giver, secret=secret)
        return made.secret

    def _revoke(self, name: str, giver: Token) -> str:
        store = self.service.center.store
        with audited(store, giver.name, "token.revoke", name):
            return revoke_token(store, name, giver=giver).name


def _render(content: object, name: str, status: int = 200) -> Answer:
    return reply(content, status, indent=True)._replace(name=name)


def _pool(name: str) -> None:
    if name not in ("", "default"):
        raise Refused(400, "pool not found")
