"""Reading task tables in the order of next_time, for those who compare them with the index.

Everything here runs on the index (status, next_time), whose entries end with job_id: a Position is a place in
it, and a page begins after one. No page reads more than it returns, however many rows share an instant.
"""

# ruff: noqa: S608 - SQL is made of our own names and of numbers; texts are parameters (toc.store.server)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from toc.model.sharding import table_of_job
from toc.model.task import TaskStatus
from toc.observe.log import get_logger
from toc.store import rows as sql
from toc.store.server import DatabaseServer, Statement
from toc.store.shards import Answers, Shards, Trouble

log = get_logger(__name__)

_START, _END = "<start>", "<end>"
"""Where a question that is kept gets its instants."""
MOST_TOLD = 100
"""Of so many rows in wrong tables the log tells, once each."""


class Position(NamedTuple):
    """A place in the order of (next_time, job_id) of one table: what comes after it has yet to be read."""

    next_time: int
    job_id: int = 0


class DueRow(NamedTuple):
    """As much of a row as the index needs. ``next_time`` is milliseconds; of a dead row, when it died."""

    job_id: int
    biz_type: int
    next_time: int
    attempts: int
    slot_crc: int
    slot_amount: int

    @property
    def position(self) -> Position:
        """Where it stands in its table."""
        return Position(self.next_time, self.job_id)


class Looked(NamedTuple):
    """What a look at many tables found.

    ``stirring`` are quiet tables that hold something; ``ids`` (job_id, next_time) of busy ones, by table.
    ``rows`` are theirs, if they were asked for. ``failed`` says of which tables nothing is known, and why.
    """

    stirring: list[int]
    ids: dict[int, list[tuple[int, int]]]
    rows: list[DueRow]
    failed: dict[int, Trouble]


class Scans:
    """Reads pages of many tables in one round trip per server. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._told: set[int] = set()
        # The same tables are asked every second, as many as there are: their questions are written once.
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
        """What is pending and due in [from_ms, to_ms): of ``quiet`` tables only whether there is anything, of
        ``busy`` ones up to ``limit`` after a Position: ids, which the index alone tells, or ``whole`` rows.

        Of a quiet table the server reads one entry of the index, and tells nothing if that is due later.
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
            stirring = [row[0] for result in results[: len(first)] for row in result.rows]
            numbers = sql.number_rows(results[len(first) :], len(DueRow._fields) if whole else 2)
            rows = list(map(DueRow._make, numbers)) if whole else []
            ids: dict[int, list[tuple[int, int]]] = {}
            for job_id, due in ((row.job_id, row.next_time) for row in rows) if whole else numbers:
                ids.setdefault(table_of_job(job_id, self._shards.tables), []).append((job_id, due))
            return Looked(stirring, ids, rows, {})

        parts = self._shards.each(self._shards.group_tables(asked), send)
        return Looked(
            [table for part in parts.results for table in part.stirring],
            {table: sorted(ids, key=_by_time) for part in parts.results for table, ids in part.ids.items()},
            [row for part in parts.results for row in part.rows],
            parts.failed,
        )

    def _write_probes(self, server: DatabaseServer, tables: Sequence[int]) -> list[str]:
        """The questions whether these tables hold anything that is pending and due from start to end."""
        names = self._shards.names
        selects = [
            server.first_due(table, names[table], TaskStatus.PENDING, _START, _END) for table in tables
        ]
        return [statement.sql for statement in sql.unions(server, selects)]

    def pending(self, job_ids: Iterable[int]) -> list[DueRow]:
        """Those of these tasks that are pending, as far as their tables answer."""

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
        """Of each table up to ``limit`` rows of a status after its Position, those before ``to_ms`` alone.

        ``where`` is one more condition (see ``of_type``).
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
        """The rows, each with the table that it was found in; and the tables that did not answer."""

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
        """A condition: rows whose job_id names this table. Another program, or one that was set for other
        tables, may have written others here, where nobody looks for them: they must hold up nothing."""
        return f" AND ((job_id>>12)&{self._shards.tables - 1:d})={table:d}"

    def _tell(self, strays: Sequence[tuple[int, int]]) -> None:
        for table, job_id in strays:
            if job_id not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(job_id)
                log.error("row_in_wrong_table", job_id=job_id, table=self._shards.names[table])


def of_type(biz_type: int) -> str:
    """A condition for ``page``: rows of one biz_type alone."""
    return f" AND biz_type={biz_type:d}"


def _after(server: DatabaseServer, status: TaskStatus, start: Position) -> str:
    """The rows of a status after a Position, as two ranges of the index."""
    instant = server.instant(start.next_time)
    if not start.job_id:
        return f"status={status:d} AND next_time>={instant}"
    return f"status={status:d} AND (next_time>{instant} OR (next_time={instant} AND job_id>{start.job_id:d}))"


def _columns(server: DatabaseServer, names: Sequence[str]) -> str:
    """What to SELECT: all of it as one text, for the reason given at ``rows.try_columns``."""
    return server.joined([server.milliseconds(name) if name == "next_time" else name for name in names])


def _due_rows(server: DatabaseServer, selects: Sequence[str]) -> list[DueRow]:
    results = server.run(sql.unions(server, selects), outwait=False)
    return list(map(DueRow._make, sql.number_rows(results, len(DueRow._fields))))


def _by_time(pair: tuple[int, int]) -> tuple[int, int]:
    return pair[1], pair[0]


def _place(row: DueRow) -> tuple[int, int]:
    return row.next_time, row.job_id
