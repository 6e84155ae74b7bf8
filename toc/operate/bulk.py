"""What operators do to many tasks at once: in chunks, at most as fast as the operator says.

After every chunk each generator yields what it has done so far, so that the caller can show it, and can tell
how far it came if it fails. A chunk that was yielded is done; repeating it is harmless. Bulk jobs
(``operate/bulk_jobs``) do what the generators do, in steps of their own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from toc.model.errors import IndexUnavailable, InvalidExpiry
from toc.model.task import CancelOutcome, RescheduleOutcome, TaskStatus
from toc.model.topic import Slot
from toc.model.verdict import entry_score
from toc.operate.audit import audited, tasks_chosen
from toc.sdk.changes import Changes
from toc.sdk.client import TimeoutCenter
from toc.sdk.indexing import Indexing

CHUNK = 500
"""At most this many tasks per step: transactions and scripts stay short."""
STEPS_PER_SECOND = 5
"""Into how many chunks the work of one second is split when a rate is given."""
LAST_SWEEP_SECONDS = 1.0
"""After this many seconds no sweep is left that read a row before it was purged."""

Counts = dict[str, int]


class BulkStep(NamedTuple):
    """How many tasks are done, and their outcomes."""

    done: int
    counts: Counts


def last_counts(
    steps: Iterator[BulkStep], progress: Callable[[BulkStep], None] = lambda _step: None
) -> Counts:
    """Take all steps. Returns the counts of the last; none without a step."""
    counts: Counts = {}
    for step in steps:
        counts = step.counts
        progress(step)
    return counts


def changed(
    center: TimeoutCenter,
    by: str,
    action: str,
    steps: Iterator[BulkStep],
    job_ids: Sequence[int],
    *,
    target: str = "tasks",
    progress: Callable[[BulkStep], None] = lambda _step: None,
    **selected: str,
) -> Counts:
    """Take all steps, as ``last_counts`` does, and record the ``action`` and its counts in the audit, also if
    it fails half-way. Does and records nothing without tasks.

    ``selected`` says how the tasks were chosen.
    """
    if not job_ids:
        return {}
    with audited(center.store, by, action, target, **selected, **tasks_chosen(job_ids)) as record:

        def note(step: BulkStep) -> None:
            record.update(step.counts)
            progress(step)

        return last_counts(steps, note)


def redrive(
    center: TimeoutCenter,
    job_ids: Sequence[int],
    rate: float | None = None,
    *,
    tries: int | None = None,
    expires_at: int = 0,
) -> Iterator[BulkStep]:
    """Make dead tasks pending again, due now, with all their tries. Skips tasks that are not dead.

    ``tries``: how many they have from now on. They expire at ``expires_at`` (ms), by default never. Writes
    the rows first, then the index. Counts ``redriven``, and ``not_indexed_yet``: those of them that wait for
    the sweep, because Redis is out of reach. Raises StoreUnavailable.
    """
    counts = {"redriven": 0, "not_indexed_yet": 0}
    for done, chunk in paced(job_ids, rate):
        redriven, not_indexed = redrive_some(center, chunk, tries=tries, expires_at=expires_at)
        counts["redriven"] += redriven
        counts["not_indexed_yet"] += not_indexed
        yield BulkStep(done, dict(counts))


def redrive_some(
    center: TimeoutCenter, job_ids: Sequence[int], *, tries: int | None = None, expires_at: int = 0
) -> tuple[int, int]:
    """Redrive at most CHUNK tasks. Returns how many, and how many of them wait for the sweep."""
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    rows = center.store.redrive(job_ids, center.clock.now_ms(), tries=tries, expires_at=expires_at)
    entries: dict[Slot, list[tuple[int, float]]] = {}
    not_indexed = 0
    for row in rows:
        topic = topics.get(row.biz_type)
        if topic is None:
            not_indexed += 1  # its topic was removed: no worker consumes its slot
            continue
        entry = row.job_id, entry_score(topic, row.next_time, 0)
        entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append(entry)
    for slot, reply in center.queues.redrive(entries).items():
        if isinstance(reply, IndexUnavailable):
            not_indexed += len(entries[slot])
    return len(rows), not_indexed


def purge_dead(
    center: TimeoutCenter, job_ids: Sequence[int], rate: float | None = None
) -> Iterator[BulkStep]:
    """Delete dead tasks for good. Counts ``purged``, and ``left``: those whose Redis server is out of reach.

    Removes the DeadQueue entry first: without its row it could not be found. If this stops in between, the
    sweep adds the entry again. So may a sweep that read the row before it was deleted; therefore the entries
    are removed once more at the end. Leaves a task alone that was redriven meanwhile.
    """
    counts = {"purged": 0, "left": 0}
    gone: dict[Slot, list[int]] = {}
    for done, chunk in paced(job_ids, rate):
        purged, left, entries = purge_some(center, chunk)
        for slot, some in entries.items():
            gone.setdefault(slot, []).extend(some)
        counts["purged"] += purged
        counts["left"] += left
        yield BulkStep(done, dict(counts))
    if gone:
        time.sleep(LAST_SWEEP_SECONDS)
        center.queues.purge_dead(gone)


def purge_some(center: TimeoutCenter, job_ids: Sequence[int]) -> tuple[int, int, dict[Slot, list[int]]]:
    """Purge at most CHUNK dead tasks, entry first. Returns how many, how many were left because their Redis
    server is out of reach, and the entries that were removed."""
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    rows = [row for row in center.store.read(job_ids).values() if row.status == TaskStatus.DEAD]
    entries: dict[Slot, list[int]] = {}
    sizes = {row.job_id: -1 if row.body_length is None else row.body_length for row in rows}
    free: list[int] = []
    left = 0
    for row in rows:
        topic = topics.get(row.biz_type)
        if topic is None:  # its topic was removed: the sweep knows no slot for it either
            free.append(row.job_id)
        else:
            entries.setdefault(topic.slot(row.slot_crc, row.slot_amount), []).append(row.job_id)
    for slot, removed in center.queues.purge_dead(entries).items():
        if isinstance(removed, IndexUnavailable):
            left += len(entries.pop(slot))
        else:
            free += entries[slot]
    deleted = {job_id: sizes[job_id] for job_id in free}
    return center.store.ended.delete(deleted, [TaskStatus.DEAD]), left, entries


def cancel(center: TimeoutCenter, job_ids: Sequence[int], rate: float | None = None) -> Iterator[BulkStep]:
    """Cancel tasks. Counts the outcomes by name."""
    counts: Counter[str] = Counter({outcome.value: 0 for outcome in CancelOutcome})
    for done, chunk in paced(job_ids, rate):
        counts.update(outcome.value for outcome in cancel_some(center, chunk).values())
        yield BulkStep(done, dict(counts))


def cancel_some(center: TimeoutCenter, job_ids: Sequence[int]) -> dict[int, CancelOutcome]:
    """Cancel at most CHUNK tasks, in one transaction per server. Returns the outcome of each."""
    return Changes(lambda: center.store, Indexing(center), lambda: center.clock).cancel(job_ids)


def reschedule(
    center: TimeoutCenter,
    job_ids: Sequence[int],
    due: Callable[[], datetime],
    rate: float | None = None,
    *,
    expires_at: datetime | None = None,
) -> Iterator[BulkStep]:
    """Move tasks one by one to the time that ``due`` returns for each. Counts the outcomes by name.

    Counts ``expires_before``: those left alone because they expire before that time.
    """
    counts: Counter[str] = Counter({outcome.value: 0 for outcome in RescheduleOutcome})
    for done, chunk in paced(job_ids, rate):
        for job_id in chunk:
            counts[reschedule_one(center, job_id, due(), expires_at)] += 1
        yield BulkStep(done, dict(counts))


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


def paced(job_ids: Sequence[int], rate: float | None) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the ids in chunks, each with the number of ids up to its end.

    Yields at most ``rate`` ids a second (None: as fast as the caller takes them).
    """
    size = CHUNK if rate is None else max(1, min(CHUNK, int(rate / STEPS_PER_SECOND)))
    began = time.monotonic()
    for first in range(0, len(job_ids), size):
        if rate is not None:
            time.sleep(max(0.0, began + first / rate - time.monotonic()))
        chunk = job_ids[first : first + size]
        yield first + len(chunk), chunk
