"""Reads task tables in the order of next_time: for comparison with the index, and to count what comes due.

All queries use the index (status, next_time, job_id, biz_type): a Position is a place in it, and
a page begins after one, even if many rows share an instant. A page reads no row that it does not return, but
for those that workers have; of other topics than it is asked for it reads entries of the index alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import NamedTuple

from toc.model.due import FAR, NEAR, OTHERS, Counted, Part, read
from toc.model.errors import InvalidDocument
from toc.model.task import TaskStatus
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Answers, Shards, Trouble
from toc.store.tasks import rows as sql

PENDING = TaskStatus.PENDING
FOREVER_MS = 253_370_764_800_000
"""The year 9999, beyond any deadline."""
TABLES_READ, ROWS_READ = 32, 200
"""How many tables, and rows of each, a search for what is overdue reads, unless it is told."""
ENTRIES_READ = 500_000
"""How many entries of the index it looks at in all, of each table its share."""


class Position(NamedTuple):
    """A place in the order of (next_time, job_id) of one table; later rows are not yet read."""

    next_time: int
    job_id: int = 0


class DueRow(NamedTuple):
    """The columns of a row that the index and the purge need. Instants are in ms. ``next_time`` is when an
    ended row ended; ``expires_at`` is 0 for never, ``body_length`` -1 without a body; ``holds``: whether what
    the scan was to judge is true."""

    job_id: int
    biz_type: int
    next_time: int
    attempts: int
    slot_crc: int
    slot_amount: int
    expires_at: int = 0
    body_length: int = -1
    holds: int = 1

    @property
    def position(self) -> Position:
        """Its place in its table."""
        return Position(self.next_time, self.job_id)


class Scanned(NamedTuple):
    """The result of a scan of many tables.

    ``with_due_rows`` are the ``quiet`` tables that hold a due row. ``pages`` are the due rows of each
    ``busy`` table, in order. ``failed`` gives the tables without an answer, and why.
    """

    with_due_rows: list[int]
    pages: dict[int, list[DueRow]]
    failed: dict[int, Trouble]


class OverdueRows(NamedTuple):
    """Pending rows that are due, of the first of each table. ``more``: not all were read.

    ``failed`` gives the tables without an answer, and why.
    """

    rows: list[DueRow]
    more: bool
    failed: Mapping[int, Trouble]


class Scans:
    """Reads pages of many tables in one round trip per server. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def scan(
        self, quiet: Iterable[int], busy: Mapping[int, Position], from_ms: int, to_ms: int, limit: int, *,
        status: TaskStatus = TaskStatus.PENDING, where: str = "", judge: str = "",
        ends: Mapping[int, Position] | None = None,
    ) -> Scanned:  # fmt: skip
        """Find rows of a status that are due in [from_ms, to_ms).

        For ``quiet`` tables it returns only whether there is one, for which the server reads one entry of the
        index; for ``busy`` ones up to ``limit`` rows after a Position. ``where`` is one more SQL condition,
        for which others are passed over (see ``of_types``). ``judge`` is one of which ``holds`` tells.
        ``ends`` are the last places that are looked at, of tables that may have more.
        """
        asked: dict[int, Position | None] = {**dict.fromkeys(quiet), **busy}

        def send(
            server: DatabaseServer, part: Mapping[int, Position | None]
        ) -> tuple[list[int], list[list[int]]]:
            """Return the tables without a Position that hold a due row, and the rows of the others: the table
            that holds each, and its columns."""
            names, start, end = self._shards.names, server.instant(from_ms), server.instant(to_ms)
            is_due = f"status={status:d} AND next_time>={start} AND next_time<{end}"
            # One text per row costs less than several (as in ``tries``).
            columns = [_column(server, name) for name in DueRow._fields[:-1]]
            columns += [f"COALESCE(({judge}),0)"] if judge else []
            probes, selects = [], []
            for table, position in part.items():
                rest = _until(server, (ends or {}).get(table)) + where
                if position is None:
                    probes.append(f"SELECT {table:d} FROM {names[table]} WHERE {is_due}{rest} LIMIT 1")
                else:
                    # Another program, or one with other table settings, may have written rows of other tables
                    # here, where no lookup finds them: they must not block anything.
                    home = f"((job_id>>12)&{self._shards.tables - 1:d})={table:d}"
                    selects.append(
                        f"SELECT {server.joined([f'{table:d}', *columns])} FROM {names[table]} "
                        f"WHERE {_after(server, status, position)} AND next_time<{end}{rest} "
                        f"AND {home} ORDER BY next_time,job_id LIMIT {limit:d}"
                    )
            asks = sql.unions(server, probes)
            results = server.run([*asks, *sql.unions(server, selects)], outwait=False)
            due = [row[0] for result in results[: len(asks)] for row in result.rows if row[0] in part]
            return due, sql.number_rows(results[len(asks) :], 1 + len(columns))

        parts = self._shards.each(self._shards.group_tables(asked), send)
        pages: dict[int, list[DueRow]] = {table: [] for table in busy if table not in parts.failed}
        for _, rows in parts.results:
            for table, *values in rows:
                if table in pages:  # else the answer is damaged
                    pages[table].append(DueRow(*values))
        for page in pages.values():
            page.sort(key=attrgetter("position"))  # a union need not keep the order of its parts
        return Scanned([table for some, _ in parts.results for table in some], pages, parts.failed)

    def page(
        self, starts: Mapping[int, Position], to_ms: int, limit: int, *, where: str = ""
    ) -> Answers[list[DueRow]]:
        """Return up to ``limit`` pending rows of each table, after its Position and due before ``to_ms``."""
        scanned = self.scan((), starts, 0, to_ms, limit, where=where)
        return Answers(scanned.pages, scanned.failed)

    def overdue(
        self, before_ms: int, where: str, judge: str, *, tables: int = TABLES_READ, each: int = ROWS_READ
    ) -> OverdueRows:
        """Return rows due before ``before_ms`` that have not ended, and of which ``judge`` is true (both
        conditions as in ``scan``): whatever the index says, also of tasks that a worker has.

        It reads the first rows in a bounded number of tables, and looks for them among the first entries of
        the index of each: those of other tasks, too, are so many at most.
        """
        entries = ENTRIES_READ // self._shards.tables

        def send(server: DatabaseServer, part: Mapping[int, None]) -> dict[int, Position]:
            is_due = f"status={PENDING:d} AND next_time<{server.instant(before_ms)}"
            return _places(server, self._shards.names, dict.fromkeys(part, is_due), entries)

        all_tables = dict.fromkeys(range(self._shards.tables))
        ends = self._shards.each(self._shards.group_tables(all_tables), send).joined()
        due = self.scan(all_tables, {}, 0, before_ms, 1, where=where, ends=ends)
        busy = dict.fromkeys(due.with_due_rows[:tables], Position(0))
        found = self.scan((), busy, 0, before_ms, each, where=where, judge=judge, ends=ends)
        more = bool(ends) or len(due.with_due_rows) > tables or each in map(len, found.pages.values())
        rows = [row for page in found.pages.values() for row in page if row.holds]
        return OverdueRows(rows, more, due.failed | found.failed)

    def follow_switchover(self, table: int) -> str:
        """Connect anew to the server of a table if it has become read-only: its address may lead to another.

        Returns the server's name if so, else "". One that does not answer is marked as away.
        """

        def ask(server: DatabaseServer, _part: object) -> str:
            return server.name if server.left_by_switchover() else ""

        parts = self._shards.each(self._shards.group_tables({table: None}), ask)
        return parts.results[0] if parts.results else ""

    def ended_ago(self, ms: int) -> str:
        """A condition for ``scan``: rows whose next_time was so long ago by the clock of their server."""
        return f" AND next_time<{self._shards.servers[0].from_now(-ms)}"  # all servers are of one kind


