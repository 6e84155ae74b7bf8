"""Leases on rows: who runs a task that Redis cannot speak for, and until when that is taken for true.

Revision: 0003. Two columns on every task table, without a default value: programs that do not know them
neither read nor write them. Both servers add them at once, without copying rows, and while others write.
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import inspect

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
    inspector = inspect(op.get_bind())
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        # An upgrade that broke off may have been here.
        left = [f"{n:04d}" for n in part if _has_them(inspector, n) is not wanted]
        if left:
            context.config.attributes["execute"]([template.replace("{n}", n) for n in left])
        context.config.attributes["migrated"](revision, first + len(part))


def _has_them(inspector, table: int) -> bool:  # type: ignore[no-untyped-def]
    columns = {column["name"] for column in inspector.get_columns(f"timeout_task_{table:04d}")}
    return "lease_until" in columns
