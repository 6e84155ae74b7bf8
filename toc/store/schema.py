"""The tables, declared once in SQLAlchemy Core.

``migrations/`` builds them; a test requires that both give the same tables. A stored format: a change here
needs a migration that only expands (new columns have a default; nothing is renamed or dropped) until no
deployed program needs the old shape.
"""

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Column, ColumnElement, MetaData, String, Table, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import SchemaItem
from sqlalchemy.types import TypeDecorator, TypeEngine

from toc.model.lateness import MAX_LATE_CHARS
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import MAX_ATTRIBUTE_CHARS

ERROR_COLUMN_CHARS = 1024
"""Characters kept of a task's last error."""

MAX_HISTORY_CHARS = 4000
"""Characters kept of a task's failed tries: the last fifteen or more."""

REVISION = "1001"
"""The oldest revision in ``migrations/`` that this code can use; revisions sort as text."""

TOPIC_TABLE = "timeout_topic"
IDENTITY_TABLE = "timeout_identity"
REQUEST_TABLE = "timeout_request"
DUE_TABLE = "timeout_due"


_MYSQL = ("mysql", "mariadb")
_U64 = sa.BigInteger().with_variant(mysql.BIGINT(unsigned=True), *_MYSQL)
_ROWID = sa.Integer().with_variant(
    mysql.BIGINT(unsigned=True), *_MYSQL
)  # SQLite: the rowid itself, no second tree
_U32 = sa.Integer().with_variant(mysql.INTEGER(unsigned=True), *_MYSQL)
_U16 = sa.SmallInteger().with_variant(mysql.SMALLINT(unsigned=True), *_MYSQL)


class _Datetime(TypeDecorator[int]):
    """A DATETIME of MySQL, read and written as milliseconds since 1970 UTC, which the server converts."""

    impl = mysql.DATETIME
    cache_ok = True

    def bind_expression(self, bindparam: sa.BindParameter[int]) -> ColumnElement[Any]:
        """Return an expression for the instant of so many ms."""
        return sa.func.timestampadd(_MICROSECOND, bindparam * sa.literal_column("1000"), _EPOCH)

    def column_expression(self, column: ColumnElement[int]) -> ColumnElement[Any]:
        """Return an expression for the ms of an instant."""
        return sa.func.timestampdiff(_MICROSECOND, _EPOCH, column).op("DIV")(sa.literal_column("1000"))


_MICROSECOND: ColumnElement[Any] = sa.literal_column("MICROSECOND")
_EPOCH: ColumnElement[Any] = sa.literal_column("TIMESTAMP'1970-01-01 00:00:00'")
_INSTANT = sa.BigInteger().with_variant(_Datetime(fsp=3), *_MYSQL)  # SQLite: the milliseconds as a number
_TINY = sa.SmallInteger().with_variant(mysql.TINYINT(), *_MYSQL)
_LONG_TEXT = Text().with_variant(mysql.MEDIUMTEXT(), *_MYSQL)
_BODY = sa.LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)
_KEY = sa.LargeBinary(MAX_KEY_BYTES).with_variant(mysql.VARBINARY(MAX_KEY_BYTES), *_MYSQL)


def _binary(size: int) -> TypeEngine[bytes]:
    """Bytes of a fixed size: a hash or random bits."""
    return sa.LargeBinary(size).with_variant(mysql.BINARY(size), *_MYSQL)


_INNODB = {"engine": "InnoDB", "row_format": "DYNAMIC", "charset": "utf8mb4", "collate": "utf8mb4_bin"}
_OPTIONS: dict[str, Any] = {
    f"{dialect}_{name}": value for dialect in _MYSQL for name, value in _INNODB.items()
}


_Type = TypeEngine[Any] | type[TypeEngine[Any]]


class _Maybe(NamedTuple):
    """The type of a column that an INSERT may leave out: it is then NULL, or has this default."""

    kind: _Type
    default: str | None = None


def _columns(**kinds: _Type | _Maybe) -> list[Column[Any]]:
    """Columns by name. What is no _Maybe is never NULL."""
    return [
        Column(
            name,
            kind.kind if isinstance(kind, _Maybe) else kind,
            nullable=isinstance(kind, _Maybe) and kind.default is None,
            server_default=sa.text(kind.default) if isinstance(kind, _Maybe) and kind.default else None,
        )
        for name, kind in kinds.items()
    ]


