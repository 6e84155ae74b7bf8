"""The table of members without ZooKeeper: a row for each daemon, which writes it every second.

A row is changed only under a number that grows with each write, so a write that arrives late, when its
sender has long given it up, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, delete, insert, literal_column, or_, select, update

from toc.model.member import MemberRow
from toc.store.records.table import RecordTable
from toc.store.servers.server import Duplicate

KEPT_MS = 86_400_000
"""How long (ms) the row of a dead member is kept."""


class MemberTable(RecordTable):
    """The rows of members. Any method raises StoreUnavailable or SchemaBehind."""

    def beat(self, name: str, number: int, timeout: int, data: str) -> list[MemberRow] | None:
        """Write a member's row, then read those of all that are not dead, in one round trip.

        Each is committed by itself: of two members that write at the same time, one at least reads what the
        other wrote. ``number`` grows with each call. None: there is no such row, or others have called it
        dead; nothing was written, and ``join`` makes a new one.
        """
        column = self._column
        ours = and_(column.name == name, column.dead == 0, column.beat <= number)
        values = {"beat": number, "heartbeat": self._now, "timeout": timeout, "data": data}
        written, read = self._server.run(
            [self._compiled(update(self._table).where(ours).values(values)), self._compiled(self._living)]
        )
        return _members(read.rows) if written.matched else None

    def join(self, name: str, host: str, number: int, timeout: int, data: str) -> None:
        """Make a member's row, in place of an earlier one of its own, and delete rows of the long dead."""
        column = self._column
        former = and_(column.name == name, column.beat < number)
        old = and_(column.dead == 1, column.heartbeat < literal_column(self._server.from_now(-KEPT_MS)))
        row = {
            "name": name,
            "host": host,
            "beat": number,
            "heartbeat": self._now,
            "timeout": timeout,
            "dead": 0,
            "data": data,
            "gmt_create": self._clock.now_ms(),
        }
        statements = [delete(self._table).where(or_(former, old)), insert(self._table).values(row)]
        with suppress(Duplicate):  # this call arrives late
            self._server.run([self._compiled(each) for each in statements], transaction=True)

    def bury(self, name: str, number: int) -> None:
        """Call a member dead that has not written since ``number``. It owns nothing from then on."""
        column = self._column
        silent = and_(column.name == name, column.beat == number, column.dead == 0)
        self._write(update(self._table).where(silent).values(dead=1, data="{}"))

    def leave(self, name: str) -> None:
        """Delete a member's row: it has ended in good order."""
        self._write(delete(self._table).where(self._column.name == name))

    def list(self) -> list[MemberRow]:
        """Return all rows, those of the dead too, by name."""
        return _members(self._rows(self._all))

    @property
    def _now(self) -> ColumnElement[Any]:
        """The server's own time."""
        return literal_column(self._server.from_now(0))

    @property
    def _all(self) -> Select[Any]:
        column, ms = self._column, self._server.milliseconds
        age: ColumnElement[int] = literal_column(f"{ms(self._server.from_now(0))}-{ms('heartbeat')}")
        named = (column.name, column.host, column.beat, age, column.timeout, column.dead, column.data)
        return select(*named).order_by(column.name)

    @property
    def _living(self) -> Select[Any]:
        return self._all.where(self._column.dead == 0)


def _members(rows: Sequence[Any]) -> list[MemberRow]:
    return [
        MemberRow(name, host, beat, max(age, 0), timeout, bool(dead), data)
        for name, host, beat, age, timeout, dead, data in rows
    ]
