"""The handler of webhook topics: makes a task the request that its target gets, and judges the answer."""

import asyncio
import hashlib
import random
import resource
import socket
from collections import Counter
from http import HTTPStatus
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

from toc.failpoint import failpoint
from toc.index.queues import Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, to_ms
from toc.model.errors import Busy, InvalidTarget, SecretsLocked, TocError, UnknownTarget
from toc.model.handler import Handler
from toc.model.raised import Delivered, Postponed, Sent, Undelivered
from toc.model.target import Allow, Target, TargetSecrets, route_of, url_of
from toc.model.task import Task
from toc.model.topic import Delivery
from toc.observe import metrics
from toc.observe.log import get_logger
from toc.store.records.targets import TargetBook, TargetTable
from toc.webhooks.answers import Meaning, Response, meaning
from toc.webhooks.connect import IN_NAME_OF, Lookup
from toc.webhooks.limiter import Full, Limiter
from toc.webhooks.request import body_of, named_headers, signed, webhook_id
from toc.webhooks.sender import Sender

log = get_logger(__name__)

OWN_URL = "(url)"
"""The label in metrics for all URLs that tasks bring themselves."""
OWN_CONCURRENCY = 50
"""Requests in flight, over all workers, to one origin of such URLs."""
OWN_SECONDS = 15.0
"""Time-out of a request to such a URL."""
WAITS, SENDS = 0.1, 0.8
"""Shares of the topic's max_runtime: for how long a task may wait for a place, and how long its
request may take. The wait alone never exceeds max_runtime. A request that takes too long can, and
the target's breaker counts it."""
LOOK_SECONDS = 1.0
"""How soon a task whose target is paused, unknown or locked is tried again, if few wait."""
MIN_WAIT_SECONDS = 0.25
"""How soon one is that waits for a breaker, a place or a rate."""
MAX_LOOKS = 100.0
"""How many of them are tried in a second, in one process, if many wait."""
LOOK_BYTES = 1 << 16
"""A body of this size, which is read again for each try, makes a task count twice there."""
MAX_LOOK_SECONDS = 300.0
LUMP_MS = 50
"""Postponed tasks come back at multiples of this: taking one costs nearly as much as taking many."""
MAX_REQUESTS = 20_000
"""Requests in flight in one process, however many descriptors it may have."""
FEW = 4
"""Requests in flight that a target may have in one process while any place is free."""
MAX_HELD = 128 << 20
"""Bytes of bodies of tasks that are sent, or wait for a place in memory, in one process."""
MAX_LABELS = 300
"""Targets with a name of their own in the metrics of one process."""
OTHERS = "(others)"
PAUSED_BY = "webhook"


class Bound(NamedTuple):
    """Where a task goes, and with which keys it is signed. A task's own URL has no target and no
    signature."""

    url: str
    name: str
    """The name under which its limits are shared."""
    label: str
    target: Target | None
    opened: TargetSecrets | None
    path: str = ""
    """The path on the target's host that the task named, instead of the target's own URL."""


