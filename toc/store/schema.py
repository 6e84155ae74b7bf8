"""The tables, declared once in SQLAlchemy Core.

``migrations/`` builds them; a test requires that both give the same tables. A stored format: a change here
needs a migration that only expands (new columns have a default; nothing is renamed or dropped) until no
deployed program needs the old shape.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
    func,
    literal_column,
    text,
)
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
_U64 = BigInteger().with_variant(mysql.BIGINT(unsigned=True), *_MYSQL)
_ROWID = Integer().with_variant(
    mysql.BIGINT(unsigned=True), *_MYSQL
)  # SQLite: the rowid itself, no second tree
_U32 = Integer().with_variant(mysql.INTEGER(unsigned=True), *_MYSQL)
_U16 = SmallInteger().with_variant(mysql.SMALLINT(unsigned=True), *_MYSQL)


class _Datetime(TypeDecorator[int]):
    """A DATETIME of MySQL, read and written as milliseconds since 1970 UTC, which the server converts."""

    impl = mysql.DATETIME
    cache_ok = True

    def bind_expression(self, bindparam: BindParameter[int]) -> ColumnElement[Any]:
        """Return an expression for the instant of so many ms."""
        return func.timestampadd(_MICROSECOND, bindparam * literal_column("1000"), _EPOCH)

    def column_expression(self, column: ColumnElement[int]) -> ColumnElement[Any]:
        """Return an expression for the ms of an instant."""
        return func.timestampdiff(_MICROSECOND, _EPOCH, column).op("DIV")(literal_column("1000"))


_MICROSECOND: ColumnElement[Any] = literal_column("MICROSECOND")
_EPOCH: ColumnElement[Any] = literal_column("TIMESTAMP'1970-01-01 00:00:00'")
_INSTANT = BigInteger().with_variant(_Datetime(fsp=3), *_MYSQL)  # SQLite: the milliseconds as a number
_TINY = SmallInteger().with_variant(mysql.TINYINT(), *_MYSQL)
_LONG_TEXT = Text().with_variant(mysql.MEDIUMTEXT(), *_MYSQL)
_BODY = LargeBinary().with_variant(mysql.LONGBLOB(), *_MYSQL)
_KEY = LargeBinary(MAX_KEY_BYTES).with_variant(mysql.VARBINARY(MAX_KEY_BYTES), *_MYSQL)


def _binary(size: int) -> TypeEngine[bytes]:
    """Bytes of a fixed size: a hash or random bits."""
    return LargeBinary(size).with_variant(mysql.BINARY(size), *_MYSQL)


_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in _MYSQL
    for option, value in {"engine": "InnoDB", "charset": "utf8mb4", "collate": "utf8mb4_bin"}.items()
}


def _table(metadata: MetaData, name: str, *parts: SchemaItem) -> Table:
    return Table(name, metadata, *parts, **_OPTIONS)


def task_table_name(table: int) -> str:
    """``timeout_task_0011`` for 11."""
    return f"timeout_task_{table:04d}"


def body_table_name(table: int) -> str:
    """``timeout_body_0011`` for 11."""
    return f"timeout_body_{table:04d}"


def schedule_table_name(table: int) -> str:
    """``timeout_schedule_0011`` for 11."""
    return f"timeout_schedule_{table:04d}"


def task_table(metadata: MetaData, table: int) -> Table:
    """Declare one of the task tables. TaskRow describes the columns."""
    return _table(
        metadata,
        task_table_name(table),
        Column("job_id", _ROWID, primary_key=True, autoincrement=False),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("gmt_modified", _INSTANT, nullable=False),
        Column("biz_id", _U64, nullable=False),
        Column("biz_key", _KEY),
        Column("biz_type", _U64, nullable=False),
        Column("status", _TINY, nullable=False),
        Column("action_time", _INSTANT, nullable=False),
        Column("next_time", _INSTANT, nullable=False),
        Column("attribute", String(MAX_ATTRIBUTE_CHARS), nullable=False),
        Column("version", _U32, nullable=False),
        Column("attempts", _U16, nullable=False),
        Column("crashes", _U16, nullable=False),
        Column("slot_crc", _U32, nullable=False),
        Column("slot_amount", _U16, nullable=False),
        Column("dedup_key", _KEY),
        Column("last_error", String(ERROR_COLUMN_CHARS)),
        Column("lease_owner", _U64),
        Column("lease_until", _INSTANT),
        Column("lease_since", _INSTANT),
        Column("history", String(MAX_HISTORY_CHARS)),
        Column("tries", _U16, nullable=False, server_default=text("0")),
        Column("expires_at", _INSTANT),
        Column("expired", _TINY, nullable=False, server_default=text("0")),
        Column("body_length", _U32),
        Column("body_sha256", _binary(32)),
        Column("pull_nonce", _binary(16)),
        Column("pull_began", _INSTANT),
        Column("redrives", _U16, nullable=False, server_default=text("0")),
        Column("late", String(MAX_LATE_CHARS)),
        # also serves "all tasks of this biz_id"
        UniqueConstraint("biz_id", "biz_type", "dedup_key", name=f"uk_dedup_{table:04d}"),
        # for the sweep (pending and due) and the list of the dead, newest first; with biz_type, so that tasks
        # are counted by topic without their rows
        Index(f"ix_due_{table:04d}", "status", "next_time", "job_id", "biz_type"),
    )


def body_table(metadata: MetaData, table: int) -> Table:
    """Declare the table of the bodies of one task table's tasks: one row for each version with a body."""
    return _table(
        metadata,
        body_table_name(table),
        Column("job_id", _U64, primary_key=True, autoincrement=False),
        Column("version", _U32, primary_key=True, autoincrement=False),
        Column("content_type", String(255), nullable=False),
        Column("body", _BODY, nullable=False),
    )


