"""What dialects do with tasks: only with their own, in the topics of their templates.

A task is a dialect's own if its topic fits one of the dialect's patterns and its dedup_key begins with the
dialect's name and a colon. Nobody else submits to these topics.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from toc.gateway.exchange import CURRENT
from toc.gateway.pull_calls import with_bodies
from toc.gateway.service import Service
from toc.model.errors import InvalidInput, NameTaken, TocError, TooManyTopics
from toc.model.pull import NONCE_BYTES, AckOutcome, PullLease
from toc.model.sharding import BizId, check_key
from toc.model.task import CancelOutcome, NewTask, Put, TaskRow, TaskStatus
from toc.model.topic import NAME, Delivery, Template, Topic, best_of, matches
from toc.operate.operation import Place
from toc.pull.handed_out import HandedOut, TtrOf

R = TypeVar("R")

MAX_TEMPLATES = 100
"""How many templates a dialect makes unasked: one for each of its namespaces, if it has any."""
MAX_IN_LINE = 5_000
"""Most calls that wait for a thread of one server: the protocols have no answer that means "try later"."""
MAX_TOPICS = 1000
"""Most topics that a pull of a dialect names."""
LOOK_SECONDS = 0.5
"""How often a waiting pull looks whether a topic that it names has been created."""
TOPICS_BY_TEMPLATE = 100
"""How many topics a dialect creates by one template; `toc template alter` allows more."""

_HASHED = re.compile(r"h-[0-9a-f]{32}")


def template_of(prefix: str, **policies: Any) -> Template:
    """Return the template of a dialect's topics, whose names begin with ``prefix``."""
    usual = {"slot_amount": 4, "topic_type": "instant", "delivery": "pull"}
    return Template(f"{prefix}*", {**usual, **policies}, TOPICS_BY_TEMPLATE)


def topic_for(name: str, prefix: str = "") -> str:
    """Return the topic for a dialect's name: ``prefix`` and the name, or ``h-`` and a hash if toc forbids it.

    A name that looks like such a hash is hashed as well, so no two names ever share a topic.
    """
    fits = NAME.fullmatch(prefix + name) and not _HASHED.fullmatch(name) and name
    return prefix + (name if fits else hashed(name))


def key_for(text: str) -> str:
    """Return the biz_id for a dialect's text: the text, or ``h-`` and a hash if the text cannot be a key.

    Keys have no control characters.
    """
    try:
        check_key("id", text)
    except InvalidInput:
        return hashed(text)
    return hashed(text) if _HASHED.fullmatch(text) else text


def hashed(name: str) -> str:
    """Return ``h-`` and 128 bits of the name's hash."""
    return f"h-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:32]}"


