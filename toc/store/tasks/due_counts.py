"""Counts pending rows by topic and the time at which they are due, in pages, and keeps the counts beside the
tables.

All is read from the index by due times alone, and the servers add up: of a page only its sums are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from toc.model.due import NEAR, OTHERS, Part
from toc.model.task import TaskStatus
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Answers, Shards, Trouble
from toc.store.tasks import rows as sql
from toc.store.tasks.scan import Position

PENDING = TaskStatus.PENDING
FOREVER_MS = 253_370_764_800_000
"""The year 9999, beyond any deadline."""


class Place(NamedTuple):
    """Where the count of a table is. ``at``: what is due from then on is left or, if it has a job_id, what
    follows it at that instant, and then the rest. ``now_ms``: when the count began."""

    at: Position
    now_ms: int


class Page(NamedTuple):
    """The counts of a page, by biz_type and number of the span, and where the next one begins; None after
    the last. The span OTHERS holds what was due already."""

    groups: dict[tuple[int, int], int]
    following: Position | None


class StoredCount(NamedTuple):
    """What was counted of a part, as JSON, and how long ago (ms) the count began, by its server's clock."""

    part: str
    age: int
    counts: str


class DueCounts:
    """Counts and their tables. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def page(self, places: Mapping[int, Place], part: Part, limit: int) -> Answers[Page]:
        """Count up to ``limit`` pending rows of a part of each table, from its Place on."""

        def send(server: DatabaseServer, tables: Mapping[int, Place]) -> dict[int, Page]:
            names = self._shards.names
            ranges = {table: _range(server, part, place) for table, place in tables.items()}
            # Where the page ends, if there are more rows. A page with a LIMIT would be a table of its own.
            last = [
                f"SELECT {server.joined([f'{table:d}', server.milliseconds('next_time'), 'job_id'])} "
                f"FROM {names[table]} WHERE {where} "
                f"ORDER BY status,next_time,job_id LIMIT 1 OFFSET {limit - 1:d}"
                for table, where in ranges.items()
            ]
            found = sql.number_rows(server.run(sql.unions(server, last), outwait=False), 3)
            ends = {table: Position(*end) for table, *end in found}
            pages = {}
            for table, place in tables.items():
                more, following = _cut(server, place.at, ends.get(table))
                ranges[table] += more
                pages[table] = Page({}, following)
            span = server.whole(server.milliseconds("next_time"), part.length)
            counts = [
                f"SELECT {server.joined([f'{table:d}', 'biz_type', 'span', 'n'])} FROM "
                f"(SELECT biz_type,CASE WHEN next_time<{server.instant(tables[table].now_ms)} "
                f"THEN {OTHERS:d} ELSE {span} END AS span,COUNT(*) AS n FROM {names[table]} "
                f"WHERE {where} GROUP BY biz_type,span) AS counted"
                for table, where in ranges.items()
            ]
            for table, biz_type, number, count in sql.number_rows(
                server.run(sql.unions(server, counts), outwait=False), 4
            ):
                pages[table].groups[biz_type, number] = count
            return pages

        return self._shards.each(self._shards.group_tables(places), send).joined()

    def keep(self, part: Part, counts: Mapping[int, tuple[str, int]]) -> Mapping[int, Trouble]:
        """Write a part's counts of tables as JSON, each with how long ago (ms) the count began. Returns those
        without an answer."""

        def send(server: DatabaseServer, tables: Mapping[int, tuple[str, int]]) -> None:
            server.run(
                [
                    Statement(
                        f"REPLACE INTO {self._shards.due_names[table]} (number,part,counts,counted_at) "
                        f"VALUES ({table:d},'{part.name}',%s,{server.from_now(-ago)})",
                        [text],
                    )
                    for table, (text, ago) in tables.items()
                ],
                transaction=True,
                outwait=False,
            )

        return self._shards.each(self._shards.group_tables(counts), send).failed

    def kept(self, tables: Iterable[int]) -> Answers[list[StoredCount]]:
        """Return what is kept of each table."""

        def send(server: DatabaseServer, asked: Mapping[int, None]) -> dict[int, list[StoredCount]]:
            since = f"{server.milliseconds(server.from_now(0))}-{server.milliseconds('counted_at')}"
            names: dict[str, list[int]] = {}
            for table in asked:
                names.setdefault(self._shards.due_names[table], []).append(table)
            selects = [
                Statement(
                    f"SELECT number,part,{since},counts FROM {name} WHERE number IN ({sql.numbers(own)})"
                )
                for name, own in names.items()
            ]
            found: dict[int, list[StoredCount]] = {table: [] for table in asked}
            results = server.run(selects, outwait=False)
            with sql.understood():
                for result in results:
                    for table, part, age, counts in result.rows:
                        found[table].append(StoredCount(part, int(age), counts))
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
