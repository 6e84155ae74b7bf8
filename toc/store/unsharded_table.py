"""What the tables of the first database share: topics, templates, tokens, targets, audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toc.model.clock import Clock, RateLimit
from toc.model.errors import NameTaken, StoreUnavailable
from toc.store.server import DatabaseServer, Duplicate, Param, Statement

REPEATS = 5
"""How often a change is repeated if another process changed the row first."""

COMPLAIN_SECONDS = 60.0
"""How often a row that is not understood is named in the log: the tables are read every other second."""


class UnshardedTable:
    """A table that only the first database has. Any method raises StoreUnavailable or SchemaBehind."""

    _named = "name"
    """The column that names a row."""

    def __init__(self, server: DatabaseServer, table: str, clock: Clock) -> None:
        self._server = server
        self._table = table
        self._clock = clock
        self._complains = RateLimit(clock, COMPLAIN_SECONDS)

    def names(self) -> set[str]:
        """Return the names of all rows, also of those that cannot be understood."""
        return {str(name) for (name,) in self._rows(f"SELECT {self._named} FROM {self._table}")}

    def _now(self) -> str:
        """Now as SQL."""
        return self._server.instant(self._clock.now_ms())

    def _rows(self, select: str, params: Sequence[Param] = ()) -> Sequence[Any]:
        return self._server.run([Statement(select, params)])[0].rows

    def _write(self, change: str, params: Sequence[Param] = ()) -> int:
        """Make a change once. Returns how many rows it matched. Raises Duplicate."""
        return self._server.run([Statement(change, params)], again=False)[0].matched

    def _add(self, insert: str, params: Sequence[Param], taken: str) -> None:
        """Insert a row. Raises NameTaken, with this text."""
        try:
            self._write(insert, params)
        except Duplicate as exc:
            raise NameTaken(taken) from exc

    def _state(self, column: str) -> tuple[int, int]:
        """Return the number of rows and the sum of a column: another pair means that a row has changed."""
        ((count, total),) = self._rows(f"SELECT COUNT(*),COALESCE(SUM({column}),0) FROM {self._table}")
        return int(count), int(total)

    def _keeps_changing(self, what: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self._server.name}: {what} keeps changing; try again")
