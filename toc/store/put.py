"""Submits that replace or are remembered. The row, its body and its request are written in one transaction,
for one caller or for many together.

The rows are read first, and decide what to do (toc.store.put_plan). A request that is sent again after a lost
answer, even from another process, changes nothing twice, because its own row shows that it was answered.
Without a request, the task's row shows whether a change whose answer was lost took effect; if another change
has come since, the outcome is unknown (SubmitUnknown).

    many ─▶ look ─▶ plan each ─▶ one transaction ─▶ an outcome for each
             ▲          └─ refused, answered before ─▶ its outcome
             └── a row is locked or has changed: again, later in halves; a single item goes alone
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import NamedTuple

from toc.model.errors import SchemaBehind, StoreUnavailable, SubmitUnknown, TocError
from toc.model.sharding import JobIds
from toc.model.task import Request, TaskRow
from toc.store import requests
from toc.store import rows as sql
from toc.store.outcomes import alone, note_away, unwritable
from toc.store.put_plan import Plan, Planner, Seen, Stored, ToPut, seen_columns, seen_rows
from toc.store.same_task import equal
from toc.store.server import DatabaseServer, Duplicate, Locked, Lost, Refused, Statement, Transient, pause
from toc.store.shards import Shards
from toc.store.submit import REPEATS, RESEND_SECONDS

TRIES_TOGETHER = 3
"""Transactions of many that are tried before the many are halved."""

Outcome = Stored | TocError | None
"""The outcome of one item of many. None: another item or a lock prevented it, and nothing was
written for it. The caller must put it alone."""
Name = tuple[int, int, int, str]
"""Table, biz_id, biz_type and dedup_key."""


class _Looked(NamedTuple):
    """What is stored: rows by job_id and by name, and answers to requests."""

    by_id: dict[int, TaskRow]
    by_name: dict[Name, Seen]
    answers: requests.Answered


class Puts:
    """Stores and replaces named tasks, and remembers requests. Thread-safe."""

    def __init__(
        self, shards: Shards, job_ids: JobIds, stamp: Callable[[], int], remembered: requests.Requests
    ) -> None:
        self._shards = shards
        self._requests = remembered
        self._job_ids = job_ids
        self._stamp = stamp
        self._planner = Planner(shards)

    # --- one

    def put(self, asked: ToPut) -> Stored:
        """Store a row, or do with the task that has its dedup_key what ``on_conflict`` says.

        Raises DedupConflict, TaskExists, RequestReused, InvalidExpiry, SubmitUnknown.
        """
        if asked.request is not None and not asked.request.part:
            self._requests.claim(asked.request, self._shards.table_of(asked.row.job_id))
        return self._settle(asked, None)

    def put_alone(self, asked: ToPut) -> Stored | TocError:
        """Do as ``put``, and return an error; does not wait for a server known to be away."""
        return alone(self._shards, asked.row, lambda: self.put(asked))

    def _settle(self, asked: ToPut, unsure: Plan | None) -> Stored:
        """Try until it is done. ``unsure`` is the plan of a transaction whose answer was lost, if any."""
        server = self._server_of(asked)
        deadline = time.monotonic() + RESEND_SECONDS
        cause: Exception | None = None
        for attempt in count():
            if attempt:
                # If others change the same rows, one of them succeeds each time: no need for a last try.
                contended = cause is None or isinstance(cause, Duplicate)
                if (attempt > 1 and time.monotonic() > deadline) or (attempt >= REPEATS and not contended):
                    break
                pause(attempt, contended=contended)
            try:
                now = self._stamp()
                looked = self._look(server, [asked], [] if unsure is None else [unsure.stored.put.job_id])
                done = requests.answer_of(asked.request, looked.answers)
                if done is not None:
                    return Stored(done)
                if unsure is not None and asked.request is None and _was_done(unsure, looked.by_id):
                    return unsure.stored
                asked = self._renamed(asked, looked)
                plan = self._plan(server, asked, looked, now)
            except StoreUnavailable as exc:
                if unsure is None:
                    raise
                cause = exc
                continue
            if plan.empty:
                return plan.stored
            try:
                statements, (telling,) = self._planner.transaction(server, [plan], now)
                results = server.run(statements, transaction=True, again=False)
                if telling is None or results[telling].matched:
                    return plan.stored
                cause = None  # the rows have changed since they were read
            except Lost as exc:
                unsure, cause = plan, exc
            except Duplicate as exc:
                cause = exc
            except StoreUnavailable as exc:
                if unsure is None:
                    raise
                cause = exc
        if unsure is not None:
            raise SubmitUnknown(unsure.stored.put.job_id) from cause
        raise StoreUnavailable(f"{server.name}: the task keeps changing; try again") from cause

    # --- many

    def put_each(self, wanted: Sequence[ToPut]) -> list[Outcome]:
        """Put rows of different callers, all of one server, together. Returns each one's outcome.

        None: certainly not put, because of another one or of a lock; ``put_alone`` it.
        """
        if len(wanted) == 1:
            return [self.put_alone(wanted[0])]
        outcomes: list[Outcome] = [None] * len(wanted)
        todo = self._different(wanted)
        failed = unwritable(self._shards, self._server_of(wanted[0]), [wanted[n].row for n in todo])
        for n, error in zip(todo, failed, strict=True):
            outcomes[n] = error
        todo = [n for n in todo if outcomes[n] is None]
        refused = self._requests.claim_each(
            (one.request, self._shards.table_of(one.row.job_id))
            for one in (wanted[n] for n in todo)
            if one.request is not None and not one.request.part
        )
        for n in todo:
            request = wanted[n].request
            outcomes[n] = None if request is None else refused.get(request)
        todo = [n for n in todo if outcomes[n] is None]
        found = self._together([wanted[n] for n in todo], TRIES_TOGETHER)
        for n, outcome in zip(todo, found, strict=True):
            outcomes[n] = outcome
        return outcomes

    def _different(self, wanted: Sequence[ToPut]) -> list[int]:
        """Return the indexes of the items that share neither name nor request with an earlier one."""
        seen: set[Name | bytes] = set()
        indexes = []
        for index, one in enumerate(wanted):
            keys: set[Name | bytes] = set() if one.request is None else {one.request.key}
            keys |= {name} if (name := self._name(one.row)) is not None else set()
            if not keys & seen:
                indexes.append(index)
            seen |= keys
        return indexes

    def _together(self, wanted: Sequence[ToPut], tries: int) -> list[Outcome]:
        """Put items without common names, in halves if they cannot go together."""
        if not wanted:
            return []
        server = self._server_of(wanted[0])
        for attempt in range(tries):
            if attempt:
                pause(attempt)
            try:
                return self._at_once(server, wanted)
            except (Duplicate, Locked):
                continue
            except (StoreUnavailable, SchemaBehind) as exc:
                note_away(self._shards, server, exc)
                return [None if isinstance(exc, (Transient, Refused, SchemaBehind)) else exc] * len(wanted)
        if len(wanted) == 1:
            return [None]
        half = len(wanted) // 2
        return [*self._together(wanted[:half], 1), *self._together(wanted[half:], 1)]

    def _at_once(self, server: DatabaseServer, wanted: Sequence[ToPut]) -> list[Outcome]:
        """Put all in one transaction. Raises Duplicate or Locked if one of them prevents that, or another
        error; nothing is stored then."""
        now = self._stamp()
        looked = self._look(server, wanted, wait=False)
        outcomes: list[Outcome] = [None] * len(wanted)
        plans: dict[int, Plan] = {}
        for n, asked in enumerate(wanted):
            try:
                done = requests.answer_of(asked.request, looked.answers)
                if done is not None:
                    outcomes[n] = Stored(done)
                    continue
                plan = self._plan(server, self._renamed(asked, looked), looked, now)
            except TocError as exc:
                outcomes[n] = exc
                continue
            if plan.empty:
                outcomes[n] = plan.stored
            else:
                plans[n] = plan
        if not plans:
            return outcomes
        statements, telling = self._planner.transaction(server, list(plans.values()), now)
        try:
            results = server.run(statements, transaction=True, again=False, outwait=False)
        except Lost:
            for n, plan in plans.items():
                outcomes[n] = self._after_loss(server, plan)
            return outcomes
        except (Locked, Refused):  # after seconds: each finds out by itself which one was locked
            rows = [plan.asked.row for plan in plans.values()]
            failed = unwritable(self._shards, server, rows, find=True)
            for n, error in zip(plans, failed, strict=True):
                outcomes[n] = error
            return outcomes
        for (n, plan), place in zip(plans.items(), telling, strict=True):
            if place is None or results[place].matched:
                outcomes[n] = plan.stored
        return outcomes

    def _after_loss(self, server: DatabaseServer, plan: Plan) -> Stored | TocError:
        """Return the outcome of a plan whose transaction's answer was lost. Carries it out if it was not
        done."""
        away = self._shards.health[server].away
        if away is not None:
            unknown = SubmitUnknown(plan.stored.put.job_id)
            unknown.__cause__ = away
            return unknown
        try:
            return self._settle(plan.asked, plan)
        except TocError as exc:
            note_away(self._shards, server, exc.__cause__ if isinstance(exc, SubmitUnknown) else exc)
            return exc

    # --- reading

    def _look(
        self,
        server: DatabaseServer,
        wanted: Sequence[ToPut],
        also: Collection[int] = (),
        *,
        wait: bool = True,
    ) -> _Looked:
        """Return the rows with the names of these, those with their job_ids (and ``also``), and answers to
        their requests.

        Like a plain submit, it waits for transactions that insert such a name, or is refused as Locked.
        """
        what = seen_columns(server)
        names, request_names = self._shards.names, self._shards.request_names
        ids = self._shards.group([*(one.row.job_id for one in wanted), *also])[server]
        statements = [
            Statement(f"SELECT {what} FROM {names[table]} WHERE job_id IN ({sql.numbers(part)})")
            for table, part in ids.items()
        ]
        plain = len(statements)
        keys: dict[int, list[tuple[str, bytes]]] = {}
        asked: dict[str, list[Request]] = {}
        for one in wanted:
            row, table = one.row, self._shards.table_of(one.row.job_id)
            if row.dedup_key is not None:
                own = f"(biz_id={row.biz_id:d} AND biz_type={row.biz_type:d} AND dedup_key=%s)"
                keys.setdefault(table, []).append((own, row.dedup_key.encode()))
            if one.request is not None:
                asked.setdefault(request_names[table], []).append(one.request)
        for table, part in sorted(keys.items()):
            for first in range(0, len(part), sql.KEYS):
                some = part[first : first + sql.KEYS]
                rows_of = server.by_whole_keys(names[table], " OR ".join(one for one, _ in some), wait=wait)
                statements.append(Statement(f"SELECT {what} FROM {rows_of}", [key for _, key in some]))
        rows = len(statements)
        # last, so that they are at least as new as the rows
        statements += [requests.select(name, part) for name, part in asked.items()]
        results = server.run(statements, outwait=wait)
        named = seen_rows(results[plain:rows])
        by_name = {name: seen for seen in named if (name := self._name(seen.row)) is not None}
        by_id = {one.row.job_id: one.row for one in seen_rows(results[:plain])}
        return _Looked(by_id, by_name, requests.answered(results[rows:]))

    def _plan(self, server: DatabaseServer, asked: ToPut, looked: _Looked, now: int) -> Plan:
        name = self._name(asked.row)
        found = None if name is None else looked.by_name.get(name)
        return self._planner.plan(server, asked, found, now)

    def _renamed(self, asked: ToPut, looked: _Looked) -> ToPut:
        """Return it with another job_id if its own is taken by another task."""
        row = asked.row
        if row.job_id not in looked.by_id:
            return asked
        return asked._replace(row=row._replace(job_id=self._job_ids.another(row.job_id)))

    def _name(self, row: TaskRow) -> Name | None:
        if row.dedup_key is None:
            return None
        return self._shards.table_of(row.job_id), row.biz_id, row.biz_type, row.dedup_key

    def _server_of(self, asked: ToPut) -> DatabaseServer:
        return self._shards.server_of[self._shards.table_of(asked.row.job_id)]


def _was_done(unsure: Plan, by_id: dict[int, TaskRow]) -> bool:
    """Whether a transaction whose answer was lost is known to have been committed. Raises SubmitUnknown."""
    stored, wanted = unsure.stored, unsure.asked.row
    now = by_id.get(stored.put.job_id)
    if stored.inserted is not None:
        return now is not None and equal(stored.inserted, now)
    if stored.before is None:
        return False
    version = stored.before.version
    if now is None or now.version > version + 1:
        raise SubmitUnknown(stored.put.job_id)
    return now.version == version + 1 and _content(now) == _content(wanted)


def _content(row: TaskRow) -> tuple[object, ...]:
    """Return what a put gives a pending row."""
    return row.action_time, row.attribute, row.body_sha256, row.tries, row.expires_at
