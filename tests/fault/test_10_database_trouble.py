"""Faults 10, 11, 55 and 56: MySQL refuses, hangs, is full, spoils sessions;
connections that a proxy forgot."""

import random
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple
from zlib import crc32

import pymysql
import pytest
from conftest import Launch
from fault.conftest import Case
from fault.kit.load import Load, tasks
from fault.kit.proxy import Proxy, through
from fault.kit.servers import application_url, fill
from harness.rows import known
from harness.system import System
from harness.tables import task_tables
from harness.threads import Beside
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, NewTask, Settings, TimeoutCenter, Topic
from toc.index.messages import Peek
from toc.model import errors
from toc.model.errors import StoreUnavailable
from toc.model.finding import Level
from toc.model.topic import Slot
from toc.store.migrate import Migrator
from toc.store.servers.health import ALONE_SECONDS, MAX_PATIENCE_SECONDS

# Faults 10 and 11: deadlocks, lock waits, a read-only database, one that hangs, a full disk.

# Fault 10: deadlocks, lock waits, a read-only database, connections that are killed.


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


class Quarrel(Beside):
    """Transactions that lock rows of the task tables out of order, so that others deadlock with them."""

    def __init__(self, system: System, root: Engine) -> None:
        super().__init__()
        self.tables = task_tables(system.settings)
        self._engine = root.execution_options(isolation_level="READ COMMITTED")

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


def test_what_the_database_refuses_or_rolls_back_is_done_later_and_once(case: Case, root: Engine) -> None:
    line, system = case.begin(10, "deadlock, lock wait, read-only, gone away")
    # Made by root; from here on the account that an application would have.
    system.env["TOC_DATABASE_URLS"] = application_url(case.mariadb)
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


# Fault 11: MySQL hangs, or its disk is full.


@pytest.mark.slow
def test_a_database_that_hangs_fails_calls_fast_and_all_goes_on_after(case: Case, resumed: MariaDB) -> None:
    line = case.verdict(11, "MySQL hangs (SIGSTOP)")
    system = case.build(connect_timeout=0.5, read_timeout=1.0, write_timeout=1.0)
    daemon = system.start()
    system.client.submit_many(tasks(300, ahead=(0.5, 4.0), fail=0.1))
    with Load(system.client, rate=100, ahead=(0.1, 1.0)) as load:
        load.more(50)
        with system.recorder.fault("store_down"):
            resumed.pause()
            began = time.monotonic()
            with pytest.raises(errors.StoreUnavailable):
                system.center.get(load.job_ids[0])
            failed_after = time.monotonic() - began
            system.wait(lambda: "rows_not" in daemon.log.read_text(), "the workers meet it", 60)
            resumed.resume()
        load.more(30)
    line.prove(
        failed_after > 0.3, f"a read failed after {failed_after:.1f} s; {load.errors.total()} calls failed"
    )
    line.within(failed_after, 3)
    # A submit whose answer is missing asks again for five seconds before it says that nobody knows.
    line.within(load.slowest, 9)
    line.judge(system, within=4)


@pytest.mark.parametrize("halt", [pytest.param(0.2, marks=pytest.mark.slow), 1.5])
def test_after_a_short_halt_of_the_only_database_server_no_task_waits_for_more_than_the_halt(
    case: Case, resumed: MariaDB, halt: float
) -> None:
    line, system = case.begin(11, f"MySQL halts for {halt} s")
    daemon = system.start()
    count, job_ids = 2_000, list[int]()
    for ahead in (4, 30):  # on a busy machine those of the first round may be due before all are stored
        began = time.time() + ahead
        due = datetime.fromtimestamp(began, UTC)
        job_ids = system.client.submit_many(
            [
                NewTask("test.async", n, action_time=due + timedelta(seconds=2.5 * n / count))
                for n in range(count)
            ]
        )
        if time.time() < began:
            break
    line.prove(time.time() < began, "all are stored ahead")
    with system.recorder.fault("store_down"):
        time.sleep(max(0.0, began + 0.3 - time.time()))
        resumed.pause()
        time.sleep(halt)
        resumed.resume()
    system.wait(lambda: not system.pending(job_ids), "all have run", 30)
    late = system.late(job_ids)
    away = daemon.log.read_text().count('"database_away"')
    line.prove(late.most > 500 * halt, f"marked as away {away} times; {late}")
    if halt + line.slack < ALONE_SECONDS:
        assert not away
    # What was postponed meanwhile would return in lumps, the last of them seconds later.
    line.on_time(late, most=1000 * (halt + 0.4))
    line.judge(system, within=4)


