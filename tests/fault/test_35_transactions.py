"""Faults 35 and 57: callers' transactions, in which tasks are submitted and changed,
stay open or roll back."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Case
from fault.kit.load import TOPICS, Load
from fault.kit.proxy import Proxy
from fault.kit.transactions import TOPIC, metadata, ops
from harness import forks
from harness.history import Client
from harness.system import System
from harness.tables import engine_of, raw, task_tables
from harness.threads import Beside
from sqlalchemy import Connection, Engine, create_engine, select
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, NewTask, TaskStatus
from toc.model.errors import StoreUnavailable

# Fault 35: callers' open transactions in which tasks with a dedup_key were submitted.

WAIT_SECONDS = 0.2
"""Far below the lock wait of two seconds of toc's sessions."""


@pytest.fixture
def application(mariadb: MariaDB) -> Iterator[Engine]:
    """An application's engine, as it comes: REPEATABLE READ."""
    with engine_of(mariadb.url) as engine:
        yield engine


class Strangers(Beside):
    """Submits of others while transactions are open: at every place between, before and behind the biz_ids of
    those, and how long the slowest took."""

    def __init__(self, system: System, biz_ids: list[int]) -> None:
        super().__init__()
        self.slowest = 0.0
        self.count = 0
        self.failed: list[str] = []
        self._client = system.client
        self._biz_ids = biz_ids

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


def test_open_transactions_block_no_stranger_and_do_not_deadlock(case: Case, application: Engine) -> None:
    line = case.verdict(35, "a caller's open transaction with a dedup_key", "REPEATABLE READ")
    system = case.build(databases=1, tables=1)
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


def test_a_submit_that_waits_for_a_dedup_key_blocks_nobody_else(case: Case, application: Engine) -> None:
    line = case.verdict(35, "a caller's open transaction with a dedup_key", "others want the same key")
    system = case.build(databases=1, tables=1)
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


# Fault 57: tasks cancelled in a caller's transaction that stays open over their times.

RATE = 50


@pytest.mark.parametrize(
    ("seconds", "count"), [(3, 100), pytest.param(60, 1000, marks=pytest.mark.slow)], ids=["3 s", "60 s"]
)
@pytest.mark.parametrize(
    "indexed",
    [pytest.param(True, id=""), pytest.param(False, id="the database alone", marks=pytest.mark.slow)],
)
def test_others_in_the_same_tables_are_not_late(case: Case, seconds: int, count: int, indexed: bool) -> None:
    where = "" if indexed else ", the database alone"
    line = case.verdict(
        57, "tasks cancelled in a caller's open transaction", f"{count:,} for {seconds} s{where}"
    )
    system = case.build(index=indexed)
    client = system.client
    daemon = system.start()
    engine = create_engine(case.mariadb.url)
    ahead = 5 + 4 * count * took_one(system, engine)  # by then all are cancelled
    soon = 0.3 if indexed else 2.0  # without an index, rows are read once a second
    held = client.submit_many(
        [
            NewTask(TOPICS[n % len(TOPICS)], n, ahead + seconds * n / count, attribute={"fail": n % 7 == 0})
            for n in range(count)
        ]
    )
    try:
        with (
            Load(client, rate=RATE, ahead=(soon, soon), cancel=0.0, fail=0.1) as load,
            engine.connect() as connection,
            client.cancelled_with(connection, held) as outcomes,
        ):
            cancelled = time.time()
            load.more(RATE)
            due = system.row(held[-1]).action_time / 1000
            system.wait(lambda: time.time() > due, "all would have been due", ahead + seconds)
            others = load.job_ids[:]
            began = time.monotonic()
            system.wait(lambda: not system.pending(others), "those of others are written meanwhile", 30)
            behind = time.monotonic() - began
            if indexed:
                system.wait(lambda: "rows_not_written" in daemon.told(), "a row could not be written", 30)
            started = {event.job_id for event in system.history() if event.event == "start"} & set(held)
            unwritten = len(system.pending(held))
            connection.commit()
    finally:
        engine.dispose()
    late = system.late(load.job_ids)
    # Where the row alone answers: what was cancelled before anybody could have read it as due soon.
    in_time = {job_id for job_id in held if system.row(job_id).action_time / 1000 > cancelled + 2}
    line.prove(
        len(started) > count // 2 if indexed else len(in_time) > count // 10 and not started & in_time,
        f"{len(started):,} of {count:,} had started, none could be written; of others {late}, the last "
        f"written after {behind:.1f} s; outcomes {dict(Counter(outcome.value for outcome in outcomes))}",
    )
    assert not load.errors
    line.within(behind, 3)  # a failed try of others, and its next one
    line.on_time(late, p99=10, most=100)
    told = dict(zip(held, outcomes, strict=True))
    assert set(outcomes) <= {CancelOutcome.CANCELLED, CancelOutcome.MAY_HAVE_STARTED}
    assert unwritten == count
    assert all(told[job_id] is CancelOutcome.MAY_HAVE_STARTED for job_id in started)
    line.judge(system, within=6)
    ran = {event.job_id for event in system.history() if event.event == "start"} & set(held)
    assert {job_id for job_id in held if told[job_id] is CancelOutcome.CANCELLED} & ran == set()


