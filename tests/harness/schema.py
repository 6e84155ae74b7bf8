"""The tables of a system, copied from those that the migrations have made for an earlier one.

The migrations take a fifth of a second of a processor, and hundreds of tests want tables. tests/migration is
about what migrations make; here they make the first system of each layout.
"""

from pymysql.err import Error

from harness.secured import migrating
from toc import Settings
from toc.store.migrate import Migrator
from toc.store.servers.mysql import connector
from toc.store.servers.shards import Layout

_made: dict[tuple[int, int], list[list[str]]] = {}
"""By numbers of databases and tables: the statements that make each database."""


def make_tables(settings: Settings) -> None:
    """Make the databases that a system with these settings needs, or bring those to date that exist."""
    layout = layout_of(settings)
    numbers = settings.databases, settings.tables
    if layout.sqlite or numbers not in _made or not _copy(layout, _made[numbers]):
        migrator_of(settings).upgrade()
        if not layout.sqlite:
            _made.setdefault(numbers, statements(layout))


def layout_of(settings: Settings) -> Layout:
    """Where the tables are, for the account that may change them."""
    urls = list(map(migrating, settings.database_urls))
    return Layout(urls, settings.databases, settings.tables, settings.database_prefix)


def migrator_of(settings: Settings) -> Migrator:
    """The migrations of these tables."""
    urls = list(map(migrating, settings.database_urls))
    prefix = settings.database_prefix
    return Migrator(urls, databases=settings.databases, tables=settings.tables, prefix=prefix)


def _copy(layout: Layout, made: list[list[str]]) -> bool:
    """Make the databases; returns False if there are some already, or who asks may not make any."""
    for server, url in enumerate(layout.urls):
        with connector(url, 10, None, 60)().driver as connection, connection.cursor() as cursor:
            for database in layout.databases_of(server):
                name = layout.database_name(database)
                try:
                    cursor.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
                except Error:
                    return False
                cursor.execute(";".join([f"USE {name}", *made[database]]))
                while cursor.nextset():
                    pass
    return True


def statements(layout: Layout) -> list[list[str]]:
    """The statements that make each of these databases as it is."""
    found = []
    for server, url in enumerate(layout.urls):
        for database in layout.databases_of(server):
            name = layout.database_name(database)
            with (
                connector(url, 10, None, 60, database=name)().driver as connection,
                connection.cursor() as cursor,
            ):
                cursor.execute("SHOW TABLES")
                tables = [str(table) for (table,) in cursor.fetchall()]
                made = []
                for table in tables:
                    cursor.execute(f"SHOW CREATE TABLE {table}")
                    ((_, statement),) = cursor.fetchall()
                    made.append(str(statement))
                cursor.execute("SELECT version_num FROM alembic_version")
                ((version,),) = cursor.fetchall()
                found.append([*made, f"INSERT INTO alembic_version VALUES ('{version}')"])
    return found
