"""Maps tables to servers: servers hold blocks of databases, database = table mod databases."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar, Unpack
from urllib.parse import unquote

from sqlalchemy import MetaData
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from toc.model.errors import ConfigError, SchemaBehind, StoreUnavailable
from toc.model.sharding import table_of_job
from toc.store import schema
from toc.store.servers.health import LOCKED_SECONDS, Health
from toc.store.servers.health import OF_TABLES as OF_TABLES
from toc.store.servers.health import Trouble as Trouble
from toc.store.servers.mysql import MySqlServer
from toc.store.servers.server import DatabaseServer, Locked, Lost, Options, Refused, Statement
from toc.store.servers.threads import Threads

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")

MAX_FAILED = 3
"""After this many locked or refused rows of a table, one call leaves the rest for later."""


class Layout:
    """How databases and tables are spread over servers, without a connection to any.

    With 8 databases on 2 URLs the first holds 0..3, the second 4..7. ``toc.config.Settings`` has checked that
    the numbers fit. Raises ConfigError for a URL that cannot be parsed.
    """

    def __init__(self, urls: Sequence[str], databases: int, tables: int, prefix: str) -> None:
        self.urls = [_parse(url) for url in urls]
        self.databases = databases
        self.tables = tables
        self.prefix = prefix
        self.sqlite = any(url.get_backend_name() == "sqlite" for url in self.urls)

    def databases_of(self, server: int) -> range:
        """The block of databases that a server holds."""
        block = self.databases // len(self.urls)
        return range(server * block, (server + 1) * block)

    def tables_of(self, database: int) -> range:
        """The task tables of a database."""
        return range(database, self.tables, self.databases)

    def database_name(self, database: int) -> str:
        """``toc_3`` for 3."""
        return f"{self.prefix}{database}"


class Answers(dict[int, R]):
    """The answers by job_id, and in ``unanswered`` why the rest failed: a server is away, a table or row
    locked."""

    def __init__(
        self, answered: Mapping[int, R] | None = None, unanswered: Mapping[int, Trouble] | None = None
    ) -> None:
        super().__init__(answered or {})
        self.unanswered: dict[int, Trouble] = dict(unanswered or {})

    def whole(self) -> Answers[R]:
        """Return self if everything was answered. Raises the first failure otherwise."""
        for error in self.unanswered.values():
            raise error
        return self


class Parts(Generic[R]):
    """The servers' answers, each for its part, and the failures by job_id or, for scans, by table."""

    def __init__(self) -> None:
        self.results: list[R] = []
        self.failed: dict[int, Trouble] = {}

    def add(self, other: Parts[R]) -> None:
        """Add what others have answered."""
        self.results += other.results
        self.failed |= other.failed

    def whole(self) -> list[R]:
        """The results if no part failed. Raises the first failure otherwise."""
        for error in self.failed.values():
            raise error
        return self.results

    def rows(self: Parts[list[V]]) -> list[V]:
        """The rows of all parts, if none failed. Raises the first failure otherwise."""
        return [row for part in self.whole() for row in part]

    def joined(self: Parts[dict[int, V]]) -> Answers[V]:
        """The answers by job_id. For parts that are mappings by job_id."""
        return Answers({one: answer for part in self.results for one, answer in part.items()}, self.failed)

    def fail(self, tables: Mapping[int, T], errors: Mapping[int, Trouble]) -> None:
        """Record the failure of these tables' parts: of all ids, if a part is a list of ids."""
        for table, error in errors.items():
            part = tables[table]
            self.failed.update(dict.fromkeys(part, error) if isinstance(part, list) else {table: error})


