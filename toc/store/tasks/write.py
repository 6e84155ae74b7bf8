"""The engine that writes what is submitted: for one caller, for many together, or many tasks of one call.

    wanted ─▶ read ─▶ plan each ─▶ one transaction ─▶ an outcome for each
               ▲                         │
               └── a clash, a lost answer, a row that has changed: read again

The rows are read first, and decide what to do (``plan``). A plain submit need not read: its INSERT,
one round trip, tells whether a row is there already. If the answer is lost, the same rows are sent again,
under the same job_ids: a row that equals the one that was sent shows that it was stored. A request is settled
by its own row, even from another process. Any other change is settled by the version of the task's row; if
another change has come since, the outcome is unknown (SubmitUnknown).

No lock on a gap outlives its statement, because it would block every insert into that gap. Before a row is
inserted, its dedup_key is looked up by the whole key at READ COMMITTED. This locks, and waits for, only the
row with that key. (At REPEATABLE READ, a locking read that finds nothing locks the gap before the next row
until the transaction ends. An INSERT that meets a duplicate does so at any level. InnoDB's rules are the same
in MySQL 8.) One case still locks a gap: an INSERT that meets a key which came between look-up and INSERT.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from operator import attrgetter
from typing import NamedTuple, TypeVar

from toc.model import errors
from toc.model.clock import Clock
from toc.model.errors import SchemaBehind, StoreUnavailable, SubmitUnknown, TocError
from toc.model.sharding import JobIds
from toc.model.task import Put, Request, Submission, TaskRow
from toc.store.servers import server as db
from toc.store.servers.server import DatabaseServer, Duplicate, Lost, Result, Statement, pause
from toc.store.servers.shards import OF_TABLES, Shards, Trouble
from toc.store.servers.threads import Threads
from toc.store.tasks import requests
from toc.store.tasks import rows as sql
from toc.store.tasks.plan import Plan, Planner, Seen, Stored, inserting, same_task, seen_columns, seen_rows

R = TypeVar("R")

CHUNK_ROWS = 1000
CHUNK_BYTES = 1_000_000
"""Most rows, and most bytes of SQL, roughly, of one transaction of ``put_many``."""
REPEATS = 7
RESEND_SECONDS = 5.0
"""Seconds to retry an ambiguous commit before SubmitUnknown; at least one more try is made."""
THREADS = 4
"""Chunks in progress at once: the SQL of the next is written while the server works on one."""

Outcome = Stored | TocError | None
"""The outcome of one of many callers. None: another one or a lock prevented it, and nothing was written for
it. It must be put alone."""
Name = tuple[int, int, int, str]
"""Table, biz_id, biz_type and dedup_key."""


class _Known(NamedTuple):
    """What is stored: rows by job_id and by name, and answers to requests."""

    by_id: Mapping[int, TaskRow]
    by_name: Mapping[Name, Seen]
    answers: requests.Answered


_NOTHING = _Known({}, {}, {})


class _Work:
    """What is being written together, to one server. ``todo`` shrinks as ``outcomes`` grows.

    ``many``: for callers of their own, so none waits for a lock, and an error is the outcome of one alone.
    """

    def __init__(self, server: DatabaseServer, todo: dict[int, Submission], *, many: bool = False) -> None:
        self.server, self.todo, self.many = server, todo, many
        self.outcomes: dict[int, Stored | TocError] = {}
        self.unsure: dict[int, Plan] = {}
        """Plans of transactions whose answers were lost."""
        self.tried = False

    def settle(self, number: int, outcome: Stored | TocError) -> None:
        """Record an outcome."""
        self.outcomes[number] = outcome
        del self.todo[number]
        self.unsure.pop(number, None)


class Writer:
    """Stores and replaces tasks. Thread-safe."""

    def __init__(
        self, shards: Shards, job_ids: JobIds, stamp: Callable[[], int], remembered: requests.Requests,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._shards = shards
        self._requests = remembered
        self._job_ids = job_ids
        self._stamp = stamp
        self._clock = clock
        self._planner = Planner(shards)
        self._threads = Threads(THREADS, "toc-submit")

    def close(self) -> None:
        """End the threads. May be called twice; the object stays usable."""
        self._threads.close()

    # --- one

    def put(self, one: Submission) -> Stored:
        """Store a row, or do with the task that has its dedup_key what ``on_conflict`` says. A new row has
        its job_id, or another if that was taken.

        Raises DedupConflict, TaskExists, RequestReused, InvalidExpiry, SubmitUnknown.
        """
        if one.request is not None:
            for error in self._claim([one]).values():
                raise error
        work = _Work(self._server_of(one), {0: one})
        self._settle(work)
        outcome = work.outcomes[0]
        if isinstance(outcome, TocError):
            raise outcome
        return self._told(one, outcome)

    def _put_alone(self, one: Submission) -> Stored | TocError:
        """Do as ``put``, and return an error; does not wait for a server known to be away."""
        try:
            return self._asked(one, self.put)
        except TocError as exc:
            return exc

    def _claim(self, wanted: Iterable[Submission]) -> dict[Request, errors.RequestReused]:
        """Claim the names of these requests. Returns those that are bound to something else."""
        return self._requests.claim_each(
            (one.request, self._shards.table_of(one.row.job_id))
            for one in wanted
            if one.request is not None and not one.request.part
        )

    # --- many callers

    def put_each(self, wanted: Sequence[Submission]) -> list[Outcome]:
        """Put submissions of different callers, all of one server, together. Returns each one's outcome. Of
        one alone it is never None."""
        if len(wanted) == 1:
            return [self._put_alone(wanted[0])]
        server = self._server_of(wanted[0])
        outcomes: list[Outcome] = [*self._unwritable(server, wanted)]
        asked = [one for one, error in zip(wanted, outcomes, strict=True) if error is None]
        refused = self._claim(asked)
        for n, one in enumerate(wanted):
            if outcomes[n] is None and one.request is not None:
                outcomes[n] = refused.get(one.request)
        work = _Work(server, {n: one for n, one in enumerate(wanted) if outcomes[n] is None}, many=True)
        try:  # what is left to do after this must go by itself
            self._try(work)
        except Lost as exc:
            self._settle(work, exc)
        except (Duplicate, db.Locked):
            pass
        except (StoreUnavailable, SchemaBehind) as exc:
            self._shards.health[server].note(exc)
            if not isinstance(exc, (db.Transient, db.Refused, SchemaBehind)):
                for n in list(work.todo):
                    work.settle(n, exc)
        found = [work.outcomes.get(n, outcome) for n, outcome in enumerate(outcomes)]
        many = zip(wanted, found, strict=True)
        return [self._told(one, done) if isinstance(done, Stored) else done for one, done in many]

    def _told(self, one: Submission, done: Stored) -> Stored:
        """Return an outcome as it is told. That of a request stays as it is stored: a repeat gets it, too."""
        return done.told(self._clock.now_ms()) if one.request is None else done

    # --- many tasks of one caller

    def put_many(
        self,
        many: Sequence[Submission],
        then: Callable[[Sequence[TaskRow]], object],
        refused: Mapping[int, errors.InvalidInput],
    ) -> list[int]:
        """Store tasks with ``on_conflict="keep"``, in chunks of up to 1,000 (less with bodies) per
        transaction and round trip. Returns job_ids in order.

        ``refused``: why a row, by its number, must not be new; raised if nobody has its dedup_key.

        ``then`` gets the rows of each chunk as they are stored, perhaps on another thread, while the next
        chunk is being sent. It gets no rows whose dedup_key was stored before. Raises DedupConflict before
        anything is written; PartialSubmit when a server failed after some were.
        """
        rows = [one.row for one in many]
        first: dict[Name, int] = {}
        same_as: dict[int, int] = {}
        by_table: dict[int, list[int]] = {}
        for n, row in enumerate(rows):
            table = self._shards.table_of(row.job_id)
            if row.dedup_key is not None:
                name = table, row.biz_id, row.biz_type, row.dedup_key
                if (earlier := first.setdefault(name, n)) != n:
                    same_task(row, rows[earlier], stored=False)
                    same_as[n] = earlier
                    continue
            by_table.setdefault(table, []).append(n)
        stored = self._stored_before(first, many)
        if lacking := refused.keys() - stored.keys() - same_as.keys():
            raise refused[min(lacking)]
        if stored:
            by_table = {table: [n for n in part if n not in stored] for table, part in by_table.items()}
        chunks = [
            (server, chunk)
            for server, tables in self._shards.group_tables(by_table).items()
            for chunk in chunks_of(tables, rows)
        ]
        failed: list[TocError] = []
        store = [partial(self._store_chunk, many, then, failed, *chunk) for chunk in chunks]
        done = [store[0]()] if len(chunks) == 1 else self._threads.all(store)
        for part in done:
            stored |= part
        unknown = [error.job_id for error in failed if isinstance(error, SubmitUnknown)]
        if failed and not any(done) and not unknown:
            raise failed[0]
        stored |= {n: stored[earlier] for n, earlier in same_as.items() if earlier in stored}
        if failed:
            raise errors.PartialSubmit([stored.get(n) for n in range(len(rows))], unknown) from failed[0]
        return [stored[n] for n in range(len(rows))]

    def _stored_before(self, names: Mapping[Name, int], many: Sequence[Submission]) -> dict[int, int]:
        """Return the job_ids of the tasks that have these names, by the number of the row that wants one.
        Raises DedupConflict."""
        keyed, stored = self._keyed(many[n] for n in names.values()), dict[int, int]()
        for server, part in self._shards.group_tables(keyed).items():
            results = server.run(self._of_names(server, part, seen_columns(server)))
            for name, seen in self._by_name(results).items():
                stored[names[name]] = same_task(many[names[name]].row, seen.row)
        return stored

    def _store_chunk(
        self, many: Sequence[Submission], then: Callable[[Sequence[TaskRow]], object], failed: list[TocError],
        server: DatabaseServer, chunk: sql.ByTable,
    ) -> dict[int, int]:  # fmt: skip
        """Store a chunk, unless another has failed. Returns the job_ids of its tasks, and adds errors to
        ``failed``."""
        if failed:
            return {}
        by_table = {table: [many[n] for n in part] for table, part in chunk.items()}
        work = _Work(server, {n: many[n] for part in chunk.values() for n in part})
        try:
            try:  # nothing to decide, for thousands of rows
                server.run(self._planner.inserts(server, by_table), transaction=True, again=False)
            except (Lost, Duplicate) as exc:
                work.tried = True
                if isinstance(exc, Lost):
                    work.unsure = {n: inserting(one) for n, one in work.todo.items()}
                self._settle(work, exc)
        except TocError as exc:
            failed.append(exc)
            return {}
        if not work.tried:
            then([one.row for one in work.todo.values()])
            return {n: one.row.job_id for n, one in work.todo.items()}
        failed += [one for one in work.outcomes.values() if isinstance(one, TocError)]
        done = {n: one for n, one in work.outcomes.items() if isinstance(one, Stored)}
        then([row for one in done.values() if (row := one.inserted or one.kept)])
        return {n: one.put.job_id for n, one in done.items()}

    # --- the engine

    def _settle(self, work: _Work, cause: Exception | None = None) -> None:
        """Try until each has its outcome. ``cause``: what came of a transaction before.

        Raises what prevents it while it is certain that nothing was written. For ``many`` this follows a lost
        answer, and some may be left to do, of which nothing is written.
        """
        health, clock = self._shards.health[work.server], self._clock
        deadline = clock.monotonic() + RESEND_SECONDS
        for attempt in count(int(work.tried)):
            if attempt:
                # If others change the same rows, one of them succeeds each time: no need for a last try.
                contended = cause is None or isinstance(cause, Duplicate)
                if (attempt > 1 and clock.monotonic() > deadline) or (attempt >= REPEATS and not contended):
                    break
                if work.many and health.away is not None:
                    cause = health.away
                    break
                if contended:
                    pause(attempt, contended=True)
                else:
                    clock.wait(0.025 * 2**attempt)
            try:
                self._try(work)
                cause = None
            except (Lost, Duplicate) as exc:
                cause = exc
            except (StoreUnavailable, SchemaBehind) as exc:
                if not work.unsure:
                    raise
                cause = exc
            if not work.todo or (work.many and not work.unsure):
                return
        for n in list(work.todo):
            plan = work.unsure.get(n)
            error: TocError = StoreUnavailable(f"{work.server.name}: the task keeps changing; try again")
            error = error if plan is None else SubmitUnknown(plan.stored.put.job_id)
            error.__cause__ = cause
            work.settle(n, error)
        if work.many:
            health.note(cause)

    def _try(self, work: _Work) -> None:
        """Read and write, in one transaction, what is to do. Settles what is certain.

        Raises Duplicate, Lost or another error of the server; for one caller also that of a plan. Unless it
        is Lost, nothing was written then.
        """
        server, many, unsure = work.server, work.many, work.unsure
        first, work.tried = not work.tried, True
        blind = first and not many and all(one.plain for one in work.todo.values())
        known, now = _NOTHING, 0
        if not blind:
            now = self._stamp()
            also = [plan.stored.put.job_id for plan in unsure.values()]
            known = self._known(server, work.todo.values(), also, ids=not first, wait=not many)
        taken = set(known.by_id)
        used: set[Name | bytes | None] = set()
        plans: dict[int, Plan] = {}
        for n, one in list(work.todo.items()):
            try:
                plan: Plan | Stored | None = None if blind else _settled(one, unsure.get(n), known)
                if plan is None:
                    if one.row.job_id in taken:
                        one = work.todo[n] = one._replace(row=self.renamed(one.row))
                    name = self._name(one.row) if known.by_name else None
                    found = None if name is None else known.by_name.get(name)
                    plan = self._planner.plan(server, one, found, now)
            except TocError as exc:
                if not many:
                    raise
                work.settle(n, exc)
                continue
            if isinstance(plan, Stored):
                work.settle(n, plan)
                continue
            if many and not (one.row.dedup_key is None and one.request is None):
                keys = {self._name(one.row), one.request and one.request.key} - {None}
                if keys & used:  # later
                    continue
                used |= keys
            if (row := plan.stored.inserted) is not None:
                taken.add(row.job_id)
            plans[n] = plan
        if not plans:
            return
        statements, telling = self._planner.transaction(server, list(plans.values()))
        if blind:
            statements = [*self._of_names(server, self._keyed(work.todo.values()), "1"), *statements]
        try:
            results = server.run(statements, transaction=True, again=False, outwait=not many)
        except Lost:
            unsure.update(plans)
            raise
        except OF_TABLES:  # perhaps after seconds: each finds out by itself which one was locked
            if not many:
                raise
            failed = self._unwritable(server, [each.asked for each in plans.values()], find=True)
            for n, error in zip(plans, failed, strict=True):
                if error is not None and n not in unsure:
                    work.settle(n, error)
            return
        for (n, done), place in zip(plans.items(), telling, strict=True):
            if place is None or results[place].matched:
                work.settle(n, done.stored)

    # --- reading

    def found(self, one: Submission, *, wait: bool = True) -> Seen | None:
        """Return the stored row with this dedup_key, after waiting for a transaction that inserts it; Locked
        unless ``wait``."""
        name = self._name(one.row)
        return None if name is None else self._known(self._server_of(one), [one], wait=wait).by_name.get(name)

    def found_soon(self, one: Submission, *, wait: bool) -> Future[Seen | None]:
        """Do as ``found`` on a thread."""
        return self._threads.soon(partial(self.found, one, wait=wait))

    def kept(self, one: Submission) -> Put | None:
        """Return the task that has this dedup_key and would stay as it is; None if there is none, or it would
        be replaced. Raises DedupConflict, TaskExists."""
        found = self._asked(one, self.found)
        plan = None if found is None else self._planner.plan(self._server_of(one), one, found, 0)
        return plan.put if isinstance(plan, Stored) else None

    def renamed(self, row: TaskRow) -> TaskRow:
        """Return a row with another job_id."""
        return row._replace(job_id=self._job_ids.another(row.job_id))

    def _known(
        self, server: DatabaseServer, wanted: Iterable[Submission], also: Iterable[int] = (), *,
        ids: bool = False, wait: bool = True,
    ) -> _Known:  # fmt: skip
        """Return the rows with the names of these, and answers to their requests; with ``ids`` those with
        their job_ids; and those with the job_ids ``also``.

        It waits for transactions that insert such a name, or is refused as Locked unless ``wait``.
        """
        wanted = list(wanted)
        by_table = self._shards.group([*(one.row.job_id for one in wanted if ids), *also]).get(server, {})
        statements = sql.select_by_id(server, sql.columns(server), self._shards.names, by_table)
        plain = len(statements)
        statements += self._of_names(server, self._keyed(wanted), seen_columns(server), wait=wait)
        rows = len(statements)
        asked: dict[str, list[Request]] = {}
        for one in wanted:
            if one.request is not None:
                table = self._shards.request_names[self._shards.table_of(one.row.job_id)]
                asked.setdefault(table, []).append(one.request)
        # last, so that they are at least as new as the rows
        statements += [requests.select(name, part) for name, part in asked.items()]
        results = server.run(statements, outwait=wait)
        by_id = {row.job_id: row for row in sql.task_rows(results[:plain])}
        return _Known(by_id, self._by_name(results[plain:rows]), requests.answered(results[rows:]))

    def _by_name(self, results: Iterable[Result]) -> dict[Name, Seen]:
        named = seen_rows(results)
        return {name: seen for seen in named if (name := self._name(seen.row)) is not None}

    def _keyed(self, wanted: Iterable[Submission]) -> dict[int, list[TaskRow]]:
        """Return the rows of these that have a dedup_key, by table."""
        keyed: dict[int, list[TaskRow]] = {}
        for one in wanted:
            if one.row.dedup_key is not None:
                keyed.setdefault(self._shards.table_of(one.row.job_id), []).append(one.row)
        return keyed

    def _of_names(
        self, server: DatabaseServer, keyed: Mapping[int, Sequence[TaskRow]], what: str, *, wait: bool = True
    ) -> list[Statement]:
        """Return the selects of the rows with the dedup_keys of these, given by table.

        They wait for transactions that insert one, or are refused. An INSERT would wait too; but then, and
        afterwards in a caller's transaction, it locks the gap before the row as well, and with it every
        biz_id in between.
        """
        return [
            statement
            for table, rows in sorted(keyed.items())
            for statement in sql.select_by_dedup(server, what, self._shards.names[table], rows, wait=wait)
        ]

    def _name(self, row: TaskRow) -> Name | None:
        key = row.dedup_key
        return None if key is None else (self._shards.table_of(row.job_id), row.biz_id, row.biz_type, key)

    def _server_of(self, one: Submission) -> DatabaseServer:
        return self._shards.server_of[self._shards.table_of(one.row.job_id)]

    # --- servers in trouble

    def _asked(self, one: Submission, do: Callable[[Submission], R]) -> R:
        """Return ``do(one)``. Raises at once if its server is known to be away; marks it if it turns out to
        be."""
        server = self._server_of(one)
        for error in filter(None, self._unwritable(server, [one])):
            raise error
        try:
            return do(one)
        except TocError as exc:
            self._shards.health[server].note(exc.__cause__ if isinstance(exc, SubmitUnknown) else exc)
            raise

    def _unwritable(
        self, server: DatabaseServer, wanted: Iterable[Submission], *, find: bool = False
    ) -> list[Trouble | None]:
        """Return for each why it cannot be written now, or None: its server is known to be away, or its table
        locked or damaged.

        ``find``: first find out which tables are. For when a transaction of all these was refused.
        """
        health = self._shards.health[server]
        tables = [self._shards.table_of(one.row.job_id) for one in wanted]
        if find:
            health.set_aside(dict.fromkeys(tables))
        _, failed = health.sort_out(dict.fromkeys(tables))
        return [failed.get(table) for table in tables]


def _settled(one: Submission, unsure: Plan | None, known: _Known) -> Stored | None:
    """Return what was done already: for a request that was answered, or by the transaction of ``unsure``,
    whose answer was lost. None if nothing was. Raises RequestReused, SubmitUnknown."""
    done = requests.answer_of(one.request, known.answers)
    if done is not None:
        return Stored(done)
    if unsure is None or one.request is not None:
        return None
    stored = unsure.stored
    now = known.by_id.get(stored.put.job_id)
    if stored.inserted is not None:  # [rule: resend]
        return stored if now is not None and _submitted(now) == _submitted(stored.inserted) else None
    if stored.before is None:
        return None
    version = stored.before.version
    if now is None or now.version > version + 1:
        raise SubmitUnknown(stored.put.job_id)
    return stored if now.version == version + 1 and _content(now) == _content(one.row) else None


_submitted = attrgetter(
    "biz_id", "biz_key", "biz_type", "attribute", "slot_crc", "slot_amount", "dedup_key", "gmt_create",
    "body_sha256",
)  # fmt: skip
"""What of a row is as it was submitted, whatever changed since."""
_content = attrgetter("action_time", "attribute", "body_sha256", "tries", "expires_at")
"""What a put gives a pending row."""


def chunks_of(by_table: sql.ByTable, rows: Sequence[TaskRow]) -> Iterator[sql.ByTable]:
    """Split rows of one server, given by table and number, into chunks of bounded size."""
    least = CHUNK_BYTES // CHUNK_ROWS
    places = ((table, n) for table, numbers in by_table.items() for n in numbers)
    for part in sql.bounded(((place, max(rows[place[1]].size, least)) for place in places), CHUNK_BYTES):
        chunk: dict[int, list[int]] = {}
        for table, n in part:
            chunk.setdefault(table, []).append(n)
        yield chunk
