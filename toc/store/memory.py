"""The task table of a test: SQLite in memory, with production's tables, and faults that the test asks for."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache

from sqlalchemy import create_engine, text
from sqlalchemy.pool import StaticPool

from toc.model.clock import Clock
from toc.model.errors import StoreUnavailable
from toc.store.schema import REVISION, database_metadata, task_table_name
from toc.store.servers.server import DatabaseServer, Lost, Pool, Result, Statement
from toc.store.servers.sqlite import SqliteConnection, SqliteServer
from toc.store.tasks.write import REPEATS

WAIT_SECONDS = 10.0
"""How long a thread waits for another one's statements."""


class MemoryDatabase(SqliteServer):
    """A database in memory. All threads share one connection, in turn; its clock is the test's.

    ``away``: no statement reaches it. ``loses_reply``: the next write is committed, its answer is lost, and
    so are all further tries of the call to find out what became of it.
    """

    def __init__(self, clock: Clock) -> None:
        self.away = self.loses_reply = False
        self.refuses = 0
        """How many more statements do not reach it."""
        self.written = False
        """Whether anything was written since it was loaded."""
        self._clock = clock
        self._driver = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        DatabaseServer.__init__(self, "the test's database", [0], Pool(self._connection, 1, WAIT_SECONDS))

    def _connection(self) -> SqliteConnection:
        return _Connection(self._driver, self)

    def _connect_within(self, seconds: float) -> SqliteConnection:  # noqa: ARG002
        return self._connection()

    def from_now(self, milliseconds: int) -> str:
        """An instant after the test's now."""
        return f"{self._clock.now_ms() + milliseconds:d}"

    def check(self) -> None:
        """Raise StoreUnavailable if the test has it away."""
        if self.away or self.refuses:
            self.refuses = max(0, self.refuses - 1)
            raise StoreUnavailable(f"{self.name} is away, as the test asked")

    def job_ids(self) -> list[int]:
        """All tasks, the first due first."""
        select = f"SELECT job_id FROM {task_table_name(0)} ORDER BY action_time, job_id"
        return [job_id for (job_id,) in self.run([Statement(select)])[0].rows]

    def empty(self) -> None:
        """Forget everything that is stored, and all faults."""
        self.away = self.loses_reply = False
        self.refuses = 0
        self.load(_empty())

    def load(self, content: bytes) -> None:
        """Hold this, which ``content`` has returned."""
        self._driver.rollback()
        self._driver.deserialize(content)
        self.written = False

    def content(self) -> bytes:
        """Return all that is stored."""
        return self._driver.serialize()


class _Connection(SqliteConnection):
    """One user's hold of the connection, which stays open."""

    def __init__(self, driver: sqlite3.Connection, database: MemoryDatabase) -> None:
        super().__init__(driver, WAIT_SECONDS)
        self._database = database

    def execute(self, statements: Sequence[Statement], transaction: bool, patient: bool) -> list[Result]:
        """Run the statements, unless the test has the database away."""
        database = self._database
        database.check()
        results = super().execute(statements, transaction, patient)
        writes = not all(sql.startswith("SELECT") for sql, _ in statements)
        database.written |= writes
        if database.loses_reply and writes:
            database.loses_reply, database.refuses = False, REPEATS - 1
            raise Lost(f"{database.name}: its answer was lost, as the test asked")
        return results

    def ask(self, statements: Sequence[Statement]) -> None:
        """Run read-only statements, unless the test has the database away."""
        self._database.check()
        super().ask(statements)

    def close(self) -> None:
        """Do nothing: the data would be lost."""


@cache
def _empty() -> bytes:
    """A database with empty tables. Made once a process; a copy takes less than a millisecond."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    database_metadata(0, 1, 1).create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": REVISION})
    driver = engine.raw_connection().driver_connection
    assert isinstance(driver, sqlite3.Connection)  # noqa: S101 - narrows the type
    content = driver.serialize()
    engine.dispose()
    return content