def _key(name: str, kind: _Type) -> Column[Any]:
    """A column of the primary key."""
    return Column(name, kind, primary_key=True, autoincrement=False)


def _table(metadata: MetaData, name: str, *parts: SchemaItem) -> Table:
    return Table(name, metadata, *parts, **_OPTIONS)


task_table_name = "timeout_task_{:04d}".format
"""``timeout_task_0011`` for 11."""
body_table_name = "timeout_body_{:04d}".format
schedule_table_name = "timeout_schedule_{:04d}".format


# fmt: off


def _declare_task_table(metadata: MetaData, table: int) -> None:
    """One of the task tables. TaskRow describes the columns."""
    _table(
        metadata, task_table_name(table), _key("job_id", _ROWID),
        *_columns(
            gmt_create=_INSTANT, gmt_modified=_INSTANT, biz_id=_U64, biz_key=_Maybe(_KEY), biz_type=_U64,
            status=_TINY, action_time=_INSTANT, next_time=_INSTANT, attribute=String(MAX_ATTRIBUTE_CHARS),
            version=_U32, attempts=_U16, crashes=_U16, slot_crc=_U32, slot_amount=_U16,
            dedup_key=_Maybe(_KEY), last_error=_Maybe(String(ERROR_COLUMN_CHARS)),
            lease_owner=_Maybe(_U64), lease_until=_Maybe(_INSTANT), lease_since=_Maybe(_INSTANT),
            history=_Maybe(String(MAX_HISTORY_CHARS)), tries=_Maybe(_U16, "0"), expires_at=_Maybe(_INSTANT),
            expired=_Maybe(_TINY, "0"), body_length=_Maybe(_U32), body_sha256=_Maybe(_binary(32)),
            pull_nonce=_Maybe(_binary(16)), pull_began=_Maybe(_INSTANT), redrives=_Maybe(_U16, "0"),
            late=_Maybe(String(MAX_LATE_CHARS)),
        ),
        # also serves "all tasks of this biz_id"
        sa.UniqueConstraint("biz_id", "biz_type", "dedup_key", name=f"uk_dedup_{table:04d}"),
        # for the sweep (pending and due) and the list of the dead, newest first; with biz_type, so that tasks
        # are counted by topic without their rows
        sa.Index(f"ix_due_{table:04d}", "status", "next_time", "job_id", "biz_type"),
    )


def _declare_body_table(metadata: MetaData, table: int) -> None:
    """The bodies of one task table's tasks: a row for each version with a body."""
    _table(
        metadata, body_table_name(table), _key("job_id", _U64), _key("version", _U32),
        *_columns(content_type=String(255), body=_BODY),
    )


def _declare_schedule_table(metadata: MetaData, table: int) -> None:
    """The schedules whose occurrences are in one task table.

    ``definition`` is a JSON object (model.schedule.Definition), whose topic is also in ``topic``;
    model.schedule_state.State describes the rest.
    ``change_id`` is a random number of the last change, by which its transaction knows its own.
    """
    _table(
        metadata, schedule_table_name(table), _key("name", String(128)),
        *_columns(
            schedule_id=_U64, topic=String(128), definition=Text, version=_U32, change_id=_U64, paused=_TINY,
            after_time=_INSTANT, next_time=_Maybe(_INSTANT), look_time=_Maybe(_INSTANT),
            buffered=_Maybe(_INSTANT), last_job_id=_Maybe(_U64), fired=_U64, skipped=_U64, missed=_U64,
            missed_at=_Maybe(_INSTANT), gmt_create=_INSTANT, gmt_modified=_INSTANT,
        ),
        # Finds the schedules that need a step, and their topics, which take turns. While none does, only the
        # least look_time is read.
        sa.Index(f"ix_look_{table:04d}", "look_time", "topic"),
    )


