"""The SDK for asyncio: what TimeoutCenter does, awaitable.

Nothing is decided here. A submit and a get go in batches with others that are in flight on the event loop;
what is given the caller's session runs within its ``run_sync``; all else runs on threads, as it is. Each
server has its own, so one that hangs holds up only calls that need it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from functools import cache, partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from toc.model.clock import Clock
from toc.model.errors import ConfigError, InvalidInput
from toc.model.fork import in_each_process
from toc.model.sharding import BizId
from toc.model.task import NewTask, Put, Request, Task, TaskRow
from toc.observe.log import get_logger
from toc.sdk.batcher import Batcher
from toc.sdk.client import TimeoutCenter
from toc.sdk.handlers import Registry
from toc.sdk.parts import check_running
from toc.sdk.schedules import Schedules
from toc.sdk.submission import check_job_id
from toc.sdk.targets import Targets
from toc.store.servers.threads import Threads

if TYPE_CHECKING:
    from toc.config import Settings

log = get_logger(__name__)

THREADS = 16
"""Most calls at once that are neither in a batch nor in a caller's session, for each server, and of those
that need several."""
FEW = 100
"""So many tasks of a list tell whether it needs several servers."""
FIRST = 0
"""The server of the topics and targets."""

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Any, P], R]
Awaitable = Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]


def awaitable(method: Method[P, R]) -> Awaitable[P, R]:
    """Return the method of the sync object that the owner stands for, awaitable, with the same signature."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found: R = await self._run(method, *args, **kwargs)
        return found

    return call


