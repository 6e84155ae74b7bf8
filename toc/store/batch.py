"""Many tasks in one round trip per server: read, finish, fail, die, redrive, scan.

Every update is guarded by what its caller had read, so it can be sent twice, and every outcome of a guard has
a name. A row that ends (status 2, 3, 4) gets the time of its end as next_time: the index (status, next_time)
then serves the sweep (toc.store.scan), the list of dead letters and the purge.
"""

# ruff: noqa: S608 - SQL is made of our own names and of numbers; texts are parameters (toc.store.server)

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeVar

from toc.model.clock import Clock
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.task import TaskRow, TaskStatus, TryRow
from toc.model.verdict import Failure
from toc.store import bodies
from toc.store import rows as sql
from toc.store.health import PATIENCE_SECONDS, Ail, drain
from toc.store.history import FailedTry, line
from toc.store.leases import NO_LEASE, Leases
from toc.store.schema import MAX_ERROR_CHARS, MAX_HISTORY_CHARS
from toc.store.server import DatabaseServer, Exchange, Result, Statement
from toc.store.shards import Answers, Parts, Shards, Trouble

PENDING, PROCESSED = int(TaskStatus.PENDING), int(TaskStatus.PROCESSED)
CANCELLED, DEAD = int(TaskStatus.CANCELLED), int(TaskStatus.DEAD)


R = TypeVar("R")

SLICE_SECONDS = 0.001
"""Seconds to wait for each of several servers before looking at the next one."""

TakeTries = Callable[[Sequence[int], Answers[TryRow]], None]
"""Callback that gets the ids whose rows were to be read, and the answers."""


class Owing(StoreUnavailable):
    """The server still owes answers to other callers; those will show whether it is out of reach.

    ``seconds``: when it will have answered, for a far server; None: the answers are overdue.
    """

    def __init__(self, text: str, seconds: float | None) -> None:
        super().__init__(text)
        self.seconds = seconds


