"""``toc doctor`` finds what is wrong with servers, settings, rights, workers, topics; it never breaks off."""

import json
import os
import signal
from pathlib import Path
from typing import Any
from zlib import crc32

import pymysql
import pytest
from conftest import Launch
from harness import forks
from harness.gateway import Gateway
from harness.patience import until
from harness.rows import change, insert, insert_many, known
from harness.secured import migrating
from harness.system import NewSystem, System
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisCluster, RedisServer
from benchmarks.private import free_port
from toc import NewTask, Settings, TimeoutCenter
from toc.coordination.operator import Operator
from toc.dev.local import embedded_stack
from toc.index.messages import Peek
from toc.model.finding import Level, Line
from toc.model.payload import GIVEN_BACK
from toc.model.topic import Delivery, Topic
from toc.operate import doctor
from toc.operate.cluster import living_workers
from toc.store.migrate import Migrator
from toc.store.records.targets import new_key
from toc.store.servers import mysql
from toc.store.tasks.scan import OverdueRows


@pytest.fixture
def system(hosts: System) -> System:
    return hosts


def having(lines: list[Line], level: Level, text: str) -> list[Line]:
    return [line for line in lines if line.level is level and text in line.what]


def bad(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line.level in (Level.REFUSE, Level.WARN)]


def test_the_embedded_default_is_well_and_says_what_it_is_not_for(tmp_path: Path) -> None:
    with embedded_stack(tmp_path, redis=False) as servers:
        settings = Settings(**servers)
        Migrator(settings.database_urls, databases=1, tables=settings.tables).upgrade()
        with TimeoutCenter(settings) as center:
            lines = doctor.examine(center)
    assert bad(lines) == []
    assert doctor.exit_code(lines) == 0
    (line,) = having(lines, Level.NOTE, "SQLite")
    assert "not for production" in line.what
    assert having(lines, Level.NOTE, "no topics")


def test_tasks_whose_payload_does_not_fit_are_told_and_what_was_not_read_is_not_said_to_be_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with embedded_stack(tmp_path, redis=False) as servers:
        settings = Settings(**servers)
        Migrator(settings.database_urls, databases=1, tables=settings.tables).upgrade()
        with TimeoutCenter(settings) as center:
            center.store.topics.create(Topic("order.close", 1, 1))
            job_ids = [center.submit("order.close", biz_id=n, delay=30) for n in range(3)]
            for job_id in job_ids[1:]:
                change(center.store, job_id, "last_error=%s", f"total: Field required; {GIVEN_BACK}, as")
            (line,) = having(doctor.examine(center), Level.WARN, "2 tasks given back, as the payload")
            read = center.store.scans.overdue
            in_part = lambda *which: OverdueRows(read(*which).rows, True, {})  # noqa: E731
            monkeypatch.setattr(center.store.scans, "overdue", in_part)
            assert having(doctor.examine(center), Level.WARN, "2 tasks or more given back")
            monkeypatch.setattr(center.store.scans, "overdue", lambda *_: OverdueRows([], True, {}))
            assert not having(lines := doctor.examine(center), Level.OK, "none is overdue")
            assert having(lines, Level.NOTE, "of those that were looked at none is overdue")
    assert line.of == "order.close"
    assert any(str(job_id) in line.do for job_id in job_ids[1:])


def test_targets_that_are_missing_paused_or_locked_are_told(tmp_path: Path) -> None:
    with embedded_stack(tmp_path, redis=False) as servers:
        settings = Settings(**servers, secret_key=new_key())
        Migrator(settings.database_urls, databases=1, tables=settings.tables).upgrade()
        with TimeoutCenter(settings) as center:
            for biz_type, name in enumerate(("there", "missing"), 1):
                center.store.topics.create(
                    Topic(f"to.{name}", biz_type, 1, delivery=Delivery.WEBHOOK, target=name)
                )
            center.targets.create("there", "https://example.com/")
            center.targets.pause("there", by="ann", why="it moves")
            told = [line for line in doctor.examine(center) if line.part == "targets"]
        with TimeoutCenter(Settings(**servers)) as center:
            without = [line for line in doctor.examine(center) if line.part == "targets"]
    assert [(line.level, line.of) for line in told] == [(Level.WARN, "missing"), (Level.NOTE, "there")]
    assert "to.missing" in told[0].what
    assert "paused by ann: it moves" in told[1].what
    (locked,) = having(without, Level.WARN, "TOC_SECRET_KEY")
    assert locked.of == "there"


