"""What tests lean on: their tables are those of the migrations."""

from __future__ import annotations

from harness.schema import layout_of, make_tables, migrator_of, statements

from toc import Settings
from toc.dev.local.servers import MariaDB


def test_copied_tables_are_those_of_the_migrations(mariadb: MariaDB, database_prefix: str) -> None:
    migrated, first, copied = (
        Settings(
            database_urls=[mariadb.url], databases=2, tables=8, database_prefix=f"{database_prefix}{name}_"
        )
        for name in ("a", "b", "c")
    )
    migrator_of(migrated).upgrade()
    make_tables(first)  # from now on there is a copy
    make_tables(copied)
    assert statements(layout_of(copied)) == statements(layout_of(migrated))
    assert not any(status.behind for status in migrator_of(copied).check())
