"""What a submit does, decided on what is stored, and the statements of its transaction.

Each statement is guarded by what was read, so an outdated decision changes nothing and is taken again. A
request's own row comes first: its key is unique, so a second transaction of the same request waits for the
first, and then fails as a whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.errors import DedupConflict, TaskExists
from toc.model.task import OnConflict, Put, PutOutcome, Request, Submission, TaskRow, TaskStatus, check_expiry
from toc.store.servers.server import DatabaseServer, Result, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import bodies, requests
from toc.store.tasks import rows as sql
from toc.store.tasks.leases import LEASED_IS_TRIED
from toc.store.tasks.pulls import moved

PENDING, CANCELLED = int(TaskStatus.PENDING), int(TaskStatus.CANCELLED)

TRIED_BEFORE = "a try for a former time had begun"
"""last_error of a tried task without another error, after a new deadline has restored all tries."""


Expiry = Callable[[TaskRow], int]
"""Tells of a row as it was read when it expires with its new deadline (ms; 0: never)."""


class Stored(NamedTuple):
    """What a submit did. ``inserted``: the new row, if any. ``kept``: the row that has its dedup_key and
    stays as it was. ``before``: the pending row that it replaced, as it was; a leased one counts as tried.
    ``due``: when that is due now (ms)."""

    put: Put
    inserted: TaskRow | None = None
    kept: TaskRow | None = None
    before: TaskRow | None = None
    due: int = 0

    def told(self, now: int) -> Self:
        """Return it as it is told ``now`` (ms), once it is written, perhaps long after it was planned."""
        if self.before is None:
            return self
        return self._replace(put=self.put._replace(outcome=_replaced(self.before, now)))


class Seen(NamedTuple):
    """A stored row, and whether a try of it may be running. ``until``: when its lease or hand-out ends or has
    ended (ms), 0 if none."""

    row: TaskRow
    leased: bool
    until: int


class Plan(NamedTuple):
    """What the transaction of a submit does, besides inserting ``stored.inserted``.

    ``request`` is stored with the answer. ``ended``: the job_id of a row that loses the name. ``changes`` are
    guarded: if the one at ``telling`` matches no row, none of them changes anything.
    """

    asked: Submission
    stored: Stored
    request: Request | None = None
    ended: int | None = None
    changes: Sequence[Statement] = ()
    telling: int = 0


class Planner:
    """Plans submits for the tables of some servers."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def plan(self, server: DatabaseServer, asked: Submission, found: Seen | None, now: int) -> Plan | Stored:
        """Return what a submit writes at ``now`` (ms), if this row has its dedup_key; or its outcome, if it
        writes nothing.

        Raises DedupConflict, TaskExists, InvalidExpiry.
        """
        row = asked.row
        if found is None:
            return inserting(asked)
        other = found.row
        if row.biz_key != other.biz_key:
            same_task(row, other)  # raises: two texts with one number
        if asked.on_conflict is OnConflict.ERROR:
            what = f"task {other.job_id} already has dedup_key {row.dedup_key!r}"
            raise TaskExists(f"{what}; on_conflict='replace' would replace it", other.job_id)
        if asked.on_conflict is OnConflict.KEEP:
            kept = Stored(Put(same_task(row, other), PutOutcome.KEPT), kept=other)
            return kept if asked.request is None else Plan(asked, kept, asked.request)
        if other.status == PENDING:
            return self._renew(server, asked, found, now)
        put = Put(row.job_id, PutOutcome.NEW)
        return Plan(asked, Stored(put, row), asked.request, ended=other.job_id)

    def _renew(self, server: DatabaseServer, asked: Submission, seen: Seen, now: int) -> Plan:
        """Replace a pending task: it keeps its job_id and slot; everything else is new."""
        row, before = asked.row, seen.row
        table = self._shards.table_of(before.job_id)
        name, body_name = self._shards.names[table], self._shards.body_names[table]
        check_expiry(row.expires_at, row.action_time)
        put = Put(before.job_id, _replaced(tried(seen), now))
        changes = []
        if asked.request is not None:
            # The row stays as it is from here on: either both statements that look at it change something, or
            # neither.
            into = self._shards.request_names[table]
            of_row = f"{name} WHERE job_id={before.job_id:d}"
            source = f"{of_row} AND {as_read(seen)}"
            changes = [
                Statement(f"SELECT job_id FROM {of_row}{server.for_update}"),
                requests.insert_if(server, into, asked.request, put, source),
            ]
        telling = len(changes)
        body = "NULL,body_sha256=NULL"
        if row.body_sha256 is not None:
            body = f"{row.body_length:d},body_sha256={sql.literal(row.body_sha256)}"
        more = f"attribute=%s,tries={row.tries:d},body_length={body},"
        values = [row.attribute]
        changes.append(new_version(server, name, seen, row.action_time, row.expires_at, now, more, values))
        if before.body_sha256 is not None and before.body_sha256 == row.body_sha256:
            changes.append(bodies.follow(body_name, name, [before.job_id]))
        else:
            if before.body_sha256 is not None:
                changes.append(bodies.delete_former(body_name, name, before.job_id))
            if asked.content is not None:
                version = before.version + 1
                changes.append(bodies.insert_if(body_name, name, before.job_id, version, asked.content))
        due = max(row.action_time, 0 if seen.leased else seen.until)
        return Plan(asked, Stored(put, before=tried(seen), due=due), changes=changes, telling=telling)

    def transaction(
        self, server: DatabaseServer, plans: Sequence[Plan]
    ) -> tuple[list[Statement], list[int | None]]:
        """Return the statements of one transaction for plans of different names, and where in it each plan's
        telling statement is, if it has one.

        All callers lock rows in one order: requests, tables, and in a table by name.
        """
        names = self._shards.names
        answers: dict[str, list[tuple[Request, Put]]] = {}
        ended: dict[int, list[int]] = {}
        inserted: dict[int, list[Submission]] = {}
        changing: list[int] = []
        ordered = []
        for n, plan in enumerate(plans):
            row = plan.asked.row  # by name, those without one by job_id
            name = (-1, "") if row.dedup_key is None else (row.biz_id, row.dedup_key)
            ordered.append((self._shards.table_of(row.job_id), name, row.job_id, n))
        for table, _, _, n in sorted(ordered):
            plan = plans[n]
            if plan.changes:
                changing.append(n)
            if plan.stored.inserted is not None:
                inserted.setdefault(table, []).append(plan.asked)
            if plan.request is not None:
                into = self._shards.request_names[table]
                answers.setdefault(into, []).append((plan.request, plan.stored.put))
            if plan.ended is not None:
                ended.setdefault(table, []).append(plan.ended)
        statements = [requests.insert(server, into, sorted(answers[into])) for into in sorted(answers)]
        for table, ids in ended.items():
            these = f"job_id IN ({sql.numbers(sorted(ids))}) AND status<>{PENDING}"
            statements.append(Statement(f"UPDATE {names[table]} SET dedup_key=NULL WHERE {these}"))
        telling: list[int | None] = [None] * len(plans)
        for n in changing:
            telling[n] = len(statements) + plans[n].telling
            statements += plans[n].changes
        return statements + self.inserts(server, inserted), telling

    def inserts(
        self, server: DatabaseServer, by_table: Mapping[int, Sequence[Submission]]
    ) -> list[Statement]:
        """Return the INSERTs of rows and their bodies."""
        statements = []
        for table, many in by_table.items():
            statements.append(sql.insert(server, self._shards.names[table], [one.row for one in many]))
            statements += bodies.insert(self._shards.body_names[table], many)
        return statements


