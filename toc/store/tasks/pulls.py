"""The rows of pull consumers: how tasks are handed out, and how hand-outs end.

A hand-out is one guarded UPDATE: it charges the try, draws a nonce, and makes the end of ttr the row's
next_time. The row is then pending and not yet due, which is all that the sweep, the row check and reclaim
need to know. When ttr has ended, the row is due like any other. Only the clock of the row's server decides
whether a lease lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from toc.model.pull import LEASE_ENDED, AckOutcome, PullLease, PullRow
from toc.model.task import MAX_ATTEMPTS, UNLIMITED, TaskStatus
from toc.model.verdict import Nack
from toc.store.servers.server import DatabaseServer, Result, Statement
from toc.store.servers.shards import Answers, Shards
from toc.store.tasks import rows as sql
from toc.store.tasks.history import FailedTry, added, error_text, with_late
from toc.store.tasks.leases import NO_LEASE

T = TypeVar("T")

PENDING, PROCESSED, CANCELLED, DEAD = map(int, TaskStatus)

FREE = "pull_nonce=NULL,pull_began=NULL"
"""Assignments that end a row's hand-out."""


def moved(server: DatabaseServer, due: str) -> str:
    """Return the assignments that give a pending row another deadline, and end its hand-out.

    ``due`` is an SQL instant. If a consumer has the task, the task is not due before the end of the
    consumer's lease. That end is kept in ``lease_until``, without a ``lease_owner``, so that later
    changes of the row respect it too.
    """
    now = server.from_now(0)
    held = f"WHEN pull_nonce IS NOT NULL AND next_time>{now} THEN next_time"
    asked = f"WHEN lease_owner IS NULL AND lease_until>{now} THEN lease_until"
    # MySQL assigns from left to right, SQLite all at once. ``asked`` reads lease_until after its assignment,
    # but only where that has left it as it was.
    return (  # [rule: consumer-first]
        f"lease_until=CASE {held} ELSE lease_until END,"
        f"next_time={server.greatest}({due},CASE {held} {asked} ELSE {due} END),{FREE}"
    )


_ENDED = {PROCESSED: AckOutcome.ALREADY, CANCELLED: AckOutcome.CANCELLED, DEAD: AckOutcome.DEAD}


class HandOut(NamedTuple):
    """A task to hand out for ``ttr_ms``. ``retries`` is the topic's."""

    job_id: int
    biz_type: int
    retries: int
    ttr_ms: int
    nonce: bytes


