"""The rows of schedules, each in the database of its occurrences.

A schedule is in the table of its name's CRC32. The biz_id of its occurrences is that name, so they are in the
task table beside it. One transaction moves a schedule on: it changes the row, guarded by its version, and
inserts the tasks only if it has changed the row (``change_id``). So any process may move any schedule on, and
several may do so at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from toc.model.clock import Clock, to_ms
from toc.model.errors import InvalidSchedule, ScheduleExists, StoreUnavailable
from toc.model.schedule import Definition, Occurrence, State, Step
from toc.model.sharding import BizId, JobIds, crc32
from toc.model.task import TaskRow, TaskStatus, scheduled_for_text
from toc.model.topic import Topic
from toc.store import rows as sql
from toc.store.server import LOST_FAST_SECONDS, DatabaseServer, Duplicate, Lost, Param, Statement, Transient
from toc.store.shards import Shards, Trouble

TRIES = 5
TOGETHER = 200
"""About how many tasks one transaction inserts; those of one schedule are never split."""

_COLUMNS = {  # field of State -> column of the table
    "schedule_id": "schedule_id", "version": "version", "paused": "paused", "after": "after_time",
    "next_time": "next_time", "look": "look_time", "buffered": "buffered", "last_job_id": "last_job_id",
    "fired": "fired", "skipped": "skipped", "missed": "missed", "missed_at": "missed_at",
    "created": "gmt_create", "modified": "gmt_modified",
}  # fmt: skip
_INSTANTS = frozenset({"after", "next_time", "look", "buffered", "missed_at", "created", "modified"})
_FIXED = frozenset({"schedule_id", "version", "created", "modified"})


@lru_cache(8192)
def _definition(name: str, text: str) -> Definition:
    return Definition.of_json(name, text)


class Stored(NamedTuple):
    """A stored schedule. ``text`` is its definition as stored."""

    name: str
    text: str
    state: State

    @property
    def definition(self) -> Definition:
        """The definition. Raises InvalidSchedule if this host cannot follow it, or if the row is damaged."""
        if None in (self.state.after, self.state.created, self.state.modified):  # such as 0000-00-00
            raise InvalidSchedule(f"the row of schedule {self.name!r} is damaged: it lacks a time")
        return _definition(self.name, self.text)


class DueSchedule(NamedTuple):
    """A schedule that needs a step, whether the task of its last occurrence has ended, and the time (ms): by
    this host's clock, or by its server's if that is behind."""

    stored: Stored
    ended: bool
    now: int


class Due(NamedTuple):
    """Schedules that need a step; the tables that have more of them, and the tables without an answer."""

    rows: list[DueSchedule]
    more: set[int]
    failed: dict[int, Trouble]


class Move(NamedTuple):
    """A schedule as it was read, its new state, and the tasks to insert with it."""

    stored: Stored
    state: State
    rows: Sequence[TaskRow]


class Moved(NamedTuple):
    """The result of moves: those that took effect, and the schedules, by name, of servers without an answer.

    The others were moved on by another process.
    """

    done: list[Move]
    failed: dict[str, Trouble]


class Planned(NamedTuple):
    """An occurrence that is a task already and not yet due, as it was read. ``expires_at`` is 0 for never."""

    job_id: int
    nominal: int
    due: int
    version: int
    expires_at: int

    @property
    def moved(self) -> bool:
        """Whether somebody gave it another time by hand."""
        return self.version > 0


class ScheduleTable:
    """The schedules. Any method raises StoreUnavailable or SchemaBehind, unless it says otherwise."""

    def __init__(self, shards: Shards, job_ids: JobIds, clock: Clock) -> None:
        self._shards = shards
        self._job_ids = job_ids
        self._clock = clock

    def table_of(self, name: str) -> int:
        """Return the number of the table that holds the schedule of this name."""
        return crc32(name) % self._shards.tables

    # --- reading

    def now(self, name: str) -> int:
        """Return the time (ms) by the clock of a schedule's server.

        Processes that change the schedule agree by it on what is past: the clocks of their hosts may differ.
        """
        server = self._shards.server_of[self.table_of(name)]
        (result,) = server.run([Statement(f"SELECT {server.milliseconds(server.from_now(0))}")])
        with sql.understood():
            return int(result.rows[0][0])

    def get(self, name: str) -> Stored | None:
        """Return the schedule of a name, or None."""
        return self.named([name])[0].get(name)

    def named(self, names: Iterable[str]) -> tuple[dict[str, Stored], dict[str, Trouble]]:
        """Return the schedules of these names, and the names whose servers do not answer.

        Raises only if no server answers.
        """
        by_table: dict[int, tuple[str, ...]] = {}
        for name in names:
            table = self.table_of(name)
            by_table[table] = (*by_table.get(table, ()), name)

        def send(server: DatabaseServer, part: Mapping[int, tuple[str, ...]]) -> list[Stored]:
            statements = [
                Statement(
                    f"SELECT {_read(server)} FROM {self._shards.schedule_names[table]} s "
                    f"WHERE name IN ({','.join(['%s'] * len(some))})",
                    some,
                )
                for table, some in part.items()
            ]
            return [_stored(row) for result in server.run(statements) for row in result.rows]

        if not by_table:
            return {}, {}
        parts = self._shards.each(self._shards.group_tables(by_table), send)
        if not parts.results:
            parts.whole()
        failed = {name: error for table, error in parts.failed.items() for name in by_table[table]}
        return {stored.name: stored for part in parts.results for stored in part}, failed

    def page(self, after: str = "", limit: int = 1000) -> list[Stored]:
        """Return the first ``limit`` schedules by name whose name is greater than ``after``."""

        def send(server: DatabaseServer, part: Mapping[int, None]) -> list[Stored]:
            selects = [
                f"SELECT {_read(server)} FROM {self._shards.schedule_names[table]} s WHERE name>%s "
                f"ORDER BY name LIMIT {limit:d}"
                for table in part
            ]
            statements = [
                Statement(statement.sql, [after] * statement.sql.count("%s"))
                for statement in sql.unions(server, selects)
            ]
            return [_stored(row) for result in server.run(statements) for row in result.rows]

        everywhere = dict.fromkeys(range(self._shards.tables))
        parts = self._shards.each(self._shards.group_tables(everywhere), send).whole()
        found = [stored for part in parts for stored in part]
        return sorted(found, key=lambda stored: stored.name)[:limit]

    def soonest(self, tables: Iterable[int]) -> tuple[dict[int, int], dict[int, Trouble]]:
        """Return when (ms, by this host's clock) the first schedule of each table needs a step, and the
        tables without an answer.

        Tables in which every schedule is paused are left out. A server reads one index entry per table.
        """
        asked = self._clock.now_ms()

        def send(server: DatabaseServer, part: Mapping[int, None]) -> list[tuple[int, int]]:
            now = server.milliseconds(server.from_now(0))
            # An invalid instant, such as 0000-00-00, counts as 0: as NULL it would hide all the others.
            least = (
                "CASE WHEN MIN(look_time) IS NOT NULL "
                f"THEN COALESCE({server.milliseconds('MIN(look_time)')},0) END"
            )
            selects = [
                f"SELECT {table:d},{least},{now} FROM {self._shards.schedule_names[table]}" for table in part
            ]
            results = server.run(sql.unions(server, selects), outwait=False)
            with sql.understood():
                return [
                    (int(table), int(look) + max(asked - int(told), 0))
                    for result in results
                    for table, look, told in result.rows
                    if look is not None
                ]

        parts = self._shards.each(self._shards.group_tables(dict.fromkeys(tables)), send)
        return {table: look for part in parts.results for table, look in part}, parts.failed

    def due(self, tables: Iterable[int], until: int, limit: int) -> Due:
        """Return at most ``limit`` schedules of each table that need a step by ``until`` (ms), by the
        clocks of this host and of their server.

        Otherwise a host whose clock is ahead would take future occurrences for missed ones.
        """

        def send(server: DatabaseServer, part: Mapping[int, None]) -> list[DueSchedule]:
            pending = f"CASE WHEN t.status={TaskStatus.PENDING:d} THEN 1 ELSE 0 END"
            now = server.from_now(0)
            selects = [
                f"SELECT {_read(server)},{pending},{server.milliseconds(now)} "
                f"FROM {self._shards.schedule_names[table]} s "
                f"LEFT JOIN {self._shards.names[table]} t ON t.job_id=s.last_job_id "
                f"WHERE s.look_time<={server.instant(until)} AND s.look_time<={now} "
                f"ORDER BY s.look_time LIMIT {limit:d}"
                for table in part
            ]
            results = server.run(sql.unions(server, selects), outwait=False)
            with sql.understood():
                return [
                    DueSchedule(_stored(row[:-2]), not int(row[-2]), min(until, int(row[-1])))
                    for result in results
                    for row in result.rows
                ]

        parts = self._shards.each(self._shards.group_tables(dict.fromkeys(tables)), send)
        rows = [row for part in parts.results for row in part]
        counts: dict[int, int] = {}
        for row in rows:
            table = self.table_of(row.stored.name)
            counts[table] = counts.get(table, 0) + 1
        return Due(rows, {table for table, count in counts.items() if count >= limit}, parts.failed)

    def ended(self, stored: Stored) -> bool:
        """Whether the task of the last occurrence has ended, or is gone."""
        if stored.state.last_job_id is None:
            return True
        table = self.table_of(stored.name)
        select = (
            f"SELECT status FROM {self._shards.names[table]} WHERE job_id={stored.state.last_job_id:d} "
            f"AND status={TaskStatus.PENDING:d}"
        )
        return not self._shards.server_of[table].run([Statement(select)])[0].rows

    def planned(self, stored: Stored, biz_type: int, later_than: int) -> list[Planned]:
        """Return the occurrences whose tasks have not started and are due later than this (ms).

        Leaves out those of a backfill, unless they were moved by hand.
        """
        table, definition = self.table_of(stored.name), stored.definition
        server, biz = self._shards.server_of[table], BizId.of(stored.name)
        due = server.milliseconds("action_time")
        prefix = f"{stored.state.schedule_id}/"
        # A moved one may have any nominal time. The server chooses the better of two indexes.
        select = Statement(
            f"SELECT job_id,{due},version,{sql.column(server, 'expires_at')},{server.text('dedup_key')} "
            f"FROM {self._shards.names[table]} "
            f"WHERE biz_id={biz.number:d} AND biz_type={biz_type:d} AND dedup_key>%s AND dedup_key<%s "
            f"AND next_time>{server.instant(later_than)} AND {_UNTOUCHED}",
            [prefix.encode(), f"{prefix}:".encode()],
        )
        (result,) = server.run([select])
        found = []
        with sql.understood():
            for job_id, at, version, expires_at, key in result.rows:
                nominal = _nominal(stored.state.schedule_id, str(key))
                if nominal is None:
                    continue
                one = Planned(int(job_id), nominal, int(at), int(version), int(expires_at))
                # A backfill makes tasks of past nominal times, due later than they were.
                ours = one.moved or one.due == nominal + definition.offset
                if ours and one.due > later_than:
                    found.append(one)
        return sorted(found, key=lambda planned: planned.nominal)

    def last_but(self, stored: Stored, biz_type: int, planned: Sequence[Planned]) -> int | None:
        """Return the job_id of the last occurrence by nominal time, without those in ``planned``, that is a
        task of this biz_type; or None."""
        table, prefix = self.table_of(stored.name), f"{stored.state.schedule_id}/"
        select = Statement(
            f"SELECT job_id FROM {self._shards.names[table]} WHERE biz_id={BizId.of(stored.name).number:d} "
            f"AND biz_type={biz_type:d} AND dedup_key>%s AND dedup_key<%s "
            f"AND job_id NOT IN ({sql.numbers(one.job_id for one in planned)}) "
            "ORDER BY dedup_key DESC LIMIT 1",
            [prefix.encode(), f"{prefix}:".encode()],
        )
        (result,) = self._shards.server_of[table].run([select])
        with sql.understood():
            return int(result.rows[0][0]) if result.rows else None

    def present(self, stored: Stored, nominals: Sequence[int]) -> set[int]:
        """Return the nominal times (ms) among these that have a task, in any state, also on a topic that the
        schedule had before."""
        table = self.table_of(stored.name)
        server = self._shards.server_of[table]
        keys = {occurrence_key(stored.state.schedule_id, nominal).encode(): nominal for nominal in nominals}
        of_it = f"WHERE biz_id={BizId.of(stored.name).number:d}"
        select = Statement(f"SELECT DISTINCT biz_type FROM {self._shards.names[table]} {of_it}")
        (types,) = server.run([select])
        with sql.understood():
            biz_types = [int(biz_type) for (biz_type,) in types.rows]
        found = (self._keyed(server, table, stored.name, each, list(keys)) for each in biz_types)
        return {keys[key] for part in found for _, key in part}

    # --- writing

    def create(self, definition: Definition, state: State) -> Stored:
        """Add a schedule. Raises ScheduleExists."""
        table, text = self.table_of(definition.name), definition.to_json()
        server = self._shards.server_of[table]
        names, marks = ["name", "definition", "change_id"], ["%s", "%s", f"{_change_id():d}"]
        for field, column in _COLUMNS.items():
            names.append(column)
            marks.append(_literal(server, field, getattr(state, field)))
        schedules = self._shards.schedule_names[table]
        insert = Statement(
            f"INSERT INTO {schedules} ({','.join(names)}) VALUES ({','.join(marks)})",
            [definition.name, text],
        )
        for attempt in range(TRIES):
            try:
                server.run([insert], again=False)
            except Duplicate:
                other = self.get(definition.name)
                if other is None:
                    continue  # it has just been deleted
                if other.state.schedule_id != state.schedule_id:
                    raise ScheduleExists(
                        f"schedule {definition.name!r} exists already; `toc schedule alter` changes it"
                    ) from None
            except Lost:
                if attempt == TRIES - 1:
                    raise
                continue  # sent again: if it is there, it is ours
            return Stored(definition.name, text, state)
        raise StoreUnavailable(f"{server.name}: schedule {definition.name!r} keeps changing; try again")

    def move(self, stored: Stored, step: Step, topic: Topic) -> Move:
        """Return what ``advance`` needs to take a step."""
        rows = [self._row(stored.definition, step.state, occurrence, topic) for occurrence in step.made]
        return Move(stored, _after(step.state, rows), rows)

    def again(
        self, moved: Iterable[Planned], definition: Definition, state: State, topic: Topic
    ) -> dict[int, TaskRow]:
        """Return the tasks with which ``change`` replaces moved ones, at their times, by the job_id of
        these."""
        rows = {}
        for one in moved:
            row = self._row(definition, state, Occurrence(one.nominal, one.due), topic)
            rows[one.job_id] = row._replace(version=1, expires_at=one.expires_at)  # counts as moved
        return rows

    def _row(self, definition: Definition, state: State, occurrence: Occurrence, topic: Topic) -> TaskRow:
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
        )

    def advance(self, moves: Iterable[Move]) -> Moved:
        """Move schedules on and insert their tasks, each if no other process has moved it since it was read.

        Raises nothing: servers that do not answer are in ``failed``.
        """
        by_table: dict[int, tuple[Move, ...]] = {}
        for move in moves:
            table = self.table_of(move.stored.name)
            by_table[table] = (*by_table.get(table, ()), move)
        parts = self._shards.each(self._shards.group_tables(by_table), self._advance, writes=True)
        failed = {
            move.stored.name: error for table, error in parts.failed.items() for move in by_table[table]
        }
        return Moved([move for part in parts.results for move in part], failed)

    def change(
        self,
        stored: Stored,
        definition: Definition,
        state: State,
        cancelled: Sequence[Planned] = (),
        instead: Iterable[TaskRow] = (),
    ) -> Stored | None:
        """Give a schedule another definition and state, and cancel occurrences that have not started.

        ``instead``: tasks that replace some of them. Returns None if another process has changed the
        schedule, or one of the occurrences, since it was read.
        """
        text = definition.to_json()
        after = Stored(stored.name, text, state._replace(version=stored.state.version + 1))
        return after if self._change(stored, state, cancelled, instead, text=text) else None

    def delete(self, stored: Stored, cancelled: Sequence[Planned] = ()) -> bool:
        """Delete a schedule, and cancel occurrences that have not started. Returns whether it did.

        False: another process has changed or deleted it, or one of the occurrences, since it was read.
        """
        return self._change(stored, stored.state, cancelled, delete=True)

    def _change(
        self,
        stored: Stored,
        state: State,
        cancelled: Sequence[Planned],
        instead: Iterable[TaskRow] = (),
        *,
        text: str | None = None,
        delete: bool = False,
    ) -> bool:
        table, change_id, now = self.table_of(stored.name), _change_id(), self._clock.now_ms()
        server, name = self._shards.server_of[table], self._shards.names[table]
        schedules = self._shards.schedule_names[table]
        ours = self._ours(table, stored, change_id)
        update = self._update(server, table, stored, state, change_id, text)
        statements, place = [update], 0
        if cancelled:
            ended = server.instant(now)
            ids = f"job_id IN ({sql.numbers(one.job_id for one in cancelled)})"
            as_read = f"SELECT COUNT(*) FROM {name} WHERE {_UNTOUCHED} AND ({_at_versions(cancelled)})"
            # Locked first: either they stay as they were read until the commit, or nothing is changed.
            place = 1
            statements = [
                Statement(f"SELECT job_id FROM {name} WHERE {ids}{server.for_update}"),
                Statement(f"{update.sql} AND ({as_read})={len(cancelled):d}", update.params),
                # They give up their keys, because a replacement may have the same nominal time.
                Statement(
                    f"UPDATE {name} SET status={TaskStatus.CANCELLED:d},dedup_key=NULL,next_time={ended},"
                    f"gmt_modified={ended} WHERE {ids} AND EXISTS (SELECT 1 FROM {ours.sql})",
                    ours.params,
                ),
            ]
        statements += [sql.insert_if(server, name, row, ours) for row in instead]
        if delete:
            statements.append(Statement(f"DELETE FROM {ours.sql}", ours.params))
        try:
            return server.run(statements, transaction=True, again=False)[place].matched == 1
        except Lost:
            # The row shows whether it was committed.
            seen = self._shards.server_of[table].run(
                [Statement(f"SELECT change_id FROM {schedules} WHERE name=%s", [stored.name])]
            )[0]
            if seen.rows and int(seen.rows[0][0]) == change_id:
                return True
            if delete and not seen.rows:
                return True
            raise

    def _advance(self, server: DatabaseServer, part: Mapping[int, tuple[Move, ...]]) -> list[Move]:
        done: list[Move] = []
        chunk: list[tuple[int, Move]] = []
        size = 0
        for table, moves in sorted(part.items()):
            for move in sorted(moves, key=lambda move: move.stored.name):
                if chunk and size + len(move.rows) + 1 > TOGETHER:
                    done += self._together(server, chunk)
                    chunk, size = [], 0
                chunk.append((table, move))
                size += len(move.rows) + 1
        return done + self._together(server, chunk)

    def _together(self, server: DatabaseServer, chunk: Sequence[tuple[int, Move]]) -> list[Move]:
        """Make moves in one transaction; or one by one, if a key of one of them is taken."""
        try:
            return self._send(server, chunk)
        except Duplicate:
            return [done for table, move in chunk for done in self._alone(server, table, move)]

    def _send(self, server: DatabaseServer, chunk: Sequence[tuple[int, Move]]) -> list[Move]:
        """Make moves in one transaction. Returns those that took effect. Raises Duplicate."""
        ids = [_change_id() for _ in chunk]
        began = time.monotonic()
        try:
            return self._run(server, chunk, ids)
        except Lost:
            if time.monotonic() - began > LOST_FAST_SECONDS:
                raise
        # One broken connection says nothing about the server. The rows show whether it was committed.
        done = [
            move
            for (table, move), own in zip(chunk, ids, strict=True)
            if self._seen(server, table, move, own)
        ]
        return done or self._run(server, chunk, [_change_id() for _ in chunk])

    def _run(
        self, server: DatabaseServer, chunk: Sequence[tuple[int, Move]], ids: Sequence[int]
    ) -> list[Move]:
        statements: list[Statement] = []
        places = []
        for (table, move), change_id in zip(chunk, ids, strict=True):
            places.append(len(statements))
            statements.append(self._update(server, table, move.stored, move.state, change_id))
            ours = self._ours(table, move.stored, change_id)
            statements += [sql.insert_if(server, self._shards.names[table], row, ours) for row in move.rows]
        results = server.run(statements, transaction=True, again=False)
        return [move for place, (_, move) in zip(places, chunk, strict=True) if results[place].matched == 1]

    def _seen(self, server: DatabaseServer, table: int, move: Move, change_id: int) -> bool:
        """Whether the row carries the change_id of this change."""
        ours = self._ours(table, move.stored, change_id)
        return bool(server.run([Statement(f"SELECT 1 FROM {ours.sql}", ours.params)])[0].rows)

    def _alone(self, server: DatabaseServer, table: int, move: Move) -> list[Move]:
        """Make one move whose job_id or occurrence exists already.

        A backfill may have made the occurrence, which then stays as it is.
        """
        for _ in range(TRIES):
            keys = [(row.dedup_key or "").encode() for row in move.rows]
            biz_type = move.rows[0].biz_type if move.rows else 0
            found = self._keyed(server, table, move.stored.name, biz_type, keys)
            there = {key: job_id for job_id, key in found}
            crc = crc32(move.stored.name)
            rows = [
                row._replace(job_id=self._job_ids.make(crc))
                for row, key in zip(move.rows, keys, strict=True)
                if key not in there
            ]
            state = _after(move.state._replace(fired=move.state.fired - len(move.rows) + len(rows)), rows)
            if keys and keys[-1] in there:
                state = state._replace(last_job_id=there[keys[-1]])
            move = Move(move.stored, state, rows)
            try:
                return self._send(server, [(table, move)])
            except Duplicate:
                continue
        raise Transient(f"{server.name}: schedule {move.stored.name!r} keeps changing; try again")

    def _keyed(
        self, server: DatabaseServer, table: int, name: str, biz_type: int, keys: Sequence[bytes]
    ) -> list[tuple[int, bytes]]:
        """Return the job_id and dedup_key of the occurrences with these keys."""
        select = (
            f"SELECT job_id,{server.text('dedup_key')} FROM {self._shards.names[table]} "
            f"WHERE biz_id={BizId.of(name).number:d} AND biz_type={biz_type:d} AND dedup_key IN"
        )
        parts = [keys[first : first + sql.KEYS] for first in range(0, len(keys), sql.KEYS)]
        results = server.run(
            [Statement(f"{select} ({','.join(['%s'] * len(part))})", part) for part in parts]
        )
        with sql.understood():
            return [(int(job_id), str(key).encode()) for result in results for job_id, key in result.rows]

    def _ours(self, table: int, stored: Stored, change_id: int) -> Statement:
        """Return a FROM clause that yields the row only if its own transaction has changed it."""
        return Statement(
            f"{self._shards.schedule_names[table]} WHERE name=%s AND version={stored.state.version + 1:d} "
            f"AND change_id={change_id:d}",
            [stored.name],
        )

    def _update(
        self,
        server: DatabaseServer,
        table: int,
        stored: Stored,
        state: State,
        change_id: int,
        text: str | None = None,
    ) -> Statement:
        # Only what differs: a column that was damaged by hand cannot be written as it was read.
        sets = [
            f"{column}={_literal(server, field, getattr(state, field))}"
            for field, column in _COLUMNS.items()
            if field not in _FIXED and getattr(state, field) != getattr(stored.state, field)
        ]
        params: list[Param] = []
        if text is not None:
            sets.append("definition=%s")
            params.append(text)
        sets += ["version=version+1", f"change_id={change_id:d}"]
        sets.append(f"gmt_modified={server.instant(self._clock.now_ms())}")
        return Statement(
            f"UPDATE {self._shards.schedule_names[table]} SET {','.join(sets)} "
            f"WHERE name=%s AND version={stored.state.version:d} "
            f"AND schedule_id={stored.state.schedule_id:d}",
            [*params, stored.name],
        )


_UNTOUCHED = f"status={TaskStatus.PENDING:d} AND attempts=0 AND crashes=0 AND lease_owner IS NULL"
"""The condition that, by the row, no try of a task has begun."""


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


def _at_versions(planned: Iterable[Planned]) -> str:
    """Return the condition that a row is one of these occurrences, at the version that was read."""
    by_version: dict[int, list[int]] = {}
    for one in planned:
        by_version.setdefault(one.version, []).append(one.job_id)
    return " OR ".join(
        f"(version={version:d} AND job_id IN ({sql.numbers(ids)}))" for version, ids in by_version.items()
    )


def _after(state: State, rows: Sequence[TaskRow]) -> State:
    return state._replace(last_job_id=rows[-1].job_id) if rows else state


def _change_id() -> int:
    return secrets.randbits(63)


def _literal(server: DatabaseServer, field: str, value: int | None) -> str:
    if value is None:
        return "NULL"
    return server.instant(value) if field in _INSTANTS else f"{value:d}"


def _read(server: DatabaseServer) -> str:
    """The columns to SELECT for ``_stored``."""
    columns = [
        server.milliseconds(f"s.{column}") if field in _INSTANTS else f"s.{column}"
        for field, column in _COLUMNS.items()
    ]
    return ",".join(["s.name", "s.definition", *columns])


def _stored(row: Sequence[object]) -> Stored:
    with sql.understood():
        name, text, *values = row
        numbers = [None if value is None else int(str(value)) for value in values]
        state = State._make(numbers)
        return Stored(str(name), str(text), state._replace(paused=bool(state.paused)))
