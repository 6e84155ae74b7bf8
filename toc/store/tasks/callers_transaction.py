"""Submits and changes tasks in an open transaction of the caller, through SQLAlchemy.

What is written is planned as for other calls (``write``, ``plan``), but sent once and never rolled back: the
transaction is the caller's, who also chooses its isolation. At REPEATABLE READ a locking read or an UPDATE
that finds nothing, or that scans, locks gaps until that transaction ends, and with them every new row that
belongs there. So what is not known to exist is looked up by plain reads: over a connection of the store's
own, and over the caller's, which sees what it has written itself. Locked is by whole primary keys alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import pymysql
from sqlalchemy import Connection, CursorResult, TwoPhaseTransaction, event
from sqlalchemy.exc import DBAPIError, IntegrityError, MissingGreenlet, UnboundExecutionError

from toc.model import errors
from toc.model.errors import InvalidInput, StoreUnavailable, WrongShardConnection
from toc.model.task import Submission, TaskRow, check_expiry
from toc.observe.log import get_logger
from toc.store.servers.mysql import NO_RIGHT, error_code
from toc.store.servers.server import DatabaseServer, Locked, Result, Statement
from toc.store.servers.shards import Shards
from toc.store.servers.threads import Threads
from toc.store.tasks import bodies, plan
from toc.store.tasks import rows as sql
from toc.store.tasks.plan import PENDING, Planner, Seen
from toc.store.tasks.write import REPEATS, Writer, chunks_of

log = get_logger(__name__)

W = TypeVar("W")

_WITHOUT_TEXTS = {"biz_key": "NULL", "attribute": "''", "dedup_key": "NULL"} | {
    name: f"CASE WHEN {name} IS NULL THEN NULL ELSE '' END" for name in ("last_error", "body_sha256")
}
"""A caller's character set may lack a letter of a text, or differ from the one that its driver decodes."""
UPDATED = 200
"""Most rows of one UPDATE."""
COMMIT_SECONDS, MAX_PAUSE_SECONDS = 5.0, 0.02
"""How long a thread waits for a COMMIT that hangs: after that, the sweep finds the rows. How often it
looks."""
WAIT_SECONDS, AGAIN_SECONDS = 10.0, 0.02
"""How long a submit in an asynchronous transaction waits for another with its dedup_key, and how often it
looks."""


def connection_of(session: Any, connection: Any) -> Connection:
    """Return the connection of a caller's transaction: of a Session or AsyncSession, or the one given.

    Raises TwoPhase, NoTransaction, Serializable, WrongShardConnection; InvalidInput for an AsyncSession
    outside its ``run_sync``.
    """
    if session is not None and connection is not None:
        raise InvalidInput("give a session or a connection, not both")
    found = getattr(connection, "sync_connection", connection)
    if session is not None:
        session = session() if hasattr(session, "registry") else session  # a scoped_session
        session = getattr(session, "sync_session", session)
        if getattr(session, "twophase", False):
            raise errors.TwoPhase
        try:
            found = session.connection()
        except AttributeError:
            raise WrongShardConnection(
                f"session must be a sqlalchemy Session or AsyncSession, not {type(session).__name__}"
            ) from None
        except MissingGreenlet:
            raise InvalidInput(_IN_RUN_SYNC) from None
        except UnboundExecutionError:
            raise WrongShardConnection(
                "the session has no default bind: pass connection=session.connection(bind_arguments=...) "
                "of the bind that leads to toc's server"
            ) from None
    if not isinstance(found, Connection):
        raise WrongShardConnection(f"connection must be a sqlalchemy.Connection, not {type(found).__name__}")
    if found.closed:
        raise WrongShardConnection("the connection passed is closed; pass one with an open transaction")
    if isinstance(found.get_transaction(), TwoPhaseTransaction):
        raise errors.TwoPhase
    if _commits_at_once(found):
        raise errors.NoTransaction(
            "the connection passed commits each statement at once (isolation_level AUTOCOMMIT): there is no "
            "transaction to join; submit without it, or over a connection that has one"
        )
    level = found.get_execution_options().get("isolation_level") or found.default_isolation_level
    if level == "SERIALIZABLE" and found.dialect.name != "sqlite":  # whose transactions all are
        raise errors.Serializable(
            "SERIALIZABLE would block others' submits; use another level, or toc.outbox"
        )
    return found


