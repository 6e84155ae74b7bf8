"""Fault 40: what servers answer is cut off at any byte, damaged, or larger than a packet."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.proxy import Proxy, through
from harness.patience import until
from harness.system import System
from harness.tables import raw, task_tables

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, TimeoutCenter
from toc.model.errors import StoreUnavailable, TocError, UnreadableTask
from toc.model.task import TaskStatus
from toc.store.servers.mysql import MySqlServer
from toc.store.servers.server import Statement
from toc.store.servers.shards import Layout


@pytest.fixture
def damaged(
    build: Build, clean_redis: RedisServer, mariadb: MariaDB, relay: Callable[..., Proxy]
) -> Iterator[tuple[System, TimeoutCenter, list[Proxy]]]:
    """A system, and an SDK that reaches both of its servers through proxies."""
    system = build()
    proxies = [relay(mariadb.port, seed=40), relay(clean_redis.port, seed=41)]
    changed = {
        "database_urls": [through(proxies[0], mariadb.url)],
        "redis_url": f"redis://127.0.0.1:{proxies[1].port}",
        "read_timeout": 1.0,
        "connect_timeout": 1.0,
    }
    with TimeoutCenter(system.settings.model_copy(update=changed)) as center:
        center.catalog.refresh()
        yield system, center, proxies


class Calls:
    """Calls of all kinds in random order; what they raised."""

    def __init__(self, system: System, center: TimeoutCenter) -> None:
        self.biz_ids: list[int] = []
        """Of the tasks that were submitted, each by one call."""
        self.errors: Counter[str] = Counter()
        self.strange: list[str] = []
        """Errors that are none of toc's."""
        self._center = center
        self._dice = random.Random(40)
        self._known = system.center.submit_many(
            [NewTask("test.sync", n, 3600.0, attribute={"n": n}) for n in range(60)]
        )

    def one(self) -> None:
        center, known = self._center, self._known
        self.biz_ids.append(10_000 + len(self.biz_ids))
        job_id = self._dice.choice(known)
        task = NewTask("test.sync", self.biz_ids[-1], 3600.0)
        kinds: list[Callable[[], object]] = [
            partial(center.submit, **task._replace(dedup_key="k", attribute={"n": 1})._asdict()),
            partial(center.submit_many, [task] * 20),
            partial(center.get, job_id),
            partial(center.find, biz_id=job_id % 60),
            partial(center.cancel, job_id),
            partial(center.store.read, known),
            partial(center.store.read_tries, known),
            center.catalog.refresh,
            partial(center.cancel_by_biz, "test.sync", job_id % 60),
        ]
        try:
            self._dice.choice(kinds)()
        except TocError as exc:
            self.errors[type(exc).__name__] += 1
        except Exception as exc:
            self.strange.append(f"{type(exc).__name__}: {exc}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "count"),
    [("cut", 100), *(pytest.param(kind, 3000, marks=pytest.mark.slow) for kind in ("cut", "flip"))],
)
def test_calls_of_the_sdk_over_broken_answers_raise_named_errors_alone(
    damaged: tuple[System, TimeoutCenter, list[Proxy]], verdict: Verdict, kind: str, count: int
) -> None:
    line = verdict(40, f"answers damaged at any byte: {kind}", f"SDK, {count} calls and more")
    system, center, proxies = damaged
    for proxy in proxies:
        proxy.damage(**{kind: 0.25})
    calls = Calls(system, center)

    def bitten() -> list[int]:
        return [proxy.stats.cut_short + proxy.stats.flipped for proxy in proxies]

    def enough() -> bool:
        """After a failed call the SDK leaves Redis alone for a while: a quick machine makes more calls."""
        for _ in range(count):
            calls.one()
        return sum(bitten()) > count / 6 and min(bitten()) > 3

    bit = until(enough)
    for proxy in proxies:
        proxy.damage()
    mysql, redis = bitten()
    line.prove(bit, f"{mysql} answers of MySQL and {redis} of Redis; {calls.errors.total()} errors")
    assert calls.strange == []
    # What is whole again works at once.
    job_id = center.submit("test.sync", biz_id=1, delay=3600.0, attribute={"n": 7})
    task = center.get(job_id)
    assert task is not None
    assert task.attribute == {"n": 7}
    # A submit under a dedup_key left one row or none, whatever its caller was told.
    rows = Counter(
        row.biz_id
        for biz_id in calls.biz_ids
        for row in system.center.find(biz_id=biz_id)
        if row.attribute == {"n": 1}
    )
    assert set(rows.values()) <= {1}