def _declare_shared(metadata: MetaData) -> None:
    """The tables of which each database has one."""
    # Requests that named themselves by an Idempotency-Key. ``answer`` is the first answer as JSON, null until
    # it is known.
    _table(
        metadata, REQUEST_TABLE, _key("request_key", _binary(32)),
        *_columns(payload=_binary(32), answer=_Maybe(Text), gmt_create=_INSTANT),
        sa.Index("ix_request_age", "gmt_create"),
    )
    # What comes due when. For each task table (``number``) it has a row for the minutes of the next hour and
    # one for the hours of the next week (``part``). ``counts`` is JSON (toc.model.due); ``counted_at``: when
    # the count began.
    _table(
        metadata, DUE_TABLE, _key("number", _ROWID), _key("part", String(8)),
        *_columns(counts=_LONG_TEXT, counted_at=_INSTANT),
    )


def first_tables(metadata: MetaData) -> dict[str, Table]:
    """Declare the tables that only the first database has, and return them by name."""
    tables = [
        # Topics. Topic describes the columns.
        _table(
            metadata, TOPIC_TABLE, _key("name", String(128)),
            *_columns(
                biz_type=_U64, slot_amount=_U16, topic_type=String(16), retries=_TINY, backoff=String(16),
                backoff_base=sa.Double, backoff_cap=sa.Double, prepare_timeout=_U32, max_runtime=_U32,
                horizon=_U32, retention=_U32, paused=_TINY, gmt_create=_INSTANT, gmt_modified=_INSTANT,
                version=_U32, concurrency=_Maybe(_U32, "0"), resume_rate=_Maybe(_U32, "0"),
                resumed_at=_Maybe(_U64, "0"), delivery=_Maybe(String(16), "'handler'"),
                closed=_Maybe(_TINY, "0"), target=_Maybe(String(128), "''"), expires_in=_Maybe(_U32, "0"),
                paused_at=_Maybe(_U64, "0"), paused_by=_Maybe(String(128), "''"),
            ),
            sa.UniqueConstraint("biz_type", name="uk_biz_type"),
        ),
        # One row, number 1: the identity of the task table. ``lease_secret``, in hexadecimal digits, seals
        # the leases of consumers. ``indexed``: whether Redis holds an index of the tasks. ``horizon`` (s) is
        # how far ahead it reaches at most, 0 for no bound; ``horizon_why`` and ``horizon_since`` (ms) tell of
        # it, ``horizon_looked`` (ms) when somebody last looked whether it still fits. ``marked_by`` is a
        # host with a daemon that shares by ZooKeeper, until ``marked_until`` unless it is said again.
        _table(
            metadata, IDENTITY_TABLE, _key("number", _TINY),
            *_columns(
                identity=String(32), lease_secret=String(64), indexed=_Maybe(_TINY, "1"), gmt_create=_INSTANT,
                horizon=_Maybe(_U32, "0"), horizon_why=_Maybe(String(255), "''"),
                horizon_since=_Maybe(_U64, "0"), horizon_looked=_Maybe(_U64, "0"),
                marked_by=_Maybe(String(255), "''"), marked_until=_Maybe(_INSTANT),
            ),
        ),
        # Topic templates. ``policies`` is a JSON object.
        _table(
            metadata, "timeout_template", _key("pattern", String(128)),
            *_columns(
                policies=Text, most_topics=_U32, gmt_create=_INSTANT, gmt_modified=_INSTANT, version=_U32,
            ),
        ),
        # The biz_types of deleted topics. None is used again. ``retention``: for how many seconds the topics'
        # finished rows are kept.
        _table(
            metadata, "timeout_retired", _key("biz_type", _ROWID),
            *_columns(name=String(128), retention=_U32, gmt_create=_INSTANT),
        ),
        # Access tokens. ``roles``, ``topics`` (patterns) and ``limits`` are JSON. The token itself is not
        # stored, only its hash.
        _table(
            metadata, "timeout_token", _key("name", String(64)),
            *_columns(
                sha256=_binary(32), roles=String(255), topics=Text, limits=Text, expires_at=_Maybe(_INSTANT),
                revoked_at=_Maybe(_INSTANT), created_by=String(128), gmt_create=_INSTANT, version=_U32,
            ),
            sa.UniqueConstraint("sha256", name="uk_token_sha256"),
        ),
        # Webhook targets. ``settings`` is JSON: timeout, concurrency, rate, dead_on, header_names. ``sealed``
        # holds secrets and headers as an encrypted JSON object. ``change_id`` is a random number of the last
        # change.
        _table(
            metadata, "timeout_target", _key("name", String(128)),
            *_columns(
                url=Text, settings=Text, paused=_TINY, paused_by=String(128), paused_why=String(255),
                previous_until=_Maybe(_INSTANT), sealed=Text, change_id=_U64, gmt_create=_INSTANT,
                gmt_modified=_INSTANT,
            ),
        ),
        # Operators' actions: a row of intent, one of the result, both with the same ``action_id``.
        # ``details`` and ``result`` are JSON.
        _table(
            metadata, "timeout_audit", Column("audit_id", _ROWID, primary_key=True),
            *_columns(
                action_id=String(32), phase=String(8), actor=String(128), action=String(64),
                target=String(255), details=Text, result=_Maybe(Text), gmt_create=_INSTANT,
            ),
            sa.Index("ix_audit_age", "gmt_create"),
        ),
        # Bulk jobs. toc.model.bulk.BulkJob describes the columns; ``details`` and ``counts`` are JSON.
        # ``owner`` is a random number of the gateway process that works on the job, until ``lease_until`` at
        # most.
        _table(
            metadata, "timeout_bulk", _key("name", String(32)),
            *_columns(
                kind=String(16), topic=String(128), details=Text, created_by=String(128), rate=sa.Double,
                tasks=_U32, state=String(16), done=_U32, counts=Text, error=String(1000), owner=_Maybe(_U64),
                lease_until=_Maybe(_INSTANT), gmt_create=_INSTANT, gmt_modified=_INSTANT,
                ended=_Maybe(_INSTANT),
            ),
        ),
        # The tasks of bulk jobs: a row for each toc.model.bulk.PART. ``job_ids`` has eight bytes for each,
        # lowest first; ``outcomes`` one byte for each that was done (toc.model.bulk.STORED).
        _table(
            metadata, "timeout_bulk_part", _key("name", String(32)), _key("part", _U32),
            *_columns(job_ids=_BODY, outcomes=_BODY, gmt_create=_INSTANT),
        ),
        # Episodes of late tasks. Episode describes the columns.
        _table(
            metadata, "timeout_episode", _key("episode_id", _ROWID),
            *_columns(
                topic=String(128), cause=String(32), who=String(300), since_time=_INSTANT,
                until_time=_INSTANT, gmt_create=_INSTANT, tasks=_U32, worst=_U64, job_id=_U64,
                evidence=String(255),
            ),
            sa.Index("ix_episode_age", "gmt_create"),
        ),
        # Members without ZooKeeper: a row for each daemon. ``beat`` counts its writes, ``heartbeat`` is the
        # instant of the last one, by the server's clock, and ``timeout`` the time (ms) without one after
        # which others may call it ``dead``. ``data`` is a JSON object (toc.coordination.ledger).
        _table(
            metadata, "timeout_member", _key("name", String(300)),
            *_columns(
                host=String(255), beat=_U64, heartbeat=_INSTANT, timeout=_U32, dead=_TINY, data=_LONG_TEXT,
                gmt_create=_INSTANT,
            ),
        ),
        # What was done in each of the last minutes. ``member``: whose row it is, a daemon or embedded worker,
        # each time it runs. ``counts`` is JSON (toc.model.minute).
        _table(
            metadata, "timeout_minute", _key("minute", _INSTANT), _key("member", String(300)),
            *_columns(counts=_LONG_TEXT),
        ),
    ]
    return {table.name: table for table in tables}


# fmt: on


def database_metadata(database: int, databases: int, tables: int) -> MetaData:
    """Declare the tables of one database, with unqualified names."""
    metadata = MetaData()
    for table in range(database, tables, databases):
        _declare_task_table(metadata, table)
        _declare_body_table(metadata, table)
        _declare_schedule_table(metadata, table)
    _declare_shared(metadata)
    if database == 0:
        first_tables(metadata)
    return metadata
