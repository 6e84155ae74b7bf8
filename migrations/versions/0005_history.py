"""A history of the failed tries on every task row.

Revision: 0005. Adds a column without a default value to every task table: programs that do not know it
neither read nor write it. Both servers add it instantly, without copying rows, while others write.
"""

from __future__ import annotations

from alembic import context, op

revision = "0005"
down_revision = "0004"

BATCH = 32
"""Tables per round trip."""

MYSQL = "ALTER TABLE timeout_task_{n} ADD COLUMN history VARCHAR(4000) NULL"
SQLITE = "ALTER TABLE timeout_task_{n} ADD COLUMN history VARCHAR(4000)"
DOWN = "ALTER TABLE timeout_task_{n} DROP COLUMN history"


def upgrade() -> None:
    _each_table(MYSQL, SQLITE, wanted=True)


def downgrade() -> None:
    _each_table(DOWN, DOWN, wanted=False)


def _each_table(mysql: str, sqlite: str, *, wanted: bool) -> None:
    template = sqlite if op.get_bind().dialect.name == "sqlite" else mysql
    tables = list(context.config.attributes["tables"])
    there = context.config.attributes["columns"]()
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        # An interrupted upgrade may have added it.
        left = [f"{n:04d}" for n in part if ("history" in there[f"timeout_task_{n:04d}"]) is not wanted]
        if left:
            context.config.attributes["execute"]([template.replace("{n}", n) for n in left])
        context.config.attributes["migrated"](revision, first + len(part))