def same(method: Method[P, R]) -> Method[P, R]:
    """Return the method of the sync object that the owner stands for, as it is: one that asks no server."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self.sync, *args, **kwargs)

    return call


def signed_as(method: Method[P, R]) -> Callable[[Callable[..., Any]], Awaitable[P, R]]:
    """Return a decorator of a coroutine that is called as the method is."""
    return wraps(method)


class AsyncSchedules:
    """``center.schedules`` of an AsyncTimeoutCenter."""

    def __init__(self, sync: Schedules, run: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.sync, self._run = sync, partial(run, sync)

    create = awaitable(Schedules.create)
    get = awaitable(Schedules.get)
    preview = awaitable(Schedules.preview)
    list = awaitable(Schedules.list)
    alter = awaitable(Schedules.alter)
    pause = awaitable(Schedules.pause)
    resume = awaitable(Schedules.resume)
    delete = awaitable(Schedules.delete)
    trigger = awaitable(Schedules.trigger)
    backfill = awaitable(Schedules.backfill)
    reconcile = awaitable(Schedules.reconcile)


class AsyncTargets:
    """``center.targets`` of an AsyncTimeoutCenter."""

    def __init__(self, sync: Targets, run: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.sync, self._run = sync, partial(run, sync)

    create = awaitable(Targets.create)
    get = awaitable(Targets.get)
    list = awaitable(Targets.list)
    alter = awaitable(Targets.alter)
    rotate = awaitable(Targets.rotate)
    test = awaitable(Targets.test)
    pause = awaitable(Targets.pause)
    resume = awaitable(Targets.resume)
    delete = awaitable(Targets.delete)
    reseal = awaitable(Targets.reseal)


class AsyncTimeoutCenter(Registry[Coroutine[Any, Any, int]]):
    """One application's access to the timeout center from asyncio: a TimeoutCenter whose calls are awaited.

    It may be made anywhere and used on several event loops; it connects on first use. Close it on the loop
    that uses it, before that ends, or use it with ``async with``.

    A call whose await is cancelled goes on, unless it still waited for a thread. Of a ``submit`` or ``put``
    the CancelledError has the ``job_id`` under which the task may be stored, and so does the log
    (``submit_cancelled``). What else was cancelled is logged when it ends, with the job_ids that it stored
    or changed and the outcomes (``call_ended_alone``).
    """

    def __init__(self, settings: Settings | None = None, *, clock: Clock | None = None) -> None:
        self.sync = TimeoutCenter(settings, clock=clock)
        """The same center for code that is not asynchronous, such as plain handlers."""
        self.handlers, self.topics, self.hooks = self.sync.handlers, self.sync.topics, self.sync.hooks
        self.handled = self.sync.handled
        self.schedules = AsyncSchedules(self.sync.schedules, self._run_on)
        self.targets = AsyncTargets(self.sync.targets, self._run_on)
        self._run = partial(self._run_on, self.sync)
        self._threads: dict[int | None, Threads] = {}
        in_each_process(self._forget)

    def _forget(self) -> None:
        self._batchers: dict[asyncio.AbstractEventLoop, Batcher] = {}

    async def close(self) -> None:
        """Close every connection. May be called twice; the next use connects again."""
        self._let_go()
        if (batcher := self._batchers.pop(_loop(), None)) is not None:  # others' are theirs to close
            await batcher.close()
        for threads in list(self._threads.values()):
            await asyncio.to_thread(threads.close)
        await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    @property
    def settings(self) -> Settings:
        """The settings. Raises ConfigError, which names each that is wrong."""
        return self.sync.settings

    schedule = same(TimeoutCenter.schedule)
    worker = same(TimeoutCenter.worker)

    @signed_as(TimeoutCenter.submit)
    async def submit(  # noqa: D102 - the docstring comes with the signature
        self, topic: str, *, session: Any = None, connection: Any = None, **more: Any
    ) -> int:
        if session is not None or connection is not None:
            more |= {"session": session, "connection": connection}
            return int(await self._run(TimeoutCenter.submit, topic, **more))
        with self.hooks.call("submit"):
            return (await self._put(NewTask(topic, **more))).job_id

    @signed_as(TimeoutCenter.put)
    async def put(self, task: NewTask, *, request: Request | None = None) -> Put:  # noqa: D102
        with self.hooks.call("put"):
            return await self._put(task, request)

    async def _put(self, task: NewTask, request: Request | None = None) -> Put:
        if self.sync.stands_in is not None:
            return self.sync._put(task, request)
        batcher = self._batchers.get(_loop()) or await self._batcher()
        catalog = self.sync.catalog
        topic = catalog.fresh(task.topic) or await self._on_thread(partial(catalog.get, task.topic), FIRST)
        one = await batcher.checked(task, request=request, topic=topic)
        if isinstance(one, Put):
            return one
        try:
            return await batcher.store(one)
        except asyncio.CancelledError as exc:
            job_id = exc.job_id = one.row.job_id  # type: ignore[attr-defined]
            exc.add_note(f"the task may be stored all the same, as job_id {job_id}")
            log.warning("submit_cancelled", job_id=job_id, topic=task.topic)
            raise

    @signed_as(TimeoutCenter.submit_many)
    async def submit_many(self, tasks: Iterable[NewTask], **more: Any) -> list[int]:  # noqa: D102
        found: list[int] = await self._run(TimeoutCenter.submit_many, list(tasks), **more)
        return found

    index = awaitable(TimeoutCenter.index)
    cancel = awaitable(TimeoutCenter.cancel)
    cancel_by_biz = awaitable(TimeoutCenter.cancel_by_biz)
    reschedule = awaitable(TimeoutCenter.reschedule)

    @signed_as(TimeoutCenter.get)
    async def get(self, job_id: int) -> Task | None:  # noqa: D102
        if self.sync.stands_in is not None:
            return self.sync.get(job_id)
        with self.hooks.call("get"):
            row = await (await self._batcher()).get(job_id)
            if row is None:
                return None
            if row.body_length is None and self.sync.catalog.known_type(row.biz_type) is not None:
                return self.sync._task(row)
            read = partial(_with_body, self.sync, row)
            return await self._on_thread(read, self.sync.store.server_of(job_id))

    find = awaitable(TimeoutCenter.find)

    # --- inside

    async def _batcher(self) -> Batcher:
        loop = _loop()
        if loop not in self._batchers:
            await self._on_thread(self.sync._check_places)
            self._let_go()
            if loop not in self._batchers:
                self._batchers[loop] = Batcher(self.sync)
        return self._batchers[loop]

    def _let_go(self) -> None:
        """Forget the batchers of loops that ended without a close: their threads end with them."""
        for ended in [one for one in list(self._batchers) if one.is_closed()]:
            self._batchers.pop(ended, None)

    async def _run_on(self, sync: Any, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Call a method of a sync object where it holds up no other coroutine."""
        _loop()
        do = partial(method, sync, *args, **more)
        session, connection = more.get("session"), more.get("connection")
        if session is None and connection is None:
            return await self._on_thread(do, self._server(method, args, more))
        theirs: Any = connection if session is None else session
        theirs = theirs() if hasattr(theirs, "registry") else theirs  # an async_scoped_session
        if not hasattr(theirs, "run_sync"):
            raise InvalidInput(
                f"an AsyncTimeoutCenter takes an AsyncSession or AsyncConnection, no {type(theirs).__name__}"
                "; its `sync`, a TimeoutCenter, in a Session or Connection"
            )
        await self._on_thread(self.sync._check_places)
        if method is TimeoutCenter.reschedule:
            # Its first read needs no session: a server that hangs holds up no loop here.
            job_id = check_job_id([*args, more.get("job_id")][0])
            await self._on_thread(partial(self.sync.store.get, job_id), self.sync.store.server_of(job_id))
        return await theirs.run_sync(lambda _: do())

    def _server(self, method: Callable[..., Any], args: Iterable[Any], more: dict[str, Any]) -> int | None:
        """Return which server, by number, a call needs. None: several, or what it is given is invalid."""
        if method.__qualname__.startswith("Targets."):
            return FIRST
        store, given = self.sync.store, dict(zip(_names(method), args, strict=False)) | more
        try:
            if "job_id" in given:
                return store.server_of(check_job_id(given["job_id"]))
            # A schedule is where the tasks with its name as their biz_id are.
            biz_ids = [given[name] for name in ("biz_id", "name") if name in given]
            biz_ids += [task.biz_id for task in given.get("tasks", ())[:FEW]]
            (server,) = {store.server_of_biz(BizId.of(one)) for one in biz_ids}
        except (InvalidInput, ValueError, AttributeError):
            return None
        return server

    def _threads_of(self, server: int | None) -> Threads:
        name = "toc-async" if server is None else f"toc-async-{server}"
        return self._threads.get(server) or self._threads.setdefault(server, Threads(THREADS, name))

    async def _on_thread(self, do: Callable[[], R], server: int | None = None) -> R:
        _loop()
        if self.sync.stands_in is not None:  # there is no server to wait for
            return do()
        running = self._threads_of(server).soon(partial(copy_context().run, do))
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.cancelled():
                running.add_done_callback(partial(_ended_alone, do))
            raise