def _commits_at_once(connection: Connection) -> bool:
    """Whether the driver says that it does, and has not begun a transaction all the same (only SQLite's
    tell)."""
    driver: Any = connection.connection
    try:
        at_once = connection.dialect.detect_autocommit_setting(driver.dbapi_connection)
    except (AttributeError, NotImplementedError):  # SQLAlchemy before 2.0.43, or an unusual driver
        return False
    return at_once and not getattr(driver.driver_connection, "in_transaction", False)


_IN_RUN_SYNC = (
    "an AsyncSession or AsyncConnection works within its run_sync: "
    "await session.run_sync(lambda session: center.submit(..., session=session))"
)


class CallersTransaction:
    """Inserts and changes rows for callers with a transaction, which this never ends. Thread-safe.

    Each method raises WrongShardConnection, before it writes, unless the connection leads to the server of
    each row's table.
    """

    def __init__(self, shards: Shards, writer: Writer, stamp: Callable[[], int]) -> None:
        self._shards = shards
        self._writer = writer
        self._stamp = stamp
        self._planner = Planner(shards)
        self._identities: dict[DatabaseServer, tuple[Any, ...] | None] = {}

    # --- submit

    def put_many(
        self, connection: Connection, many: Sequence[Submission], refused: Mapping[int, InvalidInput]
    ) -> list[int]:
        """Store rows. Returns their job_ids in order.

        ``refused``: why a row, by its number, must not be new; raised if nobody has its dedup_key.
        """
        rows = [one.row for one in many]
        for server in self._shards.group(row.job_id for row in rows):
            with self._on(connection, server):
                pass
        stored, same_as = dict[int, int](), dict[int, int]()
        first: dict[tuple[object, ...], int] = {}
        plain: dict[int, list[int]] = {}
        for n, row in enumerate(rows):  # before any is written: a conflict leaves none
            name = (n,) if row.dedup_key is None else (row.biz_id, row.biz_type, row.dedup_key)
            if (earlier := first.setdefault(name, n)) != n:
                plan.same_task(row, rows[earlier], stored=False)
                same_as[n] = earlier
            elif (kept := self._kept(connection, many[n])) is not None:
                stored[n] = kept
            elif n in refused:
                raise refused[n]
            elif row.body_sha256 is None:
                plain.setdefault(self._shards.table_of(row.job_id), []).append(n)
        for server, by_table in self._shards.group_tables(plain).items():
            for table, numbers in (part for chunk in chunks_of(by_table, rows) for part in chunk.items()):
                insert = sql.insert(server, self._shards.names[table], [rows[n] for n in numbers])
                with self._on(connection, server), suppress(IntegrityError):  # then one by one
                    _run(connection, insert)
                    stored |= {n: rows[n].job_id for n in numbers}
        for n, one in enumerate(many):
            if n not in stored:
                stored[n] = stored[same_as[n]] if n in same_as else self._put(connection, one)
        return [stored[n] for n in range(len(many))]

    def _put(self, connection: Connection, one: Submission) -> int:
        """Store a row whose dedup_key nobody has had. Returns its job_id."""
        server = self._shards.server_of[self._shards.table_of(one.row.job_id)]
        with self._on(connection, server):
            for _ in range(REPEATS):
                (insert, *body), _none = self._planner.transaction(server, [plan.inserting(one)])
                try:
                    _run(connection, insert)
                except IntegrityError:  # the statement alone was undone
                    if (kept := self._kept(connection, one, clashed=True)) is not None:
                        return kept
                    # no clash with another's dedup_key, so the job_id is taken
                    one = one._replace(row=self._writer.renamed(one.row))
                    continue
                for statement in body:
                    _run(connection, statement)
                return one.row.job_id
        raise StoreUnavailable(f"{server.name}: no free job_id was found; try again")

    def _kept(self, connection: Connection, one: Submission, *, clashed: bool = False) -> int | None:
        """Return the task that has this dedup_key. Raises DedupConflict."""
        if one.row.dedup_key is None:
            return None
        table = self._shards.table_of(one.row.job_id)
        with self._on(connection, self._shards.server_of[table]):
            found = _named(connection, self._shards.names[table], one.row)
            found = found or self._found(connection, one, clashed)
        return None if found is None else plan.same_task(one.row, found.row)

    def _found(self, connection: Connection, one: Submission, clashed: bool) -> Seen | None:
        """Do as ``Writer.found``. The event loop that serves the caller goes on meanwhile: it may serve the
        transaction that is waited for, too. So no thread or connection of ours waits, unless an INSERT has
        ``clashed``: then the other has committed, and the lock that was left is the caller's own."""
        if not connection.dialect.is_async:
            return self._writer.found(one)

        async def found() -> Seen | None:
            until = time.monotonic() + WAIT_SECONDS
            while True:
                try:
                    return await asyncio.wrap_future(self._writer.found_soon(one, wait=clashed))
                except Locked:
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(AGAIN_SECONDS)

        driver = cast(Any, connection.connection.dbapi_connection)
        return cast("Seen | None", driver.run_async(lambda _: found()))

    # --- change

    def ids(self, connection: Connection, server: DatabaseServer, select: Statement) -> list[int]:
        """Return the job_ids that a plain read finds."""
        with self._on(connection, server):
            return [int(job_id) for (job_id,) in _run(connection, select)]

    def cancel(self, connection: Connection, job_ids: Iterable[int]) -> dict[int, tuple[bool, TaskRow]]:
        """Cancel those tasks that are pending. Returns for each existing one whether this call cancelled it,
        and its row as it was before, but with the ``gmt_modified`` that it has now."""
        now, found = self._stamp(), {}
        for server, ids in self._shards.group(job_ids).items():
            with self._on(connection, server):
                pending: dict[int, list[int]] = {}
                for seen in self._locked(connection, server, ids):
                    row = plan.tried(seen)
                    if changed := row.status == PENDING:
                        pending.setdefault(self._shards.table_of(row.job_id), []).append(row.job_id)
                    found[row.job_id] = changed, row._replace(gmt_modified=now) if changed else row
                for table, part in pending.items():
                    for first in range(0, len(part), UPDATED):
                        some = {table: part[first : first + UPDATED]}
                        sets, where = plan.cancelling(server, now), f"status={PENDING}"
                        for update in sql.update_by_id(server, self._shards.names, some, sets, where):
                            _run(connection, update)
        return found

    def reschedule(
        self, connection: Connection, job_id: int, action_time: int, expiry: plan.Expiry
    ) -> tuple[bool, TaskRow | None]:
        """Do as ``Store.reschedule``; the row that is returned has no texts. Raises InvalidExpiry."""
        table = self._shards.table_of(job_id)
        server, name = self._shards.server_of[table], self._shards.names[table]
        with self._on(connection, server):
            found = self._locked(connection, server, {table: [job_id]})
            if not found or found[0].row.status != PENDING:
                return False, found[0].row if found else None
            row = found[0].row
            check_expiry(expires_at := expiry(row), action_time)
            _run(connection, plan.new_version(server, name, found[0], action_time, expires_at, self._stamp()))
            if row.body_sha256 is not None:
                _run(connection, bodies.follow_one(self._shards.body_names[table], job_id, row.version))
            return True, plan.tried(found[0])

    def _locked(self, connection: Connection, server: DatabaseServer, ids: sql.ByTable) -> list[Seen]:
        """Lock those rows that there are, each by its whole primary key, and return them without texts."""
        names = self._shards.names
        there = sql.select_by_id(server, "job_id", names, ids)
        # Theirs first: an event loop that serves the caller goes on, should the server hang.
        known = {int(row[0]) for statement in there for row in _run(connection, statement)}
        known.update(row[0] for result in server.run(there) for row in result.rows)
        if known and self._shards.layout.sqlite:
            # A write locks the file until the caller's end; for a read, sqlite3 does not even begin.
            _run(connection, Statement(f"UPDATE {names[min(ids)]} SET status=status WHERE 0"))
        what = plan.seen_columns(server, **_WITHOUT_TEXTS)
        selects = [
            f"SELECT {what} FROM {names[table]} WHERE job_id={job_id:d}{server.for_update}"
            for table, part in ids.items()
            for job_id in part
            if job_id in known
        ]
        return plan.seen_rows(
            Result([tuple(row) for row in _run(connection, statement)], 0)
            for statement in sql.unions(server, selects)
        )

    # --- whose connection it is

    @contextmanager
    def _on(self, connection: Connection, server: DatabaseServer) -> Iterator[None]:
        """Name the errors of what is done over the caller's connection, once it is known to lead there."""
        try:
            self._check_server(connection, server)
            yield
        except MissingGreenlet:
            raise InvalidInput(_IN_RUN_SYNC) from None
        except DBAPIError as exc:
            error = exc.orig
            if not isinstance(error, Exception):
                raise
            if not self._shards.layout.sqlite and not isinstance(error, pymysql.err.MySQLError):
                error = pymysql.err.OperationalError(*error.args)  # another driver's
            if error_code(error) in NO_RIGHT:
                like = self._shards.layout.prefix.replace("_", r"\_")
                raise WrongShardConnection(
                    f"{server.name}: the account of this connection needs GRANT SELECT, INSERT, UPDATE, "
                    f"DELETE ON `{like}%`.* ({error_code(error)}); without it, use toc.outbox"
                ) from error
            # Chain the driver's error: the text of SQLAlchemy's error quotes the row, with its attribute.
            raise server.translate(error, sent=True) from exc.orig

    def _check_server(self, connection: Connection, server: DatabaseServer) -> None:
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
                f"this task is stored on {server.name}, and the connection passed leads to another server: "
                "only tasks of a biz_id that is stored on your own server can join its transaction. "
                "For others there is toc.outbox"
            )


