"""The occurrences of schedules: rows of the task table beside the schedule.

The biz_id of an occurrence is the schedule's name, and its dedup_key names the schedule and the nominal time.
So an occurrence becomes a task at most once, whoever makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from toc.model.clock import Clock, to_ms
from toc.model.schedule import Definition
from toc.model.schedule_state import Occurrence, Planned, State
from toc.model.sharding import BizId, JobIds, crc32
from toc.model.task import TaskRow, TaskStatus, scheduled_for_text
from toc.model.topic import Topic
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import rows as sql
from toc.store.tasks.schedule_rows import StoredSchedule

UNTOUCHED = (
    f"status={TaskStatus.PENDING:d} AND version=0 AND attempts=0 AND crashes=0 AND lease_owner IS NULL"
)
"""The condition that, by the row, no try of a task has begun, and nobody has rescheduled it."""


class Occurrences:
    """The occurrences. Any method raises StoreUnavailable or SchemaBehind."""

    def __init__(self, shards: Shards, job_ids: JobIds, clock: Clock) -> None:
        self._shards = shards
        self._job_ids = job_ids
        self._clock = clock

    def ended(self, stored: StoredSchedule) -> bool:
        """Whether the task of the last occurrence has ended, or is gone."""
        if stored.state.last_job_id is None:
            return True
        table = self._table_of(stored.name)
        select = (
            f"SELECT status FROM {self._shards.names[table]} WHERE job_id={stored.state.last_job_id:d} "
            f"AND status={TaskStatus.PENDING:d}"
        )
        return not self._shards.server_of[table].run([Statement(select)])[0].rows

    def planned(self, stored: StoredSchedule, biz_type: int, later_than: int) -> list[Planned]:
        """Return the occurrences whose tasks have not started, are due later than this (ms), and are as the
        schedule made them, by nominal time.

        Leaves out those of a backfill, and those that somebody has rescheduled.
        """
        table, schedule_id = self._table_of(stored.name), stored.state.schedule_id
        server, biz = self._shards.server_of[table], BizId.of(stored.name)
        prefix = f"{schedule_id}/"
        select = Statement(
            f"SELECT job_id,{server.milliseconds('action_time')},{server.text('dedup_key')} "
            f"FROM {self._shards.names[table]} "
            f"WHERE biz_id={biz.number:d} AND biz_type={biz_type:d} AND dedup_key>%s AND dedup_key<%s "
            f"AND next_time>{server.instant(later_than)} AND {UNTOUCHED}",
            [prefix.encode(), f"{prefix}:".encode()],
        )
        (result,) = server.run([select])
        found = []
        with sql.understood():
            for job_id, due, key in result.rows:
                nominal = _nominal(schedule_id, str(key))
                # A backfill makes tasks of past nominal times, due later than they were.
                if nominal is not None and int(due) == nominal + stored.definition.offset:
                    found.append(Planned(int(job_id), nominal))
        return sorted(found, key=lambda planned: planned.nominal)

    def present(self, stored: StoredSchedule, nominals: Sequence[int]) -> set[int]:
        """Return the nominal times (ms) among these that have a task, in any state, also on a topic that the
        schedule had before."""
        table = self._table_of(stored.name)
        server = self._shards.server_of[table]
        keys = {occurrence_key(stored.state.schedule_id, nominal).encode(): nominal for nominal in nominals}
        return {keys[key] for _, key in self.keyed(server, table, stored.name, list(keys))}

    def keyed(
        self, server: DatabaseServer, table: int, name: str, keys: Sequence[bytes]
    ) -> list[tuple[int, bytes]]:
        """Return the job_id and dedup_key of the occurrences with these keys, of whatever topic."""
        select = (
            f"SELECT job_id,{server.text('dedup_key')} FROM {self._shards.names[table]} "
            f"WHERE biz_id={BizId.of(name).number:d} AND dedup_key IN"
        )
        parts = [keys[first : first + sql.KEYS] for first in range(0, len(keys), sql.KEYS)]
        results = server.run(
            [Statement(f"{select} ({','.join(['%s'] * len(part))})", part) for part in parts]
        )
        with sql.understood():
            return [(int(job_id), str(key).encode()) for result in results for job_id, key in result.rows]

    def row(self, definition: Definition, state: State, occurrence: Occurrence, topic: Topic) -> TaskRow:
        """Return the row of a new task for an occurrence."""
        now, biz = self._clock.now_ms(), BizId.of(definition.name)
        return TaskRow(
            job_id=self._job_ids.make(biz.crc),
            biz_id=biz.number,
            biz_key=biz.key,
            biz_type=topic.biz_type,
            status=TaskStatus.PENDING,
            action_time=occurrence.due,
            next_time=occurrence.due,
            attribute=definition.occurrence_attribute(occurrence.nominal),
            version=0,
            attempts=0,
            crashes=0,
            slot_crc=biz.crc,
            slot_amount=topic.slot_amount,
            dedup_key=occurrence_key(state.schedule_id, occurrence.nominal),
            last_error=None,
            gmt_create=now,
            gmt_modified=now,
            expires_at=occurrence.due + 1000 * topic.expires_in if topic.expires_in else 0,
        )

    def _table_of(self, name: str) -> int:
        return crc32(name) % self._shards.tables


def occurrence_key(schedule_id: int, nominal: int) -> str:
    """The dedup_key of an occurrence."""
    return f"{schedule_id}/{scheduled_for_text(nominal)}"


def _nominal(schedule_id: int, key: str) -> int | None:
    """The nominal time in an occurrence's dedup_key, or None: a caller may have made it up."""
    try:
        nominal = to_ms(datetime.fromisoformat(key.removeprefix(f"{schedule_id}/")))
    except (ValueError, TypeError):  # a TypeError without a zone
        return None
    return nominal if key == occurrence_key(schedule_id, nominal) else None
