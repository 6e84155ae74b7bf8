"""The identity of a task table: one row in its first database, written by the first program that reads it.

It distinguishes two clusters that use one Redis and one namespace by mistake. A copy of the databases has the
identity of its original. The same row holds the secret that seals the leases of consumers, and says which
members lack which features (toc.model.features).
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from toc.model import features
from toc.store.server import Duplicate, Statement
from toc.store.unsharded_table import UnshardedTable


class IdentityTable(UnshardedTable):
    """The table of that row. Raises StoreUnavailable or SchemaBehind."""

    def get(self) -> str:
        """Return the identity: 32 hexadecimal digits, unique to this task table."""
        if (found := self._read()) is None:
            into = f"INSERT INTO {self._table} (number,identity,lease_secret,gmt_create,features)"
            # No member of an earlier version has been here: it would have made the row.
            values = [secrets.token_hex(16), secrets.token_hex(32), features.encode(features.NOBODY_LACKS)]
            with suppress(Duplicate):  # another program was faster
                self._write(f"{into} VALUES (1,%s,%s,{self._now()},%s)", values)
            found = self._read()
        return found or ""

    def lease_secret(self) -> bytes:
        """Return the secret that seals leases."""
        self.get()
        ((secret,),) = self._rows(f"SELECT lease_secret FROM {self._table} WHERE number=1")
        return bytes.fromhex(secret)

    def announce(self, lacking: features.Lacking) -> None:
        """Write which members lack which features, for every process to read (``TopicTable.read``)."""
        update = f"UPDATE {self._table} SET features=%s WHERE number=1"
        self._server.run([Statement(update, [features.encode(lacking)])])

    @property
    def place(self) -> str:
        """Return the table's location, for a message."""
        return self._server.name

    def _read(self) -> str | None:
        rows = self._rows(f"SELECT identity FROM {self._table} WHERE number=1")
        return str(rows[0][0]) if rows else None