class Shards:
    """The servers, and the mapping from a job_id to its server and table. Thread-safe and fork-safe.

    ``server``: the only one, in place of that of the layout's URL.
    """

    def __init__(
        self, layout: Layout, server: DatabaseServer | None = None, **options: Unpack[Options]
    ) -> None:
        self.layout = layout
        self.tables = layout.tables
        self.servers: list[DatabaseServer]
        if server is not None:
            self.servers = [server]
        elif layout.sqlite:
            from toc.store.servers.sqlite import SqliteServer  # few load it

            self.servers = [SqliteServer(url, **options) for url in layout.urls]
        else:
            urls = enumerate(layout.urls)
            self.servers = [MySqlServer(url, layout.databases_of(n), **options) for n, url in urls]
        block = layout.databases // len(self.servers)
        self.number_of = [table % layout.databases // block for table in range(layout.tables)]
        """The number of each table's server."""
        self.server_of = [self.servers[number] for number in self.number_of]
        """The server of each table."""
        self.names = self._named(schema.task_table_name)
        """The SQL name of each table."""
        self.body_names = self._named(schema.body_table_name)
        """The SQL name of the table of bodies beside each table."""
        self.schedule_names = self._named(schema.schedule_table_name)
        """The SQL name of the table of schedules beside each table."""
        self.request_names = self._named(lambda _: schema.REQUEST_TABLE)
        """The SQL name of the table of requests in each table's database."""
        self.due_names = self._named(lambda _: schema.DUE_TABLE)
        """The SQL name of the table of counts in each table's database."""
        alone = len(self.servers) == 1
        self.health = {server: Health(server, self.names, alone=alone) for server in self.servers}
        self.topic_server = self.servers[0]
        self.first = schema.first_tables(MetaData(None if layout.sqlite else layout.database_name(0)))
        """The tables that only the first database has, on ``topic_server``, by name."""
        self._threads = Threads(4 * len(self.servers), "toc-store")
        self.soon, self.run_detached = self._threads.soon, self._threads.run_detached

    def _named(self, name_of: Callable[[int], str]) -> list[str]:
        """Return the SQL name of a table beside each task table."""
        layout = self.layout
        return [
            server.table(layout.database_name(table % layout.databases), name_of(table))
            for table, server in enumerate(self.server_of)
        ]

    def table_of(self, job_id: int) -> int:
        """The table that can hold this job_id."""
        return table_of_job(job_id, self.tables)

    def group(self, job_ids: Iterable[int]) -> dict[DatabaseServer, dict[int, list[int]]]:
        """Group ids by server and table, all sorted, so that two batches lock rows in one order."""
        by_table: defaultdict[int, list[int]] = defaultdict(list)
        for job_id in sorted(set(job_ids)):
            by_table[table_of_job(job_id, self.tables)].append(job_id)
        return self.group_tables(by_table)

    def group_tables(self, by_table: Mapping[int, T]) -> dict[DatabaseServer, dict[int, T]]:
        """Group values of tables by server and table, sorted by table."""
        grouped: dict[DatabaseServer, dict[int, T]] = {}
        for table in sorted(by_table):
            grouped.setdefault(self.server_of[table], {})[table] = by_table[table]
        return grouped

    def each(
        self, work: Mapping[DatabaseServer, Mapping[int, T]],
        do: Callable[[DatabaseServer, Mapping[int, T]], R], *, locks: bool = False,
    ) -> Parts[R]:  # fmt: skip
        """Call ``do(server, its part by table)`` for each server, in parallel if there are several.

        Skips servers marked as away and tables set aside. What fails is marked and harms no other: tables are
        then tried one by one and, if rows of them are refused, rows. So ``do`` must tolerate further calls
        with less. ``locks``: the parts are lists of job_ids, and ``do`` waits for locks on their rows; while
        others hold some, such as an open transaction of a caller, those are left out and fail as Locked.
        """
        if len(work) == 1:
            ((server, tables),) = work.items()
            return self._ask(server, tables, do, locks)
        parts: Parts[R] = Parts()
        asks = [partial(self._ask, server, tables, do, locks) for server, tables in work.items()]
        for part in self._threads.all(asks):
            parts.add(part)
        return parts

    def _ask(
        self, server: DatabaseServer, tables: Mapping[int, T],
        do: Callable[[DatabaseServer, Mapping[int, T]], R], locks: bool,
    ) -> Parts[R]:  # fmt: skip
        parts: Parts[R] = Parts()
        health = self.health[server]
        rest, failed = health.sort_out(tables)
        parts.fail(tables, failed)
        if rest and locks and time.monotonic() < health.locked_until:
            rest = self._unlocked(server, rest, parts)
        if not rest:
            return parts
        began = time.monotonic()
        try:
            parts.results.append(do(server, rest))
            health.learn(time.monotonic() - began)
        except OF_TABLES as exc:
            health.set_aside(rest)
            free, failed = health.sort_out(rest)
            parts.fail(tables, failed)
            if locks and isinstance(exc, Locked):
                free = self._unlocked(server, free, parts)
            for table, part in free.items():
                lost = (error for error in parts.failed.values() if isinstance(error, Lost))
                if (stop := health.away or next(lost, None)) is None:
                    self._ask_table(server, table, part, do, parts)
                else:  # each other could also take all the time that an answer may take
                    parts.fail(free, {table: stop})
        except StoreUnavailable as exc:
            health.note(exc)
            parts.fail(tables, dict.fromkeys(rest, exc))
        return parts

    def locked(self, job_ids: Iterable[int], *, lately: bool = False) -> set[int]:
        """Return those of these whose rows others have locked: the leases of their neighbours would wait.

        ``lately``: asks only servers on which some were a moment ago: to ask takes locks itself. Asks by
        primary key. A locking read of the index by due times would make locks of an open transaction explicit
        there; where a page is split, InnoDB then has it lock a gap, and submits into it wait.
        """
        parts: Parts[None] = Parts()
        for server, tables in self.group(job_ids).items():
            if server.skip_locked and not (lately and time.monotonic() >= self.health[server].locked_until):
                self._unlocked(server, tables, parts)
        return set(parts.failed)

    def _unlocked(self, server: DatabaseServer, tables: Mapping[int, T], parts: Parts[R]) -> Mapping[int, T]:
        """Return these ids without those whose rows others have locked, which fail. Waits for no lock."""
        ids: Mapping[int, Sequence[int]] = tables  # type: ignore[assignment]
        selects = []
        for table, part in ids.items():
            numbers, name = ",".join(map(int.__repr__, part)), server.by_primary_key(self.names[table])
            select = f"SELECT job_id FROM {name} WHERE job_id IN ({numbers})"
            selects += [Statement(select), Statement(select + server.skip_locked)]
        try:
            results = server.run(selects, outwait=False)
        except (StoreUnavailable, SchemaBehind):
            return tables
        there = {row[0] for result in results[::2] for row in result.rows}
        free = {row[0] for result in results[1::2] for row in result.rows}
        if locked := there - free:
            self.health[server].locked_until = time.monotonic() + LOCKED_SECONDS
            error = Locked(f"{server.name}: another transaction has locked the row")
            parts.failed.update(dict.fromkeys(locked, error))
        left = {table: [job_id for job_id in part if job_id not in locked] for table, part in ids.items()}
        return {table: part for table, part in left.items() if part}  # type: ignore[misc]

    def _ask_table(
        self, server: DatabaseServer, table: int, part: T,
        do: Callable[[DatabaseServer, Mapping[int, T]], R], parts: Parts[R],
    ) -> None:  # fmt: skip
        """Run one table's part. If rows of it are locked or refused, run it row by row, in random order so
        that no row starves. (Halves would wait for the row's lock, 2 s, at each level.)"""
        try:
            parts.results.append(do(server, {table: part}))
        except (StoreUnavailable, SchemaBehind) as exc:
            self.health[server].note(exc)
            if not isinstance(exc, (Locked, Refused)) or not isinstance(part, list) or len(part) == 1:
                parts.fail({table: part}, {table: exc})
                return
            failed = 0
            for job_id in random.sample(part, len(part)):
                if failed < MAX_FAILED:
                    self._ask_table(server, table, [job_id], do, parts)  # type: ignore[arg-type]
                    if (error := parts.failed.get(job_id)) is not None:
                        failed += 1 if isinstance(error, (Locked, Refused)) else MAX_FAILED
                else:
                    parts.failed[job_id] = exc

    def close(self) -> None:
        """Close idle connections and threads."""
        for health in self.health.values():
            health.close()
        self._threads.close()
        for server in self.servers:
            server.close()


def _parse(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # not chained: SQLAlchemy's own text quotes the URL with its password
        hint = "expected mysql+pymysql://user:pw@host:3306"
        raise ConfigError(f"a database URL cannot be parsed; {hint}") from None
    if url.get_backend_name() == "sqlite":
        if "?" in text:
            raise ConfigError('the path of a sqlite:/// URL has a "?": write it %3F')
        return url.set(database=unquote(text.partition(":///")[2]))  # SQLAlchemy decodes it since 2.1
    if "@" in (url.host or ""):  # the rest of a password, which must not be resolved or logged as a host
        raise ConfigError('a database URL has an "@" in its password: write it %40')
    return url