def inserting(asked: Submission) -> Plan:
    """Return the plan of a submit whose name nobody has, as far as is known."""
    row = asked.row
    return Plan(asked, Stored(Put(row.job_id, PutOutcome.NEW), row), asked.request)


def as_before(row: TaskRow) -> int:
    """Return the expiry of a row: a new deadline changes none."""
    return row.expires_at


def new_version(
    server: DatabaseServer, name: str, seen: Seen, action_time: int, expires_at: int, stamp: int,
    more: str = "", params: Sequence[str] = (),
) -> Statement:  # fmt: skip
    """Return the UPDATE that gives a pending row a new deadline and expiry (ms), all its tries, and
    version + 1.

    ``more`` are further assignments, with their parameters. Its lease stays: the try for the old deadline may
    be running. A hand-out ends, but the row is not due before its ttr would have ended.
    """
    due, row = server.instant(action_time), seen.row
    expiry = server.instant(expires_at) if expires_at else "NULL"
    begun = seen.leased or row.attempts or row.crashes  # it resets both, but a cancel must know
    return Statement(  # [rule: new-version]
        f"UPDATE {name} SET version=version+1,attempts=0,crashes=0,action_time={due},expires_at={expiry},"
        f"{moved(server, due)},{more}{'last_error=COALESCE(last_error,%s),' if begun else ''}"
        f"gmt_modified={server.instant(stamp)} WHERE job_id={row.job_id:d} AND {as_read(seen)}",
        [*params, TRIED_BEFORE] if begun else params,
    )


