"""Finds tasks that are overdue by their rows, whatever the index says. The search is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from toc.model.topic import Topic
from toc.store.servers.shards import Trouble
from toc.store.store import Store
from toc.store.tasks.scan import DueRow, Position

TABLES_READ = 32
ROWS_READ = 200


class OverdueRows(NamedTuple):
    """Pending rows that are due, the first of each table. ``more``: there are more than these.

    ``failed`` gives the tables without an answer, and why.
    """

    rows: list[DueRow]
    more: bool
    failed: Mapping[int, Trouble]


def overdue_rows(store: Store, topics: Iterable[Topic], before_ms: int) -> OverdueRows:
    """Return rows due before ``before_ms`` that have not ended, except those of paused topics.

    This includes tasks that a worker has, whether their handlers run or wait.
    """
    scanned = store.scans.scan(store.tables, {}, 0, before_ms, 1)
    paused = ",".join(str(topic.biz_type) for topic in topics if topic.paused)
    where = f" AND biz_type NOT IN ({paused})" if paused else ""
    pages = store.scans.page(
        dict.fromkeys(scanned.with_due_rows[:TABLES_READ], Position(0)),
        before_ms,
        ROWS_READ,
        where=where,
    )
    more = len(scanned.with_due_rows) > TABLES_READ or any(len(page) == ROWS_READ for page in pages.values())
    rows = [row for page in pages.values() for row in page]
    return OverdueRows(rows, more, scanned.failed | pages.unanswered)