@pytest.mark.slow
def test_a_full_disk_fails_submits_by_name_and_nothing_that_was_acknowledged_suffers(
    case: Case, small_disk: Callable[[int], Path]
) -> None:
    line = case.verdict(11, "MySQL's disk is full")
    disk = small_disk(400)
    config = ["innodb_log_file_size=16M", "innodb_autoextend_increment=1"]
    with MariaDB(disk / "mariadb", buffer_pool="64M", config=config) as database:
        system = case.build(database_urls=[database.url])
        system.start()
        system.client.submit_many(tasks(500, ahead=(1.0, 8.0), fail=0.1))
        with Load(system.client, rate=100, ahead=(0.1, 2.0), attribute={"pad": "x" * 4000}) as load:
            load.more(50)
            with system.recorder.fault("full"):
                ballast = fill(disk)
                system.wait(lambda: load.errors["Refused"] > 20, "submits are refused", 40)
                ballast.unlink()
            load.more(100)
        line.prove(
            load.errors["Refused"] > 20,
            f"{load.errors['Refused']} submits refused: {str(load.raised['Refused']).partition(': ')[2]}",
        )
        line.judge(system, within=4)
        system.stop()


# Faults 55 and 56: what a server gives to new sessions, and connections that a proxy has forgotten.

# What a server gives to new sessions (SET GLOBAL, init_connect) changes nothing, or is refused by name.

ATTRIBUTE = {"text": 'it\'s "quoted" \\ back\\\\slash || pipe ; \n ü 漢字 😀 %s', "n": 2**63}
BODY = bytes(range(256)) + b"\xbf'\xbf\\"


class Spoiled(NamedTuple):
    """A server of a test's own; ``root`` has the session of before, whatever is spoiled."""

    server: MariaDB
    root: Any

    def url(self, account: str) -> str:
        return f"mysql+pymysql://{account}:secret@127.0.0.1:{self.server.port}"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.root.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


def root_of(server: MariaDB) -> Any:
    url = make_url(server.url)
    return pymysql.connect(
        host="127.0.0.1", port=server.port, user="root", password=str(url.password), autocommit=True
    )


@pytest.fixture
def spoiled(launch: Launch) -> Iterator[Spoiled]:
    server = launch(MariaDB, config=["log-bin=binlog", "server-id=1", "lower_case_table_names=1"])
    with root_of(server) as root:
        spoiled = Spoiled(server, root)
        for account in ("app", "logger"):
            spoiled.rows(f"CREATE USER '{account}'@'%' IDENTIFIED BY 'secret'")
            spoiled.rows(f"GRANT ALL ON `toc\\_%`.* TO '{account}'@'%'")
        spoiled.rows("GRANT BINLOG ADMIN ON *.* TO 'logger'@'%'")
        yield spoiled


@contextmanager
def with_defaults(spoiled: Spoiled, name: str, spoil: str) -> Iterator[str]:
    """While new sessions begin so; yields what another client sees of that. A failure tells the name."""
    before, usual = dict(spoiled.rows("SHOW GLOBAL VARIABLES")), seen(spoiled)
    try:
        spoiled.rows(spoil)
        differs = seen(spoiled).items() ^ usual.items()
        yield ", ".join(sorted({variable for variable, _ in differs}))
    except BaseException as exc:
        exc.add_note(name)
        raise
    after = dict(spoiled.rows("SHOW GLOBAL VARIABLES"))
    for variable, value in before.items():
        if value != after[variable] and not variable.startswith("gtid"):
            number = value.replace(".", "", 1).isdigit()
            spoiled.rows(f"SET GLOBAL {variable} = {value if number else repr(value)}")


