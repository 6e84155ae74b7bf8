"""The rows of the schedule tables: which columns they have, and how a row becomes a StoredSchedule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from toc.model.errors import InvalidSchedule
from toc.model.schedule import Definition
from toc.model.schedule_state import State
from toc.store.servers.server import DatabaseServer
from toc.store.tasks import rows as sql

COLUMNS = {  # field of State -> column of the table
    "schedule_id": "schedule_id", "version": "version", "paused": "paused", "after": "after_time",
    "next_time": "next_time", "look": "look_time", "buffered": "buffered", "last_job_id": "last_job_id",
    "fired": "fired", "skipped": "skipped", "missed": "missed", "missed_at": "missed_at",
    "created": "gmt_create", "modified": "gmt_modified",
}  # fmt: skip
INSTANTS = frozenset({"after", "next_time", "look", "buffered", "missed_at", "created", "modified"})
FIXED = frozenset({"schedule_id", "version", "created", "modified"})


@lru_cache(8192)
def _definition(name: str, text: str) -> Definition:
    return Definition.of_json(name, text)


class StoredSchedule(NamedTuple):
    """A stored schedule. ``text`` is its definition as stored."""

    name: str
    text: str
    state: State

    @property
    def definition(self) -> Definition:
        """The definition. Raises InvalidSchedule if it cannot be read, or if the row is damaged."""
        if None in (self.state.after, self.state.created, self.state.modified):  # such as 0000-00-00
            raise InvalidSchedule(f"the row of schedule {self.name!r} is damaged: it lacks a time")
        return _definition(self.name, self.text)


def literal(server: DatabaseServer, field: str, value: int | None) -> str:
    """Return the value of a field of State as SQL."""
    if value is None:
        return "NULL"
    return server.instant(value) if field in INSTANTS else f"{value:d}"


def columns(server: DatabaseServer) -> str:
    """The columns to SELECT for ``stored_of``."""
    columns = [
        server.milliseconds(f"s.{column}") if field in INSTANTS else f"s.{column}"
        for field, column in COLUMNS.items()
    ]
    return ",".join(["s.name", "s.definition", *columns])


def stored_of(row: Sequence[object]) -> StoredSchedule:
    """Return the schedule in a row with ``columns``."""
    with sql.understood():
        name, text, *values = row
        numbers = [None if value is None else int(str(value)) for value in values]
        state = State._make(numbers)
        return StoredSchedule(str(name), str(text), state._replace(paused=bool(state.paused)))
