"""The outbox: a task exists once exactly if the transaction that asked for it has committed, anywhere."""

import asyncio
import json
import secrets
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from harness.system import NewSystem, System
from harness.threads import at_once
from sqlalchemy import Engine, create_engine, event, func, select, text, update
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from benchmarks.local import MariaDB
from benchmarks.servers import PostgreSql
from toc import AsyncTimeoutCenter, CancelOutcome, NewTask, Task, TimeoutCenter, outbox
from toc.model import errors
from toc.model.clock import Duration
from toc.model.sharding import BizId
from toc.model.task import Put
from toc.store.servers.server import Locked, Refused


@pytest.fixture
def system(new_system: NewSystem) -> System:
    one = new_system()
    one.create_topics()
    return one


@pytest.fixture(params=["mariadb", "postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """An application's own database."""
    name = f"shop_{secrets.token_hex(3)}"
    if request.param == "sqlite":
        url = make_url(f"sqlite:///{tmp_path}/shop.db")
    else:
        server: MariaDB | PostgreSql
        if request.param == "mariadb":
            server = request.getfixturevalue("mariadb")
            url = make_url(server.url)
        else:
            server = request.getfixturevalue("postgres")
            url = make_url(server.url).set(drivername="postgresql+psycopg")
        root = create_engine(url, isolation_level="AUTOCOMMIT")
        with root.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        url = url.set(database=name)
    one = create_engine(url)
    outbox.metadata.create_all(one)
    yield one
    one.dispose()
    if request.param != "sqlite":
        with root.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name}"))
        root.dispose()


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(outbox.table)).scalar_one()


def _raise(error: Exception) -> None:
    raise error


def found(system: System, biz_id: int | str) -> list[Task]:
    return system.center.find(biz_id=biz_id)


def test_a_task_comes_out_as_it_went_in_if_its_transaction_commits(system: System, engine: Engine) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    deepest = json.loads('{"reason": "日%s", "in": ' + "[" * 63 + "]" * 63 + "}")  # that a task may have
    with Session(engine) as session, session.begin():
        outbox.submit(
            session,
            "test.sync",
            biz_id="order-é",
            action_time=at,
            attribute=deepest,
            tries=3,
            expires_at=at + timedelta(hours=1),
            body=bytes(range(256)) * 400,
            content_type="image/x",
        )
    with Session(engine) as session:
        outbox.submit(session, "test.sync", biz_id=1, delay=3600)
        session.rollback()
    with engine.begin() as connection:
        outbox.submit(connection, "test.sync", biz_id=2, delay=timedelta(hours=1), dedup_key="mine")
        savepoint = connection.begin_nested()
        outbox.submit(connection, "test.sync", biz_id=3, delay=3600)
        savepoint.rollback()
    assert outbox.drain(engine, system.center) == 2
    assert (outbox.drain(engine, system.center), waiting(engine)) == (0, 0)
    (task,) = found(system, "order-é")
    assert (task.topic, task.action_time, task.attribute, task.tries) == (
        "test.sync",
        at,
        deepest,
        3,
    )
    assert (task.body, task.content_type) == (bytes(range(256)) * 400, "image/x")
    assert task.expires_at == at + timedelta(hours=1)
    assert [len(found(system, biz_id)) for biz_id in (1, 2, 3)] == [0, 1, 0]


def test_a_task_that_is_to_expire_never_does_so_though_its_topic_gives_an_expiry(
    system: System, engine: Engine
) -> None:
    system.center.store.topics.alter("test.sync", expires_in=60)
    system.center.catalog.refresh()
    given: list[Duration | None] = [None, 0, timedelta(hours=1)]
    with engine.begin() as connection:
        for biz_id, expires_in in enumerate(given):
            outbox.submit(connection, "test.sync", biz_id=biz_id, delay=3600, expires_in=expires_in)
    assert outbox.drain(engine, system.center) == 3
    (default,), (never,), (own,) = (found(system, biz_id) for biz_id in range(3))
    assert default.expires_at == default.action_time + timedelta(minutes=1)
    assert never.expires_at is None
    assert own.expires_at == own.action_time + timedelta(hours=1)


