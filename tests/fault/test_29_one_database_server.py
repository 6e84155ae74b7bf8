"""Fault 29: one of several MySQL servers is away, or somebody has locked a table: nothing else is late."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from fault.conftest import Case, Servers
from fault.kit.load import TOPICS, Load
from fault.kit.proxy import through
from fault.kit.servers import application_url
from fault.kit.table import Line
from harness.history import Client
from harness.system import DaemonProcess, System
from harness.tables import raw, task_tables
from sqlalchemy import Connection

from benchmarks.local import MariaDB
from toc import NewTask, TimeoutCenter, Topic
from toc.model.sharding import BizId
from toc.store.servers.health import MAX_PATIENCE_SECONDS

RATE = 50
TABLES = 8
CROWD = 20_000
UNWRITTEN = 15
"""How many tasks a process may run, or have run and not written, as it is killed."""


def producer(
    system: System, rate: float, belongs: Callable[[int], bool], client: Client | None = None
) -> Load:
    """Submits tasks of some tables, due in a moment."""
    mine = (biz_id for biz_id in range(10**6, 10**7) if belongs(BizId.of(biz_id).crc % TABLES))
    steady: Any = {"ahead": (0.3, 0.3), "cancel": 0.0, "fail": 0.0}
    return Load(client or system.client, rate=rate, biz_ids=mine, **steady)


@contextmanager
def session(server: MariaDB, *statements: str, after: tuple[str, ...] = ()) -> Iterator[Connection]:
    """A connection of somebody else that has run these, and runs others after the block."""
    with raw(server.url) as stranger:
        for statement in statements:
            stranger.exec_driver_sql(statement)
        yield stranger
        for statement in after:
            stranger.exec_driver_sql(statement)


@contextmanager
def hanging(server: MariaDB) -> Iterator[None]:
    server.pause()
    yield
    server.resume()


@contextmanager
def killed(server: MariaDB) -> Iterator[None]:
    server.kill()
    yield
    server.start()


def read_only(server: MariaDB) -> AbstractContextManager[object]:
    return session(server, "SET GLOBAL read_only = 1", after=("SET GLOBAL read_only = 0",))


def run(
    system: System,
    break_it: Callable[[], Any],
    sick: Callable[[int], bool],
    line: Line,
    *,
    seconds: float,
    at_begin: float = 0.0,
    client: Client | None = None,
    bit: Callable[[], object] = lambda: False,
) -> DaemonProcess:
    """Load on everything, the fault for so long; what is not of the fault's part must not notice it, or only
    for the first ``at_begin`` seconds, by which it may then be late. ``bit`` proves one that makes no call
    fail. Returns the daemon."""
    daemon = system.start()
    with (
        producer(system, RATE / 2, lambda table: not sick(table), client) as healthy,
        producer(system, RATE / 2, sick, client) as ill,
    ):
        healthy.more(50)
        ill.more(50)
        healthy.slowest = 0.0
        before = len(healthy.job_ids)
        with system.recorder.fault("store_down"), break_it():
            time.sleep(seconds)
            during = healthy.job_ids[before:]
            system.wait(lambda: during and not system.pending(during), "those of the rest run meanwhile", 60)
            system.wait(
                lambda: ill.errors.total() or "rows_not_" in daemon.told() or bit(), "the fault is met", 60
            )
            failed = ill.errors.total()
        ill.more(30)
        slowest, after = healthy.slowest, len(healthy.job_ids)
    everything = healthy.job_ids + ill.job_ids
    system.wait(lambda: not system.pending(everything), "all have run", 30)
    settled = before + int(at_begin * RATE / 2)
    first = system.late(healthy.job_ids[before : settled + 1])
    late = system.late(healthy.job_ids[settled : after + 1])
    said = daemon.log.read_text()
    line.prove(
        "rows_not_read" in said or "rows_not_written" in said or failed or bit(),
        f"{failed} calls to the sick part failed; the rest meanwhile: {late}, at its begin "
        f"{first.most:.0f} ms, the slowest SDK call {slowest * 1000:.0f} ms",
    )
    assert not healthy.errors
    line.on_time(late, p99=10, most=100)
    line.on_time(first, most=1000 * at_begin + 100)
    line.within(slowest, 0.05)
    line.judge(system, within=6)
    return daemon


@pytest.mark.parametrize(("how", "which", "slots", "seconds"), [
    pytest.param(hanging, 1, 8, 2, id="hangs"),
    pytest.param(killed, 0, 2, 6, id="topic table's is killed, slots span both", marks=pytest.mark.slow),
    pytest.param(hanging, 1, 1, 30, id="hangs, slots span both", marks=pytest.mark.slow),
    pytest.param(hanging, 0, 8, 30, id="topic table's hangs", marks=pytest.mark.slow),
    pytest.param(killed, 1, 8, 30, id="is killed", marks=pytest.mark.slow),
    pytest.param(read_only, 1, 8, 30, id="is read-only", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_one_server_lacks_makes_no_task_of_another_late(
    case: Case,
    servers: Servers,
    request: pytest.FixtureRequest,
    how: Callable[[MariaDB], Any],
    which: int,
    slots: int,
    seconds: float,
) -> None:
    line = case.verdict(29, "one of two MySQL servers away", request.node.callspec.id)
    system = case.build(database_urls=list(map(application_url, servers)), slots=slots, tables=TABLES)
    run(system, lambda: how(servers[which]), lambda table: table % 2 == which, line, seconds=seconds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seconds", "at_begin"),
    [
        pytest.param("LOCK TABLES {table} WRITE", 4, 3.0, id="locked for writing"),
        pytest.param("LOCK TABLES {table} READ", 30, 3.0, id="locked for reading"),
        pytest.param("", 6, 0.0, id="its file is lost"),
    ],
)
def test_trouble_with_a_table_makes_no_task_of_another_table_late(
    case: Case, servers: Servers, request: pytest.FixtureRequest, how: str, seconds: float, at_begin: float
) -> None:
    line = case.verdict(29, "trouble with a table", request.node.callspec.id)
    system = case.build(database_urls=[application_url(servers[0])], tables=TABLES)
    database = f"{system.settings.database_prefix}0"
    table, kept, broken = (f"{database}.{name}" for name in ("timeout_task_0002", "kept", "broken"))
    lost = (
        f"CREATE TABLE {broken} LIKE {table}",
        f"ALTER TABLE {broken} DISCARD TABLESPACE",
        f"RENAME TABLE {table} TO {kept}, {broken} TO {table}",  # at no moment are its rows missing
    )
    found = (f"DROP TABLE {table}", f"RENAME TABLE {kept} TO {table}")

    def trouble() -> AbstractContextManager[object]:
        if how:
            return session(servers[0], how.format(table=table), after=("UNLOCK TABLES",))
        return session(servers[0], *lost, after=found)

    daemon = run(system, trouble, lambda number: number == 2, line, seconds=seconds, at_begin=at_begin)
    assert how or "database_away" not in daemon.log.read_text(), "the server answers"


def test_missing_tables_make_no_task_of_others_late_and_end_no_process(case: Case, servers: Servers) -> None:
    """Somebody drops them while what works through all tables, purging and giving up slots, has work."""
    line = case.verdict(29, "tables are missing", "dropped on one server while rows are purged")
    system = case.build(database_urls=list(map(application_url, servers)), tables=TABLES)
    center, database = system.center, f"{system.settings.database_prefix}1"
    store, gone = center.store, [f"{database}.{name}" for name in ("timeout_task_0003", "timeout_body_0001")]
    ended = center.submit("test.sync", biz_id=_biz_id(1), delay=3600, body=b"x", content_type="text/plain")
    center.cancel(ended)
    two_days = "next_time = next_time - INTERVAL 2 DAY"
    aged = f"UPDATE {database}.timeout_task_0001 SET {two_days} WHERE job_id={ended}"

    @contextmanager
    def dropped() -> Iterator[None]:
        daemon = system.daemons[0]
        before = daemon.workers()
        away = [f"RENAME TABLE {name} TO {name}_kept" for name in gone]
        back = tuple(f"RENAME TABLE {name}_kept TO {name}" for name in gone)
        with session(servers[1], aged, *away, after=back):
            store.topics.alter("test.sync", retention=86_400)
            system.wait(partial(daemon.events, "purge_failed"), "a purge has failed", 30)
            yield
        store.delete_ended({ended: 1}).whole()  # nobody has submitted it, as far as the verdict knows
        assert daemon.workers() == before
        assert not daemon.events("thread_died")

    run(system, dropped, lambda number: number == 3, line, seconds=2)


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "at_start"), [(0.08, 0.0), (0.3, 0.3)], ids=["suddenly", "always"])
def test_a_server_that_is_far_away_is_not_taken_for_away(
    case: Case, servers: Servers, delay: float, at_start: float
) -> None:
    line = case.verdict(29, "one of two MySQL servers far away", f"{delay * 1000:.0f} ms")
    proxy = case.relay(servers[1].port)
    urls = [application_url(server) for server in servers]
    system = case.build(database_urls=[urls[0], through(proxy, urls[1])], slots=2, tables=TABLES)
    near = system.settings.model_copy(update={"database_urls": urls})

    @contextmanager
    def far() -> Iterator[None]:
        proxy.delay(delay)
        yield

    with TimeoutCenter(near) as center:  # submits on time
        client = Client(center, system.recorder)
        proxy.delay(at_start)
        bit = lambda: proxy.stats.delayed  # noqa: E731
        daemon = run(system, far, lambda table: table % 2 == 1, line, seconds=5, client=client, bit=bit)
    if line.slack < delay / 8:  # else what the machine holds up an answer may pass for absence
        assert "database_away" not in daemon.told()


@pytest.mark.parametrize(
    "how", [pytest.param(hanging, id="hangs"), pytest.param(killed, id="is killed", marks=pytest.mark.slow)]
)
def test_processes_started_without_the_topic_tables_server_run_what_the_others_have(
    case: Case, servers: Servers, request: pytest.FixtureRequest, how: Callable[[MariaDB], Any]
) -> None:
    line = case.verdict(29, "all processes end, topic table's server away", request.node.callspec.id)
    system = case.build(database_urls=list(map(application_url, servers)), tables=TABLES, read_timeout=2)
    daemon = system.start(processes=2)
    first = daemon.workers()
    with producer(system, RATE, lambda table: table % 2 == 1) as healthy:
        healthy.more(RATE)
        with system.recorder.fault("store_down"), how(servers[0]):
            with system.recorder.fault("kill", pids=first):
                for pid in first:
                    os.kill(pid, signal.SIGKILL)
            system.wait(lambda: len(daemon.events("worker_ready")) == 4, "the successors are ready", 10)
            healthy.more(RATE)
            system.wait(lambda: _asked_in_vain(daemon), "they ask in vain", 20)
            due = list(healthy.job_ids)
            system.wait(lambda: not system.pending(due), "all of the other server have run", 10)
            late = system.late(due)
        system.client.submit("test.sync", biz_id=_biz_id(0), delay=0.2)  # the server serves again
    system.wait(lambda: not system.pending(healthy.job_ids), "the rest has run", 20)
    line.prove(not set(first) & set(daemon.workers()), f"both processes were replaced meanwhile; {late}")
    assert not healthy.errors
    line.on_time(late, most=3000)
    line.judge(system, within=6, at_most=2 * UNWRITTEN)


def _asked_in_vain(daemon: DaemonProcess) -> bool:
    """Whether processes, not their daemon alone, have asked for the topics and got no answer."""
    return any(event["source"] == "toc.worker.run.dispatch" for event in daemon.events("topics_not_read"))


def _biz_id(table: int) -> int:
    """One of which the tasks are in this table."""
    return next(biz_id for biz_id in range(10**6) if BizId.of(biz_id).crc % TABLES == table)


def test_handlers_that_wait_for_a_locked_row_hold_up_no_other_task(case: Case, servers: Servers) -> None:
    line = case.verdict(29, "handlers cancel a row that a stranger has locked")
    system = case.build(database_urls=[application_url(servers[0])], tables=TABLES)
    system.center.store.topics.create(Topic("test.cancelling", 9, 8, backoff_base=0.2))
    daemon = system.start(processes=1, threads=16, app="fault.apps.cancelling:center")
    locked = system.client.submit("test.sync", biz_id=1, delay=3600)
    system.client.cancel(locked)  # which is recorded, as those of handlers are not
    name = task_tables(system.settings)[BizId.of(1).crc % TABLES]
    lock = f"SELECT job_id FROM {name} WHERE job_id={locked} FOR UPDATE"
    with producer(system, RATE, lambda _: True) as others:
        others.more(50)
        before = len(others.job_ids)
        with system.recorder.fault("store_down"), session(servers[0], "BEGIN", lock) as stranger:
            cancelling = [
                system.client.submit("test.cancelling", biz_id=n, delay=0.2, attribute={"cancels": locked})
                for n in range(100, 112)
            ]

            def waiting() -> int:
                shown = stranger.exec_driver_sql("SHOW FULL PROCESSLIST")
                return sum("FOR UPDATE" in str(info) for *_, info, _progress in shown)

            system.wait(lambda: waiting() >= 8, "handlers wait for the row", 10)
            others.more(2 * RATE)
            proof = system.wait(waiting, "they wait still, those between two tries apart", 60)
            stranger.exec_driver_sql("ROLLBACK")
        after = len(others.job_ids)
    everything = [*others.job_ids, *cancelling]
    system.wait(lambda: not system.pending(everything), "all have run", 30)
    late = system.late(others.job_ids[before:after])
    line.prove(proof, f"{proof} calls of handlers waited for the row; others meanwhile: {late}")
    line.on_time(late, p99=10, most=100)
    if line.slack < MAX_PATIENCE_SECONDS:  # else all answers are slow
        assert "database_away" not in daemon.told()
    line.judge(system, within=15)


@pytest.mark.slow
def test_a_crowd_of_one_server_that_hangs_makes_no_task_of_another_late(case: Case, servers: Servers) -> None:
    line = case.verdict(29, "one of two MySQL servers hangs", f"{CROWD:,} of its tasks come due")
    system = case.build(database_urls=list(map(application_url, servers)), slots=1, tables=TABLES)
    daemon = system.start(processes=2)  # so some slots' rows are swept by others, on connections of their own
    sick = [biz_id for biz_id in range(10**7, 10**7 + 3 * CROWD) if BizId.of(biz_id).crc % 2][:CROWD]
    due = datetime.now(UTC) + timedelta(seconds=12)
    crowd = system.client.submit_many([NewTask(TOPICS[n % 3], n, action_time=due) for n in sick])
    with producer(system, RATE, lambda table: table % 2 == 0) as others:
        system.wait(lambda: datetime.now(UTC) > due - timedelta(seconds=1), "they are about to be due", 20)
        with system.recorder.fault("store_down"), hanging(servers[1]):
            # To put them away once takes what it takes; after that they are no trouble.
            system.wait(lambda: datetime.now(UTC) > due + timedelta(seconds=3), "they are put away", 20)
            before = len(others.job_ids)
            others.more(8 * RATE)
            after = len(others.job_ids)
        system.wait(lambda: not system.pending(crowd), "all have run", 60)
    late = system.late(others.job_ids[before:after])
    line.prove("rows_not_read" in daemon.told(), f"the other's, from 3 s on: {late}")
    line.on_time(late, p99=10, most=100)
    line.judge(system, within=60)