class Pulls:
    """The statements of pull consumers. Thread-safe.

    Every method takes many tasks, each job_id at most once, and answers by job_id.
    """

    def __init__(self, shards: Shards, stamp: Callable[[], int]) -> None:
        self._shards = shards
        self._stamp = stamp
        self._columns = {server: _columns(server) for server in shards.servers}

    def read(self, job_ids: Iterable[int]) -> Answers[PullRow]:
        """Return the rows that exist."""
        return self._shards.each(self._shards.group(job_ids), self._read).joined()

    def hand_out(self, items: Sequence[HandOut], now_ms: int) -> Answers[PullRow]:
        """Hand out those tasks that are pending and due, by their server's clock and by ``now_ms``.

        Returns all rows as they are then: one that carries its item's nonce was handed out, and next_time is
        when its ttr ends. It is not handed out if it has expired, nor if the try that has ended was the last
        one. May be repeated after a lost answer.
        """
        by_id = {item.job_id: item for item in items}
        kinds = {item.job_id: (item.biz_type, item.retries, item.ttr_ms) for item in items}

        def send(server: DatabaseServer, ids: sql.ByTable) -> dict[int, PullRow]:
            now, stamp = server.from_now(0), server.instant(now_ms)
            updates = []
            for (table, (biz_type, retries, ttr_ms)), part in sql.alike(ids, kinds).items():
                nonces = " ".join(f"WHEN {one:d} THEN {sql.literal(by_id[one].nonce)}" for one in part)
                # MySQL assigns from left to right: what reads the old nonce comes before the new one.
                updates.append(
                    Statement(  # [rule: one-hand-out]
                        f"UPDATE {server.by_primary_key(self._shards.names[table])} SET "
                        f"last_error=CASE WHEN pull_nonce IS NULL THEN last_error ELSE %s END,"
                        f"attempts=attempts+CASE WHEN attempts<{MAX_ATTEMPTS} THEN 1 ELSE 0 END,"
                        f"pull_nonce=CASE job_id {nonces} END,pull_began={now},"
                        f"next_time={server.from_now(ttr_ms)},gmt_modified={stamp},{NO_LEASE} "
                        f"WHERE job_id IN ({sql.numbers(part)}) AND status={PENDING} "
                        f"AND biz_type={biz_type:d} AND next_time<={now} AND next_time<={stamp}"
                        f"{self.open({biz_type: retries})}",
                        (LEASE_ENDED,),
                    )
                )
            results = server.run([*updates, *self._select(server, ids)], transaction=True, outwait=False)
            return _rows(results[len(updates) :])

        return self._shards.each(self._shards.group(by_id), send, locks=True).joined()

    def open(self, retries: Mapping[int, int]) -> str:
        """One more SQL condition for due rows: that they have not expired, and that the ttr that has ended,
        if any, was not the last try's. ``retries`` are those of the topics, by biz_type."""
        types = {count: [one for one in retries if retries[one] == count] for count in {*retries.values()}}
        cases = [f"WHEN biz_type IN ({sql.numbers(some)}) THEN {count:d}" for count, some in types.items()]
        tries = f"CASE tries WHEN 0 THEN CASE {' '.join(cases)} END ELSE tries END"
        return (
            f" AND (expires_at IS NULL OR expires_at>={self._shards.servers[0].from_now(0)})"
            f" AND (pull_nonce IS NULL OR attempts<{tries} OR tries={UNLIMITED})"
        )

    def note_late(self, lines: Mapping[int, tuple[int, str]]) -> None:
        """Add late hand-outs to rows, given as version and ``LateStart.line`` by job_id; not to redriven
        ones, whose action_time is not when they were due. What cannot be written now is left out."""

        versions = {job_id: version for job_id, (version, _) in lines.items()}
        texts = {job_id: text for job_id, (_, text) in lines.items()}

        def send(server: DatabaseServer, ids: sql.ByTable) -> None:
            updates = [
                Statement(
                    f"UPDATE {server.by_primary_key(self._shards.names[table])} "
                    f"SET {with_late(server, part, texts)} WHERE job_id IN ({sql.numbers(part)}) "
                    f"AND version={version:d} AND redrives=0"
                )
                for (table, version), part in sql.alike(ids, versions).items()
            ]
            server.run(updates, transaction=True, outwait=False)

        self._shards.each(self._shards.group(lines), send, locks=True)

    def release(self, leases: Iterable[PullLease]) -> Answers[PullRow | None]:
        """Take back tasks that no consumer has seen and whose leases live: uncharged, and due at once.

        Returns the rows as they are then.
        """
        by_id, stamp = {lease.job_id: lease for lease in leases}, self._stamp()

        def update(server: DatabaseServer, name: str, job_id: int) -> Statement:
            return Statement(  # [rule: released-uncharged]
                f"UPDATE {name} SET attempts=attempts-CASE WHEN attempts>0 THEN 1 ELSE 0 END,{FREE},"
                f"next_time={server.from_now(0)},gmt_modified={server.instant(stamp)} "
                f"WHERE {_lives(server, by_id[job_id])}"
            )

        return self._update_each(by_id, update, lambda row, _: row)

    def ack(self, leases: Iterable[PullLease]) -> Answers[AckOutcome]:
        """Mark tasks as processed that are pending under the lease's version and were handed out, however
        late.

        That try is no longer charged: attempts counts failed tries once a task has ended.
        """
        by_id, stamp = {lease.job_id: lease for lease in leases}, self._stamp()
        kinds = {lease.job_id: (lease.version, lease.biz_type) for lease in by_id.values()}

        def send(server: DatabaseServer, ids: sql.ByTable) -> dict[int, AckOutcome]:
            ended, statements = server.instant(stamp), []
            for (table, (version, biz_type)), part in sql.alike(ids, kinds).items():
                name, where = self._shards.names[table], f"job_id IN ({sql.numbers(part)})"
                nonces = ",".join(sql.literal(by_id[job_id].nonce) for job_id in part)  # no two draw the same
                lives = f"pull_nonce IN ({nonces}) AND next_time>{server.from_now(0)}"
                living = f"CASE WHEN {lives} THEN 1 ELSE 0 END"
                state = server.joined(["job_id", "status", "version", "biz_type", "attempts", living])
                by_key = server.by_primary_key(name)
                # Locked as they are read: what they are now decides the outcome.
                statements += [
                    Statement(f"SELECT {state} FROM {by_key} WHERE {where}{server.for_update}"),
                    Statement(  # [rule: ack-of-version]
                        f"UPDATE {by_key} SET status={PROCESSED},attempts=attempts-1,{FREE},"
                        f"next_time={ended},gmt_modified={ended} WHERE {where} AND status={PENDING} "
                        f"AND version={version:d} AND biz_type={biz_type:d} AND attempts>0"
                    ),
                ]
            results = server.run(statements, transaction=True, patient=True, outwait=False)
            states = {state[0]: state[1:] for state in sql.number_rows(results[::2], 6)}
            return {
                job_id: _acked(states.get(job_id), by_id[job_id]) for part in ids.values() for job_id in part
            }

        return self._shards.each(self._shards.group(by_id), send, locks=True).joined()

    def nack(self, items: Iterable[tuple[PullLease, Nack]]) -> Answers[PullRow | None]:
        """Write tries that failed, where their lease lives. Returns the rows as they are then; None where the
        lease was gone, also by the same nack whose answer was lost."""
        by_id, stamp = {lease.job_id: (lease, nack) for lease, nack in items}, self._stamp()

        def update(server: DatabaseServer, name: str, job_id: int) -> Statement:
            lease, (row, dead, delay_ms, error) = by_id[job_id]
            changed = server.instant(stamp)
            due = f"status={DEAD},next_time={changed}" if dead else f"next_time={server.from_now(delay_ms)}"
            return Statement(
                f"UPDATE {name} SET {due},{FREE},gmt_modified={changed}"
                f"{_noted(server, row, error, stamp)},last_error=%s WHERE {_lives(server, lease)}",
                (error_text(error),),
            )

        return self._update_each(by_id, update, lambda row, changed: row if changed else None)

    def extend(self, items: Iterable[tuple[PullLease, int, int]]) -> Answers[int | None]:
        """Let living leases last for ``ttr_ms`` from now, at most ``most_ms`` since their hand-out, and never
        shorter than before.

        Items are (lease, ttr_ms, most_ms). Returns until when each lives, in ms; None where it is gone.
        """
        by_id = {lease.job_id: (lease, ttr_ms, most_ms) for lease, ttr_ms, most_ms in items}

        def update(server: DatabaseServer, name: str, job_id: int) -> Statement:
            lease, ttr_ms, most_ms = by_id[job_id]
            wanted, most = server.from_now(ttr_ms), server.after("pull_began", most_ms)
            return Statement(
                f"UPDATE {name} SET next_time={server.greatest}(next_time,"
                f"CASE WHEN {most}<{wanted} THEN {most} ELSE {wanted} END) WHERE {_lives(server, lease)}"
            )

        return self._update_each(by_id, update, lambda row, lives: row.next_time if lives and row else None)

    # --- shared

    def _update_each(
        self, job_ids: Iterable[int], update: Callable[[DatabaseServer, str, int], Statement],
        result: Callable[[PullRow | None, bool], T],
    ) -> Answers[T]:  # fmt: skip
        """Change tasks by an UPDATE of each, given its server, table and job_id.

        Returns what ``result`` makes of the row as it is then, and of whether the UPDATE matched it: not if
        it is sent again because its answer was lost.
        """

        def send(server: DatabaseServer, ids: sql.ByTable) -> dict[int, T]:
            wanted = [(self._shards.names[table], job_id) for table, part in ids.items() for job_id in part]
            updates = [update(server, name, job_id) for name, job_id in wanted]
            done = server.run([*updates, *self._select(server, ids)], transaction=True, outwait=False)
            rows = _rows(done[len(updates) :])
            return {one: result(rows.get(one), done[n].matched == 1) for n, (_, one) in enumerate(wanted)}

        return self._shards.each(self._shards.group(job_ids), send, locks=True).joined()

    def _select(self, server: DatabaseServer, ids: sql.ByTable) -> list[Statement]:
        return sql.select_by_id(server, self._columns[server], self._shards.names, ids)

    def _read(self, server: DatabaseServer, ids: sql.ByTable) -> dict[int, PullRow]:
        return _rows(server.run(self._select(server, ids), outwait=False))