def _loop() -> asyncio.AbstractEventLoop:
    check_running()
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "AsyncTimeoutCenter needs an event loop of asyncio or uvloop, and here runs none: trio is not "
            "supported (anyio: choose its asyncio backend); without an event loop use TimeoutCenter"
        ) from None


@cache
def _names(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a method's parameters without ``self``."""
    return tuple(signature(method).parameters)[1:]


def _ended_alone(do: Any, ended: Future[Any]) -> None:
    """Log which tasks a call has stored or changed, and the outcomes of the changes."""
    error, do = ended.exception(), do if isinstance(do, partial) else partial(do)
    found = ended.result() if error is None else getattr(error, "outcomes", getattr(error, "job_ids", None))
    given = dict(zip(_names(do.func), do.args[1:], strict=False)) | do.keywords
    found = {given["job_id"]: found} if "job_id" in given else [found] if type(found) is int else found
    job_ids = [one for one in found if isinstance(one, int)] if isinstance(found, (list, dict)) else []
    outcomes = [getattr(found[one], "name", None) for one in job_ids] if isinstance(found, dict) else []
    log.warning(
        "call_ended_alone", call=do.func.__name__, job_ids=job_ids, outcomes=outcomes, error=str(error or "")
    )


def _with_body(center: TimeoutCenter, row: TaskRow) -> Task:
    """Return the task of a row. Its body is read: on the event loop it could not be."""
    task = center._task(row)
    _ = task.body
    return task