def of_types(biz_types: Collection[int]) -> str:
    """A condition for ``scan``: rows of these biz_types. Of others it reads the index alone."""
    return f" AND biz_type IN ({sql.numbers(biz_types)})" if biz_types else " AND 1=0"


def _column(server: DatabaseServer, name: str) -> str:
    return "COALESCE(body_length,-1)" if name == "body_length" else sql.column(server, name)


def _after(server: DatabaseServer, status: TaskStatus, start: Position) -> str:
    """The condition for rows of a status after a Position, as two ranges of the index."""
    instant = server.instant(start.next_time)
    if not start.job_id:
        return f"status={status:d} AND next_time>={instant}"
    return f"status={status:d} AND (next_time>{instant} OR (next_time={instant} AND job_id>{start.job_id:d}))"


def _until(server: DatabaseServer, end: Position | None) -> str:
    """The condition for rows up to a Position, which is among them; for all without one."""
    if end is None:
        return ""
    instant = server.instant(end.next_time)
    return f" AND (next_time<{instant} OR (next_time={instant} AND job_id<={end.job_id:d}))"


def _places(
    server: DatabaseServer, names: Sequence[str], wheres: Mapping[int, str], number: int
) -> dict[int, Position]:
    """Return where the entry of this number is among those of a table that meet its condition, for the tables
    that have so many."""
    selects = [
        f"SELECT {server.joined([f'{table:d}', server.milliseconds('next_time'), 'job_id'])} "
        f"FROM {names[table]} WHERE {where} ORDER BY status,next_time,job_id LIMIT 1 OFFSET {number - 1:d}"
        for table, where in wheres.items()
    ]
    found = sql.number_rows(server.run(sql.unions(server, selects), outwait=False), 3)
    return {table: Position(*place) for table, *place in found}


class Place(NamedTuple):
    """Where the count of a table is. ``at``: what is due from then on is left or, if it has a job_id, what
    follows it at that instant, and then the rest. ``now_ms``: when the count began."""

    at: Position
    now_ms: int


class CountPage(NamedTuple):
    """The counts of a page, by biz_type and number of the span, and where the next one begins; None after
    the last. The span OTHERS holds what was due already."""

    groups: dict[tuple[int, int], int]
    following: Position | None


