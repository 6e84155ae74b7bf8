"""The task table as all upper layers see it: one object, plain values in and out."""

import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TypeVar, Unpack

from sqlalchemy import Connection

from toc.model.clock import Clock
from toc.model.errors import BodyGone, StoreUnavailable, UnreadableTask
from toc.model.finding import Finding
from toc.model.sharding import BizId, JobIds
from toc.model.task import Content, TaskRow, check_expiry
from toc.store import check
from toc.store.records.access import AuditTable, TokenTable
from toc.store.records.bulk import BulkTable
from toc.store.records.cluster import EpisodeTable, IdentityTable, MemberTable, MinuteTable
from toc.store.records.targets import SecretBox, TargetTable
from toc.store.records.topics import TemplateTable, TopicTable
from toc.store.servers.server import DatabaseServer, Options, Statement, pause
from toc.store.servers.shards import Layout, Shards
from toc.store.tasks import bodies
from toc.store.tasks import rows as sql
from toc.store.tasks.batch import CANCELLED, PENDING, Batches
from toc.store.tasks.callers_transaction import CallersTransaction
from toc.store.tasks.history import FailedTry, parse
from toc.store.tasks.leases import LEASED_IS_TRIED, Leases
from toc.store.tasks.plan import Expiry, as_before, cancelling, new_version, seen_columns, seen_rows, tried
from toc.store.tasks.pulls import Pulls
from toc.store.tasks.requests import Requests
from toc.store.tasks.scan import DueCounts, Scans
from toc.store.tasks.schedules import ScheduleTable
from toc.store.tasks.select import Selections
from toc.store.tasks.write import RESEND_SECONDS, Writer

R = TypeVar("R")

IDS_READ = 10_000
"""Most job_ids that one statement reads."""


