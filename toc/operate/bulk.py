"""What operators do to many tasks, in chunks: redrive, purge, cancel, reschedule.

To do it twice is harmless: a chunk that is done has the same outcome. Bulk jobs (``operate/bulk_jobs``) do it
to all tasks that match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from toc.model.errors import IndexUnavailable, InvalidExpiry
from toc.model.task import CancelOutcome, TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import entry_score
from toc.sdk.changes import Changes
from toc.sdk.client import TimeoutCenter

CHUNK = 500
"""At most this many tasks at once: transactions and scripts stay short."""

Counts = dict[str, int]


def redrive(
    center: TimeoutCenter, job_ids: Sequence[int], *, tries: int | None = None, expires_at: int = 0
) -> Counts:
    """Make dead tasks pending again, due now, with all their tries. Skips tasks that are not dead.

    ``tries``: how many they have from now on. They expire at ``expires_at`` (ms), by default never. Writes
    the rows first, then the index. Counts ``redriven``, and ``not_indexed_yet``: those of them that wait for
    the sweep, because Redis is out of reach. Raises StoreUnavailable.
    """
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    counts = {"redriven": 0, "not_indexed_yet": 0}
    for chunk in _chunks(job_ids):
        rows = center.store.redrive(chunk, center.clock.now_ms(), tries=tries, expires_at=expires_at)
        entries: dict[Slot, list[tuple[int, float]]] = {}
        for row in rows:
            topic = topics.get(row.biz_type)
            if topic is None:
                counts["not_indexed_yet"] += 1  # its topic was removed: no worker consumes its slot
                continue
            entry = row.job_id, entry_score(topic, row.next_time, 0)
            entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append(entry)
        for slot, reply in center.queues.redrive(entries).items():
            if isinstance(reply, IndexUnavailable):
                counts["not_indexed_yet"] += len(entries[slot])
        counts["redriven"] += len(rows)
    return counts


def purge_dead(center: TimeoutCenter, job_ids: Sequence[int]) -> Counts:
    """Delete dead tasks for good. Counts ``purged``, and ``left``: those whose Redis server is out of reach.

    Removes the DeadQueue entry first: without its row it could not be found. If this stops in between, the
    sweep adds the entry again. One that a sweep adds which read the row just before goes with a later one.
    Leaves a task alone that was redriven meanwhile.
    """
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    counts = {"purged": 0, "left": 0}
    for chunk in _chunks(job_ids):
        rows = [row for row in center.store.read(chunk).values() if row.status == TaskStatus.DEAD]
        sizes = {row.job_id: -1 if row.body_length is None else row.body_length for row in rows}
        entries: dict[Slot, list[int]] = {}
        for row in rows:
            topic = topics.get(row.biz_type)
            if topic is not None:  # else its topic was removed, and the sweep knows no slot for it either
                entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append(row.job_id)
        for slot, removed in center.queues.purge_dead(entries).items():
            if isinstance(removed, IndexUnavailable):
                counts["left"] += len(entries[slot])
                for job_id in entries[slot]:
                    del sizes[job_id]
        counts["purged"] += center.store.delete_ended(sizes, [TaskStatus.DEAD])
    return counts


def cancel(center: TimeoutCenter, job_ids: Sequence[int]) -> dict[int, CancelOutcome]:
    """Cancel tasks, a chunk in one transaction per server. Returns the outcome of each."""
    changes = Changes(center)
    found: dict[int, CancelOutcome] = {}
    for chunk in _chunks(job_ids):
        found |= changes.cancel(chunk)
    return found


def reschedule_one(
    center: TimeoutCenter, job_id: int, due: datetime, expires_at: datetime | None = None
) -> str:
    """Move a task. Returns the outcome by name: ``expires_before`` if it expires before that time."""
    try:
        return center.reschedule(job_id, action_time=due, expires_at=expires_at).value
    except InvalidExpiry:
        if expires_at is not None:
            raise
        return "expires_before"


def _chunks(job_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(job_ids), CHUNK):
        yield job_ids[first : first + CHUNK]