def cancelling(server: DatabaseServer, now: int) -> str:
    """Return the assignments that cancel a row at ``now`` (ms)."""
    ended, attempts = server.instant(now), LEASED_IS_TRIED.format(greatest=server.greatest)
    return f"status={CANCELLED},attempts={attempts},next_time={ended},gmt_modified={ended}"


def as_read(seen: Seen) -> str:
    """Return the condition that a pending row is as it was read, as far as a new version must know."""
    row = seen.row
    return (
        f"status={PENDING} AND version={row.version:d} AND attempts={row.attempts:d} "
        f"AND crashes={row.crashes:d}{'' if seen.leased else ' AND lease_owner IS NULL'}"
    )


def seen_columns(server: DatabaseServer, **instead: str) -> str:
    """Return what to SELECT for ``seen_rows``; ``instead`` replaces columns."""
    until, columns = server.milliseconds("lease_until"), sql.columns(server, **instead)
    return f"lease_owner IS NOT NULL,COALESCE({until},0),pull_nonce IS NOT NULL,{columns}"


def seen_rows(results: Iterable[Result]) -> list[Seen]:
    """Parse the rows of ``seen_columns``."""
    found = []
    with sql.understood():
        for result in results:
            for leased, until, pulled, *values in result.rows:
                row = sql.task_row(values)
                found.append(Seen(row, bool(leased), max(until, row.next_time if pulled else 0)))
    return found


def tried(seen: Seen) -> TaskRow:
    """Return a row as callers see it: a leased one counts as tried."""
    return seen.row._replace(attempts=max(seen.row.attempts, 1)) if seen.leased else seen.row


def _replaced(row: TaskRow, now: int) -> PutOutcome:
    """Return the outcome of replacing a row at ``now`` (ms), as ``tried`` returned it."""
    started = row.attempts or row.crashes or row.last_error is not None
    if started or row.action_time - now <= MAX_CLOCK_SKEW_MS:
        return PutOutcome.MAY_HAVE_STARTED
    return PutOutcome.REPLACED


def same_task(row: TaskRow, other: TaskRow, *, stored: bool = True) -> int:
    """Return the job_id of the task that has this row's dedup_key. Raises DedupConflict if it differs."""
    differs = (
        "biz_id" if row.biz_key != other.biz_key  # two texts with one number
        else "attribute" if row.attribute != other.attribute
        else "body" if row.body_sha256 != other.body_sha256
        else None
    )  # fmt: skip
    if differs is None:
        return other.job_id
    whose = f"task {other.job_id}" if stored else "another task of this call"
    raise DedupConflict(
        f"dedup_key {row.dedup_key!r} of biz_id {row.biz_id if row.biz_key is None else row.biz_key!r} "
        f"is taken by {whose} with another {differs}",
        other.job_id if stored else None,
    )