class Store(Batches):
    """The task table and the topic table over all servers.

    Connects on first use; thread-safe; usable after a fork. ``urls`` are SQLAlchemy URLs, each of which takes
    a block of the databases, in order; or one sqlite:/// URL. ``secret_keys`` encrypt the secrets of webhook
    targets. ``indexed``: whether a task table that is new has an index. ``server``: the only one, in place of
    that of the URL. Raises ConfigError.

    Any method raises StoreUnavailable when a server is out of reach and SchemaBehind when ``toc db upgrade``
    has not been run. Methods over many tasks (``Batches``) send one batch to each server. Methods
    that return Answers raise neither: they put the ids of unreachable servers and locked tables into
    ``unanswered``. Sending these again is right: every change is guarded.
    """

    def __init__(
        self, urls: Sequence[str], *, databases: int, tables: int, prefix: str = "toc_", clock: Clock,
        secret_keys: Sequence[str] = (), indexed: bool = True, server: DatabaseServer | None = None,
        **options: Unpack[Options],
    ) -> None:  # fmt: skip
        shards = Shards(Layout(urls, databases, tables, prefix), server, **options)
        super().__init__(shards, Leases(shards), clock)
        self.soon, self.run_detached, self.locked = shards.soon, shards.run_detached, shards.locked
        self.bodies = bodies.Bodies(shards)
        self.selections = Selections(shards)
        job_ids = JobIds(clock)
        self.requests = Requests(shards, databases)
        writer = self._writer = Writer(shards, job_ids, self._stamp, self.requests, clock)
        self.put, self.put_each, self.put_many = writer.put, writer.put_each, writer.put_many
        self.kept = writer.kept
        self.callers = CallersTransaction(shards, writer, self._stamp)
        self.schedules = ScheduleTable(shards, job_ids, clock)
        self.scans = Scans(shards)
        self.due_counts = DueCounts(shards)
        self.pulls = Pulls(shards, self._stamp)
        self.topics = TopicTable(shards, clock)
        self.identity = IdentityTable(shards, clock, indexed=indexed)
        self.templates = TemplateTable(shards, clock)
        self.tokens = TokenTable(shards, clock)
        self.targets = TargetTable(shards, SecretBox(secret_keys), clock)
        self.members = MemberTable(shards, clock)
        self.minutes = MinuteTable(shards, clock)
        self.audit = AuditTable(shards, clock)
        self.bulk = BulkTable(shards, clock)
        self.episodes = EpisodeTable(shards, clock)

    def close(self) -> None:
        """Close idle connections. May be called twice; the store connects again if it is used."""
        self._writer.close()
        self._shards.close()

    def close_unused(self) -> None:
        """Close the connections that nobody has used for a minute. Called from time to time."""
        for server in self._shards.servers:
            server.close_unused()

    def other_rung(self, zookeeper: str | None) -> dict[str, str]:
        """Return what is wrong, by host, with living members that share no work with those of this
        TOC_ZOOKEEPER."""
        if zookeeper is None:
            return dict.fromkeys(
                self.identity.marked_by(), "alive with ZooKeeper, and TOC_ZOOKEEPER is not set"
            )
        hosts = [row.host for row in self.members.list() if row.alive]
        return dict.fromkeys(hosts, "alive without ZooKeeper, and TOC_ZOOKEEPER is set")

    def check(self) -> None:
        """Raise SchemaBehind, naming the shards, unless every shard has the schema that this code needs."""
        check.require(self._shards)

    def check_layout(self) -> None:
        """Raise SchemaBehind if the tables were made for other TOC_DATABASES and TOC_TABLES. One query."""
        check.require_layout(self._shards)

    def examine(self) -> list[Finding]:
        """Return findings on every server: its settings, rights and schema. A server out of reach is a
        finding too."""
        return check.examine(self._shards)

    @property
    def tables(self) -> range:
        """The numbers of all task tables."""
        return range(self._shards.tables)

    def name_of(self, table: int) -> str:
        """Return the name of a task table, with its database."""
        return self._shards.names[table]

    def tables_of_server(self) -> list[list[int]]:
        """Return the indexes of the tables that each server holds."""
        of, servers = self._shards.number_of, range(len(self._shards.servers))
        return [[table for table in self.tables if of[table] == number] for number in servers]

    def server_of(self, job_id: int) -> int:
        """Return the number, as in ``tables_of_server``, of the server that holds the task."""
        return self._shards.number_of[self._shards.table_of(job_id)]

    def away(self, server: int) -> StoreUnavailable | None:
        """Return why a server, by number, is marked as away; None if it is not."""
        return self._shards.health[self._shards.servers[server]].away

    def clocks(self) -> dict[str, float | StoreUnavailable]:
        """Return, per server name, its clock minus this machine's in seconds, or why it does not answer.

        Asks one after the other.
        """
        clocks: dict[str, float | StoreUnavailable] = {}
        for server in self._shards.servers:
            try:
                clocks[server.name] = server.clock()
            except StoreUnavailable as exc:
                clocks[server.name] = exc
        return clocks

    # --- one task ------------------------------------------------------------------------------------------

    def get(self, job_id: int) -> TaskRow | None:
        """Return the row of a job_id, or None."""
        return self.read([job_id]).get(job_id)

    def body_of(self, row: TaskRow) -> Content:
        """Return the body of a row that was read before, also if it is at another version by now.

        Raises BodyGone if the task was purged or its body replaced; UnreadableTask if its body is missing.
        """
        seen: TaskRow | None = row
        while seen is not None and seen.body_sha256 == row.body_sha256:
            version = seen.version
            content = self.bodies.one(row.job_id, version)
            if content is not None:
                return content
            seen = self.get(row.job_id)
            if seen is not None and seen.version == version:
                raise UnreadableTask(row.job_id, "its body is missing")
        raise BodyGone(f"the body of task {row.job_id} is gone: it was purged or replaced since it was read")

    def server_of_biz(self, biz: BizId) -> int:
        """Return the number, as in ``tables_of_server``, of the server that holds the tasks of a biz_id."""
        return self._shards.number_of[biz.crc % self._shards.tables]

    def find(self, biz: BizId, biz_type: int | None = None, dedup_key: str | None = None) -> list[TaskRow]:
        """Return all rows of a biz_id, of one biz_type or of all, of one dedup_key or all, oldest first."""
        server, where, params = self._of_biz(biz, biz_type)
        if dedup_key is not None:
            where += " AND dedup_key=%s"
            params.append(dedup_key.encode())
        select = f"SELECT {sql.columns(server)} FROM {where}"
        return sorted(sql.task_rows(server.run([Statement(select, params)])))

    def ids_of(self, biz: BizId, biz_type: int) -> list[int]:
        """Return the job_ids of a biz_id of one biz_type, ascending, however many there are."""
        server, where, params = self._of_biz(biz, biz_type)
        ids: list[int] = []
        whole = True
        while whole:
            more = f" AND job_id>{ids[-1] if ids else 0:d} ORDER BY job_id LIMIT {IDS_READ:d}"
            (result,) = server.run([Statement(f"SELECT job_id FROM {where}{more}", params)])
            ids += [int(job_id) for (job_id,) in result.rows]
            whole = len(result.rows) == IDS_READ
        return ids

    def ids_with(self, connection: Connection, biz: BizId, biz_type: int) -> list[int]:
        """Return what ``ids_of`` does, with those that a caller's transaction has submitted."""
        server, where, params = self._of_biz(biz, biz_type)
        select = Statement(f"SELECT job_id FROM {where}", params)
        # In this order for the reason in ``CallersTransaction._locked``.
        return sorted({*self.callers.ids(connection, server, select), *self.ids_of(biz, biz_type)})

    def _of_biz(self, biz: BizId, biz_type: int | None) -> tuple[DatabaseServer, str, list[bytes]]:
        """Return the server of a biz_id, and its rows as table, condition and parameters."""
        table = biz.crc % self._shards.tables
        where = f"biz_id={biz.number:d}" + ("" if biz_type is None else f" AND biz_type={biz_type:d}")
        where += " AND biz_key IS NULL" if biz.key is None else " AND biz_key=%s"
        params = [] if biz.key is None else [biz.key.encode()]
        return self._shards.server_of[table], f"{self._shards.names[table]} WHERE {where}", params

    def cancel_many(self, job_ids: Iterable[int]) -> dict[int, tuple[bool, TaskRow]]:
        """Cancel those tasks that are pending, in one transaction per server, one by one.

        Returns for each existing task whether this call cancelled it, and its row as it was before. A leased
        row counts as tried: without the index, a lease is committed before a handler starts.
        """
        groups = self._shards.group(job_ids).items()
        return {job_id: done for server, ids in groups for job_id, done in self._cancel(server, ids)}

    def _cancel(self, server: DatabaseServer, ids: sql.ByTable) -> Iterable[tuple[int, tuple[bool, TaskRow]]]:
        now = self._stamp()
        what = sql.columns(server, attempts=LEASED_IS_TRIED.format(greatest=server.greatest))
        statements = []
        for table, part in ids.items():
            name, where = self._shards.names[table], f"job_id IN ({sql.numbers(part)})"
            by_key = server.by_primary_key(name)
            statements.append(Statement(f"SELECT {what} FROM {by_key} WHERE {where}{server.for_update}"))
            statements.append(
                Statement(f"UPDATE {by_key} SET {cancelling(server, now)} WHERE {where} AND status={PENDING}")
            )
        for row in sql.task_rows(server.run(statements, transaction=True)[::2]):
            if row.status == CANCELLED and row.gmt_modified == now:
                # This call cancelled it, and its first answer was lost.
                yield row.job_id, (True, row._replace(status=PENDING, next_time=row.action_time))
            else:
                yield row.job_id, (row.status == PENDING, row)  # locked as it was read

    def reschedule(
        self, job_id: int, action_time: int, expiry: Expiry = as_before
    ) -> tuple[bool, TaskRow | None]:
        """Give a pending task a new deadline (ms), all its tries, and version + 1.

        From then on it expires as ``expiry`` tells. Returns whether this call did it, and the row as it was
        before; a leased row counts as tried. The lease of a worker stays, because the try
        for the old deadline may be running. The lease of a consumer ends, but the task is not due before
        that lease would have ended.

        Raises InvalidExpiry if the task would expire before its new deadline, StoreUnavailable also if the
        answer was lost: the outcome is then unknown, and to call again is right.
        """
        table = self._shards.table_of(job_id)
        server, name = self._shards.server_of[table], self._shards.names[table]
        now = self._stamp()
        select = Statement(f"SELECT {seen_columns(server)} FROM {name} WHERE job_id={job_id:d}")
        deadline = time.monotonic() + RESEND_SECONDS
        for attempt in count(1):
            found = seen_rows(server.run([select]))
            row = found[0].row if found else None
            if row is None or row.status != PENDING:
                return False, row
            check_expiry(expires_at := expiry(row), action_time)
            statements = [new_version(server, name, found[0], action_time, expires_at, now)]
            if row.body_sha256 is not None:
                statements.append(bodies.follow(self._shards.body_names[table], name, [job_id]))
            if server.run(statements, transaction=True, again=False)[0].matched == 1:
                return True, tried(found[0])
            if time.monotonic() > deadline:
                break
            pause(attempt, contended=True)  # others change the row: one of them succeeds each time
        raise StoreUnavailable(f"{server.name}: task {job_id} keeps changing; look at it")

    def history(self, job_id: int) -> list[FailedTry]:
        """Return the kept failed tries of a task, oldest first; [] if there is no such task."""
        table = self._shards.table_of(job_id)
        server, name = self._shards.server_of[table], self._shards.names[table]
        rows = server.run([Statement(f"SELECT history FROM {name} WHERE job_id={job_id:d}")])[0].rows
        return parse(rows[0][0]) if rows else []