def took_one(system: System, engine: Engine) -> float:
    """Seconds that a cancel in a transaction takes here, now."""
    job_ids = system.client.submit_many([NewTask("test.sync", n, 3600) for n in range(10)])
    began = time.monotonic()
    with engine.connect() as connection:
        for job_id in job_ids:
            system.center.cancel(job_id, connection=connection)
        connection.rollback()
    return (time.monotonic() - began) / len(job_ids)


# Fault 57: a task exists, and is as it is, exactly if and as the caller's committed transactions say so.

PROCESSES = 4
Running = tuple[forks.Forked, Path]
"""A program, and the file of what it prints."""


@pytest.mark.parametrize(
    ("count", "kills"),
    [(300, 6), pytest.param(100_000, 0, marks=[pytest.mark.chaos, pytest.mark.timeout(10_800)])],
    ids=["300", "100k"],
)
def test_a_task_exists_exactly_if_the_callers_rows_do(case: Case, count: int, kills: int) -> None:
    line, system = case.begin(57, "random transactions of callers", f"{count:,}", redis_url=case.redis.url)
    engine = create_engine(make_url(case.mariadb.url).set(database=f"{system.settings.database_prefix}0"))
    metadata.create_all(engine)
    at = datetime.now(UTC) + timedelta(hours=3)
    shared = system.center.submit_many([NewTask(TOPIC, n, action_time=at) for n in range(6)])
    with engine.begin() as connection:
        for job_id in shared:
            connection.execute(ops.insert().values(tx="shared", job_id=job_id, op="submit", due=0))
    due = int(1000 * (time.time() + 7200))
    place = case.path / "said"
    try:
        with Proxy(case.mariadb.port) as proxy:
            proxy.eat(b"\x03COMMIT", count=None, probability=0.02, quiet=0.02)
            url = engine.url.set(port=proxy.port).render_as_string(hide_password=False)
            for first in range(0, 10 * PROCESSES, PROCESSES):  # where they run in turn, they do not meet
                running = [
                    _program(system, place, url, first + seed, count // PROCESSES, due)
                    for seed in range(PROCESSES)
                ]
                for program in running:
                    _printed(program)
                eaten = proxy.stats.eaten
                if eaten and {"unknown", "rolled back"} <= _states(place).keys() and _failed(place):
                    break
        direct = engine.url.render_as_string(hide_password=False)
        last = _printed(_program(system, place, direct, -1, kills, due, "kill")).splitlines()[-1]
        at_lines = json.loads(last)
        with engine.connect() as connection:
            written = connection.execute(select(ops).order_by(ops.c.number)).all()
    finally:
        engine.dispose()
    said, states, deadlocks = _said(place), _states(place), _failed(place)
    line.prove(
        eaten
        and deadlocks
        and at_lines["killed"] == (kills or at_lines["lines"])
        and states["rolled back"]
        and states["unknown"],
        f"{dict(states)}, {deadlocks} deadlocks, {eaten} answers to COMMIT lost, killed at each of "
        f"{at_lines['killed']} of {at_lines['lines']} lines",
    )
    print(line.proof)
    assert states["committed"] > count // 4
    expected, rows = _replayed(written), _rows(system)
    _compare_transactions(said, written, expected)
    assert {one: row[:2] for one, row in rows.items()} == {one: task[:2] for one, task in expected.items()}
    moved = {one: at for one, (_, _, at) in expected.items() if at}
    assert {one: rows[one][2] for one in moved} == moved
    assert _indexed(case.redis) <= set(rows)
    _run_all(system, {one for one, (status, *_) in rows.items() if status == TaskStatus.PENDING})


def _said(place: Path) -> list[dict[str, Any]]:
    """What the application has heard of each transaction."""
    return [json.loads(text) for text in place.read_text().splitlines()]


def _states(place: Path) -> Counter[str]:
    """In how many transactions it ended so."""
    return Counter(one["state"] for one in _said(place))


def _failed(place: Path) -> int:
    """How many were rolled back because they met another one's locks."""
    return sum(one.get("why") == "Transient" for one in _said(place))


def _program(system: System, place: Path, url: str, seed: int, count: int, due: int, *more: str) -> Running:
    """Starts it; what it prints is in the file."""
    out = place.with_suffix(f".{seed}")
    words = [str(place), url, str(seed), str(count), str(due), *more]
    streams = dict.fromkeys(("stdout", "stderr"), str(out))
    return forks.start(words, env=system.env, module="fault.kit.transactions", streams=streams), out


def _printed(program: Running) -> str:
    """Waits for its end, and returns what it has printed."""
    process, out = program
    code, text = process.wait(), out.read_text()
    assert code == 0, text
    return text


def _compare_transactions(
    said: list[dict[str, Any]], written: Any, expected: dict[int, tuple[int, int, int]]
) -> None:
    """Each was written whole or not at all, as its caller heard; outcomes that were told are so."""
    counts = Counter(op.tx for op in written)
    for one in said:
        if one["state"] == "committed":
            assert counts[one["tx"]] == one["ops"], one
        elif one["state"] != "unknown":
            assert counts[one["tx"]] == 0, one
        for job_id, op, outcome in one.get("told", []):
            if outcome in ("cancelled", "too_late"):  # by this transaction or another
                assert expected[job_id][0] == TaskStatus.CANCELLED, one
            elif outcome == "rescheduled" or (op, outcome) == ("cancel", "not committed"):
                assert bool(counts[one["tx"]]) is (outcome == "rescheduled"), one


def _replayed(written: Any) -> dict[int, tuple[int, int, int]]:
    """Status, version and time (0: its first) of each task that was submitted."""
    tasks: dict[int, tuple[int, int, int]] = {}
    for op in written:
        status, version, due = tasks.setdefault(op.job_id, (0, 0, 0))
        if op.op != "submit" and not status:
            tasks[op.job_id] = (3, version, due) if op.op == "cancel" else (0, version + 1, op.due)
    return tasks


def _rows(system: System) -> dict[int, tuple[int, int, int]]:
    """Status, version and time of each task that there is."""
    with raw(system.settings) as connection:
        return {
            job_id: (status, version, at)
            for name in task_tables(system.settings)
            for job_id, status, version, at in connection.exec_driver_sql(
                "SELECT job_id,status,version,TIMESTAMPDIFF(MICROSECOND,'1970-01-01',action_time) DIV 1000 "
                f"FROM {name}"
            )
        }


def _indexed(redis: RedisServer) -> set[int]:
    """The ids of all entries."""
    call: Any = redis.call
    return {int(one) for key in call("KEYS", "test.*_?") for one in call("ZRANGE", key, 0, -1)}


def _run_all(system: System, pending: set[int]) -> None:
    """Have everything come due now: what is pending runs once, and nothing else."""
    with raw(system.settings) as connection:
        for name in task_tables(system.settings):
            now = "UTC_TIMESTAMP(3)-INTERVAL 1 SECOND"
            connection.exec_driver_sql(f"UPDATE {name} SET action_time={now},next_time={now} WHERE status=0")
    system.start()
    system.wait(lambda: not system.pending(pending), "all have run", 60 + len(pending) / 200)
    starts = Counter(event.job_id for event in system.history() if event.event == "start")
    assert starts == dict.fromkeys(pending, 1)
