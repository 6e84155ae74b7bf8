"""The identity of a task table: one row in its first database, written by the first program that reads it.

It distinguishes two clusters that use one Redis and one namespace by mistake. A copy of the databases has the
identity of its original. The same row holds the secret that seals the leases of consumers.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from sqlalchemy import insert, select

from toc.store.records.table import RecordTable
from toc.store.servers.server import Duplicate


class IdentityTable(RecordTable):
    """The table of that row. Raises StoreUnavailable or SchemaBehind."""

    def get(self) -> str:
        """Return the identity: 32 hexadecimal digits, unique to this task table."""
        return self._read()[0]

    def lease_secret(self) -> bytes:
        """Return the secret that seals leases."""
        return bytes.fromhex(self._read()[1])

    @property
    def place(self) -> str:
        """Return the table's location, for a message."""
        return self._server.name

    def _read(self) -> tuple[str, str]:
        """Return identity and secret; make them if this is the first program that asks."""
        query = select(self._column.identity, self._column.lease_secret).where(self._column.number == 1)
        if not (rows := self._rows(query)):
            values = {"number": 1, "identity": secrets.token_hex(16), "lease_secret": secrets.token_hex(32)}
            with suppress(Duplicate):  # another program was faster
                self._write(insert(self._table).values(**values, gmt_create=self._clock.now_ms()))
            rows = self._rows(query)
        ((identity, secret),) = rows
        return identity, secret
