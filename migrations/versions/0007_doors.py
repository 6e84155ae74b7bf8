"""What tasks and topics of other doors need: bodies, tries and ends of their own, pulls, tokens, audit.

Revision: 0007. Every task table gets eight columns, which are nullable or have a default, and a table of
bodies beside it; every database a table of requests; the first database the delivery of topics, the features
that every member knows, templates,
retired biz_types, tokens and the audit. Both servers add the columns instantly. Programs that do not know
them leave them alone; features that such programs would ignore are refused until every member knows them.
"""

from __future__ import annotations

from alembic import context, op

revision = "0007"
down_revision = "0006"

BATCH = 32
"""Tables per round trip."""

COLUMNS = {  # name -> type in MySQL, in SQLite
    "tries": ("SMALLINT UNSIGNED NOT NULL DEFAULT 0", "SMALLINT DEFAULT 0 NOT NULL"),
    "expires_at": ("DATETIME(3) NULL", "BIGINT"),
    "expired": ("TINYINT NOT NULL DEFAULT 0", "SMALLINT DEFAULT 0 NOT NULL"),
    "body_length": ("INTEGER UNSIGNED NULL", "INTEGER"),
    "body_sha256": ("BINARY(32) NULL", "BLOB"),
    "pull_nonce": ("BINARY(16) NULL", "BLOB"),
    "pull_began": ("DATETIME(3) NULL", "BIGINT"),
    "pull_written": ("TINYINT NOT NULL DEFAULT 0", "SMALLINT DEFAULT 0 NOT NULL"),
}
TOPIC_COLUMNS = {
    "delivery": ("VARCHAR(16) NOT NULL DEFAULT 'handler'", "VARCHAR(16) DEFAULT 'handler' NOT NULL"),
    "closed": ("TINYINT NOT NULL DEFAULT 0", "SMALLINT DEFAULT 0 NOT NULL"),
}
IDENTITY_COLUMNS = {"features": ("TEXT NULL", "TEXT")}
FIRST = (("timeout_topic", TOPIC_COLUMNS), ("timeout_identity", IDENTITY_COLUMNS))
"""Columns of tables that only the first database has."""

TABLES = {  # columns; instants, numbers and bytes are filled in for the server
    "timeout_request": (
        "request_key {b32} NOT NULL, payload {b32} NOT NULL, answer TEXT NULL, gmt_create {ms} NOT NULL, "
        "PRIMARY KEY (request_key)"
    ),
    "timeout_template": (
        "pattern VARCHAR(128) NOT NULL, policies TEXT NOT NULL, most_topics {u32} NOT NULL, "
        "gmt_create {ms} NOT NULL, gmt_modified {ms} NOT NULL, version {u32} NOT NULL, PRIMARY KEY (pattern)"
    ),
    "timeout_retired": (
        "biz_type {rowid} NOT NULL, name VARCHAR(128) NOT NULL, retention {u32} NOT NULL, "
        "gmt_create {ms} NOT NULL, PRIMARY KEY (biz_type)"
    ),
    "timeout_token": (
        "name VARCHAR(64) NOT NULL, sha256 {b32} NOT NULL, roles VARCHAR(255) NOT NULL, "
        "topics TEXT NOT NULL, "
        "limits TEXT NOT NULL, expires_at {ms} NULL, revoked_at {ms} NULL, created_by VARCHAR(128) NOT NULL, "
        "gmt_create {ms} NOT NULL, version {u32} NOT NULL, PRIMARY KEY (name), "
        "CONSTRAINT uk_token_sha256 UNIQUE (sha256)"
    ),
    "timeout_audit": (
        "audit_id {serial}, action_id VARCHAR(32) NOT NULL, phase VARCHAR(8) NOT NULL, "
        "actor VARCHAR(128) NOT NULL, action VARCHAR(64) NOT NULL, target VARCHAR(255) NOT NULL, "
        "details TEXT NOT NULL, result TEXT NULL, gmt_create {ms} NOT NULL, PRIMARY KEY (audit_id)"
    ),
}
BODY = (
    "job_id {u64} NOT NULL, version {u32} NOT NULL, content_type VARCHAR(255) NOT NULL, "
    "body {blob} NOT NULL, "
    "PRIMARY KEY (job_id, version)"
)
INDEXES = {"timeout_request": "ix_request_age", "timeout_audit": "ix_audit_age"}  # both on gmt_create
MYSQL = {
    "b32": "BINARY(32)", "ms": "DATETIME(3)", "u32": "INTEGER UNSIGNED", "u64": "BIGINT UNSIGNED",
    "rowid": "BIGINT UNSIGNED", "serial": "BIGINT UNSIGNED NOT NULL AUTO_INCREMENT", "blob": "LONGBLOB",
}  # fmt: skip
SQLITE = {
    "b32": "BLOB", "ms": "BIGINT", "u32": "INTEGER", "u64": "BIGINT", "rowid": "INTEGER",
    "serial": "INTEGER NOT NULL", "blob": "BLOB",
}  # fmt: skip


