"""Stores rows as the SDK does."""

from __future__ import annotations

from collections.abc import Sequence

from toc.model.body import NO_BODIES, Contents
from toc.model.task import OnConflict, Request, Submission, TaskRow
from toc.store.store import Store
from toc.store.tasks.plan import Stored


def put(
    store: Store,
    row: TaskRow,
    contents: Contents = NO_BODIES,
    *,
    on_conflict: OnConflict = OnConflict.REPLACE,
    request: Request | None = None,
) -> Stored:
    """Store a row, or replace the task that has its dedup_key."""
    return store.put(Submission(row, contents, on_conflict, request))


def insert(store: Store, row: TaskRow, contents: Contents = NO_BODIES) -> int:
    """Store a row. Returns its job_id."""
    return store.put(Submission(row, contents)).put.job_id


def insert_many(store: Store, rows: Sequence[TaskRow], contents: Contents = NO_BODIES) -> list[int]:
    """Store rows in one call. Returns their job_ids."""
    return store.put_many(rows, contents, lambda _: None, {})