def test_drains_that_die_half_way_or_run_at_once_make_one_task(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.begin() as connection:
        for biz_id in range(40):
            outbox.submit(connection, "test.sync", biz_id=biz_id, delay=3600)
    with monkeypatch.context() as patch:
        patch.setattr("sqlalchemy.delete", lambda _: 1 / 0)  # it dies between submit and removal
        with pytest.raises(ZeroDivisionError):
            outbox.drain(engine, system.center)
    assert waiting(engine) == 40
    assert len(found(system, 7)) == 1
    at_once([partial(outbox.drain, engine, system.center)] * 3)
    assert waiting(engine) == 0
    assert [len(found(system, biz_id)) for biz_id in range(40)] == [1] * 40


def test_what_replaces_is_done_once_by_drains_that_die_half_way_or_run_at_once(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(biz_id: int, body: bytes) -> None:
        with engine.begin() as connection:
            outbox.submit(
                connection,
                "test.sync",
                biz_id=biz_id,
                delay=3600,
                dedup_key="mine",
                on_conflict="replace",
                body=body,
            )

    replace(1, b"first")
    with monkeypatch.context() as patch:
        patch.setattr("sqlalchemy.delete", lambda _: 1 / 0)  # it dies between submit and removal
        with pytest.raises(ZeroDivisionError):
            outbox.drain(engine, system.center)
    (task,) = found(system, 1)
    assert system.center.cancel(task.job_id) is CancelOutcome.CANCELLED
    assert outbox.drain(engine, system.center) == 1
    assert [one.job_id for one in found(system, 1)] == [task.job_id]

    replace(2, b"second")
    replace(3, b"third")
    with engine.begin() as connection:
        outbox.submit(connection, "test.sync", biz_id=4, delay=3600, body=b"fourth")
    put = system.center.put
    with monkeypatch.context() as patch:

        def overtaken(task: NewTask, **how: Any) -> Put:
            patch.setattr(system.center, "put", put)
            outbox.drain(engine, system.center)
            return put(task, **how)

        patch.setattr(system.center, "put", overtaken)
        with structlog.testing.capture_logs() as logs:
            outbox.drain(engine, system.center)
    bodies = b"second", b"third", b"fourth"
    tasks = [one for n in (2, 3, 4) for one in found(system, n)]
    assert [(one.version, one.body) for one in tasks] == [(0, body) for body in bodies]
    assert not [one for one in logs if one["event"] == "outbox_refused"], "nothing was refused"


def test_a_drain_holds_few_bodies_at_a_time(system: System, engine: Engine) -> None:
    size, many = 1 << 19, 40
    with engine.begin() as connection:
        for n in range(many):
            outbox.submit(connection, "test.sync", biz_id=n, delay=3600, body=bytes([n]) * size)
    tracemalloc.start()
    try:
        assert outbox.drain(engine, system.center) == many
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < many * size / 2
    assert [found(system, n)[0].body for n in (0, 39)] == [bytes(size), b"\x27" * size]


def test_a_task_that_toc_refuses_stays_and_holds_up_no_other(system: System, engine: Engine) -> None:
    with engine.begin() as connection:
        outbox.submit(connection, "no.such", biz_id=1, delay=3600)
        outbox.submit(connection, "test.sync", biz_id=2, delay=3600)
        outbox.submit(connection, "test.sync", biz_id=3)  # the topic is not an instant one
        outbox.submit(connection, "test.sync", biz_id=4, delay=3600)
        for bad in (
            {"delay": -1},
            {"delay": 5, "attribute": {"x": {1}}},
            {"action_time": datetime(2000, 1, 1, tzinfo=UTC)},
        ):
            with pytest.raises(errors.InvalidInput):
                outbox.submit(connection, "test.sync", biz_id=5, **bad)
    assert outbox.drain(engine, system.center) == 2
    assert [len(found(system, biz_id)) for biz_id in (1, 2, 3, 4)] == [0, 1, 0, 1]
    with engine.begin() as connection:
        records = connection.execute(select(outbox.table.c.error).order_by(outbox.table.c.id)).scalars().all()
        assert ["no.such" in records[0], "action_time" in records[1]] == [True, True]
        connection.execute(
            update(outbox.table).values(
                error=None, task=func.replace(outbox.table.c.task, "no.such", "test.async")
            )
        )
    assert outbox.drain(engine, system.center) == 1


@pytest.mark.parametrize("charset", ["latin1", "utf8mb3"])
@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_an_error_that_quotes_what_the_database_cannot_hold_holds_up_no_other(
    system: System, engine: Engine, charset: str
) -> None:
    key: dict[str, Any] = {"delay": 3600, "dedup_key": "\N{MONEY BAG}"}
    system.center.submit("test.sync", biz_id=1, **key)
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE toc_outbox CONVERT TO CHARACTER SET {charset}"))
        outbox.submit(connection, "test.sync", biz_id=1, body=b"another", **key)
        outbox.submit(connection, "test.sync", biz_id=2, delay=3600)
    assert outbox.drain(engine, system.center) == 1
    with engine.connect() as connection:
        (error,) = connection.execute(select(outbox.table.c.error)).scalars()
    assert r"\U0001f4b0" in error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "5",
        "[" * 60_000,
        '{"topic": "test.sync"}',
        '{"of another release": 1}',
        '{"request": 1, "on_conflict": "replace"}',
        "a biz_id",
    ],
    ids=lambda text: text[:20],
)
def test_an_unreadable_record_stays_and_holds_up_no_other(system: System, engine: Engine, text: str) -> None:
    with engine.begin() as connection:
        outbox.submit(connection, "test.sync", biz_id=1, delay=3600)
        (whole,) = connection.execute(select(outbox.table.c.task)).scalars()
        other = json.loads(whole) | {"biz_id": []} if text == "a biz_id" else None
        changed = json.dumps(other) if other else text
        connection.execute(update(outbox.table).values(task=changed))
        outbox.submit(connection, "test.sync", biz_id=2, delay=3600)
    assert outbox.drain(engine, system.center) == 1
    assert len(found(system, 2)) == 1
    with engine.connect() as connection:
        (error,) = connection.execute(select(outbox.table.c.error)).scalars()
        assert ("biz_id must be" if other else "no record of this version") in error


