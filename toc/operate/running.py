"""Tasks that run: where, and since when. Every door shows the same.

Those run whose rows a worker has leased, as it does 0.75 s after the take: ``since`` is the time of that. A
task that a worker has taken and not started yet counts too, without ``since``.

They are looked for in the PrepareQueues and, as without an index there are none, among the first due rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from toc.coordination.znodes import host_of
from toc.model.access import Action as Right
from toc.model.documents import instant
from toc.model.errors import IndexUnavailable, Unavailable
from toc.model.sharding import table_of_job
from toc.model.task import TaskRow
from toc.model.topic import Delivery, Slot, Topic
from toc.operate.cluster import TOPIC, living_workers
from toc.operate.due import unread
from toc.operate.operation import Doing, Param, Place, Record, Value, operation
from toc.operate.topics import get_topic

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter
    from toc.store.servers.shards import Trouble

CONSUMER = "a consumer"
"""The owner of a task that was handed out."""
LEASED_MS = 1500
"""How long after its start a task is leased at the latest by a worker that is not held up."""
ROWS, LEAST_ROWS = 4096, 16
"""How many due rows are read, and how many of each table at least."""
TAKEN = 10_000
"""How many entries of each PrepareQueue are read, and of all found the rows."""


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


class Runs(NamedTuple):
    """Tasks that run. ``missing``: tables that did not answer, and why. ``more``: there may be others."""

    tasks: list[Running]
    missing: Mapping[int, Trouble]
    more: bool


@operation("task.running", "GET /v1/running", Right.READ_CLUSTER, "Show running tasks",
           TOPIC, Param("limit", Value.WHOLE, "At most N tasks.", 100, least=1, most=1000),
           place=Place.CLUSTER)  # fmt: skip
def tasks(doing: Doing, limit: int, topic: str | None = None) -> Record:
    """Show the tasks that run now, where, and since when.

    A task counts that a worker has taken more than 0.75 s ago; without `since`, it has not started yet.
    Consumers that pull are not shown. `missing` names tables that did not answer. `more`: others may run: in
    these, or beyond `limit` or, without an index, the first due tasks, which are looked at.

    toc: Example: toc running --topic order.close
    """
    store = doing.center.store
    topics = store.topics.list() if topic is None else [get_topic(store, topic)]
    found = running(doing.center, topics, limit)
    missing = unread(store, found.missing, servers=True)
    return {"tasks": [one.shown() for one in found.tasks], "missing": missing, "more": found.more}


def running(center: TimeoutCenter, topics: Collection[Topic], limit: int) -> Runs:
    """Return at most so many tasks of topics that run in workers, of tables that answer."""
    from toc.store.tasks.scan import of_types

    store, by_type = center.store, {one.biz_type: one for one in topics}
    now, tables, is_held = center.clock.now_ms(), len(store.tables), store.leases.held()
    each = max(LEAST_ROWS, ROWS // tables)
    due = store.scans.overdue(now + 1, of_types(by_type), is_held, tables=tables, each=each)
    slots, whole = _taken(center, topics)
    for row in due.rows:
        if row.biz_type in by_type:
            slots[row.job_id] = by_type[row.biz_type].slot(row.slot_crc, row.slot_amount)
    found = sorted(slots, key=lambda job_id: (slots[job_id], job_id))[:TAKEN]
    leases = store.leases.living(found)
    there = _where(center, leases, slots)
    missing = {table_of_job(one, tables): error for one, error in leases.unanswered.items()}
    more = len(slots) > TAKEN or len(there) > limit or (due.more and not whole)
    tasks, missing = [there[job_id] for job_id in found if job_id in there], {**missing, **due.failed}
    return Runs(tasks[:limit], missing, more or bool(missing))


def _taken(center: TimeoutCenter, topics: Iterable[Topic]) -> tuple[dict[int, Slot], bool]:
    """Return the tasks in the PrepareQueues, and whether these are all that workers have taken there."""
    if not (center.queues.present and center.store.identity.indexed()):
        return {}, False
    peeks = center.queues.peek([slot for topic in topics for slot in topic.slots()])
    busy = [slot for slot, peek in peeks.items() if isinstance(peek, IndexUnavailable) or peek.prepared]
    pages = center.queues.ids("prepare", dict.fromkeys(busy, 0), TAKEN)
    read = {slot: page for slot, page in pages.items() if not isinstance(page, IndexUnavailable)}
    whole = len(read) == len(busy) and all(len(page) < TAKEN for page in read.values())
    return {job_id: slot for slot, page in read.items() for job_id in page}, whole


def where_of(center: TimeoutCenter, row: TaskRow, topic: Topic) -> Running | None:
    """Return where a task runs, or None. Raises StoreUnavailable.

    Of a task that a consumer has pulled nobody knows the host.
    """
    slot = topic.slot(row.slot_crc, row.slot_amount)
    if topic.delivery is Delivery.PULL:
        pulled = center.store.pulls.read([row.job_id]).whole().get(row.job_id)
        if pulled is not None and pulled.nonce and pulled.next_time > pulled.now:
            return Running(row.job_id, slot, CONSUMER, None, pulled.began)
    leases = center.store.leases.living([row.job_id]).whole()
    return _where(center, leases, {row.job_id: slot}).get(row.job_id)


def _where(
    center: TimeoutCenter, leases: Mapping[int, tuple[int, int]], slots: Mapping[int, Slot]
) -> dict[int, Running]:
    """Return where the tasks of these leases run."""
    from toc.store.tasks.leases import owner_number

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
