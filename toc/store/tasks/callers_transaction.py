"""Stores a row in an open transaction of the caller, through SQLAlchemy: ``connection=``.

What is written is planned as for other submits (``write``), but sent once and never rolled back: the
transaction is the caller's, who also chooses its isolation. So a dedup_key is looked up twice: over a
connection of the store's own, and by a plain read over the caller's, which sees what it has inserted itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, CursorResult
from sqlalchemy.exc import DBAPIError, IntegrityError

from toc.model.errors import StoreUnavailable, WrongShardConnection
from toc.model.task import Submission, TaskRow
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import rows as sql
from toc.store.tasks.plan import Planner, Seen, Stored
from toc.store.tasks.write import REPEATS, Writer


class CallersTransaction:
    """Inserts rows for callers with a transaction. Thread-safe."""

    def __init__(self, shards: Shards, writer: Writer) -> None:
        self._shards = shards
        self._writer = writer
        self._planner = Planner(shards)
        self._identities: dict[DatabaseServer, tuple[Any, ...] | None] = {}

    def put(self, connection: Connection, one: Submission) -> int:
        """Store a row in the caller's open transaction, which this never ends. Returns its job_id.

        Raises WrongShardConnection unless the connection leads to the server of the row's table.
        """
        table = self._shards.table_of(one.row.job_id)
        server, name = self._shards.server_of[table], self._shards.names[table]
        try:
            self._check_server(connection, server)
            for attempt in range(REPEATS):
                found = None
                if one.row.dedup_key is not None:
                    found = _look(connection, name, one.row) or self._writer.found(one)
                if attempt and found is None:  # no clash with another's dedup_key, so the job_id is taken
                    one = one._replace(row=self._writer.renamed(one.row))
                plan = self._planner.plan(server, one, found, 0)
                if isinstance(plan, Stored):
                    return plan.put.job_id
                (insert, *body), _ = self._planner.transaction(server, [plan], 0)
                self._check_packets(connection, server, body)
                try:
                    _run(connection, insert)
                except IntegrityError:  # the statement alone was undone
                    continue
                job_id = one.row.job_id
                try:
                    for statement in body:
                        _run(connection, statement)
                except DBAPIError:
                    with suppress(DBAPIError):  # no row without its body, should the caller commit
                        _run(connection, Statement(f"DELETE FROM {name} WHERE job_id={job_id:d}"))
                    raise
                return job_id
        except DBAPIError as exc:
            if isinstance(exc.orig, Exception):
                # Chain the driver's error: the text of SQLAlchemy's error quotes the row, with its
                # attribute.
                raise server.translate(exc.orig, sent=True) from exc.orig
            raise
        raise StoreUnavailable(f"{server.name}: no free job_id was found; try again")

    def _check_server(self, connection: Connection, server: DatabaseServer) -> None:
        if not isinstance(connection, Connection):
            raise WrongShardConnection(
                f"connection must be a sqlalchemy.Connection, not {type(connection).__name__}"
            )
        if connection.closed:
            raise WrongShardConnection("the connection passed is closed; pass one with an open transaction")
        family = "sqlite" if self._shards.layout.sqlite else "mysql"
        theirs = None
        if connection.dialect.name.replace("mariadb", "mysql") == family:
            # One query per connection of the caller: its driver's connection stays with its server.
            if "toc_server" not in connection.info:
                connection.info["toc_server"] = server.identity(
                    lambda text: [_text(value) for value in connection.exec_driver_sql(text).one()]
                )
            theirs = connection.info["toc_server"]
        if theirs is not None and theirs != self._identities.get(server):
            # Also if they differ: after a failover another server answers under its name.
            self._identities[server] = server.identity(lambda text: server.run([Statement(text)])[0].rows[0])
        if theirs is None or theirs != self._identities[server]:
            raise WrongShardConnection(
                f"this task is stored on {server.name}; the connection passed leads to another server"
            )

    def _check_packets(
        self, connection: Connection, server: DatabaseServer, statements: Sequence[Statement]
    ) -> None:
        """Raise StoreUnavailable for a statement that the server would answer by hanging up."""
        if not statements or self._shards.layout.sqlite:
            return
        if "toc_packet" not in connection.info:
            (most,) = connection.exec_driver_sql("SELECT @@max_allowed_packet").one()
            connection.info["toc_packet"] = int(most)
        if max(len(_in_ascii(statement)) for statement in statements) >= connection.info["toc_packet"]:
            raise StoreUnavailable(f"{server.name}: the body is larger than its max_allowed_packet")


def _look(connection: Connection, name: str, row: TaskRow) -> Seen | None:
    """Return the row with this dedup_key if the caller's transaction sees one, above all its own.

    A plain read: at REPEATABLE READ, a locking read that finds nothing would lock the gap until the caller's
    transaction ends: every biz_id in it, often all future ones. Texts are read as hex digits: the caller's
    character set may lack a letter, or differ from the one that its driver decodes.
    """
    assert row.dedup_key is not None  # noqa: S101 - for the type checker
    select = (
        f"SELECT job_id,HEX(biz_key),HEX(attribute),HEX(body_sha256) FROM {name} "
        f"WHERE biz_id={row.biz_id:d} AND biz_type={row.biz_type:d} AND dedup_key=%s"
    )
    found = _run(connection, Statement(select, [row.dedup_key.encode()])).first()
    if found is None:
        return None
    with sql.understood():
        biz_key, attribute, sha256 = [bytes.fromhex(_text(value) or "") for value in tuple(found)[1:]]
        seen = row._replace(
            job_id=int(found[0]),
            biz_key=biz_key.decode() or None,
            attribute=attribute.decode(),
            body_sha256=sha256 or None,
        )
    return Seen(seen, False, 0)


def _text(value: Any) -> Any:
    """Return a value of the caller's driver, which may be set to give bytes for texts."""
    return value.decode() if isinstance(value, (bytes, bytearray)) else value


def _run(connection: Connection, statement: Statement) -> CursorResult[Any]:
    driver = connection.dialect.loaded_dbapi  # the dialect's own style can be chosen by the caller
    if driver.paramstyle == "qmark":
        return connection.exec_driver_sql(statement.sql.replace("%s", "?"), tuple(statement.params))
    return connection.exec_driver_sql(_in_ascii(statement))


def _in_ascii(statement: Statement) -> str:
    """Return a statement as it is sent over the caller's connection: in any character set and sql_mode, its
    texts and bytes mean the same."""
    values = tuple(
        f"_utf8mb4 X'{value.encode().hex()}'" if isinstance(value, str) else sql.literal(value or b"")
        for value in statement.params
    )
    return statement.sql % values
