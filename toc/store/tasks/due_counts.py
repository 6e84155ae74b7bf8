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
from toc.store.tasks.scan import Position, after

PENDING = TaskStatus.PENDING
FOREVER_MS = 253_370_764_800_000
"""The year 9999, beyond any deadline."""


class Place(NamedTuple):
    """Where the count of a table is: after this Position. ``now_ms``: when it began."""

    after: Position
    now_ms: int


class Page(NamedTuple):
    """The counts of a page, by biz_type and number of the span, and the place of its last row; None if it
    was the last page. The span OTHERS holds what was due already."""

    groups: dict[tuple[int, int], int]
    last: Position | None


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
            due = {
                table: f"{self._shards.names[table]} WHERE {after(server, PENDING, place.after)} "
                f"AND next_time<{server.instant(_end(part, place.now_ms))}"
                for table, place in tables.items()
            }
            # Where the page of a table with more rows ends. Only then a range of the index is counted: a
            # page of it with a LIMIT would be a table of its own.
            last = [
                f"SELECT {server.joined([f'{table:d}', server.milliseconds('next_time'), 'job_id'])} "
                f"FROM {rows} ORDER BY next_time,job_id LIMIT 1 OFFSET {limit - 1:d}"
                for table, rows in due.items()
            ]
            found = sql.number_rows(server.run(sql.unions(server, last), outwait=False), 3)
            ends = {table: Position(*place) for table, *place in found}
            span = server.whole(server.milliseconds("next_time"), part.length)
            counts = [
                f"SELECT {server.joined([f'{table:d}', 'biz_type', 'span', 'n'])} FROM "
                f"(SELECT biz_type,CASE WHEN next_time<{server.instant(tables[table].now_ms)} "
                f"THEN {OTHERS:d} ELSE {span} END AS span,COUNT(*) AS n FROM {rows}"
                f"{_up_to(server, ends.get(table))} GROUP BY biz_type,span) AS counted"
                for table, rows in due.items()
            ]
            pages = {table: Page({}, ends.get(table)) for table in tables}
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


def _end(part: Part, now_ms: int) -> int:
    """When the rows of a part end that are counted from now on (ms)."""
    return (now_ms // part.length + part.spans) * part.length if part is NEAR else FOREVER_MS


def _up_to(server: DatabaseServer, last: Position | None) -> str:
    """The condition for rows up to the last one of a page."""
    if last is None:
        return ""
    instant = server.instant(last.next_time)
    return f" AND (next_time<{instant} OR (next_time={instant} AND job_id<={last.job_id:d}))"
