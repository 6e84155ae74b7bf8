"""The task tables as an administrator sees them: SQL on a connection of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine

from toc import Settings
from toc.store.store import Store


def task_tables(settings: Settings) -> list[str]:
    """The task tables' names in SQL."""
    names = [f"timeout_task_{table:04d}" for table in range(settings.tables)]
    if settings.need_database_urls()[0].startswith("sqlite"):
        return names
    return [
        f"{settings.database_prefix}{table % settings.databases}.{name}" for table, name in enumerate(names)
    ]


@contextmanager
def engine_of(url: str | URL, **options: Any) -> Iterator[Engine]:
    """An engine as applications have it."""
    engine = create_engine(url, **options)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def raw(where: Settings | str) -> Iterator[Connection]:
    """A connection to a server, or the first one of these settings, each statement committed at once."""
    url = where if isinstance(where, str) else where.need_database_urls()[0]
    with engine_of(url, isolation_level="AUTOCOMMIT") as engine, engine.connect() as connection:
        yield connection


@contextmanager
def refused(connection: Connection, store: Store, job_id: int) -> Iterator[None]:
    """A row that cannot be written: a damaged page, or a trigger or constraint that somebody has added."""
    name = store._shards.names[store._shards.table_of(job_id)]
    trigger = f"{name.partition('.')[0]}.refuses"
    connection.exec_driver_sql(
        f"CREATE TRIGGER {trigger} BEFORE UPDATE ON {name} FOR EACH ROW "
        f"IF NEW.job_id = {job_id} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF"
    )
    try:
        yield
    finally:
        connection.exec_driver_sql(f"DROP TRIGGER {trigger}")