def _named(connection: Connection, name: str, row: TaskRow) -> Seen | None:
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
            job_id=int(found[0]), biz_key=biz_key.decode() or None, attribute=attribute.decode(),
            body_sha256=sha256 or None,
        )  # fmt: skip
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


class AfterCommit(Generic[W]):
    """Calls ``tell`` on a thread of its own with what was done in a transaction that is over. Thread-safe.

    SQLAlchemy's event comes before the COMMIT is sent, but for the outermost transaction alone: not when a
    savepoint is released, nor when a session ends that has joined a transaction. So the hook hands what it
    was given to a thread, which waits until the transaction is over. Whether it was committed only the rows
    can tell.
    """

    def __init__(self, tell: Callable[[Sequence[W]], None]) -> None:
        self._tell = tell
        self._open: WeakKeyDictionary[Connection, _Open[W]] = WeakKeyDictionary()
        self._threads = Threads(2, "toc-commit")

    def add(self, connection: Connection, whats: Sequence[W]) -> Callable[[], bool]:
        """Note what was done in the transaction of a connection. Returns whether that is still open."""
        transaction = connection.get_transaction()
        one = self._open.get(connection)
        if one is None:
            one = self._open[connection] = _Open()
            event.listen(connection, "commit", partial(self._committing, one))
        if one.transaction is not transaction:  # the former was rolled back
            one.transaction, one.whats = transaction, []
        one.whats += whats
        return lambda: transaction is not None and transaction.is_active

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.close()

    def _committing(self, one: _Open[W], _connection: Connection) -> None:
        transaction, whats, one.transaction, one.whats = one.transaction, one.whats, None, []
        try:
            if whats:
                self._threads.run_detached(partial(self._wait, transaction, whats))
        except Exception as exc:  # such as: no thread can be started. The sweep finds the rows
            log.warning("commit_not_followed", tasks=len(whats), error=str(exc))

    def _wait(self, transaction: Any, whats: Sequence[W]) -> None:
        until, seconds = time.monotonic() + COMMIT_SECONDS, 0.0005
        while transaction is not None and transaction.is_active:
            if time.monotonic() > until:
                return
            time.sleep(seconds)
            seconds = min(2 * seconds, MAX_PAUSE_SECONDS)
        self._tell(whats)


class _Open(Generic[W]):
    """What was done in the transaction of a connection that is open."""

    def __init__(self) -> None:
        self.transaction: Any = None
        self.whats: list[W] = []
