"""The identity of a task table: one row in its first database, written by the first program that reads it.

It distinguishes two clusters that use one Redis and one namespace by mistake. A copy of the databases has the
identity of its original. The same row holds the secret that seals the leases of consumers.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from toc.store.server import Duplicate
from toc.store.unsharded_table import UnshardedTable


class IdentityTable(UnshardedTable):
    """The table of that row. Raises StoreUnavailable or SchemaBehind."""

    def get(self) -> str:
        """Return the identity: 32 hexadecimal digits, unique to this task table."""
        if (found := self._read()) is None:
            into = f"INSERT INTO {self._table} (number,identity,lease_secret,gmt_create)"
            values = [secrets.token_hex(16), secrets.token_hex(32)]
            with suppress(Duplicate):  # another program was faster
                self._write(f"{into} VALUES (1,%s,%s,{self._now()})", values)
            found = self._read()
        return found or ""

    def lease_secret(self) -> bytes:
        """Return the secret that seals leases."""
        self.get()
        ((secret,),) = self._rows(f"SELECT lease_secret FROM {self._table} WHERE number=1")
        return bytes.fromhex(secret)

    @property
    def place(self) -> str:
        """Return the table's location, for a message."""
        return self._server.name

    def _read(self) -> str | None:
        rows = self._rows(f"SELECT identity FROM {self._table} WHERE number=1")
        return str(rows[0][0]) if rows else None
