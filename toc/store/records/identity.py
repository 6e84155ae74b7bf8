"""The identity of a task table: one row in its first database, written by the first program that reads it.

It distinguishes two clusters that use one Redis and one namespace by mistake. A copy of the databases has the
identity of its original. The same row holds the secret that seals the leases of consumers, and says whether
there is an index, so that no process's settings alone decide that; and how far ahead that reaches at most.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import NamedTuple

from sqlalchemy import Table, between, insert, select, update

from toc.model.clock import Clock
from toc.store.records.table import RecordTable
from toc.store.servers.server import DatabaseServer, Duplicate


class Horizon(NamedTuple):
    """How far ahead (s) the index reaches at most, 0 for no bound; why, and since when (ms; 0: it never was
    another)."""

    seconds: int
    why: str
    since: int


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
        self._change(indexed=int(indexed), horizon=0, horizon_why="", horizon_since=0)

    def horizon(self) -> Horizon:
        """Return how far ahead the index reaches at most."""
        columns = self._column
        found = self._rows(select(columns.horizon, columns.horizon_why, columns.horizon_since))
        return Horizon(*found[0]) if found else Horizon(0, "", 0)

    def set_horizon(self, bound: Horizon) -> None:
        """Say how far ahead it reaches from now on."""
        self._change(horizon=bound.seconds, horizon_why=bound.why[:255], horizon_since=bound.since)

    def may_look(self, every_ms: int) -> bool:
        """Whether the caller is to look at the horizon now: nobody has for so long.

        A time in the future was written before a clock was set back.
        """
        now, looked = self._clock.now_ms(), self._column.horizon_looked
        lately = between(looked, now - every_ms + 1, now + every_ms)
        change = update(self._table).where(self._column.number == 1, ~lately).values(horizon_looked=now)
        return self._write(change) == 1

    @property
    def place(self) -> str:
        """Return the table's location, for a message."""
        return self._server.name

    def _change(self, **values: int | str) -> None:
        self._write(update(self._table).where(self._column.number == 1).values(**values))

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
