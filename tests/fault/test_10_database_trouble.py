"""Fault 10: deadlocks, lock waits, a read-only database, connections that are killed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.servers import application_url
from harness.system import System
from harness.tables import task_tables
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError

from benchmarks.local import MariaDB


@pytest.fixture
def root(mariadb: MariaDB) -> Iterator[Engine]:
    engine = create_engine(mariadb.url, isolation_level="AUTOCOMMIT")
    yield engine
    with engine.connect() as connection:
        connection.exec_driver_sql("SET GLOBAL read_only = 0")
    engine.dispose()


def metric(root: Engine, name: str) -> int:
    """A counter of InnoDB."""
    with root.connect() as connection:
        query = f"SELECT count FROM information_schema.innodb_metrics WHERE name = '{name}'"
        return int(connection.exec_driver_sql(query).scalar_one())


def kill_connections(root: Engine, account: str) -> int:
    """KILL every connection of an account; returns how many."""
    with root.connect() as connection:
        query = f"SELECT id FROM information_schema.processlist WHERE user = '{account}'"
        ids = [row[0] for row in connection.exec_driver_sql(query)]
        for number in ids:
            with suppress(DBAPIError):  # it has gone by itself
                connection.exec_driver_sql(f"KILL {number}")
        return len(ids)


class Quarrel:
    """Transactions that lock rows of the task tables out of order, so that others deadlock with them."""

    def __init__(self, system: System, root: Engine) -> None:
        self.tables = task_tables(system.settings)
        self._engine = root.execution_options(isolation_level="READ COMMITTED")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        dice = random.Random(10)
        while not self._over.is_set():
            with self._engine.connect() as connection, suppress(DBAPIError):
                # Many rows each, so that it is rarely the one that the server sacrifices.
                for table in dice.sample(self.tables, 4):
                    connection.exec_driver_sql(f"UPDATE {table} SET last_error = 'x' WHERE status = 0")
                    time.sleep(0.02)
                connection.rollback()

    def hold(self, seconds: float) -> None:
        """Lock every pending row for that long. If the server sacrifices this transaction, again."""
        for _ in range(20):
            with self._engine.connect() as connection, suppress(DBAPIError):
                for table in self.tables:
                    connection.exec_driver_sql(f"SELECT job_id FROM {table} WHERE status = 0 FOR UPDATE")
                time.sleep(seconds)
                connection.rollback()
                return
        raise AssertionError("the server sacrificed each try to lock the rows")


def test_what_the_database_refuses_or_rolls_back_is_done_later_and_once(
    build: Build, root: Engine, mariadb: MariaDB, verdict: Verdict
) -> None:
    line = verdict(10, "deadlock, lock wait, read-only, gone away")
    system = build()
    # Made by root; from here on the account that an application would have.
    system.env["TOC_DATABASE_URLS"] = application_url(mariadb)
    before = {name: metric(root, name) for name in ("lock_deadlocks", "lock_timeouts")}
    daemon = system.start()
    system.client.submit_many(tasks(800, ahead=(1.5, 8.0), fail=0.3))
    killed = 0
    with Load(system.client, rate=100, ahead=(0.1, 1.0), cancel=0.1, fail=0.3) as load:
        quarrel = Quarrel(system, root)
        with system.recorder.fault("store_down", note="deadlocks"), quarrel:
            enough = before["lock_deadlocks"] + 2
            system.wait(lambda: metric(root, "lock_deadlocks") > enough, "deadlocks happen", 60)
        with system.recorder.fault("store_down", note="locks held"):
            for _ in range(20):
                quarrel.hold(3.0)
                if metric(root, "lock_timeouts") > before["lock_timeouts"]:
                    break
        with system.recorder.fault("store_down", note="killed connections"):
            rounds = 0
            while rounds < 15 or (killed <= 10 and rounds < 200):
                killed += kill_connections(root, "app")
                rounds += 1
                time.sleep(0.05)
        with system.recorder.fault("store_down", note="read-only"), root.connect() as connection:
            connection.exec_driver_sql("SET GLOBAL read_only = 1")
            system.wait(lambda: "read-only" in daemon.log.read_text(), "the workers meet it", 60)
            connection.exec_driver_sql("SET GLOBAL read_only = 0")
        load.more(50)
    deadlocks, waits = (metric(root, name) - count for name, count in before.items())
    line.prove(
        deadlocks > 2 and waits > 0 and killed > 10,
        f"{deadlocks} deadlocks, {waits} lock waits timed out, {killed} connections killed, read-only met",
    )
    assert not load.errors
    line.judge(system, within=5)
