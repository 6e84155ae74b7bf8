"""Checks that every shard has the schema that this code needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from toc.model.errors import SchemaBehind, StoreUnavailable
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
        return (
            self.revision is None
            or self.revision < self.head
            or bool(self.missing_tables)
            or bool(self.unexpected_tables)
        )

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


def check(shards: Shards) -> list[ShardStatus]:
    """Return the state of every database, in order; two short queries per server. Raises StoreUnavailable."""
    return [status for server in shards.servers for status in check_server(shards, server)]


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
        raise SchemaBehind(f"{shown}: {remedy_of(behind)}")


def remedy_of(behind: Sequence[ShardStatus]) -> str:
    """Return what to do first if these are behind: where there is no table at all, nothing else matters."""
    return max(behind, key=lambda status: (status.absent, status.misfit)).remedy


def require_layout(shards: Shards) -> None:
    """Raise SchemaBehind if the tables were made for other TOC_DATABASES and TOC_TABLES.

    Otherwise a task would be written into a table in which its job_id is never looked up. This looks only at
    the first server. Tables that are missing there are no error here: the statement that uses them raises it.
    """
    for status in check_server(shards, shards.topic_server):
        if status.unexpected_tables:
            raise SchemaBehind(f"{status}: {_OTHER_LAYOUT}")


def _tables(shards: Shards, server: DatabaseServer, names: Sequence[str]) -> dict[str, set[str]]:
    """Return the names of the tables in each of these databases."""
    tables: dict[str, set[str]] = {name: set() for name in names}
    if shards.layout.sqlite:
        query = "SELECT name FROM sqlite_master WHERE type = 'table'"
        tables[names[0]].update(name for (name,) in server.run([Statement(query)])[0].rows)
        return tables
    schemas = ",".join(f"'{name}'" for name in names)
    query = (
        "SELECT table_schema, table_name, @@lower_case_table_names FROM information_schema.tables "
        f"WHERE table_schema IN ({schemas})"
    )
    lower = {name.lower(): name for name in names}
    for schema, table, folded in server.run([Statement(query)])[0].rows:
        name = lower.get(schema.lower(), "") if folded else schema
        tables.get(name, set()).add(table)
    return tables


def check_server(shards: Shards, server: DatabaseServer) -> list[ShardStatus]:
    """Return the state of the databases of one server. Raises StoreUnavailable."""
    layout = shards.layout
    names = [layout.database_name(database) for database in server.databases]
    tables = _tables(shards, server, names)
    migrated = [name for name in names if _VERSIONS in tables[name]]
    revisions = server.run(
        [Statement(f"SELECT version_num FROM {server.table(name, _VERSIONS)}") for name in migrated]
    )
    revision_of = {
        name: result.rows[0][0] for name, result in zip(migrated, revisions, strict=True) if result.rows
    }
    statuses = []
    for database, name in zip(server.databases, names, strict=True):
        numbers = layout.tables_of(database)
        expected = {named(table) for table in numbers for named in (task_table_name, body_table_name)}
        if database == 0:
            expected.add(TOPIC_TABLE)
        found = {table for table in tables[name] if _SHARDED.fullmatch(table) or table == TOPIC_TABLE}
        statuses.append(
            ShardStatus(
                server.name,
                name,
                revision_of.get(name),
                REVISION,
                tuple(sorted(expected - found)),
                tuple(sorted(found - expected)),
                not tables[name],
            )
        )
    return statuses
