"""What stands in rows: bodies, damage, another program's stamps,
changes of thousands of tasks or of their topic."""

import asyncio
import hashlib
import pickle
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.hands import Pair, in_five_minutes, submit_due
from harness.patience import PATIENCE, until
from harness.rows import change, known
from harness.schema import make_tables
from harness.system import System
from harness.tables import raw

from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, NewTask, Settings, TaskStatus, TimeoutCenter, Topic
from toc.model.errors import (
    BodyGone,
    SubmitUnknown,
    TocError,
    TopicClosed,
    TopicInUse,
    UnknownTopic,
    UnreadableTask,
)
from toc.model.sharding import BizId
from toc.model.topic import Delivery
from toc.operate import bulk_jobs as bulk
from toc.operate import topics
from toc.operate.operation import Doing, Operation, Record
from toc.operate.records import row_record, task_or_damage, task_shown
from toc.pull.pulls import Pulls
from toc.sdk import batcher
from toc.sdk.batcher import Batcher
from toc.worker.entry import LOST

# Every try has the body of its task as its row was checked, or does not begin.


def test_each_try_has_its_body_whatever_dies_moves_or_fails_and_the_purge_leaves_none(system: System) -> None:
    system.create_topics(slots=2, backoff_base=0.1)
    system.start(processes=2)
    rng, center = random.Random(7), system.center
    tasks = []
    for n in range(120):
        topic = ("test.sync", "test.async", "test.batch")[n % 3]
        body = rng.randbytes(rng.choice((0, 1, 300, 70_000)))
        attribute = {"sha": hashlib.sha256(b"x/y:" + body).hexdigest(), "fail": n % 2}
        tasks.append(NewTask(topic, n, 1.5, None, attribute, body=body, content_type="x/y"))
    # One brings down every process that runs it but the one in which it runs alone.
    body = rng.randbytes(900_000)
    attribute = {"sha": hashlib.sha256(b"x/y:" + body).hexdigest(), "die": 3}
    tasks.append(NewTask("test.sync", 777, 1.5, None, attribute, body=body, content_type="x/y"))
    without = [NewTask("test.sync", n, 1.5) for n in range(10)]
    job_ids = center.submit_many([*tasks, *without])
    for job_id in job_ids[:40:2]:
        center.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(seconds=1))
    system.wait(lambda: not system.pending(job_ids), "all have ended", 60)
    rows = center.store.read(job_ids)
    assert {
        (row.status, row.last_error) for row in rows.values() if row.status != TaskStatus.PROCESSED
    } == set()
    assert rows[job_ids[120]].crashes >= 3, "it ran alone"

    seen = known(center.get(job_ids[5]))
    assert seen.body_length == len(tasks[5].body or b"")
    assert str(tasks[5].body) not in repr(seen)
    assert (seen.body, seen.content_type) == (tasks[5].body, "x/y")
    assert pickle.loads(pickle.dumps(seen)) == seen == center.find(biz_id=5)[0]
    plain = known(center.get(job_ids[-1]))
    assert (plain.body, plain.content_type, plain.body_length) == (None, None, None)
    late = center.get(job_ids[6])
    sizes = {row.job_id: -1 if row.body_length is None else row.body_length for row in rows.values()}
    assert sum(center.store.delete_ended(sizes).whole()) == len(job_ids)
    assert late is not None
    with pytest.raises(BodyGone):
        _ = late.body
    assert bodies(system) == 0


def bodies(system: System) -> int:
    """How many there are."""
    names = (f"{system.settings.database_prefix}{n % 2}.timeout_body_{n:04d}" for n in range(8))
    with raw(system.settings) as connection:
        return sum(connection.exec_driver_sql(f"SELECT COUNT(*) FROM {name}").scalar_one() for name in names)


def test_a_try_whose_task_was_moved_meanwhile_neither_begins_nor_costs(system: System, hands: Pair) -> None:
    worker, other = hands
    job_id = submit_due(system, b"body")
    worker.take()
    system.center.reschedule(job_id, action_time=in_five_minutes())
    worker.start()
    worker.await_gone(job_id)
    row = system.row(job_id)
    assert (worker.runs, row.status, row.attempts, row.crashes) == ([], TaskStatus.PENDING, 0, 0)

    system.center.store.reschedule(job_id, system.center.clock.now_ms())
    system.center.index([job_id])
    other.begin()
    assert other.runs[0].body == b"body"
    other.end_well(job_id)


def test_a_try_whose_body_cannot_be_read_now_is_put_away_uncharged(system: System, hands: Pair) -> None:
    worker, _ = hands
    job_id = submit_due(system, b"body")
    worker.take()
    with locked_body(system, job_id):
        worker.start()
        worker.await_gone(job_id)
        assert worker.runs == []

    def runs() -> bool:
        worker.take()
        return bool(worker.runs)

    assert until(runs, PATIENCE)
    worker.end_and_finish()
    row = system.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PROCESSED, 0, 0)


