"""The identity of the task table: a table with one row, so that no two task tables share one index unnoticed.

Revision: 0006. Only in the first database. Programs that do not know the table leave it alone; the first
program that knows it writes the row.
"""

from __future__ import annotations

from alembic import context, op

revision = "0006"
down_revision = "0005"

MYSQL = (
    "CREATE TABLE IF NOT EXISTS timeout_identity (number TINYINT NOT NULL, identity VARCHAR(32) NOT NULL, "
    "gmt_create DATETIME(3) NOT NULL, PRIMARY KEY (number)) "
    "ENGINE=InnoDB CHARSET=utf8mb4 COLLATE utf8mb4_bin"
)
SQLITE = (
    "CREATE TABLE IF NOT EXISTS timeout_identity (number SMALLINT NOT NULL, identity VARCHAR(32) NOT NULL, "
    "gmt_create BIGINT NOT NULL, PRIMARY KEY (number))"
)


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    if 0 in context.config.attributes["tables"]:  # the first database
        context.config.attributes["execute"]([SQLITE if sqlite else MYSQL])


def downgrade() -> None:
    if 0 in context.config.attributes["tables"]:
        context.config.attributes["execute"](["DROP TABLE IF EXISTS timeout_identity"])