def schedule_table(metadata: MetaData, table: int) -> Table:
    """Declare the table of the schedules whose occurrences are in one task table.

    ``definition`` is a JSON object (model.schedule.Definition), whose topic is also in ``topic``;
    model.schedule_state.State describes the rest.
    ``change_id`` is a random number of the last change, by which its transaction knows its own.
    """
    return _table(
        metadata,
        schedule_table_name(table),
        Column("name", String(128), primary_key=True),
        Column("schedule_id", _U64, nullable=False),
        Column("topic", String(128), nullable=False),
        Column("definition", Text, nullable=False),
        Column("version", _U32, nullable=False),
        Column("change_id", _U64, nullable=False),
        Column("paused", _TINY, nullable=False),
        Column("after_time", _INSTANT, nullable=False),
        Column("next_time", _INSTANT),
        Column("look_time", _INSTANT),
        Column("buffered", _INSTANT),
        Column("last_job_id", _U64),
        Column("fired", _U64, nullable=False),
        Column("skipped", _U64, nullable=False),
        Column("missed", _U64, nullable=False),
        Column("missed_at", _INSTANT),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("gmt_modified", _INSTANT, nullable=False),
        # Finds the schedules that need a step, and their topics, which take turns. While none does, only the
        # least look_time is read.
        Index(f"ix_look_{table:04d}", "look_time", "topic"),
    )


def request_table(metadata: MetaData) -> Table:
    """Declare the table of requests that named themselves by an Idempotency-Key; one in each database.

    ``answer`` is the first answer as JSON, null until it is known.
    """
    return _table(
        metadata,
        REQUEST_TABLE,
        Column("request_key", _binary(32), primary_key=True),
        Column("payload", _binary(32), nullable=False),
        Column("answer", Text),
        Column("gmt_create", _INSTANT, nullable=False),
        Index("ix_request_age", "gmt_create"),
    )


def due_table(metadata: MetaData) -> Table:
    """Declare the table of what comes due when; one in each database.

    For each task table (``number``) it has a row for the minutes of the next hour and one for the hours of
    the next week (``part``). ``counts`` is JSON (toc.model.due); ``counted_at``: when the count began.
    """
    return _table(
        metadata,
        DUE_TABLE,
        Column("number", _ROWID, primary_key=True, autoincrement=False),
        Column("part", String(8), primary_key=True),
        Column("counts", _LONG_TEXT, nullable=False),
        Column("counted_at", _INSTANT, nullable=False),
    )


