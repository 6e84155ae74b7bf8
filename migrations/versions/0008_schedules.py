"""Schedules: beside every task table a table of the schedules whose occurrences are in it.

Revision: 0008. Nothing that exists is changed. Programs that do not know the tables leave them alone: their
schedules wait for a member that does.
"""

from __future__ import annotations

from alembic import context, op

revision = "0008"
down_revision = "0007"

BATCH = 32
"""Tables per round trip."""

COLUMNS = (
    "name VARCHAR(128) NOT NULL, schedule_id {u64} NOT NULL, definition TEXT NOT NULL, "
    "version {u32} NOT NULL, change_id {u64} NOT NULL, paused {tiny} NOT NULL, after_time {ms} NOT NULL, "
    "next_time {ms} NULL, look_time {ms} NULL, buffered {ms} NULL, last_job_id {u64} NULL, "
    "fired {u64} NOT NULL, skipped {u64} NOT NULL, missed {u64} NOT NULL, missed_at {ms} NULL, "
    "gmt_create {ms} NOT NULL, gmt_modified {ms} NOT NULL, PRIMARY KEY (name)"
)
MYSQL = {"u64": "BIGINT UNSIGNED", "u32": "INTEGER UNSIGNED", "tiny": "TINYINT", "ms": "DATETIME(3)"}
SQLITE = {"u64": "BIGINT", "u32": "INTEGER", "tiny": "SMALLINT", "ms": "BIGINT"}


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    tables = list(context.config.attributes["tables"])
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        statements = []
        for table in part:
            name, index = f"timeout_schedule_{table:04d}", f"ix_look_{table:04d}"
            if sqlite:
                statements.append(f"CREATE TABLE IF NOT EXISTS {name} ({COLUMNS.format(**SQLITE)})")
                statements.append(f"CREATE INDEX IF NOT EXISTS {index} ON {name} (look_time)")
            else:
                statements.append(
                    f"CREATE TABLE IF NOT EXISTS {name} ({COLUMNS.format(**MYSQL)}, "
                    f"INDEX {index} (look_time)) ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin"
                )
        context.config.attributes["execute"](statements)
        context.config.attributes["migrated"](revision, first + len(part))


def downgrade() -> None:
    tables = list(context.config.attributes["tables"])
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        context.config.attributes["execute"](
            [f"DROP TABLE IF EXISTS timeout_schedule_{table:04d}" for table in part]
        )
        context.config.attributes["migrated"](revision, first + len(part))
