"""Stores a row in an open transaction of the caller, through SQLAlchemy: ``connection=``.

The caller chooses its isolation, so a dedup_key is looked up twice: over a connection of the store's own, as
for other submits (``toc.store.submit``), and by a plain read over the caller's, which sees what it has
inserted itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, MetaData, Table, select
from sqlalchemy import insert as core_insert
from sqlalchemy.exc import DBAPIError, IntegrityError

from toc.model.body import NO_BODIES, Contents
from toc.model.errors import StoreUnavailable, WrongShardConnection
from toc.model.task import TaskRow
from toc.store.schema import body_table, task_table
from toc.store.server import DatabaseServer, Statement
from toc.store.shards import Shards
from toc.store.submit import TRIES, Submitter, same_task

Declare = Callable[[MetaData, int, str | None], Table]


class CallersTransaction:
    """Inserts rows for callers with a transaction. Thread-safe."""

    def __init__(self, shards: Shards, submitter: Submitter) -> None:
        self._shards = shards
        self._submitter = submitter
        self._identities: dict[DatabaseServer, tuple[Any, ...] | None] = {}
        self._core: dict[tuple[Declare, int], Table] = {}

    def insert(self, connection: Connection, row: TaskRow, contents: Contents = NO_BODIES) -> int:
        """Store a row in the caller's open transaction, which this never ends. Returns its job_id.

        Raises WrongShardConnection unless the connection leads to the server of the row's table.
        """
        table = self._shards.table_of(row.job_id)
        server = self._shards.server_of[table]
        core = self._core_table(task_table, table)
        try:
            self._check_server(connection, server)
            clashed = False
            for _ in range(TRIES):
                if row.dedup_key is not None:
                    other = _look(connection, core, row)
                    other = other or self._submitter.stored_as(row)
                    if other is not None:
                        return same_task(row, other)
                if clashed:  # and not with another's dedup_key, so the job_id is taken
                    row = self._submitter.renamed(row)
                try:
                    connection.execute(core_insert(core).values(_values(row)))
                except IntegrityError:  # the statement alone was undone
                    clashed = True
                else:
                    if row.body_sha256 is not None:
                        content = contents[row.body_sha256]
                        connection.execute(
                            core_insert(self._core_table(body_table, table)).values(
                                (row.job_id, row.version, *content)
                            )
                        )
                    return row.job_id
        except DBAPIError as exc:
            if isinstance(exc.orig, Exception):
                # Not from SQLAlchemy's own, whose text quotes the row with its attribute.
                raise server.translate(exc.orig, sent=True) from exc.orig
            raise
        raise StoreUnavailable(f"{server.name}: no free job_id was found; try again")

    def _check_server(self, connection: Connection, server: DatabaseServer) -> None:
        if not isinstance(connection, Connection):
            raise WrongShardConnection(
                f"connection must be a sqlalchemy.Connection, not {type(connection).__name__}"
            )
        family = "sqlite" if self._shards.layout.sqlite else "mysql"
        theirs = None
        if connection.dialect.name.replace("mariadb", "mysql") == family:
            # One query per connection of the caller: its driver's connection stays with its server.
            if "toc_server" not in connection.info:
                connection.info["toc_server"] = server.identity(
                    lambda text: connection.exec_driver_sql(text).first()
                )
            theirs = connection.info["toc_server"]
        if server not in self._identities:
            self._identities[server] = server.identity(lambda text: server.run([Statement(text)])[0].rows[0])
        if theirs is None or theirs != self._identities[server]:
            raise WrongShardConnection(
                f"this task is stored on {server.name}; the connection passed leads to another server"
            )

    def _core_table(self, declare: Declare, table: int) -> Table:
        core = self._core.get((declare, table))
        if core is None:
            layout = self._shards.layout
            schema = None if layout.sqlite else layout.database_name(table % layout.databases)
            core = self._core[declare, table] = declare(MetaData(), table, schema)
        return core


def _look(connection: Connection, core: Table, row: TaskRow) -> TaskRow | None:
    """Return the row with this dedup_key if the caller's transaction sees one, above all its own.

    A plain read: at REPEATABLE READ, a locking read that finds nothing would lock the gap until the caller's
    transaction ends: every biz_id in it, often all future ones.
    """
    assert row.dedup_key is not None  # noqa: S101 - for the type checker
    found = connection.execute(
        select(*[core.c[name] for name in TaskRow._fields])
        .where(core.c.biz_id == row.biz_id, core.c.biz_type == row.biz_type)
        .where(core.c.dedup_key == row.dedup_key.encode())
    ).first()
    if found is None:
        return None
    values = dict(zip(TaskRow._fields, found, strict=True))
    for name in ("biz_key", "dedup_key"):
        values[name] = values[name] and bytes(values[name]).decode()
    values["expires_at"] = values["expires_at"] or 0
    return TaskRow(**values)


def _values(row: TaskRow) -> dict[str, Any]:
    values = row._asdict()
    for name in ("biz_key", "dedup_key"):
        values[name] = values[name] and values[name].encode()
    values["expires_at"] = values["expires_at"] or None
    if row.body_sha256 is None:
        del values["body_length"], values["body_sha256"]
    return values
