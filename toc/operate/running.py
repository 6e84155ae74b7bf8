"""Which tasks run now, and where: those whose rows a worker has leased, as it does 0.75 s after the take.

A task that a worker has taken and not started yet counts too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from toc.coordination.znodes import host_of
from toc.model.errors import IndexUnavailable, Unavailable
from toc.model.task import TaskRow
from toc.model.topic import Delivery, Slot, Topic
from toc.operate.cluster import workers
from toc.sdk.client import TimeoutCenter
from toc.store.tasks.leases import owner_number
from toc.store.tasks.scan import Position

CONSUMER = "a consumer"
"""The owner of a task that was handed out."""


class Running(NamedTuple):
    """Where a task runs. ``worker`` and ``host`` are None if nobody knows; ``since`` (ms) is None if the row
    does not say it."""

    job_id: int
    slot: Slot
    worker: str | None
    host: str | None
    since: int | None


def running(center: TimeoutCenter, topics: Sequence[Topic], limit: int) -> list[Running]:
    """Return at most ``limit`` tasks of these topics that run, by slot and job_id.

    Raises StoreUnavailable.
    """
    store, by_type = center.store, {topic.biz_type: topic for topic in topics}
    starts = dict.fromkeys(store.tables, Position(0))
    where = f" AND {store.leases.held()}"
    pages = store.scans.page(starts, center.clock.now_ms() + 1, limit, where=where).whole()
    rows = [row for page in pages.values() for row in page if row.biz_type in by_type]
    found = sorted((by_type[row.biz_type].slot(row.slot_crc, row.slot_amount), row.job_id) for row in rows)
    there = _where(center, {job_id: slot for slot, job_id in found[:limit]})
    return [there[job_id] for _, job_id in found[:limit] if job_id in there]


def where_of(center: TimeoutCenter, row: TaskRow, topic: Topic) -> Running | None:
    """Return where a task runs, or None. Raises StoreUnavailable.

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
    leases = center.store.leases.living(slots)
    claims = center.queues.claims({slots[job_id] for job_id in leases}).values()
    named = [held for held in claims if not isinstance(held, IndexUnavailable)]
    owners = {owner_number(worker): worker for held in named for worker in held.values()}
    if not owners.keys() >= {owner for owner, _ in leases.values()}:  # taken by its row
        with suppress(Unavailable):
            names = [row.member.worker_id for row in workers(center)]
            owners |= {owner_number(worker): worker for worker in names}
    found: dict[int, Running] = {}
    for job_id, (owner, since) in leases.items():
        worker = owners.get(owner)
        host = None if worker is None else host_of(worker)
        found[job_id] = Running(job_id, slots[job_id], worker, host, since or None)
    return found