def test_of_a_redis_cluster_the_node_that_is_down_alone_is_blamed(tmp_path: Path, launch: Launch) -> None:
    cluster = launch(RedisCluster, config=["cluster-require-full-coverage yes"])
    env = {
        "TOC_DATABASE_URLS": f"sqlite:///{tmp_path}/toc.db",
        "TOC_DATABASES": "1",
        "TOC_TABLES": "4",
        "TOC_REDIS_URL": cluster.url,
        "NO_COLOR": "1",
    }
    settings = Settings(
        database_urls=[env["TOC_DATABASE_URLS"]], databases=1, tables=4, redis_url=cluster.url
    )
    Migrator(settings.database_urls, databases=1, tables=4).upgrade()
    down = cluster.nodes[1]
    with TimeoutCenter(settings) as center:
        topic = Topic(name="order.close", biz_type=1, slot_amount=16)
        center.store.topics.create(topic)
        down.kill()
        # The others have noticed, and refuse to serve anything.
        assert until(
            lambda: not any(isinstance(one, Peek) for one in center.queues.peek(topic.slots()).values())
        )
    done = forks.run(["doctor", "--problems", "--json"], env=env, directory=tmp_path)
    assert done.returncode == 2, done.stderr
    lines = json.loads(done.stdout)
    assert {line["level"] for line in lines} == {"wrong", "warn"}
    silent = {line["of"] for line in lines if line["part"] == "redis" and "cannot be reached" in line["what"]}
    assert f"127.0.0.1:{down.port}" in silent
    assert not any("acl" in f"{line['what']} {line['do']}".lower() for line in lines)


def test_a_cluster_that_works_has_nothing_wrong_and_then_what_is_wrong_is_named(system: System) -> None:
    center = system.center
    system.create_topics(slots=4)
    lines = doctor.examine(center)
    assert [line.what for line in lines if line.level is Level.REFUSE] == [
        "no worker is alive: nothing fires"
    ]
    assert doctor.exit_code(lines) == 2

    system.start(processes=1)
    system.wait(lambda: not having(doctor.examine(center), Level.REFUSE, ""), "nothing is wrong", 20)
    lines = doctor.examine(center)
    assert bad(lines) == [], lines
    parts = {line.part for line in lines if line.level is Level.OK}
    assert parts == {"database", "redis", "zookeeper", "workers", "slots", "tasks"}
    assert having(lines, Level.OK, "its clock is")
    assert not having(lines, Level.OK, "paused")
    center.store.topics.alter("test.async", paused=True)
    assert having(
        doctor.examine(center), Level.OK, "none is overdue by more than 10 s; those of paused topics"
    )

    doomed = center.submit("test.sync", biz_id=3, delay=0.1, attribute={"dead": 1})
    system.wait(lambda: (row := center.store.get(doomed)) is not None and row.status == 4, "it is dead", 10)
    center.store.topics.create(Topic("test.nobody", 77, 2))
    center.store.topics.create(Topic("test.pulled", 78, 2, delivery=Delivery.PULL))
    center.store.topics.create(Topic("test.deleted", 79, 2, paused=True))
    center.store.topics.close("test.deleted", center.store.topics.get_with_version("test.deleted")[1])
    center.store.topics.retire(*center.store.topics.get_with_version("test.deleted"))
    stale = known(center.store.get(doomed))
    long_ago = center.clock.now_ms() - 60_000
    for n, biz_type in enumerate((77, 78, 99, 79), 1):
        late = replace_row(stale, status=0, biz_type=biz_type, action_time=long_ago, next_time=long_ago)
        insert(center.store, replace_row(late, job_id=stale.job_id ^ n, slot_amount=2))
    lines = doctor.examine(center)
    expected = [
        (Level.REFUSE, "test.nobody", "no worker handles it"),
        (Level.WARN, "test.nobody", "1 task overdue, the first by 6"),
        (Level.REFUSE, "biz_type 99", "have a biz_type that no topic has"),
        (Level.WARN, "test.sync", "1 dead task"),
        (Level.NOTE, "test.async", "paused"),
    ]
    for level, of, text in expected:
        (line,) = [line for line in having(lines, level, text) if line.of == of]
        assert line.do
    (pulled,) = [line for line in lines if line.of == "test.pulled" and " overdue, the first" in line.what]
    assert pulled.do == "toc late --topic test.pulled says why"
    (deleted,) = [line for line in having(lines, Level.REFUSE, "no topic has") if line.of == "biz_type 79"]
    assert deleted.do.endswith(f"if it was deleted, toc cancel {stale.job_id ^ 4}")
    center.cancel(stale.job_id ^ 4)
    # Of a backlog a bounded part is read; it does not hide what is overdue of another topic.
    before = {"status": 0, "biz_type": 78, "action_time": long_ago - 1000, "next_time": long_ago - 1000}
    insert_many(center.store, [replace_row(stale, job_id=stale.job_id ^ n, **before) for n in range(16, 266)])
    center.catalog.refresh()
    center.index([stale.job_id ^ 1])
    seen = [line for line in doctor.examine(center) if " overdue, the first" in line.what]
    assert {line.of: line.what.partition(" task")[0] for line in seen} == {
        "test.pulled": "at least 200",
        "test.nobody": "at least 1",
    }
    assert "biz_type 79" not in {line.of for line in doctor.examine(center)}
    assert doctor.exit_code(lines) == 2
    assert [line.level for line in lines] == sorted(
        (line.level for line in lines), key=doctor.WORST_FIRST.index
    )