def _columns(server: DatabaseServer) -> str:
    """Return what to SELECT for ``_rows``: one text per row, as in ``try_text``."""
    instead = {
        "expires_at": f"COALESCE({server.milliseconds('expires_at')},0)",
        "began": f"COALESCE({server.milliseconds('pull_began')},0)",
        "begun": "(last_error IS NOT NULL)",
        "body_length": "COALESCE(body_length,-1)",
        "now": server.milliseconds(server.from_now(0)) if server.greatest != "MAX" else _SQLITE_NOW,
        "nonce": "CASE WHEN pull_nonce IS NULL THEN '' ELSE HEX(pull_nonce) END",
        "biz_key": "CASE WHEN biz_key IS NULL THEN '-' ELSE HEX(biz_key) END",
        "dedup_key": "CASE WHEN dedup_key IS NULL THEN '-' ELSE HEX(dedup_key) END",
    }
    instead |= {name: sql.column(server, name) for name in ("action_time", "next_time")}
    return server.joined([instead.get(name, name) for name in PullRow._fields])


_SQLITE_NOW = "CAST(ROUND((julianday('now')-2440587.5)*86400000) AS INTEGER)"
"""Now in ms. It is an expression because these columns are written once, and a literal would not change.
Julian days are floats: without rounding, half of all answers would be a millisecond behind, and ended
leases would live."""
_PARTS = len(PullRow._fields)