def topic_table(metadata: MetaData) -> Table:
    """Declare the topic table, in the first database. Topic describes the columns."""
    return _table(
        metadata,
        TOPIC_TABLE,
        Column("name", String(128), primary_key=True),
        Column("biz_type", _U64, nullable=False),
        Column("slot_amount", _U16, nullable=False),
        Column("topic_type", String(16), nullable=False),
        Column("retries", _TINY, nullable=False),
        Column("backoff", String(16), nullable=False),
        Column("backoff_base", Double, nullable=False),
        Column("backoff_cap", Double, nullable=False),
        Column("prepare_timeout", _U32, nullable=False),
        Column("max_runtime", _U32, nullable=False),
        Column("horizon", _U32, nullable=False),
        Column("retention", _U32, nullable=False),
        Column("paused", _TINY, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("gmt_modified", _INSTANT, nullable=False),
        Column("version", _U32, nullable=False),
        Column("concurrency", _U32, nullable=False, server_default=text("0")),
        Column("resume_rate", _U32, nullable=False, server_default=text("0")),
        Column("resumed_at", _U64, nullable=False, server_default=text("0")),
        Column("delivery", String(16), nullable=False, server_default=text("'handler'")),
        Column("closed", _TINY, nullable=False, server_default=text("0")),
        Column("target", String(128), nullable=False, server_default=text("''")),
        Column("expires_in", _U32, nullable=False, server_default=text("0")),
        Column("paused_at", _U64, nullable=False, server_default=text("0")),
        UniqueConstraint("biz_type", name="uk_biz_type"),
    )


def template_table(metadata: MetaData) -> Table:
    """Declare the table of topic templates, in the first database. ``policies`` is a JSON object."""
    return _table(
        metadata,
        "timeout_template",
        Column("pattern", String(128), primary_key=True),
        Column("policies", Text, nullable=False),
        Column("most_topics", _U32, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("gmt_modified", _INSTANT, nullable=False),
        Column("version", _U32, nullable=False),
    )


def retired_table(metadata: MetaData) -> Table:
    """Declare the table of biz_types of deleted topics, in the first database. None is used again.

    ``retention``: for how many seconds the topics' finished rows are kept.
    """
    return _table(
        metadata,
        "timeout_retired",
        Column("biz_type", _ROWID, primary_key=True, autoincrement=False),
        Column("name", String(128), nullable=False),
        Column("retention", _U32, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
    )


def token_table(metadata: MetaData) -> Table:
    """Declare the table of access tokens, in the first database.

    ``roles``, ``topics`` (patterns) and ``limits`` are JSON. The token itself is not stored, only its hash.
    """
    return _table(
        metadata,
        "timeout_token",
        Column("name", String(64), primary_key=True),
        Column("sha256", _binary(32), nullable=False),
        Column("roles", String(255), nullable=False),
        Column("topics", Text, nullable=False),
        Column("limits", Text, nullable=False),
        Column("expires_at", _INSTANT),
        Column("revoked_at", _INSTANT),
        Column("created_by", String(128), nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("version", _U32, nullable=False),
        UniqueConstraint("sha256", name="uk_token_sha256"),
    )


def target_table(metadata: MetaData) -> Table:
    """Declare the table of webhook targets, in the first database.

    ``settings`` is JSON: timeout, concurrency, rate, dead_on, header_names. ``sealed`` holds secrets and
    headers as an encrypted JSON object. ``change_id`` is a random number of the last change.
    """
    return _table(
        metadata,
        "timeout_target",
        Column("name", String(128), primary_key=True),
        Column("url", Text, nullable=False),
        Column("settings", Text, nullable=False),
        Column("paused", _TINY, nullable=False),
        Column("paused_by", String(128), nullable=False),
        Column("paused_why", String(255), nullable=False),
        Column("previous_until", _INSTANT),
        Column("sealed", Text, nullable=False),
        Column("change_id", _U64, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("gmt_modified", _INSTANT, nullable=False),
    )


def audit_table(metadata: MetaData) -> Table:
    """Declare the table of operators' actions, in the first database: a row of intent, one of the result.

    ``action_id`` is the same in both. ``details`` and ``result`` are JSON.
    """
    return _table(
        metadata,
        "timeout_audit",
        Column("audit_id", _ROWID, primary_key=True, autoincrement=True),
        Column("action_id", String(32), nullable=False),
        Column("phase", String(8), nullable=False),
        Column("actor", String(128), nullable=False),
        Column("action", String(64), nullable=False),
        Column("target", String(255), nullable=False),
        Column("details", Text, nullable=False),
        Column("result", Text),
        Column("gmt_create", _INSTANT, nullable=False),
        Index("ix_audit_age", "gmt_create"),
    )


def bulk_table(metadata: MetaData) -> Table:
    """Declare the table of bulk jobs, in the first database. toc.model.bulk.BulkJob describes the columns.

    ``details`` and ``counts`` are JSON objects. ``owner`` is a random number of the gateway process that
    works on the job, until ``lease_until`` at most.
    """
    return _table(
        metadata,
        "timeout_bulk",
        Column("name", String(32), primary_key=True),
        Column("kind", String(16), nullable=False),
        Column("topic", String(128), nullable=False),
        Column("details", Text, nullable=False),
        Column("created_by", String(128), nullable=False),
        Column("rate", Double, nullable=False),
        Column("tasks", _U32, nullable=False),
        Column("state", String(16), nullable=False),
        Column("done", _U32, nullable=False),
        Column("counts", Text, nullable=False),
        Column("error", String(1000), nullable=False),
        Column("owner", _U64),
        Column("lease_until", _INSTANT),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("gmt_modified", _INSTANT, nullable=False),
        Column("ended", _INSTANT),
    )


def bulk_part_table(metadata: MetaData) -> Table:
    """Declare the table of the tasks of bulk jobs, in the first database: a row for each toc.model.bulk.PART.

    ``job_ids`` has eight bytes for each, the lowest first; ``outcomes`` one byte for each that was done
    (toc.model.bulk.STORED).
    """
    return _table(
        metadata,
        "timeout_bulk_part",
        Column("name", String(32), primary_key=True),
        Column("part", _U32, primary_key=True, autoincrement=False),
        Column("job_ids", _BODY, nullable=False),
        Column("outcomes", _BODY, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
    )


def episode_table(metadata: MetaData) -> Table:
    """Declare the table of episodes of late tasks, in the first database. Episode describes the columns."""
    return _table(
        metadata,
        "timeout_episode",
        Column("episode_id", _ROWID, primary_key=True, autoincrement=False),
        Column("topic", String(128), nullable=False),
        Column("cause", String(32), nullable=False),
        Column("who", String(300), nullable=False),
        Column("since_time", _INSTANT, nullable=False),
        Column("until_time", _INSTANT, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("tasks", _U32, nullable=False),
        Column("unwritten", _U32, nullable=False),
        Column("worst", _U64, nullable=False),
        Column("job_id", _U64, nullable=False),
        Column("evidence", String(255), nullable=False),
        Index("ix_episode_age", "gmt_create"),
    )


def identity_table(metadata: MetaData) -> Table:
    """Declare the table of the task table's identity, in the first database: one row, number 1.

    ``lease_secret``, in hexadecimal digits, seals the leases of consumers. ``indexed``: whether Redis
    holds an index of the tasks. ``horizon`` (s) is how far ahead it reaches at most, 0 for no bound;
    ``horizon_why`` and ``horizon_since`` (ms) tell of it, ``horizon_looked`` (ms) when somebody last looked
    whether it still fits.
    """
    return _table(
        metadata,
        IDENTITY_TABLE,
        Column("number", _TINY, primary_key=True, autoincrement=False),
        Column("identity", String(32), nullable=False),
        Column("lease_secret", String(64), nullable=False),
        Column("indexed", _TINY, nullable=False, server_default=text("1")),
        Column("gmt_create", _INSTANT, nullable=False),
        Column("horizon", _U32, nullable=False, server_default=text("0")),
        Column("horizon_why", String(255), nullable=False, server_default=text("''")),
        Column("horizon_since", _U64, nullable=False, server_default=text("0")),
        Column("horizon_looked", _U64, nullable=False, server_default=text("0")),
    )


def member_table(metadata: MetaData) -> Table:
    """Declare the table of members without ZooKeeper, in the first database: a row for each daemon.

    ``beat`` counts its writes, ``heartbeat`` is the instant of the last one, by the server's clock, and
    ``timeout`` the time (ms) without one after which others may call it ``dead``. ``data`` is a JSON object
    (toc.coordination.members).
    """
    return _table(
        metadata,
        "timeout_member",
        Column("name", String(300), primary_key=True),
        Column("host", String(255), nullable=False),
        Column("beat", _U64, nullable=False),
        Column("heartbeat", _INSTANT, nullable=False),
        Column("timeout", _U32, nullable=False),
        Column("dead", _TINY, nullable=False),
        Column("data", _LONG_TEXT, nullable=False),
        Column("gmt_create", _INSTANT, nullable=False),
    )


def minute_table(metadata: MetaData) -> Table:
    """Declare the table of what was done in each of the last minutes, in the first database.

    ``member``: whose row it is, a daemon or embedded worker, each time it runs. ``counts`` is JSON
    (toc.model.minute).
    """
    return _table(
        metadata,
        "timeout_minute",
        Column("minute", _INSTANT, primary_key=True),
        Column("member", String(300), primary_key=True),
        Column("counts", _LONG_TEXT, nullable=False),
    )


def database_metadata(database: int, databases: int, tables: int) -> MetaData:
    """Declare the tables of one database, with unqualified names."""
    metadata = MetaData()
    for table in range(database, tables, databases):
        task_table(metadata, table)
        body_table(metadata, table)
        schedule_table(metadata, table)
    request_table(metadata)
    due_table(metadata)
    if database == 0:
        topic_table(metadata)
        identity_table(metadata)
        template_table(metadata)
        retired_table(metadata)
        token_table(metadata)
        audit_table(metadata)
        bulk_table(metadata)
        bulk_part_table(metadata)
        episode_table(metadata)
        target_table(metadata)
        member_table(metadata)
        minute_table(metadata)
    return metadata