class StoredCount(NamedTuple):
    """What was counted of a part, and how long ago (ms) the count began, by its server's clock."""

    part: str
    age: int
    counts: Counted


class DueCounts:
    """Counts pending rows by topic and the time at which they are due, in pages, and keeps the counts beside
    the tables. Of a page only its sums are sent. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def page(self, places: Mapping[int, Place], part: Part, limit: int) -> Answers[CountPage]:
        """Count up to ``limit`` pending rows of a part of each table, from its Place on."""

        def send(server: DatabaseServer, tables: Mapping[int, Place]) -> dict[int, CountPage]:
            names = self._shards.names
            ranges = {table: _range(server, part, place) for table, place in tables.items()}
            # Where the page ends, if there are more rows. A page with a LIMIT would be a table of its own.
            ends = _places(server, names, ranges, limit)
            pages = {}
            for table, place in tables.items():
                more, following = _cut(server, place.at, ends.get(table))
                ranges[table] += more
                pages[table] = CountPage({}, following)
            span = server.whole(server.milliseconds("next_time"), part.length)
            counts = [
                f"SELECT {server.joined([f'{table:d}', 'biz_type', 'span', 'n'])} FROM "
                f"(SELECT biz_type,CASE WHEN next_time<{server.instant(tables[table].now_ms)} "
                f"THEN {OTHERS:d} ELSE {span} END AS span,COUNT(*) AS n FROM {names[table]} "
                f"WHERE {where} GROUP BY biz_type,span) AS counted"
                for table, where in ranges.items()
            ]
            counted = server.run(sql.unions(server, counts), outwait=False)
            for table, biz_type, number, count in sql.number_rows(counted, 4):
                pages[table].groups[biz_type, number] = count
            return pages

        return self._shards.each(self._shards.group_tables(places), send).joined()

    def keep(self, part: Part, counts: Mapping[int, tuple[str, int]]) -> Mapping[int, Trouble]:
        """Write a part's counts of tables as JSON, each with how long ago (ms) the count began. Returns those
        without an answer."""

        def send(server: DatabaseServer, tables: Mapping[int, tuple[str, int]]) -> None:
            writes = [
                Statement(
                    f"REPLACE INTO {self._shards.due_names[table]} (number,part,counts,counted_at) "
                    f"VALUES ({table:d},'{part.name}',%s,{server.from_now(-ago)})",
                    [text],
                )
                for table, (text, ago) in tables.items()
            ]
            server.run(writes, transaction=True, outwait=False)

        return self._shards.each(self._shards.group_tables(counts), send).failed

    def kept(self, tables: Iterable[int]) -> Answers[list[StoredCount]]:
        """Return what is kept of each table."""

        def send(server: DatabaseServer, asked: Mapping[int, None]) -> dict[int, list[StoredCount]]:
            since = f"{server.milliseconds(server.from_now(0))}-{server.milliseconds('counted_at')}"
            names: dict[str, list[int]] = {}
            for table in asked:
                names.setdefault(self._shards.due_names[table], []).append(table)
            what = f"SELECT number,part,{since},counts FROM"
            selects = [
                Statement(f"{what} {name} WHERE number IN ({sql.numbers(own)})")
                for name, own in names.items()
            ]
            found: dict[int, list[StoredCount]] = {table: [] for table in asked}
            results = server.run(selects, outwait=False)
            with sql.understood():
                for table, part, age, counts in (row for result in results for row in result.rows):
                    with suppress(InvalidDocument):  # of a later version, or edited by hand
                        if part in (NEAR.name, FAR.name):
                            found[table].append(StoredCount(part, int(age), read(counts)))
            return found

        return self._shards.each(self._shards.group_tables(dict.fromkeys(tables)), send).joined()


def _range(server: DatabaseServer, part: Part, place: Place) -> str:
    """The condition for the rows that follow: one range of the index."""
    instant, job_id = server.instant(place.at.next_time), place.at.job_id
    if job_id:
        # With one status MariaDB may read all rows of the instant up to these. No row has -1.
        return f"status IN (-1,{PENDING:d}) AND next_time={instant} AND job_id>{job_id:d}"
    end = (place.now_ms // part.length + part.spans) * part.length if part is NEAR else FOREVER_MS
    return f"status={PENDING:d} AND next_time>={instant} AND next_time<{server.instant(end)}"


def _cut(server: DatabaseServer, at: Position, end: Position | None) -> tuple[str, Position | None]:
    """Return the condition that ends a page of these rows, whose last one is ``end``, and where the next
    page begins; None if there is none.

    A page ends before the rows of an instant, unless it begins with them.
    """
    if end is None:  # these are all
        return "", Position(at.next_time + 1) if at.job_id else None
    if end.next_time > at.next_time:
        return f" AND next_time<{server.instant(end.next_time)}", Position(end.next_time)
    return f" AND next_time={server.instant(end.next_time)} AND job_id<={end.job_id:d}", end
