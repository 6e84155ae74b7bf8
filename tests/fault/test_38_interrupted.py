"""Faults 38 to 40: calls that are broken off, foreign keys in Redis, answers that are cut or damaged."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import pytest
from fault.conftest import Case
from fault.kit.interrupted import AT_ONCE_SECONDS
from fault.kit.load import TOPICS, Load, tasks
from fault.kit.proxy import Proxy, through
from harness.patience import until
from harness.rows import known
from harness.system import System
from harness.tables import raw, task_tables

from benchmarks.local import RedisServer
from toc import NewTask, TaskStatus, TimeoutCenter
from toc.model.errors import StoreUnavailable, TocError, UnreadableTask
from toc.model.topic import Slot
from toc.operate import doctor
from toc.store.servers.mysql import MySqlServer
from toc.store.servers.server import Statement
from toc.store.servers.shards import Layout

# Fault 38: calls into the SDK that an exception from outside breaks off, at any instant.


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "stride"), [(200, 97), pytest.param(10_000, 7, marks=pytest.mark.slow)])
def test_broken_off_calls_lose_no_connection_and_mix_no_answers(case: Case, count: int, stride: int) -> None:
    line, system = case.begin(38, "a call into the SDK broken off by SIGALRM", f"{count:,} times")
    command = [sys.executable, "-m", "fault.kit.interrupted", str(count), str(stride), "38"]
    done = subprocess.run(command, env=system.env, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert sum(found["nested"].values()) > 100
    assert done.stderr.count("the interpreter is ending") == 3, done.stderr[-4000:]
    line.prove(
        sum(found["broken"].values()) >= count and len(found["broken"]) == 7,
        f"{sum(found['broken'].values())} calls of 7 kinds broken off; {found['stored']} tasks acknowledged",
    )
    line.within(found["slowest"], AT_ONCE_SECONDS)


# Fault 39: somebody else writes into Redis under the names of toc's queues.

SLOTS = 8
BROKEN = (0, 4)
"""Of each topic: a quarter of all slots."""
STRAYS = ("abc", "-1", "", "1" + "0" * 30, "\0", "007", "\N{ARABIC-INDIC DIGIT THREE}")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_slots_with_keys_of_another_type_run_from_the_rows_and_the_others_as_ever(case: Case) -> None:
    line = case.verdict(39, "keys of a wrong type, members that are no ids")
    redis = case.redis
    system = case.build(redis.url, slots=SLOTS, topic_prepare_timeout=5)
    daemon = system.start()
    system.wait(system.whole, "the index is recorded as whole", 30)
    broken = [Slot(topic, number) for topic in TOPICS for number in BROKEN]
    with Load(system.client, rate=60, ahead=(0.1, 1.0), fail=0.02) as load:
        time.sleep(3)
        before = time.time()
        with system.recorder.fault("redis_loss", note="keys of a wrong type"):
            keys = _break(system, redis, broken)
            for slot in (Slot(topic, number) for topic in TOPICS for number in (1, 2)):
                for member in STRAYS:
                    redis.call("ZADD", system.center.queues.keys(slot).store, "1", member)
            found = until(lambda: "slots_broken" in daemon.told(), 15)
            time.sleep(2)
            settled = time.time()
            time.sleep(6)
            meanwhile = time.time()
            said = [line for line in doctor.examine(system.center) if line.of in keys]
            redis.call("DEL", *keys.values())
        until(lambda: "slots_mended" in daemon.told(), 15)
        system.wait(system.whole, "all is whole", 30)
        after = time.time()
        time.sleep(3)
    rows = system.center.store.read(load.job_ids).values()
    topics = {topic.biz_type: topic for topic in system.center.store.topics.list()}
    slots = {row.job_id: topics[row.biz_type].slot(row.slot_crc, row.slot_amount) for row in rows}
    own, others = (
        system.late([one for one in slots if (slots[one] in broken) == inside], settled, meanwhile)
        for inside in (True, False)
    )
    line.prove(
        found and len(said) == len(keys) and all(keys[each.of] in each.what for each in said),
        f"{len(keys)} keys of a wrong type, each named by doctor; from the rows: {own}; others: {others}",
    )
    strays = daemon.told().count("orphan_dropped")
    line.prove(strays >= 6, f"{strays} times members that are no ids were dropped")
    usual = system.late(since=before - 2, before=before)
    assert own.most < 2500, "they waited for their key"
    assert others.p50 <= usual.p50 + 50
    assert system.late(since=after, before=after + 2).p50 <= usual.p50 + 50
    assert "prepare_failed" not in daemon.told(), "said once, not at each round"
    assert not load.errors
    assert daemon.process.poll() is None
    line.judge(system, within=6, at_most=8)


def test_a_topic_whose_keys_are_forbidden_makes_no_task_of_another_late(case: Case) -> None:
    """Somebody grants keys by the names of topics, and forgets a new topic."""
    line = case.verdict(39, "the account may not touch a topic's keys")
    redis = case.redis
    system = case.build(redis.url)
    daemon = system.start()
    system.wait(system.whole, "the index is recorded as whole", 30)
    keys = ["~*toc_owner", "~*test.sync_*", "~*test.async_*"]
    with (
        Load(system.client, rate=40, ahead=(0.1, 0.5), topics=("test.sync", "test.async")) as rest,
        Load(system.client, rate=20, ahead=(0.1, 0.5), topics=("test.batch",), first=2_000_000) as its_own,
    ):
        rest.more(40)
        before = len(rest.job_ids)
        with system.recorder.fault("redis_down", note="NOPERM"):
            redis.call("ACL", "SETUSER", "default", "resetkeys", *keys)
            try:
                assert until(lambda: "slots_broken" in daemon.told(), 15)
                rest.more(80)
            finally:
                redis.call("ACL", "SETUSER", "default", "~*")
        during = rest.job_ids[before:]
        assert until(lambda: "slots_mended" in daemon.told(), 15)
    system.wait(lambda: not system.pending(rest.job_ids + its_own.job_ids), "all have run", 30)
    late = system.late(during)
    line.prove("NOPERM" in daemon.told(), f"others meanwhile: {late}")
    assert "index_unreachable" not in daemon.told(), "Redis answers"
    line.on_time(late, p50=10)
    line.judge(system, within=6)


def _break(system: System, redis: RedisServer, slots: list[Slot]) -> dict[str, str]:
    """Let each slot have a key of another type, each time of another kind; the keys by their slot."""
    names = cycle(("store", "prepare", "dead", "claims", "generation"))
    keys = {}
    for slot, name in zip(slots, names, strict=False):
        key = keys[str(slot)] = getattr(system.center.queues.keys(slot), name)
        redis.call("DEL", key)
        redis.call(*(("LPUSH", key, "other") if name == "generation" else ("SET", key, "other")))
    return keys


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_clusters_on_one_redis_and_namespace_are_told_and_lose_nothing(case: Case) -> None:
    line = case.verdict(39, "two clusters on one Redis and namespace")
    first = case.build()
    one = first.start("host-a", processes=1)
    first.wait(first.whole, "the index is recorded as whole", 30)
    second = case.build(database_prefix=f"{case.prefix}b_")
    other = second.start("host-b", processes=1)
    with (
        Load(first.client, rate=40, ahead=(0.1, 1.0), fail=0.02) as ours,
        Load(second.client, rate=40, ahead=(0.1, 1.0), fail=0.02, seed=1) as theirs,
    ):
        began = time.time()
        time.sleep(8)
        until(lambda: "index_not_ours" in other.told(), 15)
        told = other.told()
        said = [
            [each.what for each in doctor.examine(system.center) if "another cluster" in each.what]
            for system in (first, second)
        ]
        meanwhile = time.time()
        usual, without = (each.late(since=began, before=meanwhile - 2) for each in (first, second))
    line.prove(
        "index_not_ours" in told,
        f"the second told; the first's {usual}; the other's, from the rows, {without}",
    )
    assert [len(lines) for lines in said] == [0, 1], said
    assert "orphan_dropped" not in told, "it took what is the first's"
    assert without.most < 2500
    assert not ours.errors
    assert not theirs.errors
    line.judge(first, within=6)
    one.stop()
    with Load(second.client, rate=40, ahead=(0.1, 1.0), seed=2, first=3_000_000):
        second.wait(lambda: "index_ours" in other.told(), "the other one has the index", 30)
        second.wait(second.whole, "and it is whole", 30)
    line.judge(second, within=6)


# Fault 40: what servers answer is cut off at any byte, damaged, or larger than a packet.


@pytest.fixture
def damaged(case: Case) -> Iterator[tuple[System, TimeoutCenter, list[Proxy]]]:
    """A system, and an SDK that reaches both of its servers through proxies."""
    system = case.build()
    proxies = [case.relay(case.mariadb.port, seed=40), case.relay(case.redis.port, seed=41)]
    changed = {
        "database_urls": [through(proxies[0], case.mariadb.url)],
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
            partial(center.submit_many, [task] * 20), partial(center.get, job_id),
            partial(center.find, biz_id=job_id % 60), partial(center.cancel, job_id),
            partial(center.store.read, known), partial(center.store.read_tries, known),
            center.catalog.refresh, partial(center.cancel_by_biz, "test.sync", job_id % 60),
        ]  # fmt: skip
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
    damaged: tuple[System, TimeoutCenter, list[Proxy]], case: Case, kind: str, count: int
) -> None:
    line = case.verdict(40, f"answers damaged at any byte: {kind}", f"SDK, {count} calls and more")
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
    assert known(center.get(job_id)).attribute == {"n": 7}
    # A submit under a dedup_key left one row or none, whatever its caller was told.
    rows = Counter(
        row.biz_id
        for biz_id in calls.biz_ids
        for row in system.center.find(biz_id=biz_id)
        if row.attribute == {"n": 1}
    )
    assert set(rows.values()) <= {1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "flip"])
def test_workers_over_broken_answers_lose_nothing_and_do_not_die(case: Case, kind: str) -> None:
    times = 500
    line = case.verdict(40, f"answers damaged at any byte: {kind}", f"workers, {times} times")
    proxies = [case.relay(case.mariadb.port, seed=42), case.relay(case.redis.port, seed=43)]
    system = case.build(topic_prepare_timeout=5)
    daemon = system.start(
        env={
            "TOC_DATABASE_URLS": through(proxies[0], case.mariadb.url),
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


def test_a_batch_above_a_packet_is_a_named_error_and_results_of_many_packets_are_read(case: Case) -> None:
    line = case.verdict(40, "packets of 16 MB and more")
    with raw(case.mariadb.url) as connection:
        limit = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        connection.exec_driver_sql("SET GLOBAL max_allowed_packet = 67108864")
    patience = {"connect_timeout": 3.0, "read_timeout": 10.0, "write_timeout": 10.0}
    (url,) = Layout([case.mariadb.url], 1, 1, "toc_").urls
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
        with raw(case.mariadb.url) as connection:
            connection.exec_driver_sql(f"SET GLOBAL max_allowed_packet = {limit}")
    line.prove(sizes[-1] > 2 * 0xFFFFFF, f"results of up to {sizes[-1]:,} bytes")


def test_a_row_that_cannot_be_read_harms_its_own_task_alone(case: Case) -> None:
    line = case.verdict(40, "a row that somebody has damaged")
    system = case.build(databases=1, tables=1, topic_retries=2, topic_backoff_base=0.1)
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
