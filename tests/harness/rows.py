"""Stores rows as the SDK does, and changes them as nobody else would."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from toc.model.task import Content, OnConflict, Request, Submission, TaskRow
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.store.tasks.plan import Stored

T = TypeVar("T")
NewRow = Callable[..., TaskRow]
"""Makes a row as the SDK does, with these values."""


def known(found: T | None) -> T:
    """What was asked for, which there is."""
    assert found is not None
    return found


def put(
    store: Store,
    row: TaskRow,
    content: Content | None = None,
    *,
    on_conflict: OnConflict = OnConflict.REPLACE,
    request: Request | None = None,
) -> Stored:
    """Store a row, or replace the task that has its dedup_key."""
    return store.put(Submission(row, content, on_conflict, request))


def insert(store: Store, row: TaskRow, content: Content | None = None) -> int:
    """Store a row. Returns its job_id."""
    return store.put(Submission(row, content)).put.job_id


def insert_many(store: Store, rows: Sequence[TaskRow], content: Content | None = None) -> list[int]:
    """Store rows in one call, those with a body with this one. Returns their job_ids."""
    many = [Submission(row, None if row.body_sha256 is None else content) for row in rows]
    return store.put_many(many, lambda _: None, {})


def change(store: Store, job_id: int | str, sets: str, *params: str | bytes | None) -> None:
    """Change a row by hand: ``change(store, job_id, "status=4")``."""
    table = store._shards.table_of(int(job_id))
    update = f"UPDATE {store._shards.names[table]} SET {sets} WHERE job_id={job_id}"
    store._shards.server_of[table].run([Statement(update, list(params))])