class Waits:
    """Counts postponed tasks by target and reason. Instants are ms. Used by the event loop alone.

    Each process counts what it has postponed itself, until the time at which that comes back. A task is
    postponed by one process at a time, so the sum over all processes is what waits.
    """

    def __init__(self) -> None:
        self._labels: set[str] = set()
        self._until: dict[tuple[str, str], Counter[int]] = {}
        """(name of a bound, reason) -> the second in which tasks come back -> how many."""

    def label(self, target: str) -> str:
        """Return the name of a target or origin in metrics: bounded, however many there are."""
        if target.startswith(_OWN_PREFIX):
            return OWN_URL
        if target not in self._labels:
            if len(self._labels) >= MAX_LABELS:
                return OTHERS
            self._labels.add(target)
        return target

    def note(self, target: str, reason: str, until: int) -> None:
        """Count a task that was postponed."""
        self._until.setdefault((target, reason), Counter())[until // 1000] += 1
        metrics.WEBHOOK_POSTPONED.of(self.label(target), reason).add()

    def waiting(self, target: str, reason: str) -> int:
        """How many tasks wait for a target, for this reason."""
        return sum(self._until.get((target, reason), {}).values())

    def update_gauges(self, now: int) -> None:
        """Forget what has come back by ``now``, and update the gauges."""
        counts: Counter[tuple[str, str]] = Counter()
        for (target, reason), seconds in list(self._until.items()):
            for second in [each for each in seconds if each < now // 1000]:
                del seconds[second]
            counts[self.label(target), reason] += sum(seconds.values())
            if not seconds:
                del self._until[target, reason]
        for labels, count in counts.items():
            metrics.WEBHOOK_WAITING.of(*labels).set(count)


class Webhooks:
    """Sends the tasks of webhook topics. One for each worker process.

    ``holder`` names the process in Redis, ``members`` is how many processes send webhooks, as far as known at
    the start. ``run_once`` reads the targets, on a thread of its own.
    """

    def __init__(
        self, *, targets: TargetTable, queues: Queues, catalog: TopicCatalog, clock: Clock, allow: Allow,
        holder: str, members: int, lookup: Lookup = socket.getaddrinfo,
    ) -> None:  # fmt: skip
        self.members = members
        """Among how many processes the limits of targets are divided, at least."""
        self._targets = targets
        self._book = TargetBook(targets, clock)
        self._catalog = catalog
        self._clock = clock
        self._most = most_requests()
        self._in_flight: Counter[str] = Counter()
        """Requests in flight by target, and those to tasks' own URLs together: each may have as many as it
        leaves free of three quarters, and FEW in any case: several that hang do not hold up others."""
        self._held: Counter[str] = Counter()
        """Bytes of bodies in memory, in the same way: each may have as many as it leaves free."""
        self._sender = Sender(allow, lookup, self._most // 2)
        self._own_sender = Sender(allow, lookup, self._most // 2)
        """For tasks' own URLs: looking up names that are not found occupies its own threads, not those of
        targets."""
        self._limiter = Limiter(queues.permits, holder, lambda: self.members)
        self._waits = Waits()
        self._updates_gauges = False
        self._locked: set[int] = set()
        """change_ids of targets whose secrets no key here opens, each of which is logged once."""
        self._pausing: set[int] = set()
        """Those that have answered 410 and are being paused: one task of each waits for that."""

    def run_once(self) -> float:
        """Read the targets. Returns the seconds until the next call."""
        return self._book.run_once()

    def handler(self, topic: str) -> Handler:
        """Return the handler of a topic whose delivery is webhook."""
        remotely = self._limiter.waiting_remotely
        return Handler(topic, self.deliver, None, True, delivery=Delivery.WEBHOOK, waiting_remotely=remotely)

    async def deliver(self, task: Task) -> Delivered:
        """Send a task. Raises Undelivered, or Postponed if it cannot be sent now."""
        if not self._updates_gauges:
            self._updates_gauges = True
            self._update_gauges()
        bound = self._bound(task)
        size = task.body_length or 0
        if size > MAX_HELD - self._held.total() - self._held[bound.label]:
            self._postpone(task, bound.label, "concurrency")
        self._held[bound.label] += size
        try:
            return await self._deliver(task, bound)
        finally:
            self._held[bound.label] -= size
            if not self._held[bound.label]:
                del self._held[bound.label]

    async def _deliver(self, task: Task, bound: Bound) -> Delivered:
        to = bound.target
        limits = (OWN_CONCURRENCY, None) if to is None else (to.concurrency, to.rate)
        capacity = self._limiter.of(bound.name, *limits)
        max_runtime = self._catalog.known()[task.topic].max_runtime
        try:
            await self._limiter.enter(capacity, WAITS * max_runtime)
        except Full as full:
            each = min(full.each, 1 / MAX_LOOKS)
            self._postpone(task, bound.name, full.reason, full.seconds, MIN_WAIT_SECONDS, each)
        breaker, era = capacity.breaker, capacity.breaker.era
        answer: Response | None = None
        try:
            bound = self._as_it_is(task, bound)
            answer = await self._send(task, bound, SENDS * max_runtime)
        finally:
            now = asyncio.get_running_loop().time()
            if breaker.judge(now, era, well=None if answer is None else not answer.unwell):
                log.warning("webhook_breaker_opened", target=bound.label, seconds=round(breaker.blocked(now)))
            self._limiter.leave(capacity, None if answer is None else answer.ms / 1000)
        failpoint("webhook.answered")
        return await self._judge(task, bound, answer)

    # --- where it goes

    def _bound(self, task: Task) -> Bound:
        """Return where a task goes. Raises Postponed while that is unknown."""
        topic = self._catalog.known()[task.topic]
        route = route_of(topic, task.attribute)
        if route.url:
            # It is not signed: with a target's signature, its receiver could pass it on to that target.
            origin = hashlib.sha256(urlsplit(route.url).netloc.encode()).hexdigest()[:16]
            return Bound(route.url, _OWN_PREFIX + origin, OWN_URL, None, None)
        name = route.target or task.topic
        if not route.target:
            self._postpone(task, name, "no-target")
        return self._at_target(task, name, route.path)

    def _as_it_is(self, task: Task, bound: Bound) -> Bound:
        """Return where a task goes that may have waited for its place: its topic or target may have changed.

        Raises Postponed, also for a task whose place is at another target or whose topic is paused by now, or
        that has expired: the next row check ends it.
        """
        expired = task.expires_at is not None and to_ms(task.expires_at) < self._clock.now_ms()
        now = self._bound(task)
        if expired or task.topic in self._catalog.paused or now.name != bound.name:
            self._postpone(task, bound.name, "concurrency", least=0.0, each=0.0)
        return now

    def _at_target(self, task: Task, name: str, path: str) -> Bound:
        """Return where a task goes whose target this is. Raises Postponed."""
        target = self._book.known(name)
        if target is None:
            self._postpone(task, name, "unknown" if self._book.ready else "targets-not-read")
        if not target.serves(task.topic):
            self._postpone(task, name, "not-for-topic")
        if target.paused or target.change_id in self._pausing:
            self._postpone(task, name, "paused")
        try:
            opened = self._book.secrets(target)
        except SecretsLocked as exc:
            if target.change_id not in self._locked:
                self._locked.add(target.change_id)
                log.warning("webhook_secrets_locked", target=name, error=str(exc))
            self._postpone(task, name, "locked")
        try:
            url = url_of(target, path)
        except InvalidTarget as exc:
            raise Undelivered(str(exc), Sent(0, 0), dead=True) from None
        return Bound(url, name, name, target, opened, path)

    def _postpone(
        self,
        task: Task,
        target: str,
        why: str,
        after: float = 0.0,
        least: float = LOOK_SECONDS,
        each: float = 1 / MAX_LOOKS,
    ) -> NoReturn:
        """Postpone a task for ``after`` and ``least`` seconds, and the longer the more wait for the same."""
        each *= 1 + (task.body_length or 0) / LOOK_BYTES
        others = min(self._waits.waiting(target, why) * each, MAX_LOOK_SECONDS)
        seconds = after + least * random.uniform(1.0, 2.0) + others * random.random()  # noqa: S311 - spreads load
        until = self._clock.now_ms() + max(round(seconds * 1000), 1)
        until += -until % LUMP_MS
        self._waits.note(target, why, until)
        raise Postponed(until, f"target {OWN_URL if target.startswith(_OWN_PREFIX) else target}: {why}")

    # --- sending, and judging the answer

    async def _send(self, task: Task, bound: Bound, most_seconds: float) -> Response:
        body, content_type = body_of(task)
        now, to, opened = self._clock.now_ms(), bound.target, bound.opened
        keys, own = (opened.signing(to, now), opened.headers) if to and opened else ((), {})
        named, at = named_headers(task), now // 1000
        headers = signed(named, webhook_id(task), body, content_type, keys=keys, timestamp=at, own=own)
        seconds, sender = (to.timeout, self._sender) if to else (OWN_SECONDS, self._own_sender)
        free = self._most - self._in_flight.total()
        if self._in_flight[bound.label] >= max(free - self._most // 4, min(free, FEW)):
            self._postpone(task, bound.label, "concurrency")
        self._in_flight[bound.label] += 1
        try:
            IN_NAME_OF.set(bound.name if to else task.topic)
            answer = await sender.send(bound.url, headers, body, min(seconds, most_seconds))
        except Busy:
            self._postpone(task, bound.label, "concurrency")
        finally:
            self._in_flight[bound.label] -= 1
            if not self._in_flight[bound.label]:
                del self._in_flight[bound.label]
        label = self._waits.label(bound.label)
        status = "none" if answer.status is None else f"{answer.status // 100}xx"
        metrics.WEBHOOK_REQUESTS.of(label, status).add()
        metrics.WEBHOOK_SECONDS.of(label).observe([answer.ms / 1000])
        return answer

    async def _judge(self, task: Task, bound: Bound, answer: Response) -> Delivered:
        found = meaning(answer, bound.target.dead_on if bound.target else ())
        sent = Sent(answer.status or 0, answer.ms)
        if found is Meaning.PROCESSED:
            return Delivered(sent, answer.text)
        to = None if bound.path else bound.target
        if answer.status == HTTPStatus.GONE and to is not None and to.change_id not in self._pausing:
            self._pausing.add(to.change_id)
            try:
                await asyncio.to_thread(self._pause, to, task.job_id)
            finally:
                self._pausing.discard(to.change_id)
        if found is Meaning.DEAD:
            raise Undelivered(answer.text, sent, dead=True)
        after = answer.retry_after
        cap = self._catalog.known()[task.topic].backoff_cap
        raise Undelivered(answer.text, sent, after_ms=round(min(after, cap) * 1000) if after else None)

    def _pause(self, target: Target, job_id: int) -> None:
        """Pause a target that has answered 410, unless it has changed. If that fails, the next task's answer
        does it."""
        why = f"it answered 410 to job {job_id}"
        try:
            if self._targets.pause(target.name, by=PAUSED_BY, why=why, change_id=target.change_id):
                log.warning("target_paused", target=target.name, job_id=job_id)
        except UnknownTarget:
            pass  # deleted meanwhile
        except TocError as exc:
            log.warning("target_not_paused", target=target.name, error=str(exc))
        self._book.run_once()

    def _update_gauges(self) -> None:
        """Update the gauges, once a second."""
        self._waits.update_gauges(self._clock.now_ms())
        asyncio.get_running_loop().call_later(1.0, self._update_gauges)


_OWN_PREFIX = "url:"


def most_requests() -> int:
    """Return how many requests may be in flight in this process.

    Four times as many descriptors there are: as many connections are kept, names are looked up, and the
    worker has its own.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_REQUESTS if limit == resource.RLIM_INFINITY else min(limit // 4, MAX_REQUESTS)
