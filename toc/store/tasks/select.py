"""Finds the rows of an operator's selection: by status, topic, biz_id, time and error.

They are read page by page in the order of next_time, from either end. A page reads a bounded number of rows,
however few match.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from toc.model.errors import InvalidInput
from toc.model.sharding import BizId
from toc.model.task import TaskRow, TaskStatus
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import rows as sql
from toc.store.tasks.leases import held

Cursor = tuple[int, int]
"""(next_time, job_id) of a row; a page begins after it."""

MIN_EACH = 4
"""Rows of each table that a page reads at first, at least; of all tables twice what it shows."""
PAGE_ROWS = 16_384
"""Rows that one page reads after that, at most."""
END_OF_TIME = 253_402_300_799_000  # the last second of the year 9999, the last that DATETIME holds


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of rows; None matches any.

    ``since`` <= next_time < ``before``, in milliseconds: the time of death of a dead row, the next try of a
    pending one. ``error`` is a literal part of last_error.
    """

    status: TaskStatus | None
    """None only together with a biz_id."""
    biz: BizId | None = None
    since: int | None = None
    before: int | None = None
    error: str | None = None
    biz_types: Sequence[int] | None = None
    """Only these; a caller may see no others."""
    dedup_key: str | None = None
    held: bool = False
    """Only those that a worker has leased, or that a consumer has."""


class Death(NamedTuple):
    """A dead task, as far as it is read to group the dead. ``next_time``: when it died, in ms."""

    next_time: int
    job_id: int
    biz_type: int
    last_error: str | None


class Page(NamedTuple):
    """A page of selected rows. ``next``: where the next one begins, None if there is none."""

    rows: list[TaskRow]
    next: Cursor | None


