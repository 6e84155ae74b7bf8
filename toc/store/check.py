"""Checks that every shard has the schema that this code needs; and, for ``toc doctor``, whether each server
is fit."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.finding import Finding, Level, clock_finding
from toc.observe.log import get_logger
from toc.store.schema import REVISION, TOPIC_TABLE, body_table_name, task_table_name
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Shards

log = get_logger(__name__)

_SHARDED = re.compile("timeout_(task|body)_[0-9]{4}")
_VERSIONS = "alembic_version"
NO_TABLES = (
    "there is no task table here: is this the right server? If it was lost, restore it; only for a new "
    "cluster run `toc db upgrade`"
)
_OTHER_LAYOUT = (
    "TOC_DATABASES and TOC_TABLES differ from those that the tables were made for: set them as at the first "
    "`toc db upgrade`, or restore lost tables from a backup"
)
PACKET_BYTES = 16 * 2**20
"""Enough for a batch of rows, with a margin."""
NEARLY_ALL = 0.8
OLDEST = {"MySQL": (8, 0), "MariaDB": (10, 6)}

_VARIABLES = (
    *("version", "innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "read_only"),
    *("max_allowed_packet", "max_connections"),
)


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The schema of one database.

    ``revision`` is the last migration applied (None: none), ``head`` the one that this code needs. A later
    revision is not behind: schemas expand before programs use them. ``unexpected_tables`` are task tables of
    another layout than the configured numbers of tables and databases, which cannot change.
    """

    server: str
    database: str
    revision: str | None
    head: str
    missing_tables: tuple[str, ...]
    unexpected_tables: tuple[str, ...]
    absent: bool
    """Whether it has no table at all."""

    @property
    def behind(self) -> bool:
        """Whether this code must not run on it."""
        stale = self.revision is None or self.revision < self.head
        return stale or bool(self.missing_tables or self.unexpected_tables)

    @property
    def misfit(self) -> bool:
        """Whether its tables are not those of the configured layout. An upgrade does not mend that."""
        return bool(self.unexpected_tables or (self.revision is not None and self.missing_tables))

    @property
    def remedy(self) -> str:
        """What to do if it is behind."""
        return NO_TABLES if self.absent else _OTHER_LAYOUT if self.misfit else "run `toc db upgrade`"

    def __str__(self) -> str:
        if self.absent:
            return f"{self.server} {self.database}: no table"
        parts = [f"{self.server} {self.database}: revision {self.revision or 'none'}, needed {self.head}"]
        for what, tables in (("missing", self.missing_tables), ("unexpected", self.unexpected_tables)):
            if tables:
                parts.append(f"{len(tables)} tables {what}, first {tables[0]}")
        return ", ".join(parts)


def require(shards: Shards) -> None:
    """Raise SchemaBehind, naming the shards, unless every shard that answers is fit.

    One of several servers may be out of reach: tasks of the others need not wait for it. Raises
    StoreUnavailable if it is the server of the topic table.
    """
    behind: list[ShardStatus] = []
    for server in shards.servers:
        try:
            behind += [status for status in check_server(shards, server) if status.behind]
        except StoreUnavailable as exc:
            if server is shards.topic_server:
                raise
            log.warning("schema_not_checked", error=str(exc))
    if behind:
        shown = "; ".join(str(status) for status in behind[:8]) + ("; ..." if len(behind) > 8 else "")
        raise SchemaBehind(f"{remedy_of(behind)} ({shown})")


def remedy_of(behind: Sequence[ShardStatus]) -> str:
    """Return what to do first if these are behind: where there is no table at all, nothing else matters."""
    return max(behind, key=lambda status: (status.absent, status.misfit)).remedy


def require_layout(shards: Shards) -> None:
    """Raise SchemaBehind if the tables were made for other TOC_DATABASES and TOC_TABLES.

    Otherwise a task would be written into a table in which its job_id is never looked up. This looks only at
    the first server. Single tables that are missing there are no error here: the statement that uses them
    raises it. Half of them and more were never made.
    """
    half = shards.layout.tables // shards.layout.databases  # of the tasks and their bodies
    for status in check_server(shards, shards.topic_server):
        if status.unexpected_tables or (status.misfit and len(status.missing_tables) >= half):
            raise SchemaBehind(f"{_OTHER_LAYOUT} ({status})")


def _tables(shards: Shards, server: DatabaseServer, names: Sequence[str]) -> dict[str, set[str]]:
    """Return the names of the tables in each of these databases."""
    tables: dict[str, set[str]] = {name: set() for name in names}
    if shards.layout.sqlite:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables[names[0]].update(name for (name,) in server.run([Statement(query)])[0].rows)
        return tables
    schemas = ",".join(f"'{name}'" for name in names)
    what = "table_schema, table_name, @@lower_case_table_names"
    query = f"SELECT {what} FROM information_schema.tables WHERE table_schema IN ({schemas})"
    lower = {name.lower(): name for name in names}
    for schema, table, folded in server.run([Statement(query)])[0].rows:
        name = lower.get(schema.lower(), "") if folded else schema
        tables.get(name, set()).add(table)
    return tables