@contextmanager
def locked_body(system: System, job_id: int) -> Iterator[None]:
    """The row of a task can be read, its body cannot."""
    table = (job_id >> 12 & 1023) % 8
    name = f"{system.settings.database_prefix}{table % 2}.timeout_body_{table:04d}"
    with raw(system.settings) as connection:
        connection.exec_driver_sql(f"LOCK TABLES {name} WRITE")
        yield
        connection.exec_driver_sql("UNLOCK TABLES")


def test_a_try_that_was_lost_while_its_body_was_read_does_not_begin(system: System, hands: Pair) -> None:
    worker, _ = hands
    job_id = submit_due(system, b"body")
    worker.take()
    entry = worker.held(job_id)
    with locked_body(system, job_id):
        worker.start()
        entry.kept = LOST  # a heartbeat finds that another worker has the entry
    worker.await_gone(job_id)
    assert (worker.runs, system.row(job_id).attempts) == ([], 0)


# What is damaged harms itself alone: a row in its table, a step of the batcher.

TOPIC = "test.pulled"
DEEP = "[" * 300 + "1" + "]" * 300


DAMAGES = [
    *((column, "'0000-00-00'") for column in ("action_time", "next_time", "gmt_create", "gmt_modified")),
    *(("attribute", f"'{text}'") for text in ("[" * 3000, DEEP, "7", '{"a": 1e999}', r'["\\ud800"]')),
    ("body_length", "4000000000"),
]


def test_damaged_values_make_their_own_rows_unreadable_alone(system: System) -> None:
    store = system.center.store
    store.topics.create(Topic(TOPIC, 9, 4, delivery=Delivery.PULL))
    system.center.catalog.refresh()
    *damaged, sound = (system.center.submit(TOPIC, biz_id=7, delay=0.01) for _ in [*DAMAGES, None])
    (table,) = {store._shards.names[store._shards.table_of(job_id)] for job_id in (*damaged, sound)}
    server = store._shards.servers[0]._connect_within(5)
    try:
        for job_id, (column, value) in zip(damaged, DAMAGES, strict=True):
            server.batch([f"UPDATE {table} SET {column}={value} WHERE job_id={job_id}"])
    finally:
        server.close()

    rows = store.read([*damaged, sound])
    for job_id in damaged:
        with pytest.raises(UnreadableTask):
            task_shown(rows[job_id], TOPIC, values=True)
        assert "unreadable" in task_or_damage(row_record, rows[job_id], TOPIC)
    assert task_shown(rows[sound], TOPIC, values=True)["job_id"] == str(sound)
    assert "unreadable" not in task_or_damage(row_record, rows[sound], TOPIC)
    assert store.read_tries([*damaged, sound]).keys() == {*damaged, sound}
    dying = [  # their consumers could not be told of them
        job_id
        for job_id, (column, _) in zip(damaged, DAMAGES, strict=True)
        if column in ("action_time", "attribute", "body_length")
    ]

    async def steps() -> None:
        pulls = Pulls(system.center, system.center.store.identity.lease_secret())
        try:
            got: set[int] = set()
            async with asyncio.timeout(60):
                while sound not in got or any(system.row(one).status != TaskStatus.DEAD for one in dying):
                    got |= {one.task.job_id for one in await pulls.pull([TOPIC], most=20, wait=1)}
        finally:
            await pulls.stop()

    asyncio.run(steps())
    for job_id in dying:
        error = system.row(job_id).last_error or ""
        assert "cannot be read" in error
        assert "UnreadableTask" not in error


