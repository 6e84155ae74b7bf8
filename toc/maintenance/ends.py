"""Ends tasks whose time is over where no worker or consumer takes them.

A worker that takes an expired task, or a pull that meets one whose last ttr is over, ends it. But nobody
takes the tasks of a paused topic, and perhaps nobody pulls: then the worker that sweeps the table does it.
"""

from __future__ import annotations

from collections.abc import Mapping

from toc.index.queues import Queues
from toc.model.task import TaskStatus
from toc.model.topic import Delivery, Slot, Topic
from toc.model.verdict import Unpulled, after_expiry, after_lapse, has_expired, unpulled
from toc.observe.log import get_logger
from toc.observe.metrics import EXPIRED_TASKS, TRIES
from toc.store.store import Store
from toc.store.tasks.batch import Guard
from toc.store.tasks.scan import DueRow

log = get_logger(__name__)

Over = Mapping[int, tuple[DueRow, Topic]]
"""Rows that may be over, with their topics."""


def may_be_over(row: DueRow, topic: Topic, now: int) -> bool:
    """Whether the time of a pending task may be over, for ``Ends`` to find out."""
    if row.next_time > now:
        return False
    if _is_pulled(topic):
        return row.attempts > 0 or has_expired(row.expires_at, now)
    return has_expired(row.expires_at, _long_ago(topic, now))


class Ends:
    """Ends such tasks: their rows, then their entries. Thread-safe."""

    def __init__(self, store: Store, queues: Queues) -> None:
        self._store = store
        self._queues = queues

    def end(self, over: Over, now: int) -> set[int]:
        """End those of these tasks whose time is over at ``now`` (ms). Returns their ids.

        What cannot be ended now is read again by a later pass.
        """
        pulled = {job_id: pair for job_id, pair in over.items() if _is_pulled(pair[1])}
        others = {job_id: pair for job_id, pair in over.items() if job_id not in pulled}
        statuses: dict[int, TaskStatus] = {}
        if pulled:
            statuses |= self._end_pulled(pulled)
        if others:
            statuses |= self._expire(others, now)
        dead: dict[Slot, list[tuple[int, int]]] = {}
        gone: dict[Slot, list[int]] = {}
        for job_id, status in statuses.items():
            row, topic = over[job_id]
            slot = topic.slot(row.slot_crc, row.slot_amount)
            if status is TaskStatus.DEAD:
                dead.setdefault(slot, []).append((job_id, now))
            else:
                gone.setdefault(slot, []).append(job_id)
        # If a node is away: the row check drops an entry, and a later pass over dead rows restores one.
        if dead:
            self._queues.restore_dead(dead)
        if gone:
            self._queues.forget(gone)
        return set(statuses)

    def _expire(self, over: Over, now: int) -> dict[int, TaskStatus]:
        """End tasks that expired more than prepare_timeout ago. Returns how they ended.

        By then a try that had started in time has a lease, and its row is left alone.
        """
        ends = [
            after_expiry(row, now)
            for row in self._store.read_tries(over).values()
            if row.status == TaskStatus.PENDING
            and row.next_time <= now
            and row.lease <= 0
            and has_expired(row.expires_at, _long_ago(over[row.job_id][1], now))
        ]
        guards = self._store.expire(ends) if ends else {}
        statuses = {}
        for end in ends:
            if guards.get(end.job_id) is Guard.APPLIED:
                name = over[end.job_id][1].name
                EXPIRED_TASKS.of(name).add()
                log.info("task_expired", job_id=end.job_id, topic=name, started=end.started)
                statuses[end.job_id] = TaskStatus.DEAD if end.started else TaskStatus.CANCELLED
        return statuses

    def _end_pulled(self, over: Over) -> dict[int, TaskStatus]:
        """End pulled tasks that have expired, or whose last ttr is over. Returns how they ended."""
        ends = [
            after_lapse(row)
            for row in self._store.pulls.read(over).values()
            if unpulled(row, over[row.job_id][1]) in (Unpulled.LAPSED, Unpulled.EXPIRED)
        ]
        ended = self._store.pulls.end(ends) if ends else {}
        statuses = {}
        for end in ends:
            if ended.get(end.row.job_id):
                statuses[end.row.job_id] = TaskStatus(end.status)
                if end.status == TaskStatus.DEAD:
                    topic = over[end.row.job_id][1]
                    log.warning("task_dead", job_id=end.row.job_id, topic=topic.name, error=end.error)
                    TRIES.of(topic.name, "dead").add()
        return statuses


def _is_pulled(topic: Topic) -> bool:
    return topic.delivery is Delivery.PULL and not topic.paused


def _long_ago(topic: Topic, now: int) -> int:
    """The instant (ms) before which a handler's task must have expired to be ended here."""
    return now - topic.prepare_timeout * 1000
