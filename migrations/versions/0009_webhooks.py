"""Webhooks: targets, the target of a topic, and how often a task was redriven.

Revision: 0009. Every task table gets a column, which servers add instantly; the first database a table of
targets and a column of topics. Programs that do not know them leave them alone.
"""

from __future__ import annotations

from alembic import context, op

revision = "0009"
down_revision = "0008"

BATCH = 32
"""Tables per round trip."""

TARGETS = (
    "name VARCHAR(128) NOT NULL, url TEXT NOT NULL, settings TEXT NOT NULL, paused {tiny} NOT NULL, "
    "paused_by VARCHAR(128) NOT NULL, paused_why VARCHAR(255) NOT NULL, previous_until {ms} NULL, "
    "sealed TEXT NOT NULL, change_id {u64} NOT NULL, gmt_create {ms} NOT NULL, gmt_modified {ms} NOT NULL, "
    "PRIMARY KEY (name)"
)
MYSQL = {"u64": "BIGINT UNSIGNED", "tiny": "TINYINT", "ms": "DATETIME(3)"}
SQLITE = {"u64": "BIGINT", "tiny": "SMALLINT", "ms": "BIGINT"}


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    count = "SMALLINT DEFAULT 0 NOT NULL" if sqlite else "SMALLINT UNSIGNED NOT NULL DEFAULT 0"
    tables = list(context.config.attributes["tables"])
    columns_of = context.config.attributes["columns"]()
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        statements = []
        for table in part:
            name = f"timeout_task_{table:04d}"
            if "redrives" not in columns_of[name]:
                statements.append(f"ALTER TABLE {name} ADD COLUMN redrives {count}")
        context.config.attributes["execute"](statements)
        context.config.attributes["migrated"](revision, first + len(part))
    if 0 in tables:  # the first database
        statements = []
        if "target" not in columns_of["timeout_topic"]:
            statements.append("ALTER TABLE timeout_topic ADD COLUMN target VARCHAR(128) NOT NULL DEFAULT ''")
        end = "" if sqlite else " ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin"
        columns = TARGETS.format(**SQLITE if sqlite else MYSQL)
        statements.append(f"CREATE TABLE IF NOT EXISTS timeout_target ({columns}){end}")
        context.config.attributes["execute"](statements)


def downgrade() -> None:
    tables = list(context.config.attributes["tables"])
    columns_of = context.config.attributes["columns"]()
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        names = [name for table in part if "redrives" in columns_of[name := f"timeout_task_{table:04d}"]]
        context.config.attributes["execute"]([f"ALTER TABLE {name} DROP COLUMN redrives" for name in names])
        context.config.attributes["migrated"](revision, first + len(part))
    if 0 in tables:
        statements = ["DROP TABLE IF EXISTS timeout_target"]
        if "target" in columns_of["timeout_topic"]:
            statements.append("ALTER TABLE timeout_topic DROP COLUMN target")
        context.config.attributes["execute"](statements)
