"""The task table of a test: SQLite in memory, with production's tables, and faults that the test asks for."""

import sqlite3
from collections.abc import Sequence

from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from toc.model.clock import Clock
from toc.model.errors import StoreUnavailable
from toc.store.schema import REVISION, TOPIC_TABLE, database_metadata, schedule_table_name, task_table_name
from toc.store.servers.pool import Pool
from toc.store.servers.server import DatabaseServer, Lost, Result, Statement
from toc.store.servers.sqlite import SqliteConnection, SqliteServer
from toc.store.tasks.write import REPEATS

NEVER = 2**63 - 1
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
        self.topic_writes = 0
        """How often topics were written since it was empty."""
        self._clock = clock
        self._driver = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._tables = _make_tables(self._driver)
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

    def reach(self) -> None:
        """Do as a statement in an application's transaction. Raises StoreUnavailable if the test has it away,
        or the answer lost: then nothing was done."""
        self.check()
        if self.loses_reply:
            self.loses_reply = False
            raise Lost(f"{self.name}: its answer was lost, as the test asked")

    def job_ids(self) -> list[int]:
        """All tasks, the first due first."""
        select = f"SELECT job_id FROM {task_table_name(0)} ORDER BY action_time, job_id"
        return [job_id for (job_id,) in self.run([Statement(select)])[0].rows]

    def next_times(self, where: str) -> list[int]:
        """When (ms) the first pending task is due for which an SQL condition holds, and when the first
        schedule needs a step: NEVER if there is none."""
        task = f"SELECT MIN(next_time) FROM {task_table_name(0)} WHERE status=0 AND {where}"
        schedule = f"SELECT MIN(look_time) FROM {schedule_table_name(0)}"
        return [result.rows[0][0] or NEVER for result in self.run([Statement(task), Statement(schedule)])]

    def empty(self) -> None:
        """Forget everything that is stored, and all faults."""
        self.away = self.loses_reply = False
        self.refuses = self.topic_writes = 0
        self._driver.rollback()
        for table in self._tables:  # a new database would have to read its schema, which takes longer
            self._driver.execute(f"DELETE FROM {table}")

    def topic_rows(self) -> list[tuple[object, ...]]:
        """Return the rows of all topics."""
        return self._driver.execute(f"SELECT * FROM {TOPIC_TABLE}").fetchall()

    def add_topics(self, rows: list[tuple[object, ...]]) -> None:
        """Add topics, which ``topic_rows`` has returned."""
        self._driver.executemany(f"INSERT INTO {TOPIC_TABLE} VALUES ({','.join('?' * len(rows[0]))})", rows)
        self.topic_writes += 1


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
        database.topic_writes += writes and any(TOPIC_TABLE in sql for sql, _ in statements)
        if database.loses_reply and writes:
            database.loses_reply, database.refuses = False, REPEATS - 1
            raise Lost(f"{database.name}: its answer was lost, as the test asked")
        return results

    def ask(self, statements: Sequence[Statement]) -> None:
        """Run statements, unless the test has the database away."""
        self._database.check()
        super().ask(statements)

    def close(self) -> None:
        """Do nothing: the data would be lost."""


def _make_tables(driver: sqlite3.Connection) -> list[str]:
    """Make production's tables, and return the names of those that hold what is stored."""
    engine = create_engine("sqlite://", creator=lambda: driver, poolclass=StaticPool)
    metadata = database_metadata(0, 1, 1)
    metadata.create_all(engine)
    driver.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    driver.execute("INSERT INTO alembic_version VALUES (?)", [REVISION])
    return [*metadata.tables]