def replace_row(row: Any, **changes: Any) -> Any:
    return row._replace(dedup_key=None, **changes)


def test_a_table_that_is_locked_is_told_and_nothing_is_said_to_lack_what_it_holds(
    hosts_with: NewSystem, mariadb: MariaDB, database_prefix: str
) -> None:
    system = hosts_with(read_timeout=1)
    center = system.center
    center.store.topics.create(Topic("test.nobody", 77, 2))
    job_id = center.submit("test.nobody", biz_id=1, delay=0.1)
    long_ago = center.clock.now_ms() - 60_000
    late = replace_row(center.store.get(job_id), action_time=long_ago, next_time=long_ago)
    insert(center.store, replace_row(late, job_id=job_id ^ 1))
    center.schedules.create("hourly", topic="test.nobody", every=3600)
    system.create_topics()
    system.start(processes=1)
    connect = mysql.connector(make_url(mariadb.url), 10, None, 60)
    with connect().driver as connection, connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLES `{database_prefix}0`.timeout_topic WRITE")
        lines = doctor.examine(center)
        cursor.execute(f"LOCK TABLES `{database_prefix}0`.timeout_target WRITE")
        without_targets = doctor.examine(center)
        number = crc32(b"hourly") % system.settings.tables
        home = f"{database_prefix}{number % system.settings.databases}"
        cursor.execute(f"LOCK TABLES `{home}`.timeout_schedule_{number:04} WRITE")
        without_schedules = doctor.examine(center)
    assert [(line.part, line.of) for line in bad(lines)] == [("topics", "-")], lines
    assert ("targets", "-") in [(line.part, line.of) for line in bad(without_targets)], without_targets
    assert ("schedules", "-") in [(line.part, line.of) for line in bad(without_schedules)], without_schedules


def test_a_topic_that_is_pulled_or_sent_needs_a_gateway_or_a_sender_and_no_handler(system: System) -> None:
    system.create_topics(slots=2)
    center = system.center
    for number, delivery in enumerate((Delivery.PULL, Delivery.WEBHOOK)):
        center.store.topics.create(Topic(f"test.{delivery}", 70 + number, 2, delivery=delivery))
    system.start("host-a", processes=1)
    system.wait(
        lambda: (
            {line.of for line in having(doctor.examine(center), Level.REFUSE, "its tasks wait")}
            == {"test.pull", "test.webhook"}
        ),
        "neither has anybody yet",
        20,
    )
    lines = doctor.examine(center)
    assert having(lines, Level.REFUSE, "no gateway is there")
    assert having(lines, Level.REFUSE, "no worker sends webhooks")
    with Gateway(system):
        system.wait(
            lambda: not having(doctor.examine(center), Level.REFUSE, "no gateway is there"), "a gateway", 20
        )


