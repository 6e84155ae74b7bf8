"""The identity of a task table: one row in its first database, written by the first program that reads it.

It tells apart two clusters that use one Redis and one namespace by mistake. A copy of the databases has the
identity of its original. Beside it stands which members lack which features (toc.model.features).
"""

# ruff: noqa: S608 - SQL is made of our own names; texts are parameters (toc.store.server)

from __future__ import annotations

import secrets
from contextlib import suppress

from toc.model import features
from toc.model.clock import Clock
from toc.store.server import DatabaseServer, Duplicate, Statement


class IdentityTable:
    """The table of that row. Raises StoreUnavailable or SchemaBehind."""

    def __init__(self, server: DatabaseServer, table: str, clock: Clock) -> None:
        self._server = server
        self._table = table
        self._clock = clock

    def get(self) -> str:
        """Return the identity: 32 hexadecimal digits, unique to this task table."""
        if (found := self._read()) is None:
            now = self._server.instant(self._clock.now_ms())
            insert = f"INSERT INTO {self._table} (number,identity,gmt_create,features) VALUES (1,%s,{now},%s)"
            # No member of an earlier version has been here: it would have made the row.
            values = [secrets.token_hex(16), features.encode(features.NOBODY_LACKS)]
            with suppress(Duplicate):  # another program was faster
                self._server.run([Statement(insert, values)], again=False)
            found = self._read()
        return found or ""

    def announce(self, lacking: features.Lacking) -> None:
        """Write which members lack which features, for every process to read (``TopicTable.read``)."""
        update = f"UPDATE {self._table} SET features=%s WHERE number=1"
        self._server.run([Statement(update, [features.encode(lacking)])])

    @property
    def place(self) -> str:
        """Return the table's location, for a message."""
        return self._server.name

    def _read(self) -> str | None:
        (result,) = self._server.run([Statement(f"SELECT identity FROM {self._table} WHERE number=1")])
        return str(result.rows[0][0]) if result.rows else None