def seen(spoiled: Spoiled) -> dict[str, Any]:
    """The state of a session of a client that sets nothing."""
    url = make_url(spoiled.url("logger"))
    with suppress(pymysql.MySQLError):
        connection = pymysql.connect(
            host=url.host, port=url.port or 0, user=url.username, password=url.password or "", autocommit=None
        )
        with connection, connection.cursor() as cursor:
            cursor.execute("SHOW SESSION VARIABLES")
            found = dict(cursor.fetchall())
            cursor.execute("SELECT @@in_transaction, DATABASE()")
            found["state"] = cursor.fetchone()
            found["timestamp"] = found.get("timestamp", "").startswith(
                "1000000000"
            )  # else it is the time of now
            return {name: value for name, value in found.items() if not name.startswith(("pseudo", "rand"))}
    return {"errors": True}


def in_each(*statements: str) -> str:
    return f"""SET GLOBAL init_connect = "{"; ".join(statements)}" """


RIGHT = {
    "autocommit off, as the manual shows": in_each("SET autocommit=0"),
    "autocommit off for all": "SET GLOBAL autocommit=0",
    "a transaction that is open": in_each("BEGIN", "SELECT 1"),
    "COMMIT begins another": "SET GLOBAL completion_type='CHAIN'",
    "COMMIT hangs up": "SET GLOBAL completion_type='RELEASE'",
    "SERIALIZABLE": "SET GLOBAL tx_isolation='SERIALIZABLE'",
    "READ UNCOMMITTED": "SET GLOBAL tx_isolation='READ-UNCOMMITTED'",
    "read-only transactions": "SET GLOBAL tx_read_only=1",
    "sql_mode: another language": "SET GLOBAL sql_mode="
    "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,NO_UNSIGNED_SUBTRACTION,HIGH_NOT_PRECEDENCE'",
    "sql_mode: Oracle's": "SET GLOBAL sql_mode='ORACLE,EMPTY_STRING_IS_NULL'",
    "sql_mode: none": "SET GLOBAL sql_mode=''",
    "time zone": "SET GLOBAL time_zone='+09:00'",
    "texts in latin1": "SET GLOBAL character_set_server='latin1', GLOBAL character_set_connection='latin1'",
    "no index, no UPDATE": "SET GLOBAL sql_safe_updates=1",
    "no rows": "SET GLOBAL sql_select_limit=0",
    "no large joins": "SET GLOBAL max_join_size=1",
    "a millisecond for each statement": "SET GLOBAL max_statement_time=0.001",
    "unique keys unchecked": in_each("SET unique_checks=0, foreign_key_checks=0"),
    "waits": "SET GLOBAL innodb_lock_wait_timeout=0, GLOBAL lock_wait_timeout=0",
    "numbers and lists cut short": "SET GLOBAL group_concat_max_len=4, GLOBAL div_precision_increment=0, "
    "GLOBAL max_sort_length=64, GLOBAL innodb_strict_mode=0",
    "another engine, short keys": "SET GLOBAL default_storage_engine='MyISAM', "
    "GLOBAL innodb_default_row_format='compact'",
    "another database": in_each("USE information_schema"),
}


def test_all_that_a_server_gives_to_sessions_is_overruled(spoiled: Spoiled, case: Case) -> None:
    line = case.verdict(55, "defaults of a server's sessions", "what toc sets anew")
    for name, spoil in RIGHT.items():
        with with_defaults(spoiled, name, spoil) as differs:
            assert differs
            everything_is_right(spoiled, case.redis)
    line.prove(True, f"{len(RIGHT)} kinds, each seen by another client; all was stored and found again")


