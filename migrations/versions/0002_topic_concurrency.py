"""How many handlers of a topic a worker process runs at once. 0: as many as it has threads.

Revision: 0002. Only in the first database, which has the topics. The column has a default, so that programs
that do not know it can still create topics.
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import inspect

revision = "0002"
down_revision = "0001"

MYSQL = "ALTER TABLE timeout_topic ADD COLUMN concurrency INTEGER UNSIGNED NOT NULL DEFAULT 0"
SQLITE = "ALTER TABLE timeout_topic ADD COLUMN concurrency INTEGER DEFAULT 0 NOT NULL"


def upgrade() -> None:
    if _topics_are_here() and not _has_it():  # an interrupted upgrade may have added it
        sqlite = op.get_bind().dialect.name == "sqlite"
        context.config.attributes["execute"]([SQLITE if sqlite else MYSQL])


def downgrade() -> None:
    if _topics_are_here() and _has_it():
        context.config.attributes["execute"](["ALTER TABLE timeout_topic DROP COLUMN concurrency"])


def _topics_are_here() -> bool:
    return 0 in context.config.attributes["tables"]  # the first database


def _has_it() -> bool:
    return "concurrency" in {column["name"] for column in inspect(op.get_bind()).get_columns("timeout_topic")}
