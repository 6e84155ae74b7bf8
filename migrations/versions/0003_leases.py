"""Leases on rows: which worker runs a task that Redis cannot account for, and until when that is valid.

Revision: 0003. Adds two columns without a default value to every task table: programs that do not know them
neither read nor write them. Both servers add them instantly, without copying rows, while others write.
"""

from __future__ import annotations

from alembic import context, op

revision = "0003"
down_revision = "0002"

BATCH = 32
"""Tables per round trip."""

MYSQL = (
    "ALTER TABLE timeout_task_{n} "
    "ADD COLUMN lease_owner BIGINT UNSIGNED NULL, ADD COLUMN lease_until DATETIME(3) NULL"
)
SQLITE = (
    "ALTER TABLE timeout_task_{n} ADD COLUMN lease_owner BIGINT;"
    "ALTER TABLE timeout_task_{n} ADD COLUMN lease_until BIGINT"
)
MYSQL_DOWN = "ALTER TABLE timeout_task_{n} DROP COLUMN lease_owner, DROP COLUMN lease_until"
SQLITE_DOWN = (
    "ALTER TABLE timeout_task_{n} DROP COLUMN lease_owner;"
    "ALTER TABLE timeout_task_{n} DROP COLUMN lease_until"
)


def upgrade() -> None:
    _each_table(MYSQL, SQLITE, wanted=True)


def downgrade() -> None:
    _each_table(MYSQL_DOWN, SQLITE_DOWN, wanted=False)


def _each_table(mysql: str, sqlite: str, *, wanted: bool) -> None:
    template = sqlite if op.get_bind().dialect.name == "sqlite" else mysql
    tables = list(context.config.attributes["tables"])
    there = context.config.attributes["columns"]()
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        # An interrupted upgrade may have added them.
        left = [f"{n:04d}" for n in part if ("lease_until" in there[f"timeout_task_{n:04d}"]) is not wanted]
        if left:
            context.config.attributes["execute"]([template.replace("{n}", n) for n in left])
        context.config.attributes["migrated"](revision, first + len(part))
