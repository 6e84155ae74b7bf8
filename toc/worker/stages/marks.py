"""Marks on rows of tries that may have begun, for whoever cancels the task meanwhile or later.

A cancel looks for the PrepareQueue entry to know whether a try may have begun, and where there is none reads
the row again. So who moves such an entry without writing a failure marks the row, before the entry goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from toc.model.task import TaskStatus, TryRow
from toc.store.shards import Trouble
from toc.store.store import Store


def mark_begun(
    store: Store, rows: Iterable[TryRow], moved: Collection[int], error: str
) -> dict[int, Trouble]:
    """Mark, of these rows, those that are cancelled, and as begun those with an id in ``moved``.

    ``moved`` are pending tasks with a new deadline; ``error`` is what they say if they have no error yet.
    Returns the ids that could not be marked, with the reason: their entries stay.
    """
    # [rule: mark-tried]
    failed: dict[int, Trouble] = {}
    if cancelled := [row.job_id for row in rows if row.status == TaskStatus.CANCELLED]:
        failed |= store.mark_tried(cancelled)
    if moved:
        failed |= store.mark_begun(moved, error)
    return failed