class DialectTasks:
    """One dialect's access to tasks, in one process."""

    def __init__(self, service: Service, name: str, templates: Sequence[Template]) -> None:
        self._service = service
        self.name = name
        self.prefix = f"{name}:"
        """How the dedup_keys of its tasks begin."""
        self._templates = templates

    # --- topics

    def fits(self, topic: str) -> bool:
        """Whether a topic is one of the dialect's, by its name."""
        return any(matches(template.pattern, topic) for template in self._templates)

    async def make_topic(self, tasks: Sequence[NewTask]) -> None:
        """Create the topic of these tasks if it does not exist yet: for a submit, never for a poll.

        The dialect's templates are added to the table of templates if they are missing; operators may alter
        them. Raises what ``ensure_topic`` does, and before anything is created what ``Batcher.checked`` does.
        """
        name = tasks[0].topic
        if name in self._service.center.catalog.known():
            return
        topic = best_of(self._templates, name).topic(name, 0)
        for task in tasks:
            await self._service.batcher.checked(task, topic=topic)
        await self._service.within(Place.FIRST, self._make_templates)
        await self._service.ensure_topic(name, self.name)

    def _make_templates(self) -> None:
        center = self._service.center
        stored = {template.pattern for template in center.store.templates.list()}
        own = sum(pattern.startswith(f"{self.name}.") for pattern in stored)
        for template in self._templates:
            if template.pattern not in stored:
                if own >= MAX_TEMPLATES:
                    raise TooManyTopics(
                        f"template {template.pattern!r} was not created: the dialect has {own}; "
                        f"`toc template create` makes more"
                    )
                try:
                    center.store.templates.create(template)
                except NameTaken:  # another process was faster
                    continue

    # --- pulls

    async def pull(
        self, topics: Iterable[str], ttr: float | TtrOf, *, wait: float = 0.0, most: int = 1
    ) -> list[HandedOut]:
        """Hand out due tasks from the first of these topics that has any.

        Works like ``Pulls.pull``. A topic that does not exist yet is not created,
        but its tasks are handed out if another call creates it during the wait.
        """
        names = list(dict.fromkeys(topics))
        pulls, loop, exchange = self._service.pulls, asyncio.get_running_loop(), CURRENT.get(None)
        end = loop.time() + wait
        # Only pulls that wait take a place among those that do: however many wait, other calls are answered.
        with exchange.waiting() if wait and exchange is not None else nullcontext():
            while True:
                left = max(end - loop.time(), 0.0)
                there = [name for name in names if self.topic_known(name)]
                step = left if len(there) == len(names) else min(left, LOOK_SECONDS)
                if there:
                    got = await pulls.pull(there, most=most, wait=step, ttr=ttr)
                    if got or step >= left:
                        return got
                elif left and not self._service.stopping:
                    await asyncio.sleep(step)
                if self._service.stopping or loop.time() >= end:
                    return []

    def topic_known(self, name: str) -> Topic | None:
        """Return a pulled topic of its own that this process knows: for polls."""
        topic = self._service.center.catalog.known().get(name) if self.fits(name) else None
        return topic if topic is not None and topic.delivery is Delivery.PULL else None

    # --- own tasks

    def topic_of(self, row: TaskRow) -> Topic | None:
        """Return the topic of a task of its own, None if it is another's."""
        topic = self._service.center.catalog.known_type(row.biz_type)
        own = row.dedup_key is not None and row.dedup_key.startswith(self.prefix)
        return topic if own and topic is not None and self.fits(topic.name) else None

    async def find_own(self, biz_id: int | str, dedup_key: str | None = None) -> list[TaskRow]:
        """Return its tasks of a biz_id, with this dedup_key or any, oldest first. Raises StoreUnavailable."""
        biz, store = BizId.of(biz_id), self._service.center.store
        look = partial(store.find, biz, dedup_key=dedup_key)
        rows = await self._at_server(store.server_of_biz(biz), look)
        if (error := await self._service.read_through(rows)) is not None:
            raise error
        return [row for row in rows if self.topic_of(row) is not None]

    async def put(self, task: NewTask) -> Put:
        """Store a task of its own, or do with the one of that name in its topic what ``on_conflict`` says.

        Raises what ``make_topic`` and ``TimeoutCenter.put`` raise.
        """
        await self.make_topic([task])
        return await self._service.batcher.put(task)

    async def end(self, row: TaskRow) -> AckOutcome:
        """End a task as processed if it was handed out in the row's version. Raises StoreUnavailable."""
        topic = self.topic_of(row)
        if topic is None or row.status != TaskStatus.PENDING:
            return AckOutcome.UNKNOWN
        if topic.delivery is not Delivery.PULL:
            return AckOutcome.NOT_HANDED_OUT
        slot = topic.slot(row.slot_crc, row.slot_amount).number
        lease = PullLease(row.job_id, row.version, row.biz_type, slot, bytes(NONCE_BYTES))
        outcome = (await self._service.pulls.ack([lease]))[0]
        if isinstance(outcome, TocError):
            raise outcome
        return outcome

    async def cancel(self, row: TaskRow) -> CancelOutcome:
        """Cancel a task, also one that is handed out. Raises StoreUnavailable."""
        if self.topic_of(row) is None:
            return CancelOutcome.UNKNOWN
        center = self._service.center
        return await self._at_server(center.store.server_of(row.job_id), partial(center.cancel, row.job_id))

    async def _at_server(self, server: int, do: Callable[[], R]) -> R:
        """Run what asks a database server, on threads of all dialects: no other door waits for them."""
        return await self._service.at_server(server, do, "line", most=MAX_IN_LINE)

    # --- bodies

    async def body(self, row: TaskRow) -> bytes:
        """Return the body of a task, empty without one. Raises BodyGone, UnreadableTask, StoreUnavailable."""
        if row.body_length is None:
            return b""
        store = self._service.center.store
        return (await self._at_server(store.server_of(row.job_id), partial(store.body_of, row))).data

    async def bodies(self, got: Sequence[HandedOut]) -> list[tuple[HandedOut, bytes]]:
        """Return tasks that were handed out with their bodies, as ``with_bodies`` does."""
        found = await with_bodies(self._service, got, "line-bodies", most=MAX_IN_LINE)
        return [(one, b"" if content is None else content.data) for one, content in found]
