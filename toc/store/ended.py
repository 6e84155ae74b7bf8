"""Finds ended rows in the order of their end, and deletes them by id.

An ended row has the time of its end as next_time, so the index (status, next_time), whose entries end with
job_id, yields the oldest first. A page is bounded by what it reads, not by what it finds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from toc.model.task import TaskStatus
from toc.store import bodies
from toc.store import rows as sql
from toc.store.server import DatabaseServer, Statement
from toc.store.shards import Shards, Trouble

FINAL = (TaskStatus.PROCESSED, TaskStatus.CANCELLED)

Cursor = tuple[int, int]
"""(next_time, job_id) of a row; a page begins after it."""


class EndedRow(NamedTuple):
    """The columns of a processed or cancelled row that its purge needs. ``ended`` is in milliseconds."""

    table: int
    status: int
    job_id: int
    biz_type: int
    ended: int
    body_length: int
    """-1 without a body."""


class EndedRows:
    """Finds and deletes ended rows. Thread-safe. Raises StoreUnavailable."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def page(
        self, after: Mapping[tuple[int, int], Cursor], *, now: int, keep: int, limit: int
    ) -> tuple[list[EndedRow], int, Mapping[int, Trouble]]:
        """Return rows that ended more than ``keep`` ms ago, by ``now`` (ms) and by the clock of their server.

        For each (table, status): the rows after its cursor, in order, at most ``limit``. Also the instant
        (ms) by which rows had to have ended, by the slowest clock that was asked, and the tables that do not
        answer.
        """
        before = now - keep
        by_table: dict[int, Mapping[int, Cursor]] = {}
        for (table, status), cursor in after.items():
            by_table[table] = {**by_table.get(table, {}), status: cursor}

        def read(
            server: DatabaseServer, part: Mapping[int, Mapping[int, Cursor]]
        ) -> tuple[list[EndedRow], int]:
            ago = server.from_now(-keep)
            selects = [
                f"SELECT {table:d} AS tab,status,job_id,biz_type,{server.milliseconds('next_time')} AS ended,"
                f"COALESCE(body_length,-1) AS body "
                f"FROM {self._shards.names[table]} WHERE status={status:d} "
                f"AND next_time>={server.instant(ended)} AND next_time<{server.instant(before)} "
                f"AND next_time<{ago} "
                f"AND (next_time>{server.instant(ended)} OR job_id>{job_id:d}) "
                f"ORDER BY next_time,job_id LIMIT {limit:d}"
                for table, cursors in part.items()
                for status, (ended, job_id) in cursors.items()
            ]
            clock = Statement(f"SELECT {server.milliseconds(ago)}")
            # The clock first: what ends after it is not passed over.
            asked, *results = server.run([clock, *sql.unions(server, selects)], outwait=False)
            return [EndedRow._make(row) for result in results for row in result.rows], asked.rows[0][0]

        parts = self._shards.each(self._shards.group_tables(by_table), read)
        # A union need not keep the order of its parts.
        rows = sorted(
            (row for part, _ in parts.results for row in part), key=lambda row: (row.ended, row.job_id)
        )
        return rows, min([before, *(ago for _, ago in parts.results)]), parts.failed

    def delete(self, sizes: Mapping[int, int], statuses: Collection[int] = FINAL) -> int:
        """Delete those rows that have one of these statuses, and their bodies. Returns how many were deleted.

        ``sizes`` is job_id -> bytes of its body, -1 without one: a transaction deletes a bounded number of
        them. Raises StoreUnavailable if rows remain because their tables do not answer.
        """
        names, body_names = self._shards.names, self._shards.body_names

        def send(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> int:
            statements = [
                Statement(
                    f"DELETE FROM {names[table]} WHERE job_id IN ({sql.numbers(part)}) "
                    f"AND status IN ({sql.numbers(statuses)})"
                )
                for table, part in ids.items()
            ]
            rows = len(statements)
            for table, part in ids.items():
                if with_body := [job_id for job_id in part if sizes[job_id] >= 0]:
                    statements.append(bodies.delete(body_names[table], names[table], with_body))
            results = server.run(statements, transaction=True, outwait=False)
            return sum(result.matched for result in results[:rows])

        return sum(
            sum(self._shards.each(self._shards.group(part), send).whole())
            for part in bodies.bounded(sizes.items())
        )