class _Begun(NamedTuple):
    """A request to one server for the rows of these ids, by table."""

    server: DatabaseServer
    ids: Mapping[int, Sequence[int]]
    exchange: Exchange | None
    future: Future[Answers[TryRow]] | None
    """Replaces the exchange if there was no idle connection."""
    at: float
    """When the request was sent, on the monotonic clock."""

    def answered(self, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the answers are there."""
        if self.exchange is not None:
            return self.exchange.answered(seconds)
        assert self.future is not None  # noqa: S101 - it is one of the two
        return bool(wait([self.future], seconds).done)


class OpenTasks(NamedTuple):
    """How many tasks of a topic have not ended well. ``held``: of the pending, those leased or handed out."""

    pending: int = 0
    held: int = 0
    dead: int = 0


class Finish(Enum):
    """The outcome of finishing a task."""

    DONE = "done"
    """This update marked the row as processed."""
    ALREADY = "already"
    """The row was processed before: this run was a duplicate."""
    CANCELLED = "cancelled"
    """The row is cancelled. It is now marked as tried, so that a cancel cannot claim otherwise."""
    DEAD = "dead"
    """The row is dead."""
    RESCHEDULED = "rescheduled"
    """The row is pending under another version: the task has a new deadline."""
    MISSING = "missing"
    """The task has no row."""


class Guard(Enum):
    """The outcome of a guarded update of one row."""

    APPLIED = "applied"
    LOST = "lost"
    """The row is no longer as it was read: another update came first."""


_ENDED = {
    PROCESSED: Finish.ALREADY,
    CANCELLED: Finish.CANCELLED,
    DEAD: Finish.DEAD,
    PENDING: Finish.RESCHEDULED,
}


class Batches:
    """The part of the Store that works on many tasks. Thread-safe."""

    def __init__(self, shards: Shards, leases: Leases, clock: Clock) -> None:
        self._shards = shards
        self.leases = leases
        self._clock = clock
        self._last_stamp = 0
        self._try_columns = {server: sql.try_columns(server) for server in shards.servers}

    # --- reading -------------------------------------------------------------------------------------------

    def read(self, job_ids: Iterable[int]) -> dict[int, TaskRow]:
        """Return the existing rows by job_id."""
        parts = self._shards.each(self._shards.group(job_ids), self._read, gated=False).whole()
        return {job_id: row for part in parts for job_id, row in part.items()}

    def read_each(self, job_ids: Iterable[int]) -> Answers[TaskRow]:
        """Return the existing rows by job_id; does not wait for a server known to be away."""
        return _joined(self._shards.each(self._shards.group(job_ids), self._read))

    def read_tries(self, job_ids: Iterable[int]) -> Answers[TryRow]:
        """Return the columns that a try needs, by job_id."""
        return self._tries(self._shards.group(job_ids))

    def _tries(self, ids: Mapping[DatabaseServer, Mapping[int, Sequence[int]]]) -> Answers[TryRow]:
        def read(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> list[TryRow]:
            results = server.run(self._select_tries(server, ids), outwait=False)
            return self.leases.judged(server, sql.try_rows(results))

        parts = self._shards.each(ids, read)
        return Answers({row.job_id: row for part in parts.results for row in part}, parts.failed)

    def _select_tries(self, server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> list[Statement]:
        return sql.select_by_id(server, self._try_columns[server], self._shards.names, ids)

    def check_tries(self, job_ids: Iterable[int], take: TakeTries) -> None:
        """Read the rows for tries without waiting: ``take`` gets the ids of each server, and its answers.

        ``take`` is called as answers come. For a server without an answer within PATIENCE_SECONDS it is
        called later, on another thread; for one of several servers that is usually slow, always so. Until
        then that server gets no further requests: its ids are reported as not answered.
        """
        begun: list[_Begun] = []
        for server, ids in self._shards.group(job_ids).items():
            health = self._shards.health[server]
            free: Mapping[int, Sequence[int]] = ids
            if health.troubled:
                free, failed = health.sort_out(ids, writes=False)
                if free and health.owing:
                    seconds = health.owing_seconds if health.slow else None
                    error = Owing(f"{server.name}: has not answered yet", seconds)
                    free, failed = {}, dict.fromkeys(ids, error)
                _refuse(ids, failed, take)
            if not free:
                continue
            one = self._begin_tries(server, free)
            if health.slow and len(self._shards.servers) > 1:
                self._take_later(one, take)
            else:
                begun.append(one)
        deadline = time.monotonic() + PATIENCE_SECONDS
        patience = PATIENCE_SECONDS if len(begun) == 1 else SLICE_SECONDS
        while begun:
            late = time.monotonic() >= deadline
            waiting = []
            for one in begun:
                if self._answered(one, 0.0 if late else patience):
                    self._take_tries(one, take)
                elif late:
                    self._take_later(one, take)
                else:
                    waiting.append(one)
            begun = waiting

    def _answered(self, one: _Begun, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the answers are there, and records the time in the
        health."""
        if not one.answered(seconds):
            return False
        if one.exchange is not None:
            self._shards.health[one.server].answered(time.monotonic() - one.at)
        return True

    def _take_later(self, one: _Begun, take: TakeTries) -> None:
        """Let another thread wait for the answers."""
        self._shards.health[one.server].owes(1, one.at)
        self._shards.soon(partial(self._wait_for_tries, one, take))

    def _begin_tries(self, server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> _Begun:
        exchange, at = None, time.monotonic()
        # Rows that fail here are read once more, on a thread that may wait.
        with contextlib.suppress(StoreUnavailable):
            exchange = server.begin(self._select_tries(server, ids))
        if exchange is not None:
            return _Begun(server, ids, exchange, None, at)
        return _Begun(server, ids, None, self._shards.soon(lambda: self._tries({server: ids})), at)

    def _take_tries(self, one: _Begun, take: TakeTries) -> None:
        """Pass on the answers, which are there."""
        server, ids, exchange, future, _ = one
        asked = [job_id for part in ids.values() for job_id in part]
        if future is not None:
            take(asked, future.result())
            return
        assert exchange is not None  # noqa: S101 - it is one of the two
        try:
            rows = sql.try_rows(exchange.results())
        except (StoreUnavailable, SchemaBehind):
            # Usually a broken connection.
            self._shards.soon(lambda: take(asked, self._tries({server: ids})))
            return
        foreign = any(map(self.leases.of_others, rows))
        if foreign and len(self._shards.servers) > 1:
            self._shards.soon(lambda: take(asked, self._judged(server, asked, rows)))
        elif foreign:
            take(asked, self._judged(server, asked, rows))
        else:
            # A worker ignores its own leases: it runs under them what it takes from the table.
            take(asked, Answers({row.job_id: row for row in self.leases.judged(server, rows)}))

    def _judged(self, server: DatabaseServer, ids: Sequence[int], rows: list[TryRow]) -> Answers[TryRow]:
        try:
            return Answers({row.job_id: row for row in self.leases.judged(server, rows)})
        except (StoreUnavailable, SchemaBehind) as exc:
            return Answers({}, dict.fromkeys(ids, exc))

    def _wait_for_tries(self, one: _Begun, take: TakeTries) -> None:
        """Find out why a server does not answer. Take what is available, and wait for the rest."""
        server, ids, exchange, _, at = one
        health = self._shards.health[server]
        if self._answered(one, max(at + health.patience - time.monotonic(), 0.0)):
            health.owes(-1)
            self._take_tries(one, take)
            return
        locked = False
        try:
            ail = health.examine(exchange, partial(self._answered, one))
            if ail is Ail.LOCKED and exchange is not None:
                health.find_locked(ids, writes=False)
                free, failed = health.sort_out(ids, writes=False)
                locked = bool(failed)
                _refuse(ids, failed, take)
                if locked and free:  # these need not wait for the others
                    take([job_id for part in free.values() for job_id in part], self._tries({server: free}))
            if not locked:
                self._take_tries(one, take)
        finally:
            health.owes(-1)
        if locked and exchange is not None:
            drain(exchange)

    def stamped_above(self, tables: Iterable[int], biz_type: int, slot_amount: int) -> set[int]:
        """Return those tables in which a pending row of a biz_type has a larger slot_amount.

        Reads every pending row of the tables that have none.
        """
        where = _above(biz_type, slot_amount)
        results = self._scan(
            tables, lambda table, name: f"SELECT {table:d} FROM {name} WHERE {where} LIMIT 1"
        )
        return {row[0] for result in results for row in result.rows}

    def count_stamped(self, tables: Iterable[int], biz_type: int) -> Counter[int]:
        """Count the pending rows of a biz_type by slot_amount, in these tables.

        Reads all their pending rows, so pass only a few of many tables at a time.
        """
        results = self._scan(
            tables,
            lambda _table, name: (
                f"SELECT slot_amount,COUNT(*) FROM {name} WHERE status={PENDING} AND biz_type={biz_type:d} "
                "GROUP BY slot_amount"
            ),
        )
        counts: Counter[int] = Counter()
        for result in results:
            for amount, count in result.rows:
                counts[amount] += count
        return counts

    def count_open(self, tables: Iterable[int], biz_type: int) -> OpenTasks:
        """Count the tasks of a biz_type that have not ended well, in these tables.

        Reads all their pending and dead rows, so pass only a few of many tables at a time.
        """

        def count(server: DatabaseServer, part: Mapping[int, None]) -> list[Result]:
            now = server.from_now(0)
            held = f"lease_until>{now} OR (pull_nonce IS NOT NULL AND next_time>{now})"
            selects = [
                f"SELECT status,COUNT(*),COALESCE(SUM(CASE WHEN {held} THEN 1 ELSE 0 END),0) "
                f"FROM {self._shards.names[table]} WHERE status IN ({PENDING},{DEAD}) "
                f"AND biz_type={biz_type:d} GROUP BY status"
                for table in part
            ]
            return server.run(sql.unions(server, selects))

        parts = self._shards.each(self._shards.group_tables(dict.fromkeys(tables)), count).whole()
        rows = [row for part in parts for result in part for row in result.rows]
        pending = [(count, held) for status, count, held in rows if status == PENDING]
        return OpenTasks(
            sum(count for count, _ in pending),
            sum(int(held) for _, held in pending),
            sum(count for status, count, _ in rows if status == DEAD),
        )

    # --- guarded changes -------------------------------------------------------------------------------

    def finish(self, items: Iterable[tuple[int, int]]) -> Answers[Finish]:
        """Mark tasks, given as (job_id, version), as processed if they are pending under that version.

        The result has an outcome for every job_id.
        """
        versions = dict(items)
        now = self._stamp()
        parts = self._shards.each(
            self._shards.group(versions),
            lambda server, ids: self._finish(server, ids, versions, now),
            writes=True,
        )
        return _joined(parts)

    def _finish(
        self, server: DatabaseServer, ids: Mapping[int, Sequence[int]], versions: Mapping[int, int], now: int
    ) -> dict[int, Finish]:
        groups: dict[tuple[int, int], list[int]] = {}
        for table, part in ids.items():
            for job_id in part:
                groups.setdefault((table, versions[job_id]), []).append(job_id)
        ended = server.instant(now)
        results = server.run(
            [
                Statement(
                    f"UPDATE {self._shards.names[table]} SET status={PROCESSED},next_time={ended},"
                    f"gmt_modified={ended} WHERE job_id IN ({sql.numbers(part)}) "
                    f"AND status={PENDING} AND version={version:d}"  # [rule: success-fence]
                )
                for (table, version), part in groups.items()
            ],
            transaction=True,
            patient=True,
            outwait=False,
        )
        cases = dict.fromkeys((job_id for part in groups.values() for job_id in part), Finish.DONE)
        doubtful: dict[int, list[int]] = {}
        for ((table, _version), part), result in zip(groups.items(), results, strict=True):
            if result.matched != len(part):
                doubtful.setdefault(table, []).extend(part)
        if not doubtful:
            return cases
        rows = self._read(server, doubtful)
        for part in doubtful.values():
            for job_id in part:
                row = rows.get(job_id)
                if row is None:
                    cases[job_id] = Finish.MISSING
                elif row.status != PROCESSED or row.gmt_modified != now:  # else: by this call
                    cases[job_id] = _ENDED.get(row.status, Finish.MISSING)  # a status that toc does not write
        self._mark_tried(server, self._shards.group(_those(cases, Finish.CANCELLED)).get(server, {}))
        return cases

    def fail(self, items: Sequence[Failure]) -> Answers[Guard]:
        """Write failed tries on pending rows whose version, attempts and crashes are still as given, and that
        no other worker has leased."""
        return self._fail(items, self.leases.free)  # [rule: lease-fence]

    def count(self, items: Sequence[Failure]) -> Answers[Guard]:
        """Count tries that begin, on rows that are unchanged. They keep this worker's lease."""
        return self._fail(items, self.leases.free, self.leases.kept())

    def crash(self, items: Sequence[Failure]) -> Answers[Guard]:
        """Write tries that ended with their workers, except on rows that a live worker has leased by now.

        Not even if this worker has: its fallback may have taken the row since its reclaim read it.
        """
        return self._fail(items, self.leases.unleased)  # [rule: crash-unleased]

    def _fail(
        self, items: Sequence[Failure], free: Callable[[DatabaseServer], str], lease: str = NO_LEASE
    ) -> Answers[Guard]:
        now = self._stamp()
        return self._guarded(
            items,
            free,
            lambda server, item: (
                f"attempts={item.new_attempts:d},crashes={item.new_crashes:d},"
                f"next_time={server.instant(item.next_time)},gmt_modified={server.instant(now)}"
                f"{_noted(server, item, now)}"
            ),
            lease,
        )

    def die(self, items: Sequence[Failure]) -> Answers[Guard]:
        """Mark rows as dead if they are unchanged since they were read. Their next_time becomes the time of
        death.

        Those that have expired before any try started become cancelled.
        """
        return self._die(items, self.leases.free)

    def expire(self, items: Sequence[Failure]) -> Answers[Guard]:
        """End rows like ``die``, except those that any live worker has leased by now, this one included."""
        return self._die(items, self.leases.unleased)

    def _die(self, items: Sequence[Failure], free: Callable[[DatabaseServer], str]) -> Answers[Guard]:
        now = self._stamp()
        return self._guarded(
            items,
            free,
            lambda server, item: (
                f"status={DEAD if item.started else CANCELLED},{'expired=1,' if item.expired else ''}"
                f"attempts={item.new_attempts:d},crashes={item.new_crashes:d},"
                f"next_time={server.instant(now)},gmt_modified={server.instant(now)}"
                f"{_noted(server, item, now)}"
            ),
        )

    def _guarded(
        self,
        items: Iterable[Failure],
        free: Callable[[DatabaseServer], str],
        changes: Callable[[DatabaseServer, Failure], str],
        lease: str = NO_LEASE,
    ) -> Answers[Guard]:
        by_id = {item.job_id: item for item in items}

        def send(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> dict[int, Guard]:
            order = [(table, by_id[job_id]) for table, part in ids.items() for job_id in part]
            nobody = free(server)
            results = server.run(
                [
                    Statement(
                        f"UPDATE {self._shards.names[table]} SET {changes(server, item)},{lease}"
                        f"{'' if item.error is None else ',last_error=%s'} "
                        # [rule: failure-fence]
                        f"WHERE job_id={item.job_id:d} AND status={PENDING} AND version={item.version:d} "
                        f"AND attempts={item.attempts:d} AND crashes={item.crashes:d} AND {nobody}",
                        () if item.error is None else (_error_text(item.error),),
                    )
                    for table, item in order
                ],
                transaction=True,
                outwait=False,
            )
            return {
                item.job_id: Guard.APPLIED if result.matched == 1 else Guard.LOST
                for (_table, item), result in zip(order, results, strict=True)
            }

        return _joined(self._shards.each(self._shards.group(by_id), send, writes=True))

    def mark_tried(self, job_ids: Iterable[int]) -> dict[int, Trouble]:
        """Record on cancelled rows that a try may have started (attempts >= 1).

        Returns those whose tables do not answer, with the reason.
        """
        return self._shards.each(self._shards.group(job_ids), self._mark_tried, writes=True).failed

    def mark_begun(self, job_ids: Iterable[int], what: str) -> dict[int, Trouble]:
        """Record on rows, as last error if they have none, that a try had begun that charges nothing.

        For rows that are pending or were cancelled a moment ago. A cancel then knows that the task was tried.
        Guards ignore it. Returns those whose tables do not answer, with the reason.
        """

        def send(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> None:
            server.run(
                [
                    Statement(
                        f"UPDATE {self._shards.names[table]} SET last_error=COALESCE(last_error,%s) "
                        f"WHERE job_id IN ({sql.numbers(part)}) AND status IN ({PENDING},{CANCELLED})",
                        (_error_text(what),),
                    )
                    for table, part in ids.items()
                ],
                transaction=True,
                outwait=False,
            )

        return self._shards.each(self._shards.group(job_ids), send, writes=True).failed

    def redrive(self, job_ids: Iterable[int], now_ms: int) -> list[TaskRow]:
        """Make dead tasks pending, due at ``now_ms``, with all their tries and version + 1; last_error stays.

        They no longer expire.
        Returns the changed rows.
        """
        changed = self._stamp()

        def send(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> list[TaskRow]:
            now, stamp, what = server.instant(now_ms), server.instant(changed), sql.columns(server)
            statements = []
            for table, part in ids.items():
                name, where = self._shards.names[table], f"job_id IN ({sql.numbers(part)})"
                statements.append(
                    Statement(  # [rule: new-version]
                        f"UPDATE {name} SET status={PENDING},version=version+1,attempts=0,crashes=0,"
                        f"expires_at=NULL,expired=0,next_time={now},gmt_modified={stamp},{NO_LEASE} "
                        f"WHERE {where} AND status={DEAD}"
                    )
                )
                # by its stamp, so that a resend after a lost answer still finds the rows
                statements.append(
                    Statement(
                        f"SELECT {what} FROM {name} "
                        f"WHERE {where} AND status={PENDING} AND gmt_modified={stamp}"
                    )
                )
                statements.append(bodies.follow(self._shards.body_names[table], name, part))
            return sql.task_rows(server.run(statements, transaction=True)[1::3])

        parts = self._shards.each(self._shards.group(job_ids), send, writes=True, gated=False)
        return [row for part in parts.whole() for row in part]

    # --- shared ------------------------------------------------------------------------------------------

    def _stamp(self) -> int:
        """Return a new instant near now: a call recognizes the rows that it changed by their gmt_modified.

        Two concurrent threads may get the same instant, which is harmless: they never change one row at once.
        """
        self._last_stamp = stamp = max(self._clock.now_ms(), self._last_stamp + 1)
        return stamp

    def _read(self, server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> dict[int, TaskRow]:
        results = server.run(sql.select_by_id(server, sql.columns(server), self._shards.names, ids))
        return {row.job_id: row for row in sql.task_rows(results)}

    def _scan(self, tables: Iterable[int], select: Callable[[int, str], str]) -> list[Result]:
        """Run the same SELECT on tables, given each table's number and name, in one round trip per server."""
        names = self._shards.names
        parts = self._shards.each(
            self._shards.group_tables(dict.fromkeys(tables)),
            lambda server, part: server.run(
                sql.unions(server, [select(table, names[table]) for table in part])
            ),
        )
        return [result for part in parts.whole() for result in part]

    def _mark_tried(self, server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> None:
        if ids:
            server.run(
                [
                    Statement(
                        f"UPDATE {self._shards.names[table]} SET attempts={server.greatest}(attempts,1) "
                        f"WHERE job_id IN ({sql.numbers(part)}) AND status={CANCELLED}"
                    )
                    for table, part in ids.items()
                ],
                transaction=True,
                outwait=False,
            )


def _refuse(ids: Mapping[int, Sequence[int]], failed: Mapping[int, Trouble], take: TakeTries) -> None:
    """Report the ids of these tables as not answered."""
    if failed:
        refused = {job_id: error for table, error in failed.items() for job_id in ids[table]}
        take(list(refused), Answers({}, refused))


def _joined(parts: Parts[dict[int, R]]) -> Answers[R]:
    """Join the answers of all parts."""
    return Answers(
        {job_id: answer for part in parts.results for job_id, answer in part.items()}, parts.failed
    )


def _above(biz_type: int, slot_amount: int) -> str:
    return f"status={PENDING} AND biz_type={biz_type:d} AND slot_amount>{slot_amount:d}"


def _those(cases: Mapping[int, Finish], case: Finish) -> list[int]:
    return [job_id for job_id, other in cases.items() if other is case]


def _noted(server: DatabaseServer, item: Failure, now: int) -> str:
    """Return the SQL that adds a failed try to the row's history."""
    if item.error is None:
        return ""
    failed = FailedTry(item.new_attempts, item.new_crashes, item.version, now, item.error)
    return f",history={server.appended('history', line(failed), MAX_HISTORY_CHARS)}"


def _error_text(error: str) -> str:
    """Truncate an error for storage, without characters that UTF-8 cannot encode."""
    return error[:MAX_ERROR_CHARS].encode(errors="replace").decode()
