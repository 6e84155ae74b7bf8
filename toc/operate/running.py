"""Tasks that run: where, and since when. Every door shows the same.

Those run whose rows a worker has leased, as it does 0.75 s after the take: ``since`` is the time of that. A
task that a worker has taken and not started yet counts too, without ``since``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from toc.coordination.znodes import host_of
from toc.model.access import Action as Right
from toc.model.documents import instant
from toc.model.errors import IndexUnavailable, Unavailable
from toc.model.task import TaskRow
from toc.model.topic import Delivery, Slot, Topic
from toc.operate.cluster import TOPIC, living_workers
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.topics import get_topic

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter

CONSUMER = "a consumer"
"""The owner of a task that was handed out."""
LEASED_MS = 1500
"""How long after its start a task is leased at the latest by a worker that is not held up."""


class Running(NamedTuple):
    """Where a task runs. ``owner`` and ``host`` are None if nobody knows; ``since`` (ms) is None if it
    has not started."""

    job_id: int
    slot: Slot
    owner: str | None
    host: str | None
    since: int | None

    def shown(self) -> Record:
        """Return it for display."""
        texts = {"job_id": str(self.job_id), "slot": str(self.slot)}
        return self._asdict() | texts | {"since": self.since and instant(self.since)}


@operation("task.running", "GET /v1/running", Right.READ_CLUSTER, "Show running tasks",
           TOPIC, Param("limit", Value.WHOLE, "At most N tasks.", 100, least=1, most=1000),
           place=Place.CLUSTER)  # fmt: skip
def tasks(doing: Doing, limit: int, topic: str | None = None) -> Record:
    """Show the tasks that run now, where, and since when.

    A task counts that a worker has taken more than 0.75 s ago; without `since`, it has not started yet.
    Consumers that pull are not shown, nor tables that do not answer.

    toc: Example: toc running --topic order.close
    """
    store = doing.center.store
    topics = store.topics.list() if topic is None else [get_topic(store, topic)]
    return {"tasks": [one.shown() for one in running(doing.center, topics, limit)]}


def running(center: TimeoutCenter, topics: Iterable[Topic], limit: int) -> list[Running]:
    """Return at most so many tasks of topics that run in workers, of tables that answer."""
    from toc.store.tasks.scan import Position

    store, by_type = center.store, {one.biz_type: one for one in topics}
    starts = dict.fromkeys(store.tables, Position(0))
    pages = store.scans.page(starts, center.clock.now_ms() + 1, limit, where=f" AND {store.leases.held()}")
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
    from toc.store.tasks.leases import owner_number

    leases = center.store.leases.living(slots)
    claims = center.queues.claims({slots[job_id] for job_id in leases}).values()
    named = [held for held in claims if not isinstance(held, IndexUnavailable)]
    owners = {owner_number(worker): worker for held in named for worker in held.values()}
    if not owners.keys() >= {owner for owner, _ in leases.values()}:  # taken by its row
        with suppress(Unavailable):
            names = [row.member.worker_id for row in living_workers(center)]
            owners |= {owner_number(worker): worker for worker in names}
    found = [(job_id, owners.get(owner), since or None) for job_id, (owner, since) in leases.items()]
    return {
        job_id: Running(job_id, slots[job_id], worker, worker and host_of(worker), since)
        for job_id, worker, since in found
    }
