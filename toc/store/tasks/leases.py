"""Leases of rows: they name the worker of a task when the index cannot.

A worker that holds a task for longer than a moment takes a lease on its row; so does a worker that takes a
task without Redis, before its handler starts. ``lease_owner`` is a number made from the worker_id.
``lease_until`` is an instant of the *server's* clock and is compared only with that clock: a row lives on one
server, so workers agree about each lease whatever their own clocks say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.task import TaskStatus, TryRow
from toc.model.verdict import next_attempts
from toc.store.servers.server import DatabaseServer, Statement, Transient
from toc.store.servers.shards import OF_TABLES, Answers, Shards, Trouble
from toc.store.tasks import rows as sql

PENDING = int(TaskStatus.PENDING)
RAN_OUT = -1
"""``TryRow.lease`` of a lease whose owner died or fell silent: a try ended with it."""

NO_LEASE = "lease_owner=NULL,lease_until=NULL"
"""Assignments that remove a row's lease."""
LEASED_IS_TRIED = "CASE WHEN lease_owner IS NULL THEN attempts ELSE {greatest}(attempts,1) END"
"""The attempts of a row whose first try may be running."""  # [rule: lease-is-tried]


def owner_number(worker_id: str) -> int:
    """Map a worker to its ``lease_owner``: 63 bits, not 0."""
    return int.from_bytes(hashlib.sha256(worker_id.encode()).digest()[:8], "big") >> 1 | 1


def held(server: DatabaseServer) -> str:
    """Return the SQL condition that a worker has leased a pending row, or that a consumer has it."""
    now = server.from_now(0)
    return f"lease_until>{now} OR (pull_nonce IS NOT NULL AND next_time>{now})"