@pytest.mark.parametrize(
    ("kind", "times"),
    [("cut", 100), *(pytest.param(kind, 500, marks=pytest.mark.slow) for kind in ("cut", "flip"))],
)
def test_workers_over_broken_answers_lose_nothing_and_do_not_die(
    build: Build,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    relay: Callable[..., Proxy],
    verdict: Verdict,
    kind: str,
    times: int,
) -> None:
    line = verdict(40, f"answers damaged at any byte: {kind}", f"workers, {times} times")
    proxies = [relay(mariadb.port, seed=42), relay(clean_redis.port, seed=43)]
    system = build(topic_prepare_timeout=5)
    daemon = system.start(
        env={
            "TOC_DATABASE_URLS": through(proxies[0], mariadb.url),
            "TOC_REDIS_URL": f"redis://127.0.0.1:{proxies[1].port}",
            "TOC_READ_TIMEOUT": "1",
        }
    )
    workers = daemon.workers()
    with system.recorder.fault("other", note="answers are broken"):
        system.client.submit_many(tasks(1000, ahead=(2.0, 10.0), fail=0.05))
        with Load(system.client, rate=60, ahead=(0.1, 1.0)):
            for proxy in proxies:
                proxy.damage(**{kind: 0.05})
            system.wait(
                lambda: sum(p.stats.cut_short + p.stats.flipped for p in proxies) >= times, "so often", 120
            )
            for proxy in proxies:
                proxy.damage()
    bitten = [proxy.stats.cut_short + proxy.stats.flipped for proxy in proxies]
    line.prove(min(bitten) > times / 25, f"{bitten[0]} answers of MySQL and {bitten[1]} of Redis")
    assert daemon.workers() == workers, daemon.told()[-4000:]
    # What was in flight on a worker that was cut off may run again. A changed digit is a number like any
    # other, which only TLS would notice: how many tries a task was charged may then be wrong.
    line.judge(system, within=12, at_most=500, but="R" if kind == "flip" else "")


def test_a_batch_larger_than_a_packet_is_a_named_error_and_results_of_many_packets_are_read(
    mariadb: MariaDB, verdict: Verdict
) -> None:
    line = verdict(40, "packets of 16 MB and more")
    with raw(mariadb.url) as connection:
        limit = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        connection.exec_driver_sql("SET GLOBAL max_allowed_packet = 67108864")
    patience = {"connect_timeout": 3.0, "read_timeout": 10.0, "write_timeout": 10.0}
    (url,) = Layout([mariadb.url], 1, 1, "toc_").urls
    server = MySqlServer(url, range(1), **patience, pool_size=1)
    try:
        sizes = [0xFFFFFF - 4, 0xFFFFFF - 3, 0xFFFFFF, 40_000_000]
        for size in sizes:
            one, two = server.run([Statement("SELECT %s", ["x" * size]), Statement("SELECT 1")])
            assert (len(one.rows[0][0]), two.rows) == (size, [(1,)])
        with pytest.raises(StoreUnavailable, match="larger than its max_allowed_packet"):
            server.run([Statement("SELECT %s", ["x" * 67108864])])
        assert server.run([Statement("SELECT 1")])[0].rows == [(1,)]
    finally:
        server.close()
        with raw(mariadb.url) as connection:
            connection.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {limit}")
    line.prove(sizes[-1] > 2 * 0xFFFFFF, f"results of up to {sizes[-1]:,} bytes")


def test_a_row_that_cannot_be_read_harms_its_own_task_alone(build: Build, verdict: Verdict) -> None:
    line = verdict(40, "a row that somebody has damaged")
    system = build(databases=1, tables=1, topic_retries=2, topic_backoff_base=0.1)
    ids = system.client.submit_many([NewTask("test.batch", n, 2.0) for n in range(30)])
    bad = {ids[3]: "attribute = '{\"n\":'", ids[4]: "attribute = '[1]'", ids[5]: "biz_key = X'ff00'"}
    with raw(system.settings) as connection:
        for job_id, change in bad.items():
            (table,) = task_tables(system.settings)
            connection.exec_driver_sql(f"UPDATE {table} SET {change} WHERE job_id = {job_id}")
    with pytest.raises(UnreadableTask, match=str(ids[3])):
        system.center.get(ids[3])
    daemon = system.start()
    workers = daemon.workers()

    def statuses() -> Counter[int]:
        return Counter(row.status for row in system.center.store.read(ids).values())

    system.wait(lambda: statuses()[TaskStatus.PENDING] == 0, "all have ended", 30)
    assert statuses() == {TaskStatus.PROCESSED: 28, TaskStatus.DEAD: 2}
    assert daemon.workers() == workers
    assert system.not_run_once([job_id for job_id in ids if job_id not in bad]) == {}
    line.prove(True, "two attributes that are no JSON object, a biz_key that is no UTF-8")
