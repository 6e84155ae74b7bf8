"""What the calls work with: the batcher, the tokens, and lines for calls that wait for servers.

Each server has a line with threads of its own, so a server that hangs holds up only calls that need it.
No sender has all threads of a line, nor all places before them: without that, one token with 70 slow searches
would keep everybody else's waiting, or have them refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from toc.gateway.exchange import CURRENT, current_sender
from toc.gateway.shares import Shares
from toc.model.errors import StoreUnavailable, TocError, UnknownTopic
from toc.model.pull import PullLease
from toc.model.task import TaskRow
from toc.model.topic import Topic, check_native
from toc.operate.operation import Place
from toc.operate.templates import ensure_topic, topic_to_be
from toc.operate.tokens import TokenBook
from toc.pull.pulls import Pulls
from toc.sdk.batcher import Batcher
from toc.sdk.client import TimeoutCenter
from toc.store.servers.threads import Threads

SMALL_TEXT = 64 << 10
"""Bytes of JSON that are parsed on the event loop."""

THREADS = 4
"""Calls of a line that are made at once."""
MAX_CALLS = 68
"""Most calls of a line, made or waiting. One sender may have as many as are still free."""

R = TypeVar("R")


class Line:
    """Calls that wait for threads of their own, which end with it. For one event loop."""

    def __init__(self, name: str, most: int = MAX_CALLS, threads: int = THREADS) -> None:
        self._threads = Threads(threads, f"toc-{name}")
        self._of_one = max(1, threads - 1)
        self._free = asyncio.Semaphore(threads)
        self._own: dict[str, asyncio.Semaphore] = {}
        """By sender: all threads but one."""
        self._calls = Shares(most, "too many requests wait for a server")

    async def run(self, sender: str, do: Callable[[], Any]) -> Any:
        """Run it on a thread, once one is free for this sender. Raises Busy, and what it raises."""
        self._calls.take(sender)
        held: list[asyncio.Semaphore] = []

        def ended(_: object = None) -> None:
            for places in held:
                places.release()
            self._calls.give(sender)
            if sender not in self._calls:
                del self._own[sender]

        own = self._own.setdefault(sender, asyncio.Semaphore(self._of_one))
        try:
            for places in (own, self._free):
                await places.acquire()
                held.append(places)
            work = asyncio.wrap_future(self._threads.soon(do))
        except BaseException:
            ended()
            raise
        work.add_done_callback(ended)  # the thread is busy until then, also if the client leaves
        return await asyncio.shield(work)


class Service:
    """What one gateway process works with. Made on its event loop; close it."""

    def __init__(self, center: TimeoutCenter, book: TokenBook, lease_secret: bytes) -> None:
        self.center = center
        self.book = book
        self.batcher = Batcher(center, current_sender)
        self.keeping = self.batcher.keep_topics()
        self.pulls = Pulls(center, lease_secret, current_sender)
        self.stopping = False
        self._lines: dict[str, Line] = {}
        self._making: dict[tuple[Callable[..., Topic], str], asyncio.Task[Topic]] = {}

    # --- work that waits for servers

    async def at_server(self, server: int, do: Callable[[], R], line: str = "server", **bounds: int) -> R:
        """Run what asks one database server, by number, in a line of its own. Raises StoreUnavailable."""
        if (error := self.center.store.away(server)) is not None:
            raise StoreUnavailable(str(error))
        return await self.within(f"{line}-{server}", do, **bounds)

    async def parsed(self, data: bytes, parse: Callable[[], R]) -> R:
        """Parse the body of a request: what is large off the event loop, one after the other."""
        if len(data) <= SMALL_TEXT:
            return parse()
        return await self.within("parse", parse, threads=1)

    async def within(self, pool: str, do: Callable[[], R], **more: int) -> R:
        """Run it on one of the threads of a pool, when it is the turn of who sent the current request.

        ``more`` are the bounds of the pool's ``Line``. Raises Busy.
        """
        line = self._lines.get(pool)
        if line is None:
            line = self._lines[pool] = Line(pool, **more)
        found: R = await line.run(current_sender(), do)
        return found

    def hold(self, size: int) -> None:
        """Take memory for bodies that will be read, until the current request is answered. Raises Busy."""
        if (exchange := CURRENT.get(None)) is not None:
            exchange.hold(size)

    # --- topics

    async def checked(self, name: str, by: str, check: Callable[[Topic], Awaitable[R]]) -> R:
        """Return what ``check`` makes of a submit to a topic, which it may raise an error to refuse.

        If the topic does not exist yet, a template makes it, but only after the check of what it would be:
        a refused submit creates nothing.
        """
        check_native(name)
        try:
            topic = await self.batcher.topic(name)
        except UnknownTopic:
            await check(await self._once(topic_to_be, name))
            topic = await self.ensure_topic(name, by)
        return await check(topic)

    async def ensure_topic(self, name: str, by: str) -> Topic:
        """Return a topic; if it does not exist yet, a template makes it. For a submit, never for a poll."""
        with suppress(UnknownTopic):
            return await self.batcher.topic(name)
        return await self._once(ensure_topic, name, by=by)

    async def _once(self, do: Callable[..., Topic], name: str, **more: str) -> Topic:
        """Run what concurrent submits to the same new topic share."""
        making = self._making.get((do, name))
        if making is None:
            making = asyncio.create_task(self.within(Place.FIRST, partial(do, self.center, name, **more)))
            self._making[do, name] = making
            making.add_done_callback(lambda _: self._making.pop((do, name)))
        return await asyncio.shield(making)

    async def read_through(self, rows: Iterable[TaskRow | PullLease]) -> TocError | None:
        """Read the topics again if one of a task is unknown: another process may just have created it.

        Returns the error if they cannot be read, so that it stays unknown whether the topic exists.
        """
        known = self.center.catalog.known_type
        if any(known(row.biz_type) is None for row in rows):
            try:
                await self.batcher.read_topics()
            except TocError as exc:
                return exc
        return None

    # --- state

    def readiness(self) -> tuple[bool, list[str]]:
        """Return whether this process can serve any task, and what it lacks. Asks no server.

        One of several database servers being away takes no gateway out of service: it would take all of them.
        """
        store = self.center.store
        servers = range(len(store.tables_of_server()))
        away = [number for number in servers if store.away(number) is not None]
        found = [f"database server {number} is out of reach" for number in away]
        ready = len(away) < len(servers)
        if self.stopping:
            ready, found = False, ["it is stopping", *found]
        if not self.book.known:
            ready, found = False, [*found, "the access tokens are not known"]
        return ready, found

    def stop(self) -> None:
        """Answer the waiting pulls, and accept no more."""
        self.stopping = True
        self.pulls.close()

    async def close(self) -> None:
        """End the threads once their present work is done."""
        await asyncio.gather(self.batcher.close(), self.pulls.stop())
        self._lines.clear()
