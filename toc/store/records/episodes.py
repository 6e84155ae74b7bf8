"""The episodes of late tasks: for each process, topic and cause that made tasks late, how many and how much.

Each process writes what it has counted in some seconds. What is old, or too much, is deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select

from toc.loop import Loop
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.lateness import Cause, Episode
from toc.observe.holdups import Holdups
from toc.store.records.table import RecordTable
from toc.store.servers.server import Duplicate
from toc.store.tasks import rows as sql

_COLUMNS = {"since": "since_time", "until": "until_time", "began": "gmt_create"}
"""The columns of fields of Episode that have another name."""
WRITE_SECONDS = 20.0
WAITING = 1000
"""Most episodes that wait to be written: the last ones."""
KEPT_MS = 7 * 86_400_000
MOST = 100_000
"""Most episodes kept."""
LAG_MS = 120_000
"""An episode is written within this time after its first task started."""


def writer(table: EpisodeTable, holdups: Holdups) -> Loop:
    """Return the loop that writes what a process has counted. What cannot be written now is written later."""

    waiting: deque[Episode] = deque(maxlen=WAITING)

    def run_once() -> float:
        waiting.extend(holdups.take_episodes())
        with suppress(StoreUnavailable, SchemaBehind):
            while waiting:
                table.write(waiting[0])
                waiting.popleft()
        return WRITE_SECONDS

    return Loop("episodes", run_once)


class EpisodeTable(RecordTable):
    """The table of episodes. Any method raises StoreUnavailable or SchemaBehind."""

    def write(self, one: Episode) -> None:
        """Add an episode, unless it is there."""
        values = {_COLUMNS.get(name, name): value for name, value in one._asdict().items()}
        with suppress(Duplicate):  # its answer was lost
            self._write(insert(self._table).values(values | {"cause": one.cause.value}))

    def list(
        self, since: int, limit: int, topics: Collection[str] | None = None, cause: Cause | None = None
    ) -> Sequence[Episode]:
        """Return episodes that began from ``since`` (ms) on, the latest first; None: of all topics."""
        where = [self._column.gmt_create >= since]
        if topics is not None:
            where.append(self._column.topic.in_(topics))
        if cause is not None:
            where.append(self._column.cause == cause.value)
        return self._read(where, limit)

    def of(self, topic: str, since: int, until: int, limit: int) -> Sequence[Episode]:
        """Return those of a topic that overlap this time (ms), the latest first."""
        column = self._column
        near = column.gmt_create.between(since - LAG_MS, until + LAG_MS)
        return self._read(
            [near, column.topic == topic, column.since_time <= until, column.until_time >= since], limit
        )

    def _read(self, where: Sequence[ColumnElement[bool]], limit: int) -> Sequence[Episode]:
        what = select(*(self._column[_COLUMNS.get(name, name)] for name in Episode._fields))
        found = self._rows(what.where(*where).order_by(self._column.gmt_create.desc()).limit(limit))
        known = {cause.value for cause in Cause}
        rows: list[Sequence[Any]] = [row for row in found if row[2] in known]  # none of a later version
        return [Episode(*row)._replace(cause=Cause(row[2])) for row in rows]

    def purge(self) -> int:
        """Delete the oldest that are too old, or too many. Returns how many."""
        ((count,),) = self._rows(select(func.count()).select_from(self._table))
        keep = 0 if int(count) > MOST else KEPT_MS
        return sql.delete_oldest(self._server, str(self._table), "episode_id", keep)
