"""The hall where pulls wait: who wants tasks of which topic, first come, first served.

A pull that is given entries leaves every queue until these are handed out or refused, so each answer is made
in one round. What is handed out for a pull that was answered meanwhile, or whose client has left, goes back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from toc.model.clock import from_ms
from toc.model.pull import PullLease, PullRow
from toc.model.task import Task
from toc.model.topic import Slot, Topic

TAKE_LIMIT = 200
"""Most entries of one topic that one round takes."""
PART_SECONDS = 0.05
"""How long a pull that has some of its tasks waits for those of a slower server."""
LAST_SECONDS = 2.0
"""How long a pull whose time is up waits for what is being handed out to it."""


TtrOf = Callable[[PullRow], int | None]
"""Tells for how long (ms) a task is handed out; None: not by this pull."""


class Delivered(NamedTuple):
    """A task as a consumer gets it.

    ``row`` is its row as it was handed out, ``key`` the lease as this package uses it. ``last``: the end of
    this lease leaves the task dead. ``task.body`` is read from the task table when it is asked for, which
    blocks.
    """

    task: Task
    row: PullRow
    key: PullLease
    last: bool

    @property
    def lease(self) -> str:
        """What ack, nack and extend take."""
        return self.key.text()

    @property
    def attempt(self) -> int:
        """The number of this try, from 1."""
        return self.row.attempts

    @property
    def lease_until(self) -> datetime:
        """Until when nobody else gets the task: aware UTC, by the clock of the task's server."""
        return from_ms(self.row.next_time)


class Entry(NamedTuple):
    """An entry that this process has prepared, or a due row (``fence`` NO_FENCE). ``taken``: ms by Redis."""

    job_id: int
    slot: Slot
    fence: float
    topic: Topic
    taken: int


class Waiter:
    """A waiting pull. The hall's lock guards it, except ``done``, which belongs to its event loop."""

    def __init__(self, topics: Sequence[str], most: int, ttr: int | TtrOf, *, hasty: bool) -> None:
        self.topics = topics
        self.most = most
        self.ttr = ttr
        """For how long it gets tasks, in ms."""
        self.hasty = hasty
        """Whether it wants only what is due now."""
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.got: list[Delivered] = []
        self.flying = 0
        """How many entries are being handed out to it."""
        self.closed = False
        """Whether it takes nothing more."""
        self.over = False
        """Whether it was answered, or its client has left."""
        self._patient = False

    def progress(self) -> None:
        """Check whether it can be answered. Runs on its loop."""
        if self.done.done():
            return
        if (self.got or self.closed) and not self.flying:
            self.done.set_result(None)
        elif self.got and not self._patient:
            self._patient = True
            self.loop.call_later(PART_SECONDS, self.end)

    def end(self) -> None:
        """Answer it with what there is. Runs on its loop."""
        if not self.done.done():
            self.done.set_result(None)


class Hall:
    """All waiting pulls of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, dict[Waiter, None]] = {}
        self._hasty: set[Waiter] = set()
        self.shut = False

    def __len__(self) -> int:
        with self._lock:
            return len({waiter for queue in self._queues.values() for waiter in queue})

    def enter(self, waiter: Waiter) -> bool:
        """Let it wait. False: the hall is shut."""
        with self._lock:
            if self.shut:
                return False
            self._queue(waiter)
            return True

    def _queue(self, waiter: Waiter) -> None:
        for name in waiter.topics:
            self._queues.setdefault(name, {})[waiter] = None
        if waiter.hasty:
            self._hasty.add(waiter)

    def _unqueue(self, waiter: Waiter) -> None:
        for name in waiter.topics:
            queue = self._queues.get(name)
            if queue is not None:
                queue.pop(waiter, None)
                if not queue:
                    del self._queues[name]
        self._hasty.discard(waiter)

    def topics(self) -> list[str]:
        """The topics of which someone wants tasks now."""
        with self._lock:
            return list(self._queues)

    def demand(self, topic: str) -> int:
        """How many tasks of the topic are wanted, up to a round's limit."""
        with self._lock:
            first = islice(self._queues.get(topic, ()), TAKE_LIMIT)
            return min(sum(waiter.most for waiter in first), TAKE_LIMIT)

    def assign(
        self, topic: str, entries: Sequence[Entry], due: Collection[str]
    ) -> tuple[list[tuple[Entry, Waiter]], list[Entry]]:
        """Give entries of a topic to those who wait. Returns the pairs, and what nobody wants.

        ``due`` are the topics that have something now: who prefers another of them gets that.
        """
        pairs: list[tuple[Entry, Waiter]] = []
        given = 0
        with self._lock:
            chosen: list[Waiter] = []
            for waiter in self._queues.get(topic, ()):
                if given == len(entries):
                    break
                if next(name for name in waiter.topics if name == topic or name in due) != topic:
                    continue
                part = entries[given : given + waiter.most]
                given += len(part)
                waiter.flying += len(part)
                chosen.append(waiter)
                pairs += [(entry, waiter) for entry in part]
            for waiter in chosen:
                self._unqueue(waiter)
        return pairs, list(entries[given:])

    def hand_over(self, results: Mapping[Waiter, tuple[int, list[Delivered]]]) -> list[Delivered]:
        """Pass on what became of entries: how many, and the tasks handed out. Returns those that nobody
        awaits any more."""
        lost: list[Delivered] = []
        with self._lock:
            for waiter, (count, delivered) in results.items():
                waiter.flying -= count
                if waiter.over:
                    lost += delivered
                    continue
                waiter.got += delivered
                if not waiter.got and not waiter.flying and not waiter.closed:
                    self._queue(waiter)
        tell(results)
        return lost

    def wants(self, waiter: Waiter) -> bool:
        """Whether it still awaits what it was given."""
        return not waiter.over

    def close(self, waiter: Waiter) -> None:
        """Its time is up: it takes nothing more, and gets what is being handed out to it."""
        with self._lock:
            waiter.closed = True
            self._unqueue(waiter)

    def leave(self, waiter: Waiter) -> list[Delivered]:
        """It is answered, or its client has left. Returns what it got."""
        with self._lock:
            waiter.closed = waiter.over = True
            self._unqueue(waiter)
            return waiter.got

    def close_hasty(self, empty: Collection[str]) -> None:
        """Answer those who want only what is due now, where all their topics are ``empty``."""
        with self._lock:
            idle = [w for w in self._hasty if not w.flying and all(name in empty for name in w.topics)]
            for waiter in idle:
                waiter.closed = True
                self._unqueue(waiter)
        tell(idle)

    def close_all(self) -> None:
        """Answer everybody: the process leaves."""
        with self._lock:
            self.shut = True
            waiting = {waiter for queue in self._queues.values() for waiter in queue}
            for waiter in waiting:
                waiter.closed = True
                self._unqueue(waiter)
        tell(waiting)


def tell(waiters: Iterable[Waiter]) -> None:
    """Let them see whether they can be answered, each on its loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.loop, []).append(waiter)
    for loop, some in by_loop.items():
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(_progress, some)


def _progress(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        waiter.progress()
