"""Alembic runs this for one database at a time. ``toc.store.migrate.Migrator`` passes the connection.

Schema changes take three deployments, never one, because old and new programs run side by side:

1. expand: a revision adds columns, tables or indexes. New columns are nullable or have a default, so that
   programs that do not know them can still insert. Run ``toc db upgrade``, then
2. deploy: programs that use the new schema, on every host. When the last old one is gone,
3. contract: a later revision drops what no program uses any more.

A revision changes every task table of its database and may be killed between any two of them. So each step
must be repeatable (IF NOT EXISTS, or check first), and reports progress with ``migrated(n)``.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
