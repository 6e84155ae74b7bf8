"""What the calls work with: the batcher, the tokens, and threads for what waits for servers.

Each server has threads of its own, so a server that hangs holds up no call that does not need it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from toc.model.errors import Busy, SchemaBehind, StoreUnavailable, TocError
from toc.model.pattern import EVERYTHING
from toc.model.task import TaskRow
from toc.operate.templates import ensure_topic
from toc.operate.tokens import PREFIX, TokenBook
from toc.sdk.batcher import Batcher
from toc.sdk.client import TimeoutCenter

if TYPE_CHECKING:
    from toc.gateway.calls import Asked

THREADS = 4
"""Calls that wait for one server at once."""
MOST_WAITING = 64
"""Most calls that wait for a thread of one server; further ones are refused."""

P = ParamSpec("P")
R = TypeVar("R")


class Service:
    """What one gateway process works with. Made on its event loop; close it."""

    def __init__(self, center: TimeoutCenter, book: TokenBook) -> None:
        self.center = center
        self.book = book
        self.batcher = Batcher(center)
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._asked: Counter[str] = Counter()

    # --- work that waits for servers

    async def at_task(self, job_id: int, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what asks the server that holds a task."""
        server = self.center.store.server_of(job_id)
        if (error := self.center.store.away(server)) is not None:
            raise StoreUnavailable(str(error))
        return await self._run(f"server-{server}", do, *args, **kwargs)

    async def at_topics(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what asks the first database: topics, templates, tokens, the audit."""
        return await self._run("first", do, *args, **kwargs)

    async def after_change(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run what follows a change that was made, at the first database: never refused, and its failure does
        not become the change's."""
        with suppress(TocError):
            await self._begin("first", partial(do, *args, **kwargs))

    async def at_all(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what asks all database servers."""
        return await self._run("all", do, *args, **kwargs)

    async def at_cluster(self, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what asks ZooKeeper and Redis."""
        return await self._run("cluster", do, *args, **kwargs)

    async def _run(self, place: str, do: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._asked[place] >= THREADS + MOST_WAITING:
            raise Busy("too many requests wait for a server; try again in a moment")
        return await self._begin(place, partial(do, *args, **kwargs))

    async def _begin(self, place: str, do: Callable[[], R]) -> R:
        threads = self._threads.get(place)
        if threads is None:
            threads = self._threads[place] = ThreadPoolExecutor(THREADS, f"toc-{place}")
        self._asked[place] += 1
        work = self._loop.run_in_executor(threads, do)
        work.add_done_callback(lambda _: self._ended(place))
        return await asyncio.shield(work)

    def _ended(self, place: str) -> None:
        self._asked[place] -= 1

    # --- topics

    async def ensure_topic(self, name: str, by: str) -> None:
        """Create a topic that is not there yet, if a template makes it. For a submit, never for a poll."""
        if name not in self.center.catalog.known():
            await self.at_topics(ensure_topic, self.center, name, by=by)

    async def read_through(self, rows: Iterable[TaskRow]) -> None:
        """Read the topics again if one of a task is unknown: another process may just have created it."""
        known = self.center.catalog.known_type
        if any(known(row.biz_type) is None for row in rows):
            with suppress(StoreUnavailable, SchemaBehind):
                await self.batcher.read_topics()

    def topic_name(self, row: TaskRow) -> str | None:
        """Return the name of a task's topic; None if there is none, as of a deleted topic."""
        topic = self.center.catalog.known_type(row.biz_type)
        return topic.name if topic else None

    def visible_types(self, asked: Asked) -> tuple[int, ...] | None:
        """Return the biz_types of the topics that a token may see; None if it may see all."""
        if EVERYTHING in asked.token.topics:
            return None
        known = self.center.catalog.known().values()
        return tuple(topic.biz_type for topic in known if asked.may(topic.name))

    # --- state

    def lacking(self) -> list[str]:
        """Return what this process lacks for all its work; asks no server."""
        found = ["it is stopping"] if self.stopping else []
        store = self.center.store
        found += [
            f"database server {number} is out of reach"
            for number in range(len(store.tables_of_server()))
            if store.away(number) is not None
        ]
        try:
            self.book.find(PREFIX)
        except StoreUnavailable:
            found.append("the access tokens are not known")
        return found

    async def close(self) -> None:
        """End the threads, after what is under way."""
        await self.batcher.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
