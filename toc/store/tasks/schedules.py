"""The rows of schedules, and of their occurrences in the task table beside them.

A schedule is in the table of its name's CRC32. The biz_id of its occurrences is that name, so they are in the
task table beside it; their dedup_key names the schedule and the nominal time, so an occurrence becomes a task
at most once, whoever makes it. One transaction moves a schedule on: it changes the row, guarded by its
version, and inserts the tasks only if it has changed the row (``change_id``). So any process may move any
schedule on, and several may do so at once.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

from toc.model.clock import Clock, to_ms
from toc.model.errors import InvalidSchedule, ScheduleExists
from toc.model.schedule import Definition
from toc.model.schedule_state import Occurrence, Planned, State, Step
from toc.model.sharding import BizId, JobIds, crc32
from toc.model.task import TaskRow, TaskStatus, scheduled_for_text
from toc.model.topic import ALL, Topic
from toc.store.servers.server import DatabaseServer, Duplicate, Param, Statement, Transient
from toc.store.servers.shards import Shards, Trouble
from toc.store.tasks import rows as sql

REPEATS = 5
MAX_OF_TOPIC = 5_000
"""Most schedules of one topic in one table."""
MAX_WAITING = 2 * MAX_OF_TOPIC
"""Schedules of a table that wait for a step and among which the topics take turns: no single topic fills
them."""
TOGETHER = 200
"""About how many tasks one transaction inserts; those of one schedule are never split."""


COLUMNS = {name: name for name in State._fields} | {
    "after": "after_time", "look": "look_time", "created": "gmt_create", "modified": "gmt_modified",
}  # fmt: skip
"""The column of each field of State."""
INSTANTS = frozenset({"after", "next_time", "look", "buffered", "missed_at", "created", "modified"})
FIXED = frozenset({"schedule_id", "version", "created", "modified"})
UNTOUCHED = (
    f"status={TaskStatus.PENDING:d} AND version=0 AND attempts=0 AND crashes=0 AND lease_owner IS NULL"
)
"""The condition that, by the row, no try of a task has begun, and nobody has rescheduled it."""

_definition = lru_cache(8192)(Definition.of_json)


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


class DueSchedule(NamedTuple):
    """A schedule that needs a step, whether the task of its last occurrence has ended, and the time (ms): by
    this host's clock, or by its server's if that is behind."""

    stored: StoredSchedule
    ended: bool
    now: int


class Due(NamedTuple):
    """Schedules that need a step; the tables that have more of them, and the tables without an answer."""

    rows: list[DueSchedule]
    more: set[int]
    failed: dict[int, Trouble]


class Move(NamedTuple):
    """A schedule as it was read, its new state, and the tasks to insert with it."""

    stored: StoredSchedule
    state: State
    rows: Sequence[TaskRow]


class Moved(NamedTuple):
    """The result of moves: those that took effect, and the schedules, by name, that are locked or refused, or
    on a server without an answer.

    The others were moved on by another process, or by this call if its reply was lost.
    """

    done: list[Move]
    failed: dict[str, Trouble]


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
        with sql.understood():
            return self._shards.server_of[self.table_of(name)].now_ms()

    def get(self, name: str) -> StoredSchedule | None:
        """Return the schedule of a name, or None."""
        table = self.table_of(name)

        def send(server: DatabaseServer, _part: object) -> list[StoredSchedule]:
            select = f"SELECT {_columns(server)} FROM {self._shards.schedule_names[table]} s WHERE name=%s"
            return [_stored_of(row) for row in server.run([Statement(select, [name])])[0].rows]

        return next(iter(self._shards.each(self._shards.group_tables({table: None}), send).rows()), None)

    def page(self, after: str = "", limit: int = 1000, topics: Sequence[str] = ALL) -> list[StoredSchedule]:
        """Return the first ``limit`` schedules by name whose name is greater than ``after``, of topics that
        match these patterns; perhaps also of some that are alike."""
        return sorted(self.of_each_table(limit, after, topics), key=lambda stored: stored.name)[:limit]

    def of_each_table(self, limit: int, after: str = "", topics: Sequence[str] = ALL) -> list[StoredSchedule]:
        """Return the first ``limit`` of each table, as ``page`` does."""
        params = [after, *(pattern.replace("*", "%") for pattern in topics)]
        of_topics = " OR ".join(["topic LIKE %s"] * len(topics)) or "1=0"

        def send(server: DatabaseServer, part: Mapping[int, None]) -> list[StoredSchedule]:
            selects = [
                f"SELECT {_columns(server)} FROM {self._shards.schedule_names[table]} s "
                f"WHERE name>%s AND ({of_topics}) ORDER BY name LIMIT {limit:d}"
                for table in part
            ]
            statements = [
                Statement(statement.sql, params * (statement.sql.count("%s") // len(params)))
                for statement in sql.unions(server, selects)
            ]
            return [_stored_of(row) for result in server.run(statements) for row in result.rows]

        everywhere = self._shards.group_tables(dict.fromkeys(range(self._shards.tables)))
        return self._shards.each(everywhere, send).rows()

    def soonest(self, tables: Iterable[int]) -> tuple[dict[int, int], dict[int, Trouble]]:
        """Return when (ms, by this host's clock) the first schedule of each table needs a step, and the
        tables without an answer.

        Tables in which every schedule is paused are left out. A server reads one index entry per table.
        """
        asked = self._clock.now_ms()

        def send(server: DatabaseServer, part: Mapping[int, None]) -> list[tuple[int, int]]:
            now = server.milliseconds(server.from_now(0))
            # An invalid instant, such as 0000-00-00, counts as 0: as NULL it would hide all the others.
            least = f"COALESCE({server.milliseconds('MIN(look_time)')},0)"
            least = f"CASE WHEN MIN(look_time) IS NOT NULL THEN {least} END"
            names = self._shards.schedule_names
            selects = [f"SELECT {table:d},{least},{now} FROM {names[table]}" for table in part]
            with sql.understood():
                return [
                    (int(table), int(look) + max(asked - int(told), 0))
                    for table, look, told in sql.read(server, selects, outwait=False)
                    if look is not None
                ]

        parts = self._shards.each(self._shards.group_tables(dict.fromkeys(tables)), send)
        return {table: look for part in parts.results for table, look in part}, parts.failed

    def due(self, tables: Iterable[int], until: int, limit: int) -> Due:
        """Return at most ``limit`` schedules of each table that need a step by ``until`` (ms), by the
        clocks of this host and of their server.

        Otherwise a host whose clock is ahead would take future occurrences for missed ones. The topics take
        turns, each with the schedule that waits longest: thousands of one topic make no other late.
        """

        def send(server: DatabaseServer, part: Mapping[int, None]) -> list[DueSchedule]:
            pending = f"CASE WHEN t.status={TaskStatus.PENDING:d} THEN 1 ELSE 0 END"
            now = server.from_now(0)
            selects = [
                f"SELECT {_columns(server)},{pending},{server.milliseconds(now)} FROM (SELECT name FROM "
                "(SELECT name,look_time,ROW_NUMBER() OVER (PARTITION BY topic ORDER BY look_time) AS turn "
                f"FROM (SELECT name,look_time,topic FROM {self._shards.schedule_names[table]} "
                f"WHERE look_time<={server.instant(until)} AND look_time<={now} "
                f"ORDER BY look_time LIMIT {MAX_WAITING:d}) w) w ORDER BY turn,look_time LIMIT {limit:d}) w "
                f"JOIN {self._shards.schedule_names[table]} s ON s.name=w.name "
                f"LEFT JOIN {self._shards.names[table]} t ON t.job_id=s.last_job_id"
                for table in part
            ]
            with sql.understood():
                return [
                    DueSchedule(_stored_of(row[:-2]), not int(row[-2]), min(until, int(row[-1])))
                    for row in sql.read(server, selects, outwait=False)
                ]

        parts = self._shards.each(self._shards.group_tables(dict.fromkeys(tables)), send)
        rows = [row for part in parts.results for row in part]
        counts = Counter(self.table_of(row.stored.name) for row in rows)
        return Due(rows, {table for table, count in counts.items() if count >= limit}, parts.failed)

    # --- occurrences

    def ended(self, stored: StoredSchedule) -> bool:
        """Whether the task of the last occurrence has ended, or is gone."""
        if stored.state.last_job_id is None:
            return True
        table = self.table_of(stored.name)
        select = f"SELECT status FROM {self._shards.names[table]} WHERE job_id={stored.state.last_job_id:d}"
        pending = Statement(f"{select} AND status={TaskStatus.PENDING:d}")
        return not self._shards.server_of[table].run([pending])[0].rows

    def planned(self, stored: StoredSchedule, biz_type: int, later_than: int) -> list[Planned]:
        """Return the occurrences whose tasks have not started, are due later than this (ms), and are as the
        schedule made them, by nominal time.

        Leaves out those of a backfill, and those that somebody has rescheduled.
        """
        table, schedule_id = self.table_of(stored.name), stored.state.schedule_id
        server, biz = self._shards.server_of[table], BizId.of(stored.name)
        prefix = f"{schedule_id}/"
        select = Statement(
            f"SELECT job_id,{server.milliseconds('action_time')},{server.text('dedup_key')} "
            f"FROM {self._shards.names[table]} "
            f"WHERE biz_id={biz.number:d} AND biz_type={biz_type:d} AND dedup_key>%s AND dedup_key<%s "
            f"AND next_time>{server.instant(later_than)} AND {UNTOUCHED}",
            [prefix.encode(), f"{prefix}:".encode()],
        )
        found = []
        with sql.understood():
            for job_id, due, key in server.run([select])[0].rows:
                nominal = _nominal(schedule_id, str(key))
                # A backfill makes tasks of past nominal times, due later than they were.
                if nominal is not None and int(due) == nominal + stored.definition.offset:
                    found.append(Planned(int(job_id), nominal))
        return sorted(found, key=lambda planned: planned.nominal)

    def present(self, stored: StoredSchedule, nominals: Iterable[int]) -> set[int]:
        """Return the nominal times (ms) among these that have a task, in any state, also on a topic that the
        schedule had before."""
        keys = {occurrence_key(stored.state.schedule_id, nominal).encode(): nominal for nominal in nominals}
        return {keys[key] for key in self._keyed(stored.name, list(keys))}

    def _keyed(self, name: str, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Return the job_ids of the occurrences with these dedup_keys, of whatever topic."""
        table = self.table_of(name)
        server = self._shards.server_of[table]
        select = (
            f"SELECT job_id,{server.text('dedup_key')} FROM {self._shards.names[table]} "
            f"WHERE biz_id={BizId.of(name).number:d} AND dedup_key IN"
        )
        parts = [keys[first : first + sql.KEYS] for first in range(0, len(keys), sql.KEYS)]
        selects = [Statement(f"{select} ({','.join(['%s'] * len(part))})", part) for part in parts]
        with sql.understood():
            return {
                str(key).encode(): int(job_id)
                for result in server.run(selects)
                for job_id, key in result.rows
            }

    def occurrence_row(
        self, definition: Definition, state: State, occurrence: Occurrence, topic: Topic
    ) -> TaskRow:
        """Return the row of a new task for an occurrence."""
        now, biz, due = self._clock.now_ms(), BizId.of(definition.name), occurrence.due
        return TaskRow(
            job_id=self._job_ids.make(biz.crc), biz_id=biz.number, biz_key=biz.key, biz_type=topic.biz_type,
            status=TaskStatus.PENDING, action_time=due, next_time=due,
            attribute=definition.occurrence_attribute(occurrence.nominal), version=0, attempts=0, crashes=0,
            slot_crc=biz.crc, slot_amount=topic.slot_amount,
            dedup_key=occurrence_key(state.schedule_id, occurrence.nominal), last_error=None,
            gmt_create=now, gmt_modified=now,
            expires_at=due + 1000 * topic.expires_in if topic.expires_in else 0,
        )  # fmt: skip

    # --- writing

    def create(self, definition: Definition, state: State) -> StoredSchedule:
        """Add a schedule. Raises ScheduleExists, or InvalidSchedule if its topic has too many."""
        self._check_room(definition)
        table, text = self.table_of(definition.name), definition.to_json()
        server = self._shards.server_of[table]
        columns = f"name,topic,definition,change_id,{','.join(COLUMNS.values())}"
        into = f"{self._shards.schedule_names[table]} ({columns})"
        fields = ",".join(_literal(server, field, state) for field in COLUMNS)
        values = f"%s,%s,%s,{secrets.randbits(63):d},{fields}"
        insert = Statement(f"INSERT INTO {into} VALUES ({values})", [definition.name, definition.topic, text])
        try:
            server.run([insert])
        except Duplicate:
            other = self.get(definition.name)
            if other is None or other.state.schedule_id != state.schedule_id:  # else: by this call
                raise ScheduleExists(
                    f"schedule {definition.name!r} exists already; `toc schedule alter` changes it"
                ) from None
        return StoredSchedule(definition.name, text, state)

    def _check_room(self, definition: Definition) -> None:
        """Raise InvalidSchedule if the topic has too many in the table of this schedule."""
        table = self.table_of(definition.name)
        count = f"SELECT COUNT(*) FROM {self._shards.schedule_names[table]} WHERE topic=%s"
        counted = self._shards.server_of[table].run([Statement(count, [definition.topic])])
        if int(counted[0].rows[0][0]) >= MAX_OF_TOPIC:
            raise InvalidSchedule(
                f"topic {definition.topic!r} has too many schedules: {MAX_OF_TOPIC} in this one's table; "
                "use tasks that submit the next one, or another topic",
                "topic",
            )

    def move(self, stored: StoredSchedule, step: Step, topic: Topic) -> Move:
        """Return what ``advance`` needs to take a step."""
        rows = [self.occurrence_row(stored.definition, step.state, one, topic) for one in step.made]
        return Move(stored, _after(step.state, rows), rows)

    def advance(self, moves: Iterable[Move]) -> Moved:
        """Move schedules on and insert their tasks, each if no other process has moved it since it was read.

        Raises nothing: what is locked or refused, or on a server that does not answer, is in ``failed``.
        """
        every = list(moves)
        by_table: dict[int, list[int]] = {}  # by number: what is locked or refused is then sent one by one
        for number, move in enumerate(every):
            by_table.setdefault(self.table_of(move.stored.name), []).append(number)
        done: dict[str, Move] = {}

        def send(server: DatabaseServer, part: Mapping[int, list[int]]) -> None:
            these = [(table, every[number]) for table, numbers in part.items() for number in numbers]
            for move in self._advance(server, [one for one in these if one[1].stored.name not in done]):
                done[move.stored.name] = move

        parts = self._shards.each(self._shards.group_tables(by_table), send)
        failed = {every[number].stored.name: error for number, error in parts.failed.items()}
        failed = {name: error for name, error in failed.items() if name not in done}
        return Moved(list(done.values()), failed)

    def change(
        self, stored: StoredSchedule, definition: Definition, state: State,
        cancelled: Sequence[Planned] = (), instead: Iterable[TaskRow] = (),
    ) -> StoredSchedule | None:  # fmt: skip
        """Give a schedule another definition and state, and cancel occurrences that have not started.

        ``instead``: tasks that replace them. Returns None if another process has changed the schedule, or one
        of the occurrences, since it was read; or if this call has, and the reply was lost. Raises
        InvalidSchedule if it comes to a topic that has too many.
        """
        if definition.topic != stored.definition.topic:
            self._check_room(definition)
        anew = definition.topic, definition.to_json()
        after = StoredSchedule(stored.name, anew[1], state._replace(version=stored.state.version + 1))
        return after if self._change(stored, state, cancelled, instead, anew=anew) else None

    def delete(self, stored: StoredSchedule, cancelled: Sequence[Planned] = ()) -> bool:
        """Delete a schedule, and cancel occurrences that have not started. Returns whether it did.

        False: another process has changed or deleted it, or one of the occurrences, since it was read; or
        this call has, and the reply was lost.
        """
        return self._change(stored, stored.state, cancelled, delete=True)

    def _change(
        self, stored: StoredSchedule, state: State, cancelled: Sequence[Planned],
        instead: Iterable[TaskRow] = (), *, anew: tuple[str, str] | None = None, delete: bool = False,
    ) -> bool:  # fmt: skip
        table, change_id, now = self.table_of(stored.name), secrets.randbits(63), self._clock.now_ms()
        server, name = self._shards.server_of[table], self._shards.names[table]
        ours = self._ours(table, stored, change_id)
        update = self._update(server, table, stored, state, change_id, anew)
        statements, place = [update], 0
        if cancelled:
            ended = server.instant(now)
            ids = f"job_id IN ({sql.numbers(one.job_id for one in cancelled)})"
            # Nor has any come due: its task may run, though nothing on the row says so yet.
            still = f"{UNTOUCHED} AND next_time>{server.from_now(0)}"
            as_read = f"SELECT COUNT(*) FROM {name} WHERE {still} AND {ids}"
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
            return server.run(statements, transaction=True)[place].matched == 1
        except Duplicate:  # sent again after a reply was lost: it was committed
            return False

    def _advance(self, server: DatabaseServer, moves: Iterable[tuple[int, Move]]) -> Iterable[Move]:
        """Make moves, in chunks. Yields those that took effect, also if it raises later."""
        ordered = sorted(moves, key=lambda one: (one[0], one[1].stored.name))
        for chunk in sql.bounded(((one, len(one[1].rows) + 1) for one in ordered), TOGETHER):
            try:
                yield from self._send(server, chunk)
            except Duplicate:
                for table, move in chunk:
                    yield from self._alone(server, table, move)

    def _send(self, server: DatabaseServer, chunk: Sequence[tuple[int, Move]]) -> list[Move]:
        """Make moves in one transaction. Returns those that took effect.

        Raises Duplicate, also if it was sent again after a reply was lost and had taken effect before.
        """
        statements: list[Statement] = []
        places = []
        for table, move in chunk:
            change_id = secrets.randbits(63)
            places.append(len(statements))
            statements.append(self._update(server, table, move.stored, move.state, change_id))
            ours = self._ours(table, move.stored, change_id)
            statements += [sql.insert_if(server, self._shards.names[table], row, ours) for row in move.rows]
        results = server.run(statements, transaction=True, outwait=False)
        return [move for place, (_, move) in zip(places, chunk, strict=True) if results[place].matched == 1]

    def _alone(self, server: DatabaseServer, table: int, move: Move) -> list[Move]:
        """Make one move whose job_id or occurrence exists already.

        A backfill may have made the occurrence, which then stays as it is.
        """
        for _ in range(REPEATS):
            keys = [(row.dedup_key or "").encode() for row in move.rows]
            there = self._keyed(move.stored.name, keys)
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

    def _ours(self, table: int, stored: StoredSchedule, change_id: int) -> Statement:
        """Return a FROM clause that yields the row only if its own transaction has changed it."""
        return Statement(
            f"{self._shards.schedule_names[table]} WHERE name=%s AND change_id={change_id:d}", [stored.name]
        )

    def _update(
        self, server: DatabaseServer, table: int, stored: StoredSchedule, state: State, change_id: int,
        anew: tuple[str, str] | None = None,
    ) -> Statement:  # fmt: skip
        # Only what differs: a column that was damaged by hand cannot be written as it was read.
        sets = [
            f"{column}={_literal(server, field, state)}"
            for field, column in COLUMNS.items()
            if field not in FIXED and getattr(state, field) != getattr(stored.state, field)
        ]
        params: list[Param] = []
        if anew is not None:
            sets += ["topic=%s", "definition=%s"]
            params += anew
        sets += ["version=version+1", f"change_id={change_id:d}"]
        sets.append(f"gmt_modified={server.instant(self._clock.now_ms())}")
        return Statement(
            f"UPDATE {self._shards.schedule_names[table]} SET {','.join(sets)} "
            f"WHERE name=%s AND version={stored.state.version:d} "
            f"AND schedule_id={stored.state.schedule_id:d}",
            [*params, stored.name],
        )


def _after(state: State, rows: Sequence[TaskRow]) -> State:
    return state._replace(last_job_id=rows[-1].job_id) if rows else state


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


def _literal(server: DatabaseServer, field: str, state: State) -> str:
    """Return the value of a field as SQL."""
    value = getattr(state, field)
    return "NULL" if value is None else server.instant(value) if field in INSTANTS else f"{value:d}"


def _columns(server: DatabaseServer) -> str:
    """The columns to SELECT for ``_stored_of``."""
    columns = [
        server.milliseconds(f"s.{column}") if field in INSTANTS else f"s.{column}"
        for field, column in COLUMNS.items()
    ]
    return ",".join(["s.name", "s.definition", *columns])


def _stored_of(row: Sequence[object]) -> StoredSchedule:
    """Return the schedule in a row with ``_columns``."""
    with sql.understood():
        name, text, *values = row
        state = State._make([None if value is None else int(str(value)) for value in values])
        return StoredSchedule(str(name), str(text), state._replace(paused=bool(state.paused)))
