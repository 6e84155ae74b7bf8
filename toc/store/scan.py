"""Reads task tables in the order of next_time, for comparison with the index.

All queries use the index (status, next_time), whose entries end with job_id: a Position is a place in it, and
a page begins after one. No page reads more than it returns, even if many rows share an instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from toc.model.sharding import table_of_job
from toc.model.task import TaskStatus
from toc.observe.log import get_logger
from toc.store import rows as sql
from toc.store.server import DatabaseServer, Statement
from toc.store.shards import Answers, Shards, Trouble

log = get_logger(__name__)

_START, _END = "<start>", "<end>"
"""Placeholders of the instants in a cached query."""
MOST_LOGGED = 100
"""Most rows in wrong tables that the log reports, once each."""


class Position(NamedTuple):
    """A place in the order of (next_time, job_id) of one table; later rows are not yet read."""

    next_time: int
    job_id: int = 0


class DueRow(NamedTuple):
    """The columns of a row that the index needs. Instants are in ms. ``next_time`` is the time of death of a
    dead row; ``expires_at`` is 0 for never."""

    job_id: int
    biz_type: int
    next_time: int
    attempts: int
    slot_crc: int
    slot_amount: int
    expires_at: int = 0

    @property
    def position(self) -> Position:
        """Its place in its table."""
        return Position(self.next_time, self.job_id)


class Looked(NamedTuple):
    """The result of ``look`` at many tables.

    ``with_due_rows`` are the ``quiet`` tables that hold a due row. ``ids`` are the (job_id, next_time)
    of the due rows in each ``busy`` table; ``rows`` are these rows, if they were requested.
    ``failed`` gives the tables without an answer, and why.
    """

    with_due_rows: list[int]
    ids: dict[int, list[tuple[int, int]]]
    rows: list[DueRow]
    failed: dict[int, Trouble]


_by_time = itemgetter(1, 0)
"""Sorts pairs of job_id and time."""


class Scans:
    """Reads pages of many tables in one round trip per server. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._logged: set[int] = set()
        # The same tables are probed every second, with the same statements, which are written once.
        self._probes = lru_cache(64)(self._write_probes)

    def look(
        self,
        quiet: Iterable[int],
        busy: Mapping[int, Position],
        from_ms: int,
        to_ms: int,
        limit: int,
        *,
        whole: bool = False,
    ) -> Looked:
        """Find pending rows due in [from_ms, to_ms).

        For ``quiet`` tables it returns only whether there is one; for ``busy`` ones up to ``limit`` after a
        Position: ids, which the index alone gives, or ``whole`` rows. For a quiet table the server reads one
        entry of the index, and returns nothing if that is due later.
        """
        asked: dict[int, Position | None] = {**dict.fromkeys(quiet), **busy}

        def send(server: DatabaseServer, part: Mapping[int, Position | None]) -> Looked:
            start, end = server.instant(from_ms), server.instant(to_ms)
            probes = self._probes(
                server, tuple(table for table, position in part.items() if position is None)
            )
            first = [Statement(probe.replace(_START, start).replace(_END, end)) for probe in probes]
            what = _columns(server, DueRow._fields if whole else ("job_id", "next_time"))
            pages = [
                f"SELECT {what} FROM {self._shards.names[table]} WHERE "
                f"{_after(server, TaskStatus.PENDING, position)} AND next_time<{end}{self._at_home(table)} "
                f"ORDER BY next_time,job_id LIMIT {limit:d}"
                for table, position in part.items()
                if position is not None
            ]
            results = server.run([*first, *sql.unions(server, pages)], outwait=False)
            with_due_rows = [row[0] for result in results[: len(first)] for row in result.rows]
            numbers = sql.number_rows(results[len(first) :], len(DueRow._fields) if whole else 2)
            rows = list(map(DueRow._make, numbers)) if whole else []
            ids: dict[int, list[tuple[int, int]]] = {}
            for job_id, due in [(row.job_id, row.next_time) for row in rows] if whole else numbers:
                ids.setdefault(table_of_job(job_id, self._shards.tables), []).append((job_id, due))
            return Looked(with_due_rows, ids, rows, {})

        parts = self._shards.each(self._shards.group_tables(asked), send)
        return Looked(
            [table for part in parts.results for table in part.with_due_rows],
            {table: sorted(ids, key=_by_time) for part in parts.results for table, ids in part.ids.items()},
            [row for part in parts.results for row in part.rows],
            parts.failed,
        )

    def _write_probes(self, server: DatabaseServer, tables: Sequence[int]) -> list[str]:
        """Write the statements that test whether these tables hold a pending row due from start to end."""
        names = self._shards.names
        selects = [
            server.first_due(table, names[table], TaskStatus.PENDING, _START, _END) for table in tables
        ]
        return [statement.sql for statement in sql.unions(server, selects)]

    def follow_switchover(self, table: int) -> str:
        """Connect anew to the server of a table if it has become read-only: its address may lead to another.

        Returns the server's name if so, else "". One that does not answer is marked as away.
        """

        def ask(server: DatabaseServer, _part: object) -> str:
            return server.name if server.left_by_switchover() else ""

        parts = self._shards.each(self._shards.group_tables({table: None}), ask)
        return parts.results[0] if parts.results else ""

    def pending(self, job_ids: Iterable[int]) -> list[DueRow]:
        """Return the pending ones of these tasks, as far as their tables answer."""

        def send(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> list[DueRow]:
            what = _columns(server, DueRow._fields)
            selects = [
                f"SELECT {what} FROM {self._shards.names[table]} "
                f"WHERE job_id IN ({sql.numbers(part)}) AND status={TaskStatus.PENDING:d}"
                for table, part in ids.items()
            ]
            return _due_rows(server, selects)

        return [row for part in self._shards.each(self._shards.group(job_ids), send).results for row in part]

    def page(
        self,
        starts: Mapping[int, Position],
        to_ms: int,
        limit: int,
        *,
        status: TaskStatus = TaskStatus.PENDING,
        where: str = "",
    ) -> Answers[list[DueRow]]:
        """Up to ``limit`` rows per table with this status, after its Position and before ``to_ms``.

        ``where`` is one more SQL condition, such as ``of_type`` returns.
        """

        found, failed = self._page(starts, to_ms, limit, status, where)
        strays = [(table, row.job_id) for table, row in found if self._shards.table_of(row.job_id) != table]
        if strays:
            self._tell(strays)
            found, failed = self._page(starts, to_ms, limit, status, where, at_home=True)
        pages = Answers[list[DueRow]]({table: [] for table in starts if table not in failed}, failed)
        for table, row in found:
            pages[table].append(row)
        for page in pages.values():
            page.sort(key=_place)
        return pages

    def _page(
        self,
        starts: Mapping[int, Position],
        to_ms: int,
        limit: int,
        status: TaskStatus,
        where: str,
        *,
        at_home: bool = False,
    ) -> tuple[list[tuple[int, DueRow]], dict[int, Trouble]]:
        """The rows, each with the table that holds it, and the tables that did not answer."""

        def send(server: DatabaseServer, part: Mapping[int, Position]) -> list[tuple[int, DueRow]]:
            what, end = _columns(server, DueRow._fields), server.instant(to_ms)
            selects = [
                f"SELECT {server.joined([f'{table:d}', what])} FROM {self._shards.names[table]} "
                f"WHERE {_after(server, status, start)} AND next_time<{end}{where}"
                f"{self._at_home(table) if at_home else ''} ORDER BY next_time,job_id LIMIT {limit:d}"
                for table, start in part.items()
            ]
            results = server.run(sql.unions(server, selects), outwait=False)
            numbers = sql.number_rows(results, 1 + len(DueRow._fields))
            return [(table, DueRow._make(rest)) for table, *rest in numbers if table in part]

        parts = self._shards.each(self._shards.group_tables(starts), send)
        return [found for part in parts.results for found in part], parts.failed

    def _at_home(self, table: int) -> str:
        """The condition that a row's job_id belongs to this table.

        Another program, or one with other table settings, may have written foreign rows here, where no lookup
        finds them: they must not block anything.
        """
        return f" AND ((job_id>>12)&{self._shards.tables - 1:d})={table:d}"

    def _tell(self, strays: Sequence[tuple[int, int]]) -> None:
        for table, job_id in strays:
            if job_id not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(job_id)
                log.error("row_in_wrong_table", job_id=job_id, table=self._shards.names[table])


def of_type(biz_type: int) -> str:
    """A condition for ``page``: rows of one biz_type."""
    return f" AND biz_type={biz_type:d}"


def _after(server: DatabaseServer, status: TaskStatus, start: Position) -> str:
    """The condition for rows of a status after a Position, as two ranges of the index."""
    instant = server.instant(start.next_time)
    if not start.job_id:
        return f"status={status:d} AND next_time>={instant}"
    return f"status={status:d} AND (next_time>{instant} OR (next_time={instant} AND job_id>{start.job_id:d}))"


def _columns(server: DatabaseServer, names: Sequence[str]) -> str:
    """The columns to SELECT as one text per row, which costs less than several (``try_text``)."""
    return server.joined([sql.column(server, name) for name in names])


def _due_rows(server: DatabaseServer, selects: Sequence[str]) -> list[DueRow]:
    results = server.run(sql.unions(server, selects), outwait=False)
    return list(map(DueRow._make, sql.number_rows(results, len(DueRow._fields))))


def _place(row: DueRow) -> tuple[int, int]:
    return row.next_time, row.job_id