def test_a_task_whose_time_has_passed_in_the_outbox_runs_at_once(system: System, engine: Engine) -> None:
    with engine.begin() as connection:
        outbox.submit(connection, "test.sync", biz_id=1, delay=0.001)
        outbox.submit(connection, "test.sync", biz_id=1, delay=0, past="run")
    due = datetime.now(UTC) + timedelta(milliseconds=20)
    system.wait(lambda: datetime.now(UTC) > due, "its time has passed", 1)
    system.start()
    assert outbox.drain(engine, system.center) == 2
    for task in found(system, 1):
        system.wait(partial(system.starts, task.job_id), "it runs", 10)


@pytest.mark.parametrize("error", [errors.StoreUnavailable, errors.SchemaBehind, errors.UnfitServer])
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_server_of_toc_that_cannot_be_used_leaves_its_records_and_holds_up_no_others(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[errors.TocError]
) -> None:
    with engine.begin() as connection:
        for biz_id in range(4):
            outbox.submit(connection, "test.sync", biz_id=biz_id, delay=3600)
    put = system.center.put

    def odd_fail(task: NewTask, **how: Any) -> Put:
        if int(task.biz_id) % 2:
            raise error("away")
        return put(task, **how)

    with monkeypatch.context() as patch:
        patch.setattr(system.center, "put", odd_fail)
        patch.setattr(system.center.store, "server_of_biz", lambda biz: biz.number % 2)
        with pytest.raises(error):
            outbox.drain(engine, system.center)
    assert waiting(engine) == 2
    assert outbox.drain(engine, system.center) == 2
    assert [len(found(system, biz_id)) for biz_id in range(4)] == [1] * 4


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_while_all_servers_of_toc_are_away_little_is_read(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.begin() as connection:
        for biz_id in range(6):
            outbox.submit(connection, "test.sync", biz_id=biz_id, delay=3600, body=b"b")
    read: list[str] = []
    listened: Any = (engine, "before_cursor_execute", lambda *about: read.append(about[2]))
    with monkeypatch.context() as patch:
        patch.setattr(outbox, "TOGETHER", 2)
        patch.setattr(system.center, "put", lambda *_, **__: _raise(errors.StoreUnavailable("away")))
        event.listen(*listened)
        with pytest.raises(errors.StoreUnavailable):
            outbox.drain(engine, system.center)
        event.remove(*listened)
    assert [statement.count("task") for statement in read if statement.startswith("SELECT")] == [1, 0], read
    assert outbox.drain(engine, system.center) == 6


@pytest.mark.parametrize("error", [Locked, Refused])
@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_table_that_cannot_be_used_leaves_its_records_and_holds_up_no_other_of_its_server(
    system: System, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[errors.TocError]
) -> None:
    """As during hours of an ALTER TABLE, or once a table is damaged."""
    tables = len(system.center.store.tables)
    bad = BizId.of(0).crc % tables
    there = [biz_id for biz_id in range(50) if BizId.of(biz_id).crc % tables == bad]
    with engine.begin() as connection:
        for biz_id in range(50):
            outbox.submit(connection, "test.sync", biz_id=biz_id, delay=3600)
    put, asked = system.center.put, list[int | str]()

    def fail_there(task: NewTask, **how: Any) -> Put:
        if task.biz_id in there:
            asked.append(task.biz_id)
            raise error("a table")
        return put(task, **how)

    with monkeypatch.context() as patch:
        patch.setattr(system.center, "put", fail_there)
        with pytest.raises(error):
            outbox.drain(engine, system.center)
    assert waiting(engine) == len(there)
    assert 1 < len(there) < 50
    assert asked == [0]  # each further one might wait for the lock again
    assert outbox.drain(engine, system.center) == len(there)


def test_an_async_session_writes_to_it_within_run_sync(system: System, mariadb: MariaDB) -> None:
    name = f"{system.settings.database_prefix}0"
    engine = create_engine(make_url(mariadb.url).set(database=name))
    outbox.metadata.create_all(engine)

    async def run() -> None:
        other = create_async_engine(engine.url.set(drivername="mysql+asyncmy"))
        async with AsyncSession(other) as session, session.begin():
            await session.run_sync(lambda s: outbox.submit(s, "test.sync", biz_id=1, delay=3600))
        await other.dispose()

    asyncio.run(run())
    center = AsyncTimeoutCenter(system.settings)
    assert outbox.drain(engine, center) == 1
    asyncio.run(center.close())
    engine.dispose()


async def test_an_async_session_is_refused_outside_of_run_sync(mariadb: MariaDB) -> None:
    """Its execute would only return a coroutine: nothing would be written, and nobody told."""
    engine = create_async_engine(make_url(mariadb.url).set(drivername="mysql+asyncmy"))
    async with AsyncSession(engine) as session, engine.connect() as connection:
        for one in (session, connection):
            with pytest.raises(errors.InvalidInput, match="run_sync"):
                outbox.submit(one, "test.sync", biz_id=1, delay=60)  # type: ignore[arg-type]
    await engine.dispose()


def test_wrong_settings_of_who_drains_mark_no_record(system: System, engine: Engine) -> None:
    with engine.begin() as connection:
        outbox.submit(connection, "test.sync", biz_id=1, delay=3600)
    system.center.store.identity.get()
    other = system.settings.model_copy(update={"redis_url": None})
    with TimeoutCenter(other) as center, pytest.raises(errors.ConfigError, match="TOC_REDIS_URL"):
        outbox.drain(engine, center)
    assert outbox.drain(engine, system.center) == 1


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_an_embedded_worker_drains_it_by_a_schedule(system: System, engine: Engine) -> None:
    with TimeoutCenter(system.settings) as shop:

        @shop.schedule("drain", every=1)
        @shop.handler("test.sync")
        def drain(_task: Task) -> None:
            outbox.drain(engine, shop)

        with engine.begin() as connection:
            outbox.submit(connection, "test.async", biz_id=1, delay=3600)
        with shop.worker():
            system.wait(lambda: found(system, 1), "it is drained", 30)
    assert waiting(engine) == 0
