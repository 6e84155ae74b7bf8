"""Which tasks run now, and where: what is prepared, under whose claim number, and since when by the lease.

A task that a worker has taken and not started yet counts too. One that runs from its row alone, while Redis
is away, is found by its job_id only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

from toc.coordination.znodes import host_of
from toc.model.errors import IndexUnavailable, Unavailable
from toc.model.scores import split
from toc.model.task import TaskRow
from toc.model.topic import Delivery, Slot, Topic
from toc.operate.cluster import workers
from toc.sdk.client import TimeoutCenter
from toc.store.tasks.leases import owner_number
from toc.store.tasks.scan import Position

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

CONSUMER = "a consumer"
"""The owner of a task that was handed out."""


class Running(NamedTuple):
    """Where a task runs. ``worker`` and ``host`` are None if nobody knows; ``since`` (ms) is None in the
    first second, before its worker takes a lease."""

    job_id: int
    slot: Slot
    worker: str | None
    host: str | None
    since: int | None


def running(center: TimeoutCenter, topics: Sequence[Topic], limit: int) -> list[Running]:
    """Return at most ``limit`` tasks of these topics that run, by slot and job_id.

    Raises StoreUnavailable, and IndexUnavailable if a slot cannot be read.
    """
    found: list[tuple[Slot, int]] = []
    if not center.queues.present:
        found = _leased(center, topics, limit)
    slots = sorted(slot for topic in topics for slot in topic.slots())
    for slot, peek in center.queues.peek(slots).items() if center.queues.present else ():
        if len(found) < limit and _known(peek).prepared:
            entries = _known(center.queues.prepared([slot], limit)[slot])
            found += [(slot, job_id) for job_id, _ in sorted(entries)]
    where = _where(center, {job_id: slot for slot, job_id in found[:limit]})
    return [where[job_id] for _, job_id in found[:limit] if job_id in where]


def _leased(center: TimeoutCenter, topics: Sequence[Topic], limit: int) -> list[tuple[Slot, int]]:
    """Return the tasks that have a lease, by slot and job_id. Raises StoreUnavailable."""
    store, by_type = center.store, {topic.biz_type: topic for topic in topics}
    starts = dict.fromkeys(store.tables, Position(0))
    where = f" AND {store.leases.held()}"
    pages = store.scans.page(starts, center.clock.now_ms() + 1, limit, where=where).whole()
    rows = [row for page in pages.values() for row in page if row.biz_type in by_type]
    return sorted((by_type[row.biz_type].slot(row.slot_crc, row.slot_amount), row.job_id) for row in rows)


def where_of(center: TimeoutCenter, row: TaskRow, topic: Topic) -> Running | None:
    """Return where a task runs, or None. Raises StoreUnavailable; what Redis does not say the row does.

    Of a task that a consumer has pulled nobody knows the host.
    """
    slot = topic.slot(row.slot_crc, row.slot_amount)
    if topic.delivery is Delivery.PULL:
        pulled = center.store.pulls.read([row.job_id]).whole().get(row.job_id)
        if pulled is not None and pulled.nonce and pulled.next_time > pulled.now:
            return Running(row.job_id, slot, CONSUMER, None, pulled.began)
    return _where(center, {row.job_id: slot}).get(row.job_id)


def _where(center: TimeoutCenter, slots: Mapping[int, Slot]) -> dict[int, Running]:
    """Return which of these tasks run, and where."""
    by_slot: dict[Slot, list[int]] = {}
    for job_id, slot in slots.items():
        by_slot.setdefault(slot, []).append(job_id)
    claims = {slot: _or_nothing(held) for slot, held in center.queues.claims(by_slot).items()}
    owners = {owner_number(worker): worker for held in claims.values() for worker in held.values()}
    leases = center.store.leases.living(slots)
    if not owners.keys() >= {owner for owner, _ in leases.values()}:  # taken by its row
        with suppress(Unavailable):
            names = [row.member.worker_id for row in workers(center)]
            owners |= {owner_number(worker): worker for worker in names}
    found: dict[int, Running] = {}
    for slot, entries in center.queues.held(by_slot).items():
        for job_id, score in _or_nothing(entries).items():
            found[job_id] = _running(job_id, slot, claims[slot].get(split(score).claim), None)
    for job_id, (owner, since) in leases.items():
        before = found.get(job_id)
        worker = owners.get(owner) or (before.worker if before else None)
        found[job_id] = _running(job_id, slots[job_id], worker, since or None)
    return found


def _running(job_id: int, slot: Slot, worker: str | None, since: int | None) -> Running:
    return Running(job_id, slot, worker, None if worker is None else host_of(worker), since)


def _known(answer: T | IndexUnavailable) -> T:
    if isinstance(answer, IndexUnavailable):
        raise answer
    return answer


def _or_nothing(answer: Mapping[K, V] | IndexUnavailable) -> Mapping[K, V]:
    return {} if isinstance(answer, IndexUnavailable) else answer