def check_server(shards: Shards, server: DatabaseServer) -> list[ShardStatus]:
    """Return the state of the databases of one server, by two short queries. Raises StoreUnavailable."""
    layout = shards.layout
    names = [layout.database_name(database) for database in server.databases]
    tables = _tables(shards, server, names)
    migrated = [name for name in names if _VERSIONS in tables[name]]
    asks = [Statement(f"SELECT version_num FROM {server.table(name, _VERSIONS)}") for name in migrated]
    answers = zip(migrated, server.run(asks), strict=True)
    revision_of = {name: result.rows[0][0] for name, result in answers if result.rows}
    statuses = []
    for database, name in zip(server.databases, names, strict=True):
        numbers = layout.tables_of(database)
        expected = {named(table) for table in numbers for named in (task_table_name, body_table_name)}
        if database == 0:
            expected.add(TOPIC_TABLE)
        found = {table for table in tables[name] if _SHARDED.fullmatch(table) or table == TOPIC_TABLE}
        missing, unexpected = tuple(sorted(expected - found)), tuple(sorted(found - expected))
        revision, absent = revision_of.get(name), not tables[name]
        statuses.append(ShardStatus(server.name, name, revision, REVISION, missing, unexpected, absent))
    return statuses


# --- for toc doctor: with rights that every account has


def examine(shards: Shards) -> list[Finding]:
    """Return findings about every server, also good ones. A server out of reach is a finding too."""
    return [finding for server in shards.servers for finding in _examine(shards, server)]


def _examine(shards: Shards, server: DatabaseServer) -> Iterator[Finding]:
    try:
        if shards.layout.sqlite:
            what = "the task table is SQLite, not for production: a lost disk loses it, one writer, one host"
            yield Finding(Level.NOTE, server.name, what, "set TOC_DATABASE_URLS=mysql+pymysql://... there")
        else:
            yield from _settings(server)
        yield from _schema(shards, server)
    except StoreUnavailable as exc:
        yield Finding(Level.REFUSE, server.name, str(exc), "bring it back, or correct TOC_DATABASE_URLS")


def _settings(server: DatabaseServer) -> Iterator[Finding]:
    names = ",".join(f"'{name}'" for name in _VARIABLES)
    began = time.monotonic()
    ahead = server.clock()
    doubt_ms = (time.monotonic() - began) * 500
    show = f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})"
    status = "SHOW GLOBAL STATUS WHERE Variable_name='Threads_connected'"
    variables, used = server.run([Statement(show), Statement(status)])
    facts = {str(name).lower(): str(value) for name, value in variables.rows}
    yield _version(server.name, facts.get("version", ""))
    yield from _wrong(server.name, facts)
    connected, most = int(used.rows[0][1]), int(facts.get("max_connections", "0"))
    room = f"{connected} of {most} connections in use"
    if most and connected > NEARLY_ALL * most:
        do = "raise max_connections: a worker process takes up to 8 per server, and its handlers as many"
        yield Finding(Level.WARN, server.name, room, do)
    else:
        yield Finding(Level.OK, server.name, room, "")
    yield clock_finding(server.name, 1000 * ahead, doubt_ms + 1)


def _version(server: str, version: str) -> Finding:
    name = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and (int(number[1]), int(number[2])) >= OLDEST[name]:
        return Finding(Level.OK, server, f"{name} {version}", "")
    oldest = " or ".join(f"{each} {major}.{minor}" for each, (major, minor) in OLDEST.items())
    return Finding(Level.WARN, server, f"it is {name} {version or '?'}", f"use {oldest} or later")


def _wrong(server: str, facts: Mapping[str, str]) -> Iterator[Finding]:
    flush = facts.get("innodb_flush_log_at_trx_commit", "1")
    if flush != "1":
        what = f"innodb_flush_log_at_trx_commit is {flush}: a crash of the machine loses acknowledged tasks"
        yield Finding(Level.REFUSE, server, what, "set innodb_flush_log_at_trx_commit = 1")
    if facts.get("read_only", "OFF") not in ("OFF", "0"):
        yield Finding(Level.REFUSE, server, "it is read-only", "point TOC_DATABASE_URLS at the primary")
    if facts.get("log_bin") in ("ON", "1") and facts.get("sync_binlog", "1") != "1":
        what = f"sync_binlog is {facts['sync_binlog']}: after a crash replicas may lack commits"
        yield Finding(Level.WARN, server, what, "set sync_binlog = 1")
    packet = int(facts.get("max_allowed_packet", PACKET_BYTES))
    if packet < PACKET_BYTES:
        what = f"max_allowed_packet is {packet / 2**20:g} MiB: large batches would be refused"
        yield Finding(Level.WARN, server, what, f"set max_allowed_packet = {PACKET_BYTES >> 20}M")


def _schema(shards: Shards, server: DatabaseServer) -> Iterator[Finding]:
    statuses = check_server(shards, server)
    if absent := [status.database for status in statuses if status.absent]:
        several = " and other databases" if len(absent) > 1 else ""
        yield Finding(Level.REFUSE, server.name, f"{absent[0]}{several}: {NO_TABLES}", "see there")
    for status in statuses:
        if status.behind and not status.absent:
            yield Finding(Level.REFUSE, server.name, str(status), status.remedy)
    fit = [status for status in statuses if not status.behind]
    if fit:
        revisions = ", ".join(sorted({str(status.revision) for status in fit}))
        yield Finding(Level.OK, server.name, f"the schema of {len(fit)} databases is at {revisions}", "")