def everything_is_right(spoiled: Spoiled, clean_redis: RedisServer) -> None:
    prefix = f"TOC_{secrets.token_hex(3)}_"  # lower_case_table_names=1
    settings = Settings(
        database_urls=[spoiled.url("app")],
        databases=2,
        tables=2,
        database_prefix=prefix,
        redis_url=clean_redis.url,
    )
    migrator = Migrator([spoiled.url("app")], databases=2, tables=2, prefix=prefix)
    migrator.upgrade()
    assert not any(status.behind for status in migrator.check())
    with TimeoutCenter(settings) as center:  # what is not committed is gone with its connections
        center.store.check()
        center.store.check_layout()
        center.store.topics.create(Topic("order.close", 1, 4))
    with TimeoutCenter(settings) as center:
        options: dict[str, Any] = {"attribute": ATTRIBUTE, "body": BODY, "content_type": "a/b"}
        first = center.submit("order.close", biz_id="ü😀'\\", delay=3600, dedup_key="k'\\", **options)
        assert center.submit("order.close", biz_id="ü😀'\\", delay=3600, dedup_key="k'\\", **options) == first
        new = [NewTask("order.close", n, 3600, None, ATTRIBUTE, dedup_key="k") for n in range(4)]
        many = center.submit_many(new)
        assert center.submit_many(new) == many
        assert center.cancel(many[0]) is CancelOutcome.CANCELLED
        found = center.find(biz_id="ü😀'\\")
        assert [(task.job_id, task.attribute) for task in found] == [(first, ATTRIBUTE)]
        task = known(center.get(first))
        assert task.body == BODY
        clock = center.store.clocks().popitem()[1]
        assert isinstance(clock, float)
        assert abs(clock) < 60
        wrong = [line for line in center.store.examine() if line.level is Level.REFUSE]
        assert not wrong
        last = center.submit("order.close", biz_id=9, delay=3600)
        expected = {(first, 0), (last, 0), (many[0], 3), *((job_id, 0) for job_id in many[1:])}
    tables = [f"`{prefix.lower()}{n}`.timeout_task_{n:04d}" for n in range(2)]
    stored = [row for table in tables for row in spoiled.rows(f"SELECT job_id, status FROM {table}")]
    assert sorted(stored) == sorted(expected)
    engines = spoiled.rows(
        "SELECT DISTINCT engine, table_collation FROM information_schema.tables "
        f"WHERE table_schema LIKE '{prefix.lower()}%' AND table_name LIKE 'timeout%'"
    )
    assert engines == [("InnoDB", "utf8mb4_bin")]


REFUSED = {
    "packets": ("SET GLOBAL max_allowed_packet=1024", "max_allowed_packet"),
    "a clock that stands still": (in_each("SET timestamp=1000000000"), "timestamp"),
    "writes that no replica gets": (in_each("SET sql_log_bin=0"), "sql_log_bin"),
    "a log of statements": ("SET GLOBAL binlog_format='STATEMENT'", "binlog_format"),
}


def test_what_cannot_be_set_is_refused_by_name(spoiled: Spoiled, case: Case) -> None:
    line = case.verdict(55, "defaults of a server's sessions", "what cannot be set")
    for name, (spoil, variable) in REFUSED.items():
        with with_defaults(spoiled, name, spoil) as differs:
            assert variable in differs
            is_refused(spoiled, variable)
    line.prove(True, ", ".join(variable for _, variable in REFUSED.values()))


def is_refused(spoiled: Spoiled, variable: str) -> None:
    urls = [spoiled.url("logger")]
    with pytest.raises(StoreUnavailable, match=f"its sessions have {variable} .* instead of "):
        Migrator(urls, databases=1, tables=1, prefix="toc_refused_").upgrade()
    with TimeoutCenter(Settings(database_urls=urls, databases=1, tables=1)) as center:
        with pytest.raises(StoreUnavailable, match=f"its sessions have {variable} "):
            center.store.check()
        assert [line.level for line in center.store.examine()] == [Level.REFUSE]
    assert not spoiled.rows("SHOW DATABASES LIKE 'toc\\_refused%'")


# Fault 56: idle connections that a proxy forgot without a word; the time-outs of green sockets.

IDLE = 2.2
"""Seconds, more than toc.store.servers.server.IDLE_SECONDS."""
GREEN = """
from gevent import monkey
monkey.patch_all()
import datetime, sys
import toc
center = toc.TimeoutCenter()
submit = lambda: center.submit("test.sync", biz_id=1, delay=datetime.timedelta(hours=1))
job_id = submit()
print("open", flush=True)
sys.stdin.readline()
if sys.argv[1] == "redis":
    assert submit() > job_id
else:
    try:
        center.get(job_id)
    except toc.Unavailable:
        pass
    else:
        sys.exit("it answered")
"""
"""A program whose sockets wait in greenlets. Line by line it meets a server that hangs."""