def upgrade() -> None:
    tables = list(context.config.attributes["tables"])
    columns_of = context.config.attributes["columns"]()
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        statements = []
        for table in part:
            name = f"timeout_task_{table:04d}"
            # One statement adds all; in SQLite one transaction does.
            if "pull_written" not in columns_of[name]:
                statements += _add(name, COLUMNS)
            statements += _create(f"timeout_body_{table:04d}", BODY)
        context.config.attributes["execute"](statements)
        context.config.attributes["migrated"](revision, first + len(part))
    statements = _create("timeout_request", TABLES["timeout_request"])
    if 0 in tables:  # the first database
        for table, added in FIRST:
            if next(iter(added)) not in columns_of[table]:
                statements += _add(table, added)
        for name, columns in TABLES.items():
            if name != "timeout_request":
                statements += _create(name, columns)
    context.config.attributes["execute"](statements)


def downgrade() -> None:
    tables = list(context.config.attributes["tables"])
    columns_of = context.config.attributes["columns"]()
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        statements = []
        for table in part:
            name = f"timeout_task_{table:04d}"
            statements += _drop(name, [column for column in COLUMNS if column in columns_of[name]])
            statements.append(f"DROP TABLE IF EXISTS timeout_body_{table:04d}")
        context.config.attributes["execute"](statements)
        context.config.attributes["migrated"](revision, first + len(part))
    statements = ["DROP TABLE IF EXISTS timeout_request"]
    if 0 in tables:
        statements += [f"DROP TABLE IF EXISTS {name}" for name in TABLES if name != "timeout_request"]
        for table, columns in FIRST:
            statements += _drop(table, [column for column in columns if column in columns_of[table]])
    context.config.attributes["execute"](statements)


def _sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"


def _add(table: str, columns: dict[str, tuple[str, str]]) -> list[str]:
    kind = int(_sqlite())
    parts = [f"ADD COLUMN {name} {types[kind]}" for name, types in columns.items()]
    return _alter(table, parts)


def _drop(table: str, names: list[str]) -> list[str]:
    return _alter(table, [f"DROP COLUMN {name}" for name in names])


def _alter(table: str, parts: list[str]) -> list[str]:
    if _sqlite():  # one change per statement
        return [f"ALTER TABLE {table} {part}" for part in parts]
    return [f"ALTER TABLE {table} {', '.join(parts)}"] if parts else []


def _create(name: str, columns: str) -> list[str]:
    index = INDEXES.get(name)
    if _sqlite():
        made = [f"CREATE TABLE IF NOT EXISTS {name} ({columns.format(**SQLITE)})"]
        return [*made, f"CREATE INDEX IF NOT EXISTS {index} ON {name} (gmt_create)"] if index else made
    inner = columns.format(**MYSQL) + (f", INDEX {index} (gmt_create)" if index else "")
    return [f"CREATE TABLE IF NOT EXISTS {name} ({inner}) ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin"]
