"""What consumers do with their leases (ack, nack, extend), and what the gateway itself writes about them.

Calls in flight share round trips, for each server of the task table and verb by itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from toc.failpoint import failpoint
from toc.model.errors import StoreUnavailable, TocError
from toc.model.pull import AckOutcome, LeaseOutcome, PullLease
from toc.model.task import TaskStatus
from toc.model.verdict import Nack, after_nack
from toc.observe.metrics import TRIES
from toc.pull.handout import HandOuts
from toc.pull.mover import EndedLease
from toc.sdk.client import TimeoutCenter
from toc.sdk.server_batcher import Settle, ask_each, one_each

SIZE = 100
"""Bytes of a lease in a statement, about."""
_BY_IT = AckOutcome.ACKED, AckOutcome.LATE
"""A task is processed by this ack."""


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


class LeaseCall(NamedTuple):
    """One lease, and what is asked about it beside the verb: of an extend the ttr (ms)."""

    lease: PullLease
    wish: NackWish | int | None = None


class Done(NamedTuple):
    """What came of leases, by job_id, and those of them that have ended."""

    outcomes: Mapping[int, Any] = {}
    failed: Mapping[int, TocError] = {}
    ends: Iterable[EndedLease] = ()


Do = Callable[[Mapping[int, LeaseCall]], Done]


class LeaseBatches:
    """Writes in batches what is asked about leases. Belongs to one event loop."""

    def __init__(self, center: TimeoutCenter, outs: HandOuts) -> None:
        self._store = center.store
        self._catalog = center.catalog
        self._outs = outs
        self._batchers = {
            verb: one_each(center, f"pull-{verb.value}", partial(self._send, do), _not_done)
            for verb, do in (
                (Verb.ACK, self._ack),
                (Verb.NACK, self._nack),
                (Verb.EXTEND, self._extend),
                (Verb.RELEASE, self._release),
            )
        }

    async def ask(self, verb: Verb, calls: Sequence[LeaseCall]) -> list[Any]:
        """Return what came of each: its outcome or a TocError."""
        batchers = self._batchers[verb]
        return await ask_each(
            [(batchers[self._store.server_of(one.lease.job_id)], one, SIZE) for one in calls]
        )

    async def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        batchers = [one for some in self._batchers.values() for one in some]
        while not all(batcher.idle for batcher in batchers):
            await asyncio.sleep(0.01)
        for batcher in batchers:
            batcher.close()

    def _send(self, do: Do, calls: Sequence[LeaseCall], answer: Settle) -> None:
        outcomes: list[Any] = [None] * len(calls)
        ends: list[EndedLease] = []
        left: Sequence[int] = range(len(calls))
        while left:  # a statement takes each task once; the rest follows
            now: dict[int, int] = {}
            later = [
                number for number in left if now.setdefault(calls[number].lease.job_id, number) != number
            ]
            done = do({job_id: calls[number] for job_id, number in now.items()})
            for job_id, number in now.items():
                outcomes[number] = done.failed.get(job_id) or done.outcomes.get(job_id)
            ends += done.ends
            left = later
        answer(outcomes)
        self._outs.ended(ends)

    def _ack(self, calls: Mapping[int, LeaseCall]) -> Done:
        outcomes = self._store.pulls.ack(call.lease for call in calls.values())
        failpoint("pull.acked")
        acked = AckOutcome.ACKED
        self._count((calls[job_id].lease, "processed") for job_id, what in outcomes.items() if what in _BY_IT)
        ends = [
            EndedLease(calls[job_id].lease, None)
            for job_id, what in outcomes.items()
            if what is acked or what.ok
        ]
        return Done(outcomes, outcomes.unanswered, ends)

    def _nack(self, calls: Mapping[int, LeaseCall]) -> Done:
        found = self._store.pulls.read(calls)
        items: list[tuple[PullLease, Nack]] = []
        for job_id, row in found.items():
            wish, topic = calls[job_id].wish, self._catalog.known_type(row.biz_type)
            if isinstance(wish, NackWish) and topic is not None:
                nack = after_nack(row, topic, delay_ms=wish.delay_ms, dead=wish.dead, error=wish.error)
                items.append((calls[job_id].lease, nack))
        done = self._store.pulls.nack(items)
        outcomes = dict.fromkeys(calls, LeaseOutcome.GONE)
        ends: list[EndedLease] = []
        came: list[tuple[PullLease, str]] = []
        for job_id, changed in done.items():
            if changed is not None:
                dead = changed.status == TaskStatus.DEAD
                outcomes[job_id] = LeaseOutcome.DEAD if dead else LeaseOutcome.DONE
                ends.append(EndedLease(calls[job_id].lease, changed))
                came.append((calls[job_id].lease, "dead" if dead else "failed"))
        self._count(came)
        return Done(outcomes, {**found.unanswered, **done.unanswered}, ends)

    def _count(self, ended: Iterable[tuple[PullLease, str]]) -> None:
        """Count what came of tries."""
        for (biz_type, outcome), tries in Counter((lease.biz_type, what) for lease, what in ended).items():
            if (topic := self._catalog.known_type(biz_type)) is not None:
                TRIES.of(topic.name, outcome).add(tries)

    def _extend(self, calls: Mapping[int, LeaseCall]) -> Done:
        items = []
        for lease, wish in calls.values():
            topic = self._catalog.known_type(lease.biz_type)
            if topic is not None and isinstance(wish, int):
                items.append((lease, wish, topic.max_runtime * 1000))
        # The entry stays where it is: when it comes due, its row says until when the lease lives.
        until = self._store.pulls.extend(items)
        return Done(until, until.unanswered)

    def _release(self, calls: Mapping[int, LeaseCall]) -> Done:
        self._outs.release(call.lease for call in calls.values())
        return Done()


def _not_done(_call: LeaseCall) -> TocError:
    return StoreUnavailable("the database server does not answer")
