"""Advances schedules: makes tasks of their occurrences, shortly before these are due.

The worker that sweeps a table serves its schedules, by time alone. There is no leader, and nothing breaks if
two workers do the same: each step is guarded by the version of the row.

A schedule at rest costs nothing. Every ``LOOK_EVERY`` a table is asked for the least time at which
one of its schedules needs a step, which is one entry of an index. This thread sleeps until exactly
that time and then reads the table. A new or changed schedule need not be announced: the program
that writes it takes the first step, and the next step is mostly further away than ``LOOK_EVERY``.
If it is nearer, it may be taken too late, once, by ``LOOK_EVERY`` at most.

It is time for a step when this host's clock and that of the schedule's server both say so. If this
host's clock were trusted alone and were ahead, future occurrences would be skipped for good. If it
is behind, occurrences are late.

Occurrences are made ``LEAD_MS`` ahead, in steps with rests, so that tasks that are due come first. Each
server of the task table has its own Scheduler, so that one that hangs holds up no other.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from toc.failpoint import failpoint
from toc.maintenance.sweep import Mine, Sweep
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock, RateLimit
from toc.model.errors import InvalidSchedule, SchemaBehind, StoreUnavailable
from toc.model.schedule_state import step
from toc.observe.log import get_logger
from toc.observe.metrics import SCHEDULE_FIRED, SCHEDULE_MISSED, SCHEDULE_SKIPPED, SCHEDULES_STUCK
from toc.store.servers.server import Refused
from toc.store.servers.shards import OF_TABLES, Trouble
from toc.store.store import Store
from toc.store.tasks.scan import DueRow
from toc.store.tasks.schedules import DueSchedule, Move, StoredSchedule

log = get_logger(__name__)

LOOK_EVERY = 1.0
"""How often each table is asked when its next schedule needs a step. If a schedule fires every few seconds
and has an overlap policy to judge, this is when the worker learns of its second occurrence."""
ASKED_PER_SECOND = 100
"""Most tables that are asked a second: a worker with more of them asks each less often."""
TABLES_PER_STEP = 16
ROWS_PER_STEP = 48
"""Schedules that one step moves on, about."""
REST = 5
"""The rest after a step, as a multiple of its time, at most LOOK_EVERY: tasks that are due come first."""
HURRY_MS = 5_000
"""With an occurrence due within this time there is no rest."""
RETRY_SECONDS = 1.0
STUCK_MS = 30_000
"""When a schedule is tried again that this worker cannot move on. Another may understand it."""


class Scheduler:
    """The schedules of this worker's tables of one server, which ``tables`` returns."""

    def __init__(self, store: Store, catalog: TopicCatalog, sweep: Sweep, tables: Mine) -> None:
        self._schedules = store.schedules
        self._catalog = catalog
        self._sweep = sweep
        self._clock: Clock = sweep.clock
        self._mine = tables
        self._tables: frozenset[int] = frozenset()
        self._ask_at = float("-inf")
        """When the tables are asked next (monotonic)."""
        self._agenda: dict[int, int] = {}
        """When each table must be read (ms); none if it holds no schedule."""
        self._complains = RateLimit(sweep.clock)

    def run_once(self) -> float:
        """Ask the tables, if it is time, and move on schedules. Returns the seconds until the next call."""
        before, self._tables = self._tables, self._mine()
        if not self._tables:
            return LOOK_EVERY
        if self._tables - before:
            self._ask_at = float("-inf")
        began = self._clock.monotonic()
        now = self._clock.now_ms()
        times = [(at, table) for table, at in list(self._agenda.items()) if table in self._tables]
        waiting = sorted(pair for pair in times if pair[0] <= now)
        hurry = False
        try:
            if self._ask_at <= began:  # also if some table waits all the time
                self._ask_at = began + max(LOOK_EVERY, len(self._tables) / ASKED_PER_SECOND)
                self._note_failed(self._ask(self._tables - {table for _, table in waiting}))
            if waiting:
                hurry = self._move_on([table for _, table in waiting[:TABLES_PER_STEP]], now)
        except (StoreUnavailable, SchemaBehind) as exc:
            if self._complains("server"):
                log.warning("schedules_not_served", error=str(exc))
            return RETRY_SECONDS
        after = self._clock.monotonic()
        rest = 0.0 if hurry else min(REST * (after - began), LOOK_EVERY)
        agenda = [at for table, at in list(self._agenda.items()) if table in self._tables]
        until = (min(agenda) - self._clock.now_ms()) / 1000 if agenda else LOOK_EVERY
        return max(rest, min(until, self._ask_at - after), 0.0)

    def _ask(self, tables: AbstractSet[int]) -> Mapping[int, Trouble]:
        """Ask tables when they must be read. Returns those without an answer."""
        soonest, failed = self._schedules.soonest(tables)
        for table in tables - failed.keys():
            self._agenda.pop(table, None)
        self._agenda |= soonest
        return failed

    def _move_on(self, tables: list[int], now: int) -> bool:
        """Move on schedules of these tables that need a step. Returns whether more are in a hurry."""
        limit = max(ROWS_PER_STEP // len(tables), 4)
        due = self._schedules.due(tables, now, limit)
        moves = []
        hurry = False
        for one in due.rows:
            move, nominal = self._move(one), one.stored.state.next_time
            moves.append(move)
            if move.rows and nominal is not None:
                hurry |= nominal + one.stored.definition.offset - one.now < HURRY_MS
        failpoint("schedule.rows-read")
        moved = self._schedules.advance(moves)
        failpoint("schedule.rows-written")
        for move in moved.done:
            self._tell(move)
        rows = [
            DueRow(row.job_id, row.biz_type, row.next_time, 0, row.slot_crc, row.slot_amount)
            for move in moved.done
            for row in move.rows
        ]
        if rows:
            self._sweep.add(rows)
        # Ask when these tables must be read next, except those of which more rows are due now.
        failed = self._ask(set(tables) - due.more - due.failed.keys())
        # Those come after all other tables that wait now.
        self._agenda |= dict.fromkeys(due.more, self._clock.now_ms())
        for name, error in moved.failed.items():
            if isinstance(error, Refused) and self._complains("row"):
                log.warning("schedule_refused", schedule=name, error=str(error))
        failed_tables = {self._schedules.table_of(name): error for name, error in moved.failed.items()}
        self._note_failed({**failed_tables, **due.failed, **failed})
        return hurry and bool(due.more)

    def _move(self, due: DueSchedule) -> Move:
        stored, ended, now = due
        try:
            definition = stored.definition
            # Not get(): that may wait for the server of the topic table.
            topic = self._catalog.known().get(definition.topic)
            if topic is None or topic.closed:
                return self._stuck(stored, now, f"there is no topic {definition.topic!r} that takes tasks")
            return self._schedules.move(stored, step(definition, stored.state, now, ended=ended), topic)
        except InvalidSchedule as exc:  # also by a step: the file of its zone may be gone by now
            return self._stuck(stored, now, str(exc))
        except OverflowError as exc:
            return self._stuck(stored, now, f"its row is damaged, a time is out of range: {exc}")

    def _stuck(self, stored: StoredSchedule, now: int, why: str) -> Move:
        """Put a schedule off that cannot be moved on here."""
        SCHEDULES_STUCK.of().add()
        if self._complains(("schedule", stored.name)):
            log.warning("schedule_stuck", schedule=stored.name, error=why)
        return Move(stored, stored.state._replace(look=now + STUCK_MS), [])

    def _tell(self, move: Move) -> None:
        before, after = move.stored.state, move.state
        missed, skipped = after.missed - before.missed, after.skipped - before.skipped
        if move.rows or missed or skipped:
            topic = move.stored.definition.topic
            SCHEDULE_FIRED.of(topic).add(len(move.rows))
            SCHEDULE_SKIPPED.of(topic).add(skipped)
            SCHEDULE_MISSED.of(topic).add(missed)
        if missed:
            log.warning("schedule_missed", schedule=move.stored.name, occurrences=missed, made=len(move.rows))

    def _note_failed(self, failed: Mapping[int, Trouble]) -> None:
        """Plan to read tables that did not answer again in a moment. Raises the error if the whole
        server failed."""
        later = self._clock.now_ms() + int(RETRY_SECONDS * 1000)
        self._agenda |= dict.fromkeys(failed, later)
        for error in failed.values():
            if not isinstance(error, OF_TABLES):
                raise error
            if self._complains("table"):
                log.warning("schedules_not_served", error=str(error))