def test_a_drained_cluster_and_a_slot_without_an_owner_are_seen(system: System) -> None:
    system.create_topics(slots=4)
    system.start("host-a", processes=1)
    with Operator(system.settings.zookeeper or "", cluster=system.settings.cluster) as operator:
        operator.want("drain", "host-a", by="ann")
    text = "every host that handles it is drained (host-a)"
    system.wait(lambda: having(doctor.examine(system.center), Level.REFUSE, text), "it is told", 20)
    drained = having(doctor.examine(system.center), Level.REFUSE, text)
    assert {line.of for line in drained} == {"test.sync", "test.async", "test.batch", "test.doomed"}


def test_a_topic_that_stays_in_no_assignment_is_told(hosts_with: NewSystem) -> None:
    system = hosts_with(session_timeout=10)
    system.create_topics(slots=2)
    daemon = system.start(processes=1)
    held = "each slot that a worker can have is held"
    system.wait(lambda: having(doctor.examine(system.center), Level.OK, held), "all is well", 20)
    os.kill(daemon.process.pid, signal.SIGSTOP)  # it leads, and assigns nothing meanwhile
    try:
        system.center.store.topics.create(Topic("test.new", 77, 2))
        lines = doctor.examine(system.center)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    missing = having(lines, Level.WARN, "it is missing from the assignment")
    assert [line.of for line in missing] == ["test.new_0", "test.new_1"]
    assert not having(lines, Level.OK, held)


def test_without_zookeeper_workers_are_told_and_a_host_that_ended_without_leaving(
    new_system: NewSystem,
) -> None:
    system = new_system()
    system.create_topics(slots=2)
    first = system.start("host-a", processes=1)

    def told(level: Level, text: str) -> list[Line]:
        return having(doctor.examine(system.center), level, text)

    def shares() -> list[int]:
        return [row.owned for row in living_workers(system.center)]

    system.wait(lambda: told(Level.OK, "1 worker on host-a"), "the first is told", 60)
    second = system.start("host-b", processes=1)
    system.wait(lambda: shares() == [4, 4], "they share the work", 60)
    lines = doctor.examine(system.center)
    assert having(lines, Level.OK, "2 workers on host-a, host-b")
    assert having(lines, Level.OK, "each slot that a worker can have is held")
    second.terminate()
    second.await_end()
    system.wait(lambda: shares() == [8], "the first goes on with everything", 60)
    assert told(Level.OK, "1 worker on host-a")
    assert not told(Level.WARN, "without leaving")
    first.kill()
    (line,) = system.wait(lambda: told(Level.WARN, "without leaving"), "its end is told", 60)
    assert line.of == "host-a"
    assert told(Level.REFUSE, "no worker is alive")
    again = system.start("host-a", processes=1)
    system.wait(lambda: shares() == [8], "its successor has everything", 60)
    again.stop()
    assert not told(Level.WARN, "without leaving"), "the last one has left"
    (line,) = told(Level.REFUSE, "no worker is alive")
    assert "center.worker()" in line.do


def test_a_host_whose_workers_use_another_index_is_named(new_system: NewSystem) -> None:
    """Its slots' tasks stand where it does not look, and it holds the slots: they would wait, unexplained."""
    system = new_system()
    system.create_topics(slots=2)
    system.start("host-a", processes=1)

    def elsewhere() -> list[str]:
        return [line.of for line in having(doctor.examine(system.center), Level.REFUSE, "another index")]

    assert elsewhere() == []
    other = system.start("host-b", processes=1, env={"TOC_NAMESPACE": "other"})
    assert system.wait(elsewhere, "doctor names it", 60) == ["host-b"]
    other.terminate()
    other.await_end()
    system.wait(lambda: elsewhere() == [], "it is gone", 60)


