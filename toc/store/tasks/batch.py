"""Many tasks in one round trip per server: read, finish, fail, die, redrive, charge.

Every update is guarded by what its caller had read, so it can be sent twice, and every outcome of a guard has
a name. A row that ends (status 2, 3, 4) gets the time of its end as next_time: the index (status, next_time)
then serves the sweep (toc.store.tasks.scan), the list of dead letters and the purge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from toc.model.clock import SET_BACK_MS, Clock
from toc.model.raised import Delivered
from toc.model.task import TaskRow, TaskStatus
from toc.model.verdict import Failure
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Answers, Parts, Shards, Trouble
from toc.store.tasks import bodies
from toc.store.tasks import rows as sql
from toc.store.tasks.history import FailedTry, Late, added, error_text, with_late
from toc.store.tasks.leases import NO_LEASE, Leases, held
from toc.store.tasks.pulls import FREE
from toc.store.tasks.tries import Tries

PENDING, PROCESSED, CANCELLED, DEAD = map(int, TaskStatus)
FINAL = (TaskStatus.PROCESSED, TaskStatus.CANCELLED)

SentTries = Mapping[int, tuple[int, Delivered]]
"""Delivered webhooks by job_id: the number of the try, and what was answered."""
NOT_SENT: SentTries = {}
NOT_LATE: Late = {}
SLOT_ROWS, LEAST_ROWS = 16_384, 16
"""How many rows are read to show what slots hold, and how many of each table at least."""


class SlotTasks(NamedTuple):
    """How many tasks of a slot have not ended well. ``held``: of the pending;
    ``due``: of the others; ``first``: when the first of these is due (ms)."""

    pending: int = 0
    held: int = 0
    due: int = 0
    dead: int = 0
    first: int | None = None


class Finish(Enum):
    """The outcome of finishing a task."""

    DONE = "done"
    """This update marked the row as processed."""
    ALREADY = "already"
    """The row was processed before: this run was a duplicate."""
    CANCELLED = "cancelled"
    """The row is cancelled. It is now marked as tried, so that a cancel does not claim that no try ran."""
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
    PROCESSED: Finish.ALREADY, CANCELLED: Finish.CANCELLED, DEAD: Finish.DEAD, PENDING: Finish.RESCHEDULED,
}  # fmt: skip


class Batches(Tries):
    """The part of the Store that works on many tasks. Thread-safe."""

    def __init__(self, shards: Shards, leases: Leases, clock: Clock) -> None:
        super().__init__(shards, leases)
        self._clock = clock
        self._last_stamp = 0

    # --- reading -------------------------------------------------------------------------------------------

    def read(self, job_ids: Iterable[int]) -> dict[int, TaskRow]:
        """Return the existing rows by job_id; also asks a server that is marked as away."""
        rows: dict[int, TaskRow] = {}
        for server, ids in self._shards.group(job_ids).items():
            rows |= self._read(server, ids)
        return rows

    def read_each(self, job_ids: Iterable[int]) -> Answers[TaskRow]:
        """Return the existing rows by job_id, of the servers that answer."""
        return self._shards.each(self._shards.group(job_ids), self._read).joined()

    def count_by_slot(self, now_ms: int, *, ahead: bool) -> tuple[dict[tuple[int, int], SlotTasks], bool]:
        """Count the tasks that have not ended well, by biz_type and number of the slot.

        Those that are not due only if ``ahead``: then of the first tasks of each table, else of all. Returns
        also whether there may be more.
        """
        slot = "slot_crc & (slot_amount-1)"  # a power of two
        each = max(LEAST_ROWS, SLOT_ROWS // self._shards.tables)
        first = f"ORDER BY next_time,job_id LIMIT {each:d}"

        def count(server: DatabaseServer, part: Mapping[int, None]) -> list[Any]:
            due, pending, dead = f"next_time<={server.instant(now_ms)}", f"status={PENDING}", f"status={DEAD}"
            taken, time_ms = f"{pending} AND ({held(server)})", server.milliseconds("next_time")
            counts = [
                f"SUM({pending})",
                f"SUM(CASE WHEN {taken} THEN 1 ELSE 0 END)",
                f"SUM(CASE WHEN {taken} THEN 0 WHEN {pending} AND {due} THEN 1 ELSE 0 END)",
                f"SUM({dead})",
                f"MIN(CASE WHEN {taken} THEN NULL WHEN {pending} THEN {time_ms} END)",
            ]
            what = "biz_type,slot_crc,slot_amount,status,next_time,lease_until,pull_nonce"
            statements = []
            for table in part:
                rows = f"{self._shards.names[table]} WHERE"
                firsts = server.union(f"SELECT {what} FROM {rows} {of} {first}" for of in (pending, dead))
                of = f"({firsts}) AS firsts" if ahead else f"{rows} {pending} AND {due} OR {dead}"
                groups = f"SELECT {table:d},biz_type,{slot},{','.join(counts)} FROM {of}"
                statements.append(Statement(f"{groups} GROUP BY biz_type,{slot}"))
            return [row for result in server.run(statements) for row in result.rows]

        everywhere = self._shards.group_tables(dict.fromkeys(range(self._shards.tables)))
        found: dict[tuple[int, int], SlotTasks] = {}
        read: Counter[tuple[int, int]] = Counter()
        for table, biz_type, number, *counts, first_due in self._shards.each(everywhere, count).rows():
            before = found.get((biz_type, number), SlotTasks())
            sums = [a + int(b) for a, b in zip(before[:4], counts, strict=True)]
            firsts = [one for one in (first_due, before.first) if one is not None]
            found[biz_type, number] = SlotTasks._make([*sums, min(firsts, default=None)])
            read += Counter({(table, PENDING): int(counts[0]), (table, DEAD): int(counts[3])})
        return found, ahead and max(read.values(), default=0) >= each

    # --- guarded changes -------------------------------------------------------------------------------

    def finish(
        self, items: Iterable[tuple[int, int]], sent: SentTries = NOT_SENT, late: Late = NOT_LATE
    ) -> Answers[Finish]:
        """Mark tasks, given as (job_id, version), as processed if they are pending under that version.

        What ``sent`` holds of them is added to their histories, and what ``late`` holds to their rows. The
        result has an outcome for every job_id.
        """
        versions, now = dict(items), self._stamp()
        finish = partial(self._finish, versions=versions, now=now, sent=sent, late=late)
        return self._shards.each(self._shards.group(versions), finish, locks=True).joined()

    def _finish(
        self, server: DatabaseServer, ids: sql.ByTable, *, versions: Mapping[int, int],
        now: int, sent: SentTries, late: Late,
    ) -> dict[int, Finish]:  # fmt: skip
        groups, ended = sql.alike(ids, versions), server.instant(now)
        updates = [
            Statement(
                f"UPDATE {server.by_primary_key(self._shards.names[table])} "
                f"SET status={PROCESSED},next_time={ended},"
                f"gmt_modified={ended}{_delivered(server, part, sent, version, now)}"
                f"{with_late(server, part, late, ',')} WHERE job_id IN ({sql.numbers(part)}) "
                f"AND status={PENDING} AND version={version:d}"  # [rule: success-fence]
            )
            for (table, version), part in groups.items()
        ]
        results = server.run(updates, transaction=True, patient=True, outwait=False)
        cases = dict.fromkeys((job_id for part in groups.values() for job_id in part), Finish.DONE)
        doubtful: list[int] = []
        for part, result in zip(groups.values(), results, strict=True):
            if result.matched != len(part):
                doubtful += part
        if not doubtful:
            return cases
        rows = self._read(server, self._shards.group(doubtful)[server])
        for job_id in doubtful:
            row = rows.get(job_id)
            if row is None:
                cases[job_id] = Finish.MISSING
            elif row.status != PROCESSED or row.gmt_modified != now:  # else: by this call
                cases[job_id] = _ENDED.get(row.status, Finish.MISSING)  # a status that toc does not write
        cancelled = [job_id for job_id, case in cases.items() if case is Finish.CANCELLED]
        self._mark_tried(server, self._shards.group(cancelled).get(server, {}))
        return cases

    def fail(self, items: Sequence[Failure], late: Late = NOT_LATE) -> Answers[Guard]:
        """Write failed tries on pending rows whose version, attempts and crashes are still as given, and that
        no other worker has leased."""
        return self._guarded(items, self.leases.free, late)  # [rule: lease-fence]

    def crash(self, items: Sequence[Failure]) -> Answers[Guard]:
        """Write tries that ended with their workers, except on rows that a live worker has leased.

        Rows that this worker has leased are left out too: it may have taken them after
        its reclaim read them.
        """
        return self._guarded(items, self.leases.unleased)  # [rule: crash-unleased]

    def die(self, items: Sequence[Failure], late: Late = NOT_LATE) -> Answers[Guard]:
        """Mark rows as dead if they are unchanged since they were read. Their next_time becomes the time of
        death.

        Those that have expired before any try started become cancelled. What ends by time alone must be due,
        and have expired, by the clock of its server too: that of a host may be ahead.
        """
        return self._guarded(items, self.leases.free, late, ends=True)

    def expire(self, items: Sequence[Failure]) -> Answers[Guard]:
        """End rows like ``die``, except those that any live worker has leased by now, this one included."""
        return self._guarded(items, self.leases.unleased, ends=True)

    def _guarded(
        self, items: Iterable[Failure], free: Callable[[DatabaseServer], str], late: Late = NOT_LATE, *,
        ends: bool = False,
    ) -> Answers[Guard]:  # fmt: skip
        by_id, now = {item.job_id: item for item in items}, self._stamp()

        def send(server: DatabaseServer, ids: sql.ByTable) -> dict[int, Guard]:
            order = [(table, by_id[job_id]) for table, part in ids.items() for job_id in part]
            nobody = free(server)
            updates = [
                Statement(
                    f"UPDATE {self._shards.names[table]} SET {_ended(item) if ends else ''}"
                    f"attempts={item.new_attempts:d},crashes={item.new_crashes:d},"
                    f"next_time={server.instant(now if ends else item.next_time)},"
                    f"gmt_modified={server.instant(now)}"
                    f"{_noted(server, item, now, 0 if ends else item.next_time)}"
                    f"{with_late(server, [item.job_id], late, ',')},{NO_LEASE},{FREE}"
                    f"{'' if item.error is None else ',last_error=%s'} "
                    # [rule: failure-fence]
                    f"WHERE job_id={item.job_id:d} AND status={PENDING} AND version={item.version:d} "
                    f"AND attempts={item.attempts:d} AND crashes={item.crashes:d} AND {nobody}"
                    f"{_too_late(server, item) if item.by_time else ''}",
                    () if item.error is None else (error_text(item.error),),
                )
                for table, item in order
            ]
            results = server.run(updates, transaction=True, outwait=False)
            return {
                item.job_id: Guard.APPLIED if result.matched == 1 else Guard.LOST
                for (_table, item), result in zip(order, results, strict=True)
            }

        return self._shards.each(self._shards.group(by_id), send, locks=True).joined()

    def mark_tried(self, job_ids: Iterable[int]) -> dict[int, Trouble]:
        """Record on cancelled rows that a try may have started (attempts >= 1).

        Returns those whose tables do not answer, with the reason.
        """
        return self._shards.each(self._shards.group(job_ids), self._mark_tried, locks=True).failed

    def mark_begun(self, job_ids: Iterable[int], what: str) -> dict[int, Trouble]:
        """Record that an uncharged try has begun: ``what`` becomes last_error, unless there is one.

        For rows that are pending or were cancelled a moment ago. The record tells a cancel that the
        task was tried. No guard compares it. Returns those whose tables do not answer, with the
        reason.
        """
        sets, where = "last_error=COALESCE(last_error,%s)", f"status IN ({PENDING},{CANCELLED})"
        return self._update(job_ids, sets, where, [error_text(what)])

    def unwritable(self, job_ids: Iterable[int]) -> dict[int, Trouble]:
        """Return which of these cannot be changed now, as others have locked them or their servers are away,
        with the reason. Changes nothing."""
        return self._update(job_ids, "version=version", "version>=0")

    def _update(
        self, job_ids: Iterable[int], sets: str, where: str, params: Sequence[str] = ()
    ) -> dict[int, Trouble]:
        def send(server: DatabaseServer, ids: sql.ByTable) -> None:
            updates = sql.update_by_id(server, self._shards.names, ids, sets, where, params)
            server.run(updates, transaction=True, outwait=False)

        return self._shards.each(self._shards.group(job_ids), send, locks=True).failed

    def redrive(
        self, job_ids: Iterable[int], now_ms: int, *, tries: int | None = None, expires_at: int = 0,
        died_by: int | None = None,
    ) -> Answers[TaskRow]:  # fmt: skip
        """Make dead tasks pending, due at ``now_ms``, with all their tries and version + 1; last_error stays.

        ``tries``: how many they have from now on (None: as before). ``expires_at`` (ms; 0: never) is
        not before ``now_ms``. ``died_by`` (ms): only those that died no later. Returns the changed rows.
        """
        changed = self._stamp()

        def send(server: DatabaseServer, ids: sql.ByTable) -> dict[int, TaskRow]:
            now, stamp, what = server.instant(now_ms), server.instant(changed), sql.columns(server)
            expiry = server.instant(expires_at) if expires_at else "NULL"
            own = "" if tries is None else f"tries={tries:d},"
            dead = f"status={DEAD}" + (f" AND next_time<={server.instant(died_by)}" if died_by else "")
            statements = []
            for table, part in ids.items():
                name, where = self._shards.names[table], f"job_id IN ({sql.numbers(part)})"
                # read by its stamp, so that a resend after a lost answer still finds the rows
                ours = f"{where} AND status={PENDING} AND gmt_modified={stamp}"
                statements += [
                    Statement(  # [rule: new-version]
                        f"UPDATE {name} SET status={PENDING},version=version+1,"
                        f"redrives=redrives+(redrives<65535),attempts=0,crashes=0,"
                        f"{own}expires_at={expiry},expired=0,next_time={now},"
                        f"gmt_modified={stamp},{NO_LEASE},{FREE} WHERE {where} AND {dead}"
                    ),
                    Statement(f"SELECT {what} FROM {name} WHERE {ours}"),
                    bodies.follow(self._shards.body_names[table], name, part),
                ]
            results = server.run(statements, transaction=True, outwait=False)
            return {row.job_id: row for row in sql.task_rows(results[1::3])}

        return self._shards.each(self._shards.group(job_ids), send, locks=True).joined()

    def delete_ended(self, sizes: Mapping[int, int], statuses: Collection[int] = FINAL) -> Parts[int]:
        """Delete those rows that have one of these statuses, and their bodies. Returns how many were deleted,
        and why others could not be.

        ``sizes`` is job_id -> bytes of its body, -1 without one: a transaction deletes a bounded number of
        them.
        """
        names, body_names = self._shards.names, self._shards.body_names

        def send(server: DatabaseServer, ids: sql.ByTable) -> int:
            where = f"status IN ({sql.numbers(statuses)})"
            statements = [
                Statement(f"DELETE FROM {names[table]} WHERE job_id IN ({sql.numbers(part)}) AND {where}")
                for table, part in ids.items()
            ]
            for table, part in ids.items():
                if with_body := [job_id for job_id in part if sizes[job_id] >= 0]:
                    statements.append(bodies.delete(body_names[table], names[table], with_body))
            results = server.run(statements, transaction=True, outwait=False)
            return sum(result.matched for result in results[: len(ids)])

        deleted: Parts[int] = Parts()
        for part in sql.bounded(sizes.items(), bodies.BODY_BYTES):
            deleted.add(self._shards.each(self._shards.group(part), send, locks=True))
        return deleted

    # --- shared ------------------------------------------------------------------------------------------

    def _stamp(self) -> int:
        """Return a new instant near now: a call recognizes the rows that it changed by their gmt_modified.

        Two concurrent threads may get the same instant, which is harmless: they never change one row at once.
        """
        now, last = self._clock.now_ms(), self._last_stamp
        self._last_stamp = stamp = now if last > now + SET_BACK_MS else max(now, last + 1)
        return stamp

    def _read(self, server: DatabaseServer, ids: sql.ByTable) -> dict[int, TaskRow]:
        results = server.run(sql.select_by_id(server, sql.columns(server), self._shards.names, ids))
        return {row.job_id: row for row in sql.task_rows(results)}

    def _mark_tried(self, server: DatabaseServer, ids: sql.ByTable) -> None:
        tried = f"attempts={server.greatest}(attempts,1)"
        updates = sql.update_by_id(server, self._shards.names, ids, tried, f"status={CANCELLED}")
        server.run(updates, transaction=True, outwait=False)


def _too_late(server: DatabaseServer, item: Failure) -> str:
    """The condition that a row that ends by time alone is due, has expired if that is why, and that the
    hand-out of a pulled task is still the one that was read: one that is released lowers attempts."""
    now = server.from_now(0)
    nonce = f"={sql.literal(item.nonce)}" if item.nonce else " IS NULL"
    return (  # [rule: last-lapse]
        f" AND next_time<={now}{f' AND expires_at<{now}' if item.expired else ''}"
        f"{'' if item.nonce is None else f' AND pull_nonce{nonce}'}"
    )


def _ended(item: Failure) -> str:
    """Return the assignments that end a row."""
    return f"status={DEAD if item.started else CANCELLED},{'expired=1,' if item.expired else ''}"


def _noted(server: DatabaseServer, item: Failure, now: int, following: int) -> str:
    """Return the SQL that adds a failed try to the history. ``following``: when the next is due (ms)."""
    if item.error is None:
        return ""
    failed = FailedTry(item.new_attempts, item.new_crashes, item.version, now, item.error)
    failed = failed._replace(stack=item.stack or None)
    if item.sent is not None:
        failed = failed._replace(status=item.sent.status, ms=item.sent.ms, next=following)
    return f",history={added(server, failed)}"


def _delivered(
    server: DatabaseServer, job_ids: Iterable[int], sent: SentTries, version: int, now: int
) -> str:
    """Return the SQL that adds the tries of those tasks that were sent to their histories."""
    cases = []
    for job_id in job_ids if sent else ():
        if job_id in sent:
            attempt, (request, text) = sent[job_id]
            tried = FailedTry(attempt, 0, version, now, text, request.status, request.ms, 0)
            cases.append(f"WHEN {job_id:d} THEN {added(server, tried)}")
    return f",history=CASE job_id {' '.join(cases)} ELSE history END" if cases else ""
