"""Fault 35: callers' open transactions in which tasks with a dedup_key were submitted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from fault.conftest import Build, Verdict
from harness.history import Client
from harness.system import System
from harness.tables import engine_of, task_tables
from sqlalchemy import Connection, Engine

from benchmarks.local import MariaDB
from toc.model.errors import StoreUnavailable

WAIT_SECONDS = 0.2
"""Far below the lock wait of two seconds of toc's sessions."""


@pytest.fixture
def application(mariadb: MariaDB) -> Iterator[Engine]:
    """An application's engine, as it comes: REPEATABLE READ."""
    with engine_of(mariadb.url) as engine:
        yield engine


class Strangers:
    """Submits of others while transactions are open: at every place between, before and behind the biz_ids of
    those, and how long the slowest took."""

    def __init__(self, system: System, biz_ids: list[int]) -> None:
        self.slowest = 0.0
        self.count = 0
        self.failed: list[str] = []
        self._client = system.client
        self._biz_ids = biz_ids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            biz_id = self._biz_ids[self.count % len(self._biz_ids)]
            key = f"stranger-{self.count}" if self.count % 2 else None
            began = time.monotonic()
            try:
                self._client.submit("test.sync", biz_id=biz_id, delay=1.0, dedup_key=key)
            except StoreUnavailable as exc:
                self.failed.append(str(exc))
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.count += 1


def deadlocks(connection: Connection) -> int:
    query = "SELECT count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'"
    return int(connection.exec_driver_sql(query).scalar_one())


def test_open_transactions_block_no_stranger_and_do_not_deadlock(
    build: Build, application: Engine, verdict: Verdict
) -> None:
    line = verdict(35, "a caller's open transaction with a dedup_key", "REPEATABLE READ")
    system = build(databases=1, tables=1)
    client = system.client
    system.start()
    client.submit("test.sync", biz_id=500, delay=1.0)
    first = client.submit("test.sync", biz_id=3000, delay=1.0, dedup_key="taken")
    places = [1, 499, 999, 1001, 1999, 2001, 2999, 3001, 10_000]
    with application.connect() as one, application.connect() as two, application.connect() as watch:
        assert one.exec_driver_sql("SELECT @@tx_isolation").scalar_one() == "REPEATABLE-READ"
        assert two.exec_driver_sql("SELECT COUNT(*) FROM mysql.help_topic").scalar_one() >= 0
        before = deadlocks(watch)
        two.exec_driver_sql(
            f"SELECT COUNT(*) FROM {task_tables(system.settings)[0]}"
        ).scalar_one()  # two's snapshot
        late = client.submit("test.sync", biz_id=2500, delay=1.0, dedup_key="late")
        submit = partial(_submit, client, delay=5.0)  # due once it is committed
        held = [submit(one, 1000, "a"), submit(two, 2000, "b")]
        # One that it holds itself, one that was there before, one that its snapshot is too old to show.
        assert submit(one, 1000, "a") == held[0]
        assert submit(one, 3000, "taken") == first
        assert submit(two, 2500, "late") == late
        held += [submit(one, 4000, "c"), submit(two, 5000, "d")]
        with Strangers(system, places) as strangers:
            system.wait(lambda: strangers.count > 30 * len(places), "others submit", 60)
        one.commit()
        two.commit()
        met = deadlocks(watch) - before
    line.prove(
        strangers.count,
        f"{strangers.count} submits by others while two transactions with four new tasks were open",
    )
    assert (strangers.failed, met) == ([], 0)
    line.within(strangers.slowest, WAIT_SECONDS)
    assert set(system.center.store.read(held)) == set(held)
    line.judge(system, within=4)


def test_a_submit_that_waits_for_a_dedup_key_blocks_nobody_else(
    build: Build, application: Engine, verdict: Verdict
) -> None:
    line = verdict(35, "a caller's open transaction with a dedup_key", "others want the same key")
    system = build(databases=1, tables=1)
    client = system.client
    system.start()
    client.submit("test.sync", biz_id=500, delay=1.0)
    got: list[int] = []
    with application.connect() as one, application.connect() as two:
        began = time.monotonic()
        held = _submit(client, one, 1000, "a")

        def wait(connection: Connection | None) -> None:
            got.append(_submit(client, connection, 1000, "a"))

        waiting = [threading.Thread(target=wait, args=[connection]) for connection in (None, two)]
        with Strangers(system, [1, 499, 999, 1001, 10_000]) as strangers:
            for thread in waiting:
                thread.start()
            system.wait(lambda: strangers.count > 200, "others submit", 60)
            assert got == []
            one.commit()
            open_for = time.monotonic() - began
            for thread in waiting:
                thread.join()
        with Strangers(system, [2, 498, 998, 1002, 10_001]) as later:  # while two is still open
            system.wait(lambda: later.count > 100, "others submit", 60)
        two.commit()
    line.prove(got == [held, held], f"two submits waited for a key while {strangers.count} others came")
    assert strangers.failed + later.failed == []
    line.within(max(strangers.slowest, later.slowest), WAIT_SECONDS)
    line.judge(system, within=4 + open_for)  # it was due meanwhile


def _submit(client: Client, connection: Connection | None, biz_id: int, key: str, delay: float = 1.0) -> int:
    return client.submit("test.sync", biz_id=biz_id, delay=delay, dedup_key=key, connection=connection)