def test_servers_that_are_set_wrongly_are_told_what_to_set(launch: Launch, database_prefix: str) -> None:
    redis = launch(RedisServer, aof=False, config=["maxmemory-policy allkeys-lru", "maxmemory 4mb"])
    database = launch(
        MariaDB,
        buffer_pool="32M",
        config=["innodb_flush_log_at_trx_commit=2", "max_allowed_packet=4M", "max_connections=10"],
    )
    settings = Settings(
        database_urls=[database.url],
        databases=2,
        tables=8,
        database_prefix=database_prefix,
        redis_url=redis.url,
    )
    with TimeoutCenter(settings) as center:
        lines = doctor.examine(center)
        for level, text, do in (
            (Level.REFUSE, "innodb_flush_log_at_trx_commit is 2", "innodb_flush_log_at_trx_commit = 1"),
            (Level.WARN, "max_allowed_packet is 4 MiB", "max_allowed_packet = 16M"),
            (Level.REFUSE, "maxmemory_policy is allkeys-lru", "noeviction"),
            (Level.WARN, "neither an append-only file", "appendonly yes"),
        ):
            (line,) = having(lines, level, text)
            assert do in line.do
        (line,) = having(lines, Level.REFUSE, "toc db upgrade")
        assert "0 and other databases: there is no task table here: is this the right server?" in line.what

        url = make_url(database.url)
        assert url.port
        held = [
            pymysql.connect(host=url.host, port=url.port, user=url.username, password=url.password or "")
            for _ in range(8)
        ]
        try:
            (line,) = having(doctor.examine(center), Level.WARN, "connections in use")
        finally:
            for connection in held:
                connection.close()
        assert "max_connections" in line.do


def test_servers_out_of_reach_are_lines_of_the_report_and_the_command_ends_with_2(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(4)]
    env = {
        "TOC_DATABASE_URLS": f"mysql+pymysql://u:canary@127.0.0.1:{ports[0]}",
        "TOC_REDIS_URL": f"redis://:canary@127.0.0.1:{ports[1]}",
        "TOC_ZOOKEEPER": f"127.0.0.1:{ports[2]},127.0.0.1:{ports[3]}",
        "TOC_CONNECT_TIMEOUT": "0.5",
        "NO_COLOR": "1",
    }
    done = forks.run(["doctor", "--json"], env=env, directory=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = json.loads(done.stdout)
    assert {line["part"] for line in lines if line["level"] == "wrong"} == {"database", "redis", "zookeeper"}
    assert all(line["do"] for line in lines if line["level"] in ("wrong", "warn"))
    assert not any(line["part"] == "topics" for line in lines), "of what cannot be read nothing is said"
    assert "canary" not in done.stdout + done.stderr


def test_a_topic_whose_slots_span_database_servers_is_told(mariadb: MariaDB, database_prefix: str) -> None:
    server, question, query = mariadb.url.partition("?")
    settings = Settings(
        database_urls=[mariadb.url, f"{server}/{question}{query}"],
        databases=4,
        tables=4,
        database_prefix=database_prefix,
    )
    Migrator(
        list(map(migrating, settings.database_urls)), databases=4, tables=4, prefix=database_prefix
    ).upgrade()
    with TimeoutCenter(settings) as center:
        for biz_type, slots in enumerate((2, 4, 8), 1):
            center.store.topics.create(Topic(f"of.{slots}", biz_type, slots))
        center.submit_many([NewTask("of.8", n, 30.0) for n in range(8)])
        center.submit_many([NewTask("of.4", n, 30.0, slot_basis="merchant-9") for n in range(8)])
        other = next(str(n) for n in range(99) if crc32(b"%d" % n) % 4 == crc32(b"1") % 4 ^ 1)
        center.submit("of.8", biz_id=1, delay=30.0, slot_basis=other)  # another database, the same server
        told = {line.of: line.do for line in having(doctor.examine(center), Level.NOTE, "database server")}
    assert told.keys() == {"of.2", "of.4"}
    assert told["of.2"].endswith("toc topic alter of.2 --slots 4")
    assert "slot_basis" in told["of.4"]