async def test_no_caller_waits_for_ever_for_a_failed_step(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.create_topics()
    monkeypatch.setattr(batcher, "GIVE_UP_SECONDS", 0.1)
    one = Batcher(system.center)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it hears of the error
    (submits,) = one._submits
    send = submits._send
    monkeypatch.setattr(submits, "_send", lambda _, answer: answer([]))
    with pytest.raises(SubmitUnknown):
        await one.put(NewTask("test.sync", 1, 60))
    monkeypatch.setattr(submits, "_send", send)
    monkeypatch.setattr(batcher, "GIVE_UP_SECONDS", 60.0)
    assert (await one.put(NewTask("test.sync", 2, 60))).job_id > 0
    await one.close()


# The slots of rows that another program has stamped; the backlog of a topic that is resumed.

STAMPED = [
    ("test.sync", 16, "slots_raised"),
    ("test.async", 65_535, "slot_amount_not_understood"),
    ("test.async", 12, "slot_amount_not_understood"),
    ("test.async", 2048, "slot_amount_not_understood"),
    ("test.async", 0, "slot_amount_not_understood"),
    ("test.async", 2, None),
]
"""A topic of four slots, the slot_amount of a row of it, and what is logged of it."""


def test_rows_that_are_stamped_otherwise_than_their_topic_run_and_it_stays_whole(system: System) -> None:
    store = system.center.store
    system.create_topics(slots=4)
    daemon = system.start(processes=1)
    before = {topic.name for topic in store.topics.list()}
    stamped: dict[int, str | None] = {}
    for topic, amount, event in STAMPED:
        for n in range(8):
            job_id = system.center.submit(topic, biz_id=n, delay=6)
            change(store, job_id, f"slot_amount={amount:d}")
            stamped[job_id] = event
    system.wait(lambda: not system.pending(stamped), "all have run", 60)
    assert {len(system.starts(job_id)) for job_id in stamped} == {1}
    amounts = {topic.name: topic.slot_amount for topic in store.topics.list()}
    assert set(amounts) == before
    assert (amounts["test.sync"], amounts["test.async"]) == (16, 4)
    for name in ("slots_raised", "slot_amount_not_understood"):
        told = {line["job_id"] for line in daemon.events(name)}
        assert told <= {job_id for job_id, event in stamped.items() if event == name}
        assert told


# Cancels that meet trouble: of thousands of tasks in one call, and of a topic that is not known yet.


@pytest.mark.skipif(secured.SECURED, reason="a proxy must be able to hang up")
def test_a_cancel_answers_although_its_topic_is_not_known_here_and_the_topic_table_is_away(
    mariadb: MariaDB, clean_redis: RedisServer, database_prefix: str
) -> None:
    with Proxy(mariadb.port) as proxy:
        settings = Settings(
            database_urls=[through(proxy, mariadb.url), mariadb.url],
            databases=2,
            tables=2,
            database_prefix=database_prefix,
            redis_url=clean_redis.url,
            connect_timeout=0.5,
        )
        make_tables(settings)
        with TimeoutCenter(settings) as one, TimeoutCenter(settings) as other:
            one.store.topics.create(Topic("known", 1, 2))
            assert other.get(one.submit("known", biz_id=1, delay=1800)) is not None
            one.store.topics.create(Topic("later", 2, 2))
            on_second = next(biz for biz in range(100) if BizId.of(biz).crc % 2)
            job_id = one.submit("later", biz_id=on_second, delay=1800)
            proxy.refuse()
            assert other.cancel(job_id) is CancelOutcome.CANCELLED
            proxy.accept()


# Topics are delivered otherwise and deleted while a cluster runs.


def _pause(system: System, name: str) -> None:
    system.center.store.topics.alter(name, paused=True)


def _do(system: System, operation: Operation, **values: object) -> None:
    operation.perform(Doing(system.center, "ann", operation.right), {"topic": "test.sync", **values})


def test_a_delivery_changes_when_nothing_runs_and_no_handler_starts_what_is_pulled(
    hosts: System, tmp_path: Path
) -> None:
    hosts.create_topics(slots=4)
    hosts.start(processes=1)
    center, client = hosts.center, hosts.client
    with pytest.raises(TopicInUse, match="not paused"):
        _do(hosts, topics.alter, delivery=Delivery.PULL)

    end = tmp_path / "end"
    running = client.submit("test.sync", biz_id=1, delay=0.1, attribute={"until": str(end)})
    hosts.wait(lambda: len(hosts.starts(running)) == 1, "it runs", 10)
    _pause(hosts, "test.sync")
    with pytest.raises(TopicInUse, match=r"1 pending \(1 prepared"):
        _do(hosts, topics.alter, delivery=Delivery.PULL)
    told: list[str] = []
    changed: list[Record] = []

    def change() -> None:
        doing = Doing(center, "ann", topics.alter.right, progress=told.append)
        changed.append(topics.alter.do(doing, "test.sync", delivery=Delivery.PULL, wait=True))

    waiting = threading.Thread(target=change)
    waiting.start()
    hosts.wait(lambda: any("1 tasks" in text for text in told), "it waits for the task", 10)
    assert not changed
    end.touch()
    waiting.join(60)
    assert [topic["delivery"] for topic in changed] == [Delivery.PULL]
    assert not hosts.pending([running])

    _do(hosts, topics.resume, rate=0)
    left = [client.submit("test.sync", biz_id=n, delay=0.05) for n in range(20)]
    # Its slots are nobody's: no member serves pulls. Other topics run on.
    others = [client.submit("test.async", biz_id=n, delay=1.0) for n in range(20)]
    hosts.wait(lambda: not hosts.pending(others), "the other topic runs", 20)
    assert len(hosts.pending(left)) == 20
    assert sum(len(hosts.starts(job_id)) for job_id in left) == 0

    _pause(hosts, "test.sync")
    _do(hosts, topics.alter, delivery=Delivery.HANDLER)
    _do(hosts, topics.resume, rate=0)
    hosts.wait(lambda: not hosts.pending(left), "handlers have it again", 20)
    assert hosts.not_run_once(left) == {}
    assert hosts.verdict().clean, hosts.logs()


def test_a_topic_is_deleted_only_empty_and_its_name_may_be_used_again(hosts: System) -> None:
    hosts.create_topics(slots=4)
    daemon = hosts.start(processes=1)
    center, store, client = hosts.center, hosts.center.store, hosts.center
    done = client.submit("test.sync", biz_id=1, delay=0.05)
    dead = client.submit("test.sync", biz_id=2, delay=0.05, attribute={"dead": 1})
    hosts.wait(lambda: not hosts.pending([done, dead]), "they have ended", 10)
    far = [client.submit("test.sync", biz_id=n, delay=3600) for n in range(30)]
    with pytest.raises(TopicInUse, match="not paused"):
        _do(hosts, topics.delete)
    _pause(hosts, "test.sync")
    with pytest.raises(
        TopicInUse, match=r"30 pending \(0 prepared, 0 leased or handed out\), 1 dead; `toc bulk cancel"
    ):
        _do(hosts, topics.delete)
    with TimeoutCenter(hosts.settings) as other:
        far.append(other.submit("test.sync", biz_id=31, delay=3600))  # it takes tasks again

    # Another program dies right after it has closed it. A third goes on.
    _, version = store.topics.get_with_version("test.sync")
    assert store.topics.close("test.sync", version)
    with TimeoutCenter(hosts.settings) as other, pytest.raises(TopicClosed):
        other.submit("test.sync", biz_id=32, delay=3600)
    bulk.cancel(center, far)
    assert bulk.purge_dead(center, [dead])["purged"] == 1
    _do(hosts, topics.delete)

    with TimeoutCenter(hosts.settings) as other, pytest.raises(UnknownTopic):
        other.submit("test.sync", biz_id=33, delay=3600)
    rows = store.read([done, dead, *far])
    assert dead not in rows
    assert {rows[job_id].status for job_id in far} == {3}
    assert store.topics.retired() == {1: 259_200}
    with pytest.raises(TocError, match="deleted"):
        store.topics.create(Topic("test.sync", 1, 4))

    # The name may be used again. The workers, which have lived through all of it, serve the new topic.
    store.topics.create(Topic("test.sync", 77, 2))
    center.catalog.refresh()
    fresh = [hosts.client.submit("test.sync", biz_id=n, delay=0.5) for n in range(20)]
    hosts.wait(lambda: not hosts.pending(fresh), "the new topic runs", 20)
    assert hosts.not_run_once(fresh) == {}
    for event in ("worker_died", "worker_recycled", "index_lost_data"):
        assert not daemon.events(event)


def test_a_backlog_is_resumed_at_the_rate_asked_for_by_age_and_then_all_is_as_ever(system: System) -> None:
    store, center = system.center.store, system.center
    system.create_topics(slots=4)
    store.topics.alter("test.async", paused=True)
    system.start(processes=2)
    job_ids = [center.submit("test.async", biz_id=n, delay=0.2 + n / 100) for n in range(150)]
    last = center.submit("test.sync", biz_id=1, delay=2.0)
    system.wait(lambda: system.row(last).status == TaskStatus.PROCESSED, "all are due", 10)
    resumed = time.time()
    topics.resume.perform(Doing(center, "ann", topics.resume.right), {"topic": "test.async", "rate": 50})
    fresh = center.submit("test.async", biz_id=7, delay=0.5)
    system.wait(lambda: not system.pending([*job_ids, fresh]), "all have run", 30)
    starts = [event for event in system.history() if event.event == "start" and event.job_id != last]
    assert len(starts) == 151
    seconds = starts[-1].at / 1e9 - resumed
    assert seconds > 150 / 50 * 0.7, f"{seconds:.1f} s for 150 tasks at 50 a second"
    for pid in {event.pid for event in starts}:  # each has slots of its own, and starts its oldest first
        order = [
            job_ids.index(event.job_id) for event in starts if event.pid == pid and event.job_id != fresh
        ]
        places = [sorted(order).index(number) for number in order]
        assert max(abs(place - number) for place, number in enumerate(places)) < 40, order
    many = [center.submit("test.async", biz_id=n, delay=0.2) for n in range(150)]
    system.wait(lambda: not system.pending(many), "what is due later runs at once", 10)