def relayed(system: System, database: Proxy, redis: Proxy) -> dict[str, str]:
    """The settings with which a program reaches both servers through the proxies."""
    url = through(database, system.settings.database_urls[0])
    return {"database_urls": url, "redis_url": f"redis://127.0.0.1:{redis.port}"}


def test_nothing_that_a_caller_sends_vanishes_in_a_connection_that_a_proxy_forgot(case: Case) -> None:
    line = case.verdict(56, "idle connections forgotten", "SDK")
    database, redis = case.relay(case.mariadb.port), case.relay(case.redis.port)
    system = case.build()
    # Who waits for an answer that does not come waits for longer than a test may take.
    ways = relayed(system, database, redis)
    center = TimeoutCenter(Settings(**{**system.settings.model_dump(), **ways, "read_timeout": 600.0}))

    def submit(n: int) -> int:
        return center.submit("test.sync", biz_id=n, slot_basis="1", delay=timedelta(minutes=1))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(submit, range(60)))
        time.sleep(IDLE + 0.8)
        forgotten = database.forget(), redis.forget()
        stored = list(threads.map(submit, range(60, 66)))
    line.prove(
        min(forgotten) > 1 and database.stats.vanished > 0 and redis.stats.vanished > 0,
        f"{forgotten[0]} connections to MySQL and {forgotten[1]} to Redis forgotten",
    )
    assert all(center.get(job_id) for job_id in stored)
    (peek,) = system.center.queues.peek([Slot("test.sync", crc32(b"1") % 8)]).values()
    assert isinstance(peek, Peek)
    assert peek.store == 66, "all are in the index, too"
    center.close()


def test_due_tasks_run_though_the_idle_connections_of_their_worker_were_forgotten(case: Case) -> None:
    line = case.verdict(56, "idle connections forgotten", "worker")
    database, redis = case.relay(case.mariadb.port), case.relay(case.redis.port)
    system = case.build()
    ways = relayed(system, database, redis)
    # Who waits for an answer that does not come waits for longer than a test may take.
    env = {"TOC_READ_TIMEOUT": "600", **{f"TOC_{name.upper()}": url for name, url in ways.items()}}
    daemon = system.start(env=env)
    first = system.client.submit_many(tasks(300, ahead=(0.5, 0.6)))
    system.wait(lambda: not system.pending(first), "the first have run", 60)
    time.sleep(IDLE + 0.8)
    forgotten = database.forget(IDLE), redis.forget(IDLE)
    second = system.client.submit_many(tasks(300, ahead=(0.5, 0.6)))
    system.wait(lambda: not system.pending(second), "the second have run", 60)
    line.prove(
        database.stats.vanished + redis.stats.vanished > 0,
        f"{forgotten[0]} connections to MySQL and {forgotten[1]} to Redis forgotten",
    )
    if line.slack < MAX_PATIENCE_SECONDS:  # else an answer may be late for another reason
        for trouble in ("database_away", "rows_not_read", "rows_not_written", "prepare_failed"):
            assert not daemon.events(trouble)
    line.judge(system, within=4)


@pytest.fixture
def halted(resumed: MariaDB, clean_redis: RedisServer) -> Iterator[dict[str, MariaDB | RedisServer]]:
    """Both servers, which go on after the test whatever happens."""
    try:
        yield {"mysql": resumed, "redis": clean_redis}
    finally:
        clean_redis.resume()


@pytest.mark.parametrize("name", ["mysql", "redis"])
def test_a_program_of_greenlets_does_not_wait_for_ever_for_a_server_that_hangs(
    case: Case, halted: dict[str, MariaDB | RedisServer], name: str
) -> None:
    line, system = case.begin(56, "green sockets", name, connect_timeout=1.0, read_timeout=1.0)
    program = [sys.executable, "-c", GREEN, name]
    with subprocess.Popen(program, env=system.env, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as green:
        assert green.stdout is not None
        line.prove(green.stdout.readline() == "open\n", "its connections are open")
        halted[name].pause()
        try:
            _, errors = green.communicate("\n", timeout=60)
        except subprocess.TimeoutExpired:
            green.kill()
            pytest.fail("not within 60 s: the call ends")
    assert green.returncode == 0, errors
