"""Marks on rows of tries that may have begun, for a concurrent or later cancel of the task.

A cancel looks for the PrepareQueue entry to learn whether a try may have begun. If there is none, it reads
the row again. So a row must be marked before its entry is moved without writing a failure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from toc.model.task import TaskStatus, TryRow
from toc.store.shards import Trouble
from toc.store.store import Store


def mark_begun(
    store: Store, rows: Iterable[TryRow], moved: Collection[int], error: str
) -> dict[int, Trouble]:
    """Mark the cancelled ones of these rows as tried, and those with an id in ``moved`` as begun.

    ``moved`` are pending tasks with a new deadline. ``error`` becomes their last_error if they have none.
    Returns the ids that could not be marked, with the reason: their entries stay.
    """
    # [rule: mark-tried]
    failed: dict[int, Trouble] = {}
    if cancelled := [row.job_id for row in rows if row.status == TaskStatus.CANCELLED]:
        failed |= store.mark_tried(cancelled)
    if moved:
        failed |= store.mark_begun(moved, error)
    return failed
