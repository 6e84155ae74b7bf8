"""What the tables of the first database share: topics, templates, tokens, targets, audit, identity.

Statements are made of the tables of toc.store.schema in SQLAlchemy Core and sent as all others are.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from re import Pattern
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy import ClauseElement, ColumnElement, insert, select, update

from toc.model.clock import Clock, RateLimit
from toc.model.errors import InvalidInput, NameTaken, StoreUnavailable, shown
from toc.observe.log import get_logger
from toc.store.servers.server import Duplicate, Statement
from toc.store.servers.shards import Shards

log = get_logger(__name__)

R = TypeVar("R")

REPEATS = 5
"""How often a change is repeated if another process changed the row first."""

BY_HAND_SECONDS = 60
"""How soon a row is read again that was changed by hand, perhaps corrected, without its version."""

State = tuple[int, int, int]
"""The number of rows, the sum of their versions, and the minute: another one means that a row may have
changed."""


class RecordTable:
    """A table that only the first database has. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema: str
    """Its name in toc.store.schema."""

    def __init__(self, shards: Shards, clock: Clock) -> None:
        self._server = shards.topic_server
        self._table = shards.first[self.in_schema]
        self._column = self._table.c
        self._clock = clock

    def _compiled(self, statement: ClauseElement) -> Statement:
        """Return a statement as text. That takes a while: keep what is sent often."""
        made: Any = statement.compile(
            dialect=self._server.dialect, compile_kwargs={"render_postcompile": True}
        )
        values = [made.params[name] for name in made.positiontup]
        numbers = [value if isinstance(value, (int, float)) else "%s" for value in values]
        return Statement(str(made) % tuple(numbers), [v for v in values if not isinstance(v, (int, float))])

    def _rows(self, query: ClauseElement | Statement) -> Sequence[Any]:
        statement = query if isinstance(query, Statement) else self._compiled(query)
        return self._server.run([statement])[0].rows

    def _write(self, change: ClauseElement) -> int:
        """Make a change once. Returns how many rows it matched. Raises Duplicate."""
        return self._server.run([self._compiled(change)], again=False)[0].matched

    def _change(self, *where: ColumnElement[bool], **values: Any) -> int:
        """Change rows once. Returns how many matched."""
        return self._write(update(self._table).where(*where).values(values))

    def _from_now(self, milliseconds: int) -> ColumnElement[Any]:
        """An instant by the server's own clock."""
        return sa.literal_column(self._server.from_now(milliseconds))


class NamedTable(RecordTable, ABC, Generic[R]):
    """A table of records with names. Any method raises StoreUnavailable or SchemaBehind."""

    noun: str
    names_fit: Pattern[str]
    """What a name looks like. MySQL takes one with a trailing space for the same name; this does not."""
    unknown: type[InvalidInput]
    """The error for a name that no record has."""
    guard = "version"
    """The column that each change of a row changes."""

    def __init__(self, shards: Shards, clock: Clock) -> None:
        super().__init__(shards, clock)
        (self._name,) = self._table.primary_key
        self._complains = RateLimit(clock)

    @abstractmethod
    def _parse(self, row: Mapping[str, Any]) -> R:
        """Make a record of a row. Raises ValueError, TypeError, KeyError or AttributeError."""

    def list(self) -> list[R]:
        """Return all records, by name."""
        return [record for record, _row in self._every()]

    def damaged(self) -> set[str]:
        """Return the names of rows that cannot be understood."""
        names = {str(name) for (name,) in self._rows(select(self._name))}
        return names - {row[self._name.name] for _, row in self._every()}

    def state(self) -> State:
        """Return the State."""
        ((count, total),) = self._rows(self._count_and_sum)
        return int(count), int(total), int(self._clock.monotonic() // BY_HAND_SECONDS)

    def _every(self) -> Sequence[tuple[R, Mapping[str, Any]]]:
        return self._understood(self._rows(self._select))

    def _find(self, name: str) -> tuple[R, int]:
        """Return a record and its version. Raises ``unknown``."""
        where = self._name == self._possible(name)
        for record, row in self._understood(self._rows(select(self._table).where(where))):
            return record, row[self.guard]
        raise self._unknown(name)

    def _understood(self, rows: Sequence[Any]) -> Sequence[tuple[R, Mapping[str, Any]]]:
        """Return the records in rows of all columns, each with its row by column."""
        found, columns = [], self._column.keys()
        for values in rows:
            row = dict(zip(columns, values, strict=True))
            try:
                found.append((self._parse(row), row))
            except (ValueError, TypeError, KeyError, AttributeError) as exc:
                name = row[self._name.name]
                if self._complains(name):  # it is of a later version, or was edited by hand
                    event = f"{self.noun}_not_understood"
                    log.warning(event, name=name, error=str(exc))
        return found

    def _add(self, taken: str, **values: Any) -> None:
        """Insert a row. Raises NameTaken, with this text."""
        try:
            self._write(insert(self._table).values(values))
        except Duplicate as exc:
            raise NameTaken(taken) from exc

    def _at(self, name: str, version: int) -> ColumnElement[bool]:
        """Select the row of a name, if it is still at this version."""
        return sa.and_(self._name == name, self._column[self.guard] == version)

    def _update(self, *where: ColumnElement[bool], **values: Any) -> bool:
        """Change a row and its version. False if none is at these conditions any more."""
        values |= {"gmt_modified": self._clock.now_ms(), "version": self._column.version + 1}
        return self._change(*where, **values) == 1

    def _delete(self, name: str) -> None:
        """Delete a row. Raises ``unknown``."""
        if not self._write(sa.delete(self._table).where(self._name == self._possible(name))):
            raise self._unknown(name)

    def _possible(self, name: object) -> str:
        """Return a name that a record can have. Raises ``unknown``."""
        if not isinstance(name, str) or not self.names_fit.fullmatch(name):
            raise self._unknown(name)
        return name

    def _unknown(self, name: object) -> InvalidInput:
        return self.unknown(f"there is no {self.noun} {shown(name)}; `toc {self.noun} list` shows all")

    def _keeps_changing(self, name: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self._server.name}: {self.noun} {name!r} keeps changing; try again")

    @cached_property
    def _select(self) -> Statement:
        return self._compiled(select(self._table).order_by(self._name))

    @cached_property
    def _count_and_sum(self) -> Statement:
        total = sa.func.coalesce(sa.func.sum(self._column[self.guard]), 0)
        return self._compiled(select(sa.func.count(), total).select_from(self._table))