def _rows(results: Iterable[Result]) -> dict[int, PullRow]:
    rows = {}
    with sql.understood():
        for result in results:
            for (text,) in result.rows:
                *numbers, nonce, biz_key, dedup_key, attribute = text.split(",", _PARTS - 1)
                keys = _key(biz_key), _key(dedup_key)
                row = PullRow._make([*map(int, numbers), bytes.fromhex(nonce), *keys, attribute])
                rows[row.job_id] = row
    return rows


def _key(text: str) -> str | None:
    return None if text == "-" else bytes.fromhex(text).decode(errors="replace")


def _acked(state: Sequence[int] | None, lease: PullLease) -> AckOutcome:
    """Return the outcome of an ack: status, version, biz_type and attempts of the row before it, and whether
    the lease lived."""
    if state is None or state[2] != lease.biz_type:
        return AckOutcome.UNKNOWN
    status, version, _, attempts, living = state
    if version != lease.version:
        return AckOutcome.REPLACED
    if status != PENDING:
        return _ENDED.get(status, AckOutcome.UNKNOWN)
    if not attempts:
        return AckOutcome.NOT_HANDED_OUT
    return AckOutcome.ACKED if living else AckOutcome.LATE


def _lives(server: DatabaseServer, lease: PullLease) -> str:
    """The condition that a row has this lease, and that its ttr has not ended."""
    return (  # [rule: living-lease]
        f"job_id={lease.job_id:d} AND status={PENDING} AND version={lease.version:d} "
        f"AND biz_type={lease.biz_type:d} AND pull_nonce={sql.literal(lease.nonce)} "
        f"AND next_time>{server.from_now(0)}"
    )


def _noted(server: DatabaseServer, row: PullRow, error: str, now: int) -> str:
    """Return the SQL that adds a failed try to the row's history."""
    return f",history={added(server, FailedTry(row.attempts, row.crashes, row.version, now, error))}"