class Leases:
    """Takes, renews and releases leases for one worker. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._me = 0
        self._dead: frozenset[int] = frozenset()

    def identify(self, worker_id: str) -> None:
        """Set the worker that takes leases here. Without it, every lease counts as another worker's."""
        self._me = owner_number(worker_id)

    def set_dead(self, worker_ids: Iterable[str]) -> None:
        """Set the workers known to be dead: their leases are free, and show a try that ended with them."""
        self._dead = frozenset(map(owner_number, worker_ids))

    # --- for other modules' statements

    def of_others(self, row: TryRow) -> bool:
        """Whether another worker has or had a lease on a row from ``try_rows``."""
        return row.lease != 0 and row.lease != self._me

    def judged(self, server: DatabaseServer, rows: list[TryRow]) -> list[TryRow]:
        """Set ``lease`` of rows from ``try_rows`` as TryRow describes it.

        How long another worker's lease lasts takes a query of its own: such rows are rare, and each
        expression more in the row check costs a tenth of its time.
        """
        for row in rows:
            if row.lease:
                break
        else:
            return rows  # the usual case: nobody has a lease
        foreign = [row.job_id for row in rows if row.lease and self.of_others(row)]
        if not foreign:
            return [row._replace(lease=0) if row.lease else row for row in rows]
        left = dict.fromkeys(foreign, 1)  # if the lease is gone by then, the row has changed: look again soon
        until = f"COALESCE({server.milliseconds('lease_until')},0)"  # somebody may have emptied it by hand
        now = server.milliseconds(server.from_now(0))
        ids = self._shards.group(foreign)[server]
        select = sql.select_by_id(server, f"job_id,lease_owner,{until}-{now}", self._shards.names, ids)
        for result in server.run(select):
            for job_id, owner, milliseconds in result.rows:
                if owner is not None:
                    gone = milliseconds < 0 or owner in self._dead
                    left[job_id] = RAN_OUT if gone else milliseconds + 1
        return [row._replace(lease=left.get(row.job_id, 0)) if row.lease else row for row in rows]

    def free(self, server: DatabaseServer) -> str:
        """Return the SQL condition that no other worker that may be alive has a lease on a row."""
        return self._none_but(server, self._me)

    def unleased(self, server: DatabaseServer) -> str:
        """Return the SQL condition that no worker that may be alive, this one included, has a lease on a
        row."""
        return self._none_but(server, 0)

    def untaken(self) -> str:
        """Return the SQL condition that a row can be taken, for reads on any server: all are of one kind."""
        return self.unleased(self._shards.servers[0])

    def due_within(self, milliseconds: int) -> str:
        """Return the SQL condition that a row is due so soon by its server's clock, for reads on any
        server."""
        return f"next_time<={self._shards.servers[0].from_now(milliseconds)}"

    def held(self) -> str:
        """Return the SQL condition that a row has a lease that has not run out, for reads on any server."""
        return f"lease_owner IS NOT NULL AND lease_until>{self._shards.servers[0].from_now(0)}"

    def unstarted(self) -> str:
        """Return the SQL condition that no worker says of a row that it runs it, for reads on any server."""
        return f"(lease_since IS NULL OR NOT ({self.held()}))"

    def _none_but(self, server: DatabaseServer, owner: int) -> str:
        owners = sql.numbers((owner, *self._dead))
        ended = f"lease_until IS NULL OR lease_until<{server.from_now(0)}"  # NULL as in ``judged``
        return f"(lease_owner IS NULL OR {ended} OR lease_owner IN ({owners}))"

    # --- its own statements

    def take(
        self, seconds: Mapping[int, int], tries: Mapping[int, TryRow] | None = None,
        renew: Collection[int] = frozenset(), due_by: int | None = None,
        waiting: Collection[int] = frozenset(),
    ) -> Answers[bool]:  # fmt: skip
        """Take or renew leases of these seconds from now on pending rows that no other worker has leased.

        An expired lease is not taken over: first the try that ended with it is charged (``Batches.fail``).
        Nor is a row leased if the failure of the requesting try is already written: ``tries`` are the rows as
        the tries read them. Leases of ``renew`` are only renewed, never taken anew. No row gets one that is
        not due by ``due_by`` (ms), as after a reschedule, or by its server's clock. Those ``waiting`` have
        not started: their rows say of none since when it runs. Returns whether this worker now has each row's
        lease. May be repeated after a lost answer.
        """

        kinds = {
            job_id: (
                lasts,
                "" if job_id in renew else "lease_owner IS NULL OR ",  # [rule: renew-only]
                _unfailed(tries.get(job_id) if tries else None),
                job_id in waiting,
            )
            for job_id, lasts in seconds.items()
        }

        def send(server: DatabaseServer, ids: sql.ByTable) -> set[int]:
            due, soon = "", server.from_now(MAX_CLOCK_SKEW_MS)
            if due_by is not None:  # this host's clock may be ahead
                due = f" AND next_time<={server.instant(due_by)} AND next_time<={soon}"
            now, mine = server.from_now(0), f"lease_owner={self._me:d}"
            # lease_since before the others: MySQL assigns from left to right
            since = {
                False: f"CASE WHEN {mine} THEN COALESCE(lease_since,{now}) ELSE {now} END", True: "NULL"
            }  # fmt: skip
            updates = [
                Statement(
                    f"UPDATE {server.by_primary_key(self._shards.names[table])} SET "
                    f"lease_since={since[waits]},{mine},lease_until={server.from_now(lasts * 1000)} "
                    f"WHERE job_id IN ({sql.numbers(part)}) AND status={PENDING} "
                    f"AND ({nobodys}{mine}){unfailed}{due}"
                )
                for (table, (lasts, nobodys, unfailed, waits)), part in sql.alike(ids, kinds).items()
            ]
            matched = sum(result.matched for result in server.run(updates, transaction=True, outwait=False))
            asked = {job_id for part in ids.values() for job_id in part}
            if matched == len(asked):
                return asked
            reads = [
                f"SELECT job_id FROM {self._shards.names[table]} WHERE job_id IN ({sql.numbers(part)}) "
                f"AND status={PENDING} AND {mine}"
                for table, part in ids.items()
            ]
            try:
                return {row[0] for row in sql.read(server, reads)}
            except OF_TABLES as exc:  # as it is, it would tell that nothing was written
                raise Transient(str(exc)) from exc

        parts = self._shards.each(self._shards.group(seconds), send, locks=True)
        ours: set[int] = set().union(*parts.results)
        return Answers({one: one in ours for one in seconds if one not in parts.failed}, parts.failed)

    def living(self, job_ids: Iterable[int]) -> Answers[tuple[int, int]]:
        """Return of those of these rows that a worker has leased its number, and since when it runs
        (ms), 0 if it has not started."""

        def read(server: DatabaseServer, ids: sql.ByTable) -> dict[int, tuple[int, int]]:
            since = f"COALESCE({server.milliseconds('lease_since')},0)"
            what = f"job_id,CASE WHEN {self.held()} THEN lease_owner ELSE 0 END,{since}"
            results = server.run(sql.select_by_id(server, what, self._shards.names, ids))
            return {row[0]: (row[1], row[2]) for result in results for row in result.rows if row[1]}

        return self._shards.each(self._shards.group(job_ids), read).joined()

    def release(self, job_ids: Iterable[int]) -> dict[int, Trouble]:
        """Release leases: no task of these runs here.

        Returns those whose tables do not answer, with the reason. Their leases expire.
        """

        def send(server: DatabaseServer, ids: sql.ByTable) -> None:
            updates = sql.update_by_id(server, self._shards.names, ids, NO_LEASE, f"lease_owner={self._me:d}")
            server.run(updates, transaction=True, outwait=False)

        return self._shards.each(self._shards.group(job_ids), send, locks=True).failed


def _unfailed(row: TryRow | None) -> str:
    """Return the condition that the failure of the try that read this row is not written; a crash does not
    count."""
    if row is None:
        return ""
    return (
        f" AND NOT (version={row.version:d} AND attempts={next_attempts(row.attempts):d} "
        f"AND crashes<={row.crashes:d})"
    )
