"""Outcomes of rows that many callers write to one server together: an error harms only its own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from toc.model.errors import StoreUnavailable, SubmitUnknown, TocError
from toc.model.task import TaskRow
from toc.store.server import DatabaseServer, PoolExhausted, Refused, Transient
from toc.store.shards import Shards

R = TypeVar("R")


def unwritable(
    shards: Shards, server: DatabaseServer, rows: Sequence[TaskRow], *, find: bool = False
) -> list[StoreUnavailable | None]:
    """Return for each row why it cannot be written now, or None: its server is known to be away, or its table
    locked or damaged.

    ``find``: first find out which tables are. For when a transaction of all these rows was refused.
    """
    health = shards.health[server]
    tables = [shards.table_of(row.job_id) for row in rows]
    distinct = dict.fromkeys(tables)
    if find:
        health.find_failing(distinct, writes=True)
    elif not health.troubled:
        return [None] * len(rows)
    _, failed = health.sort_out(distinct, writes=True)
    return [failed.get(table) for table in tables]


def alone(shards: Shards, row: TaskRow, store: Callable[[], R]) -> R | TocError:
    """Return what ``store`` returns, or its error; it is not called while the row's server is known to be
    away or its table locked."""
    server = shards.server_of[shards.table_of(row.job_id)]
    [refused] = unwritable(shards, server, [row])
    if refused is not None:
        return refused
    try:
        return store()
    except TocError as exc:
        note_away(shards, server, exc.__cause__ if isinstance(exc, SubmitUnknown) else exc)
        return exc


def note_away(shards: Shards, server: DatabaseServer, error: BaseException | None) -> None:
    """Mark a server that is out of reach, so that no other caller waits for it."""
    if isinstance(error, StoreUnavailable) and not isinstance(error, (Transient, PoolExhausted, Refused)):
        shards.health[server].mark_away(error)
