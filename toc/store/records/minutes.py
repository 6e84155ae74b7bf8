"""The table of what members did in the last minutes: a row for each member and minute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toc.store.records.table import RecordTable
from toc.store.servers.server import Statement
from toc.store.tasks import rows as sql


class MinuteRow(NamedTuple):
    """A minute of a member: when it began (ms), and what the member did in it, as JSON."""

    minute: int
    member: str
    counts: str


class MinuteTable(RecordTable):
    """The rows of minutes. Any method raises StoreUnavailable or SchemaBehind."""

    def keep(self, rows: Iterable[MinuteRow]) -> None:
        """Write rows; one that is there is replaced."""
        self._server.run(
            [
                Statement(
                    f"REPLACE INTO {self._table} (minute,member,counts) "
                    f"VALUES ({self._server.instant(minute)},%s,%s)",
                    [member, counts],
                )
                for minute, member, counts in rows
            ],
            transaction=True,
        )

    def since(self, minute: int) -> Sequence[MinuteRow]:
        """Return the rows of all members from a minute on (ms), by minute."""
        began = self._server.milliseconds("minute")
        select = (
            f"SELECT {began},member,counts FROM {self._table} "
            f"WHERE minute>={self._server.instant(minute)} ORDER BY minute,member"
        )
        with sql.understood():
            return [MinuteRow(int(at), member, text) for at, member, text in self._rows(Statement(select))]

    def purge(self, keep: int) -> int:
        """Delete rows that are older than ``keep`` ms, all of them. Returns 0: nothing is left to be
        deleted."""
        self._rows(Statement(f"DELETE FROM {self._table} WHERE minute<{self._server.from_now(-keep)}"))
        return 0
