"""Gradual changes of a topic: slots that are given up, a backlog that is resumed at a rate.

Revision: 0004. Only in the first database, which has the topics. The columns have defaults, so that programs
that do not know them can still create topics.
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import inspect

revision = "0004"
down_revision = "0003"

COLUMNS = {  # name -> type in MySQL, in SQLite
    "former_slots": ("SMALLINT UNSIGNED NOT NULL DEFAULT 0", "SMALLINT DEFAULT 0 NOT NULL"),
    "resume_rate": ("INTEGER UNSIGNED NOT NULL DEFAULT 0", "INTEGER DEFAULT 0 NOT NULL"),
    "resumed_at": ("BIGINT UNSIGNED NOT NULL DEFAULT 0", "BIGINT DEFAULT 0 NOT NULL"),
}


def upgrade() -> None:
    there = _columns()
    sqlite = op.get_bind().dialect.name == "sqlite"
    for name, (mysql, lite) in COLUMNS.items():
        if there and name not in there:  # an interrupted upgrade may have added it
            _execute(f"ALTER TABLE timeout_topic ADD COLUMN {name} {lite if sqlite else mysql}")


def downgrade() -> None:
    there = _columns()
    for name in COLUMNS:
        if name in there:
            _execute(f"ALTER TABLE timeout_topic DROP COLUMN {name}")


def _execute(statement: str) -> None:
    context.config.attributes["execute"]([statement])


def _columns() -> set[str]:
    """Return the columns of the topic table; none in databases without it."""
    if 0 not in context.config.attributes["tables"]:  # not the first database
        return set()
    return {column["name"] for column in inspect(op.get_bind()).get_columns("timeout_topic")}
