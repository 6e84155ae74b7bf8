"""The identity of a task table: one row in its first database, written by the first program that reads it.

It distinguishes two clusters that use one Redis and one namespace by mistake. A copy of the databases has the
identity of its original. The same row holds the secret that seals the leases of consumers, and says whether
there is an index, so that no process's settings alone decide that.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from sqlalchemy import Table, insert, select, update

from toc.model.clock import Clock
from toc.store.records.table import RecordTable
from toc.store.servers.server import DatabaseServer, Duplicate


class IdentityTable(RecordTable):
    """The table of that row. Raises StoreUnavailable or SchemaBehind.

    ``indexed`` is what the row says if it is written here.
    """

    def __init__(self, server: DatabaseServer, table: Table, clock: Clock, *, indexed: bool) -> None:
        super().__init__(server, table, clock)
        self._indexed = indexed

    def get(self) -> str:
        """Return the identity: 32 hexadecimal digits, unique to this task table."""
        return self._read()[0]

    def lease_secret(self) -> bytes:
        """Return the secret that seals leases."""
        return bytes.fromhex(self._read()[1])

    def indexed(self) -> bool:
        """Return whether the tasks are indexed in Redis. If not, the rows alone say what is due."""
        return self._read()[2]

    def set_indexed(self, indexed: bool) -> None:
        """Say whether they are, from now on."""
        self._read()
        self._write(update(self._table).where(self._column.number == 1).values(indexed=int(indexed)))

    @property
    def place(self) -> str:
        """Return the table's location, for a message."""
        return self._server.name

    def _read(self) -> tuple[str, str, bool]:
        """Return identity, secret and whether there is an index; make them if this is the first program that
        asks."""
        columns = self._column
        query = select(columns.identity, columns.lease_secret, columns.indexed).where(columns.number == 1)
        if not (rows := self._rows(query)):
            values = {"number": 1, "identity": secrets.token_hex(16), "lease_secret": secrets.token_hex(32)}
            values |= {"indexed": int(self._indexed), "gmt_create": self._clock.now_ms()}
            with suppress(Duplicate):  # another program was faster
                self._write(insert(self._table).values(**values))
            rows = self._rows(query)
        ((identity, secret, indexed),) = rows
        return identity, secret, bool(indexed)
