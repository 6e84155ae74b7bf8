"""What consumers do with their leases (ack, nack, extend), and what the gateway itself writes about them.

Everything that arrives during a round trip to a server of the task table shares the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

from toc.failpoint import failpoint
from toc.model.catalog import TopicCatalog
from toc.model.errors import Busy, TocError
from toc.model.pull import AckOutcome, LeaseOutcome, PullLease
from toc.model.task import TaskStatus
from toc.model.verdict import Nack, after_nack
from toc.pull.batch_thread import BatchThread
from toc.pull.handout import HandOuts
from toc.pull.mover import EndedLease
from toc.store.store import Store

TOGETHER = 500
"""Most answers of one round trip."""
MAX_WAITING = 10_000
"""If this many wait for one server, further ones from consumers are refused."""


class Verb(Enum):
    """What can be asked about a lease."""

    ACK = "ack"
    NACK = "nack"
    EXTEND = "extend"
    RELEASE = "release"


class NackWish(NamedTuple):
    """How a consumer gives a task back. ``delay_ms`` None: the topic's backoff."""

    delay_ms: int | None
    dead: bool
    error: str


class PendingCall:
    """One call, which awaits the results of all its leases (``done``). Belongs to its event loop."""

    __slots__ = ("_left", "done", "loop", "results")

    def __init__(self, count: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self.results: list[Any] = [None] * count
        """The result of each lease of the call."""
        self._left = count

    def put(self, index: int, result: object) -> None:
        """Record the result of one lease."""
        self.results[index] = result
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)


class LeaseCommand(NamedTuple):
    """One lease, what is asked about it, and where its result goes: to a position in a call, or nowhere."""

    verb: Verb
    lease: PullLease
    wish: NackWish | int | None = None
    call: PendingCall | None = None
    position: int = 0


class AnswerThreads:
    """A thread for each server of the task table, which writes what consumers answer."""

    def __init__(self, store: Store, catalog: TopicCatalog, outs: HandOuts) -> None:
        self._store = store
        self._catalog = catalog
        self._outs = outs
        self._threads: list[BatchThread[LeaseCommand]] = [
            BatchThread(f"pull-answer-{number}", self._run, TOGETHER)
            for number in range(len(store.tables_of_server()))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, seconds: float) -> None:
        """Write what was asked, and end. Later commands are refused."""
        for thread in self._threads:
            thread.stop(seconds)

    def put(self, commands: Iterable[LeaseCommand]) -> list[tuple[LeaseCommand, Busy]]:
        """Queue these for their servers. Returns those that are refused, and why.

        Asks without a call are bounded by the pulls under way, and are refused only after ``stop``.
        """
        by_server: dict[int, list[LeaseCommand]] = {}
        for command in commands:
            by_server.setdefault(self._store.server_of(command.lease.job_id), []).append(command)
        refused: list[tuple[LeaseCommand, Busy]] = []
        for number, some in by_server.items():
            thread = self._threads[number]
            if thread.waiting >= MAX_WAITING and some[0].call is not None:
                refused += [
                    (command, Busy("too many answers wait for a server; try again")) for command in some
                ]
            elif not thread.put(some):
                refused += [(command, Busy("this process is ending; try again")) for command in some]
        return refused

    def _run(self, batch: list[LeaseCommand]) -> None:
        while batch:  # a statement takes each task once; the rest follows
            by_verb: dict[Verb, dict[int, LeaseCommand]] = {}
            later: list[LeaseCommand] = []
            seen: set[int] = set()
            for command in batch:
                if command.lease.job_id in seen:
                    later.append(command)
                else:
                    seen.add(command.lease.job_id)
                    by_verb.setdefault(command.verb, {})[command.lease.job_id] = command
            for verb, commands in by_verb.items():
                _DO[verb](self, commands)
            batch = later

    def _ack(self, commands: dict[int, LeaseCommand]) -> None:
        outcomes = self._store.pulls.ack(command.lease for command in commands.values())
        failpoint("pull.acked")
        resolve(commands, outcomes, outcomes.unanswered)
        acked = AckOutcome.ACKED
        self._outs.ended(
            EndedLease(commands[job_id].lease, None)
            for job_id, what in outcomes.items()
            if what is acked or what.ok
        )

    def _nack(self, commands: dict[int, LeaseCommand]) -> None:
        found = self._store.pulls.read(commands)
        items: list[tuple[PullLease, Nack]] = []
        for job_id, row in found.items():
            wish, topic = commands[job_id].wish, self._catalog.known_type(row.biz_type)
            if isinstance(wish, NackWish) and topic is not None:
                nack = after_nack(row, topic, delay_ms=wish.delay_ms, dead=wish.dead, error=wish.error)
                items.append((commands[job_id].lease, nack))
        done = self._store.pulls.nack(items)
        outcomes = dict.fromkeys(commands, LeaseOutcome.GONE)
        ends: list[EndedLease] = []
        for job_id, changed in done.items():
            if changed is not None:
                dead = changed.status == TaskStatus.DEAD
                outcomes[job_id] = LeaseOutcome.DEAD if dead else LeaseOutcome.DONE
                ends.append(EndedLease(commands[job_id].lease, changed))
        resolve(commands, outcomes, {**found.unanswered, **done.unanswered})
        self._outs.ended(ends)

    def _extend(self, commands: dict[int, LeaseCommand]) -> None:
        items = []
        for command in commands.values():
            topic = self._catalog.known_type(command.lease.biz_type)
            if topic is not None and isinstance(command.wish, int):
                items.append((command.lease, command.wish, topic.max_runtime * 1000))
        # The entry stays where it is: when it comes due, its row says until when the lease lives.
        until = self._store.pulls.extend(items)
        resolve(commands, {job_id: until.get(job_id) for job_id in commands}, until.unanswered)

    def _release(self, commands: dict[int, LeaseCommand]) -> None:
        self._outs.release(command.lease for command in commands.values())
        resolve(commands, dict.fromkeys(commands), {})


_DO: dict[Verb, Callable[[AnswerThreads, dict[int, LeaseCommand]], None]] = {
    Verb.ACK: AnswerThreads._ack,
    Verb.NACK: AnswerThreads._nack,
    Verb.EXTEND: AnswerThreads._extend,
    Verb.RELEASE: AnswerThreads._release,
}


def resolve(
    commands: Mapping[int, LeaseCommand],
    results: Mapping[int, AckOutcome | LeaseOutcome | int | None],
    failed: Mapping[int, TocError],
) -> None:
    """Give each command its result or its error, on its call's loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[PendingCall, int, object]]] = {}
    for job_id, (_, _, _, call, index) in commands.items():
        if call is not None:
            result = failed[job_id] if job_id in failed else results.get(job_id)
            by_loop.setdefault(call.loop, []).append((call, index, result))
    for loop, some in by_loop.items():
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(_resolve, some)


def _resolve(found: Sequence[tuple[PendingCall, int, object]]) -> None:
    for call, index, result in found:
        call.put(index, result)