class Selections:
    """Finds selected rows. Thread-safe. Raises StoreUnavailable."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def page(self, wanted: Selection, after: Cursor | None, limit: int, *, newest: bool = False) -> Page:
        """Return at most ``limit`` rows after a cursor, the earliest next_time first, or the ``newest``; of a
        biz_id, by job_id.

        First it looks into all tables, then again into those whose further rows may belong on the page. It
        reads a bounded number of rows, so it may find none although more follow.
        """
        if wanted.biz_types is not None and not wanted.biz_types:
            return Page([], None)
        if wanted.biz is not None:
            return self._page_of_biz(wanted, after, limit)
        sign = -1 if newest else 1
        start = _last(wanted) if newest else _first(wanted)
        if after is not None:
            start = sign * after[0], sign * after[1]
        cursors, bound = self._cursors(wanted, start, limit, back=newest)
        rows = self._rows(abs(job_id) for _, job_id in cursors)[::sign]
        following = None if bound is None else (sign * bound[0], sign * bound[1])
        return Page([row for row in rows if row.status == wanted.status], following)

    def deaths(self, wanted: Selection, limit: int) -> tuple[list[Death], bool]:
        """Return at most ``limit`` of the selected dead tasks, the latest first, and whether there are more.

        Unlike a page, it asks for no row a second time by its id, which costs more than all else.
        """
        if wanted.biz_types is not None and not wanted.biz_types:
            return [], False
        told: dict[int, list[Any]] = {}
        cursors, bound = self._cursors(wanted, _last(wanted), limit, back=True, told=told)
        with sql.understood():
            found = [Death(-moment, -job_id, *told[-job_id]) for moment, job_id in cursors]
        return found, bound is not None

    def _cursors(
        self, wanted: Selection, start: Cursor, limit: int, *, back: bool = False, whole: bool = False,
        told: dict[int, list[Any]] | None = None,
    ) -> tuple[list[Cursor], Cursor | None]:  # fmt: skip
        """Return the cursors of at most ``limit`` rows, and where the page ends, None at the end of all.

        ``whole``: all are wanted, so rows of other topics end no page, and each table has its own time.
        ``back``: from the latest to the earliest. Then the numbers of cursors, here and of ``_read_page``,
        are negative, so that either way the lesser cursor comes first. ``told`` is given the biz_type and
        last_error of each row, by job_id.
        """
        tables = list(self._tables(wanted))
        reached = dict.fromkeys(tables, start)  # how far each table has been read that may have more
        each = max(MIN_EACH, min(limit + 1, 2 * limit // len(tables)))
        left, asked, cursors = PAGE_ROWS, reached, list[Cursor]()
        while True:
            found = self._read_page(wanted, asked, each, back=back, whole=whole, told=told)
            for table, page in found.items():
                cursors += [(moment, job_id) for moment, job_id, hit in page if hit]
                if len(page) == each:
                    reached[table] = (page[-1][0], page[-1][1])
                else:
                    del reached[table]
            cursors.sort()
            # Read on in the tables whose unread rows may still come before the end of the page.
            end = cursors[limit - 1] if len(cursors) >= limit else None
            asked = {table: cursor for table, cursor in reached.items() if end is None or cursor < end}
            each = min(4 * each, left // len(asked)) if asked else 0
            if not each:
                break
            left -= each * len(asked)
        bound = min(reached.values(), default=None)
        if bound is not None:
            cursors = [cursor for cursor in cursors if cursor <= bound]
        if len(cursors) > limit:
            return cursors[:limit], cursors[limit - 1]
        return cursors, bound

    def _page_of_biz(self, wanted: Selection, after: Cursor | None, limit: int) -> Page:
        (table,) = self._tables(wanted)
        server = self._shards.server_of[table]
        select = (
            f"SELECT {sql.columns(server)} FROM {self._shards.names[table]} WHERE {_where(server, wanted)} "
            f"AND job_id>{after[1] if after else 0:d} ORDER BY job_id LIMIT {limit + 1:d}"
        )
        parts = self._shards.each({server: {table: None}}, lambda server, _: server.run([Statement(select)]))
        rows = sql.task_rows(parts.rows())
        more = len(rows) > limit
        return Page(rows[:limit], (0, rows[limit - 1].job_id) if more else None)

    def _rows(self, job_ids: Iterable[int]) -> list[TaskRow]:
        """Return the rows of these ids, by next_time and job_id."""

        def read(server: DatabaseServer, ids: sql.ByTable) -> list[TaskRow]:
            what = sql.columns(server)
            return sql.task_rows(server.run(sql.select_by_id(server, what, self._shards.names, ids)))

        found = self._shards.each(self._shards.group(job_ids), read).rows()
        return sorted(found, key=lambda row: (row.next_time, row.job_id))

    def count(self, wanted: Selection, most: int | None = None) -> int:
        """Return how many rows are selected. Reads all rows of the status and the times; of those that match
        ``most`` at most, of each table its share."""
        if wanted.held or wanted.error is not None:  # the index has neither: a page of rows has its time
            return len(self.ids(wanted))
        limit = "" if most is None else f" LIMIT {most // self._shards.tables + 1:d}"

        def read(server: DatabaseServer, part: Mapping[int, None]) -> int:
            what, names = f"WHERE {_where(server, wanted)}{limit}) AS found", self._shards.names
            selects = [Statement(f"SELECT COUNT(*) FROM (SELECT 1 FROM {names[one]} {what}") for one in part]
            return sum(result.rows[0][0] for result in server.run(selects))  # each has its own time

        tables = self._shards.group_tables(dict.fromkeys(self._tables(wanted)))
        return sum(self._shards.each(tables, read).whole())

    def ids(self, wanted: Selection) -> array[int]:
        """Return the job_ids of all selected rows. Holds eight bytes each."""
        found = array("Q")
        if wanted.biz is not None:  # they are few, and an index leads to them
            (table,) = self._tables(wanted)
            server = self._shards.server_of[table]
            select = f"SELECT job_id FROM {self._shards.names[table]} WHERE {_where(server, wanted)}"
            found.extend(row[0] for row in server.run([Statement(select)])[0].rows)
            return found
        after: Cursor | None = _first(wanted)
        while after is not None:
            cursors, after = self._cursors(wanted, after, PAGE_ROWS, whole=True)
            found.extend(job_id for _, job_id in cursors)
        return found

    def _read_page(
        self, wanted: Selection, cursors: Mapping[int, Cursor], limit: int, *, back: bool, whole: bool,
        told: dict[int, list[Any]] | None = None,
    ) -> dict[int, list[tuple[int, int, int]]]:  # fmt: skip
        """Return (next_time, job_id, whether it matches) of ``limit`` rows of each table after its cursor."""
        assert wanted.status is not None  # noqa: S101 - only pages of a biz_id have none
        start, sign = (_last(wanted), -1) if back else (_first(wanted), 1)
        past, order = ("<", "next_time DESC,job_id DESC") if back else (">", "next_time,job_id")
        more = "" if told is None else ",biz_type,last_error"

        def read(server: DatabaseServer, part: Mapping[int, None]) -> dict[int, list[tuple[int, int, int]]]:
            matches = " AND ".join(_conditions(server, wanted)) or "1"
            range_ = f"status={wanted.status:d} AND next_time>={server.instant(_first(wanted)[0])}"
            if wanted.before is not None:
                range_ += f" AND next_time<{server.instant(wanted.before)}"
            if whole and wanted.biz_types is not None:
                range_ += f" AND biz_type IN ({sql.numbers(wanted.biz_types)})"
            selects = []
            for table in part:
                after = ""
                if cursors[table] != start:  # at first it would only cost time: each server reads 64 of these
                    at, job_id = server.instant(abs(cursors[table][0])), abs(cursors[table][1])
                    after = f" AND next_time{past}={at} AND (next_time{past}{at} OR job_id{past}{job_id:d})"
                selects.append(
                    f"SELECT {table:d} AS tab,{server.milliseconds('next_time')} AS moment,job_id,"
                    f"{matches} AS hit{more} FROM {self._shards.names[table]} "
                    f"WHERE {range_}{after} ORDER BY {order} LIMIT {limit:d}"
                )
            pages: dict[int, list[tuple[int, int, int]]] = {table: [] for table in part}
            asks = list(map(Statement, selects)) if whole else sql.unions(server, selects)
            rows = [row for result in server.run(asks) for row in result.rows]
            for table, moment, job_id, hit, *rest in rows:
                pages[table].append((sign * moment, sign * job_id, hit))
                if told is not None:
                    told[job_id] = rest
            for page in pages.values():
                page.sort()
            return pages

        parts = self._shards.each(self._shards.group_tables(dict.fromkeys(cursors)), read).whole()
        return {table: page for part in parts for table, page in part.items()}

    def _tables(self, wanted: Selection) -> Iterable[int]:
        return range(self._shards.tables) if wanted.biz is None else [wanted.biz.crc % self._shards.tables]


def _first(wanted: Selection) -> Cursor:
    """The cursor before all selected rows."""
    return max(wanted.since or 0, 0), 0


def _last(wanted: Selection) -> Cursor:
    """The cursor after all selected rows, where reading back begins."""
    return -(END_OF_TIME if wanted.before is None else wanted.before), 0


def _where(server: DatabaseServer, wanted: Selection) -> str:
    """Return the condition of a row: a range of the index (status, next_time), then the rest."""
    before = END_OF_TIME if wanted.before is None else wanted.before
    # only pages of a biz_id have no status
    conditions = [] if wanted.status is None else [f"status={wanted.status:d}"]
    conditions.append(f"next_time<{server.instant(before)}")
    conditions += [] if wanted.since is None else [f"next_time>={server.instant(wanted.since)}"]
    return " AND ".join([*conditions, *_conditions(server, wanted)])


def _conditions(server: DatabaseServer, wanted: Selection) -> list[str]:
    """Return the further conditions of a row."""
    conditions = []
    if wanted.biz_types is not None:
        conditions.append(f"biz_type IN ({sql.numbers(wanted.biz_types)})")
    if wanted.biz is not None:
        key = "IS NULL" if wanted.biz.key is None else f"= X'{wanted.biz.key.encode().hex()}'"
        conditions.append(f"biz_id={wanted.biz.number:d} AND biz_key {key}")
    if wanted.dedup_key is not None:
        conditions.append(f"dedup_key=X'{wanted.dedup_key.encode().hex()}'")
    if wanted.held:
        conditions.append(f"({held(server)})")
    if wanted.error is not None:
        conditions.append(f"INSTR(last_error,X'{wanted.error.encode(errors='replace').hex()}')>0")
    return conditions


def cursor_text(at: Cursor | None) -> str | None:
    """Write where the next page begins, for ``parse_cursor``."""
    return None if at is None else f"{at[0]}.{at[1]}"


def parse_cursor(text: str | None) -> Cursor | None:
    """Return where a page begins. Raises InvalidInput."""
    if text is None:
        return None
    moment, _, job_id = text.partition(".")
    digits = text.isascii() and moment.isdecimal() and job_id.isdecimal() and len(job_id) < 20
    if not digits or len(moment) > 15 or int(moment) > END_OF_TIME:
        raise InvalidInput("next is not a value that a page returned", "next")
    return int(moment), int(job_id)
