"""Pull consumers on real servers: what is handed out, how that ends, who dies in between,
and what fails to tell."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import structlog
from harness.gateway import Gateway
from harness.patience import PATIENCE
from harness.pulls import opened_pulls
from harness.rows import change
from harness.system import System, small_system
from harness.tables import raw

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, TaskStatus, Topic
from toc.index.messages import Peek
from toc.model.clock import from_ms
from toc.model.errors import Busy, InvalidLease, StoreUnavailable, TocError
from toc.model.pull import AckOutcome, LeaseOutcome, PullLease
from toc.model.sharding import BizId
from toc.model.topic import Backoff, Delivery, Slot
from toc.pull.handed_out import HandedOut
from toc.pull.pulls import Pulls
from toc.pull.waiting_pulls import WaitingPull, WaitingPulls
from toc.sdk.batcher import MAX_WAITING
from toc.store.servers.shards import Answers
from toc.store.tasks.scan import DueRow, Position

# Pull consumers on real servers: what is handed out, how that ends, and who dies in between.

TOPIC = "test.pulled"


either = pytest.mark.parametrize("pulled", ["system", "alone"], indirect=True)
"""With an index and without."""


@pytest.fixture
def apart(tmp_path: Path, mariadb: MariaDB, database_prefix: str) -> Iterator[System]:
    """No index, and two names of a database server, which are two."""
    urls = [mariadb.url, mariadb.url.replace("127.0.0.1", "localhost")]
    with small_system(tmp_path, None, mariadb, database_prefix, database_urls=urls) as one:
        yield one


@pytest.fixture
def pulled(request: pytest.FixtureRequest) -> System:
    """One topic of two tries that is pulled, and nobody who sweeps."""
    system: System = request.getfixturevalue(getattr(request, "param", "system"))
    topic = Topic(TOPIC, 9, 4, retries=2, backoff=Backoff.IMMEDIATE, delivery=Delivery.PULL, max_runtime=30)
    system.center.store.topics.create(topic)
    system.center.catalog.refresh()
    return system


@pytest.fixture
def gateway(runner: asyncio.Runner, pulled: System) -> Iterator[Pulls]:
    with opened_pulls(runner, pulled.center) as pulls:
        yield pulls


@pytest.fixture
def other(runner: asyncio.Runner, pulled: System) -> Iterator[Pulls]:
    with opened_pulls(runner, pulled.center) as pulls:
        yield pulls


async def one(gateway: Pulls, *, wait: float = 20.0, ttr: float = 30.0) -> HandedOut:
    (delivered,) = await gateway.pull([TOPIC], wait=wait, ttr=ttr)
    return delivered


def lease_end(delivered: HandedOut) -> datetime:
    return from_ms(delivered.row.next_time)


def entries(system: System) -> dict[str, int]:
    """How many entries there are, by queue."""
    peeks = system.center.queues.peek([Slot(TOPIC, n) for n in range(4)]).values()
    assert all(isinstance(peek, Peek) for peek in peeks)
    return {
        queue: sum(getattr(peek, queue) for peek in peeks)
        for queue in ("store", "prepared", "dead")
        if sum(getattr(peek, queue) for peek in peeks)
    }


async def settled(system: System, wanted: dict[str, int]) -> None:
    until = time.monotonic() + PATIENCE
    while (found := entries(system)) != wanted and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert found == wanted


async def due(system: System, job_ids: Sequence[int]) -> None:
    """Wait until tasks are due by their rows."""
    async with asyncio.timeout(PATIENCE):
        while any(row.next_time > row.now for row in system.center.store.pulls.read(job_ids).values()):
            await asyncio.sleep(0.01)


@dataclass
class LateMoves:
    """The mover's thread waits with all that it is told until ``answered`` is set."""

    gateway: Pulls
    answered: threading.Event = field(default_factory=threading.Event)
    held: list[Any] = field(default_factory=list)

    async def told(self, times: int) -> None:
        """Wait until the mover was told something so often, in one batch or in several."""
        waiting = self.gateway._taker.mover._thread._items
        async with asyncio.timeout(PATIENCE):
            while len(waiting) + len(self.held) < times:
                await asyncio.sleep(0.01)


@pytest.fixture
def late(gateway: Pulls, monkeypatch: pytest.MonkeyPatch) -> LateMoves:
    mover, moves_late = gateway._taker.mover._thread, LateMoves(gateway)
    move = mover._handle

    def wait_and_move(moves: list[Any]) -> None:
        moves_late.held += moves
        moves_late.answered.wait(PATIENCE)  # what raises here would end the process
        move(moves)

    monkeypatch.setattr(mover, "_handle", wait_and_move)
    return moves_late


@either
async def test_late_acks_count_and_late_nacks_and_extends_do_not(
    pulled: System, gateway: Pulls, other: Pulls
) -> None:
    job_id = pulled.center.submit(TOPIC, biz_id=1, delay=0.05)
    first = await one(gateway, ttr=1)
    second = await one(other, ttr=20)
    assert await gateway.extend([first.key], ttr=10) == [LeaseOutcome.GONE]
    assert await gateway.nack([first.key], dead=True) == [LeaseOutcome.GONE]
    (until,) = await gateway.extend([second.key], ttr=25)
    assert isinstance(until, datetime)
    assert until > lease_end(second)
    assert await gateway.extend([second.key], ttr=600) == [lease_end(second) + timedelta(seconds=10)], (
        "max_runtime in all"
    )
    assert await gateway.ack([first.key]) == [AckOutcome.LATE], "work that was done was done"
    assert await other.ack([second.key]) == [AckOutcome.ALREADY]
    assert await other.nack([second.key]) == [LeaseOutcome.GONE]
    assert pulled.row(job_id).status == TaskStatus.PROCESSED


@pytest.mark.parametrize("answer", ["ack", "nack", "bury", "release"])
async def test_an_answer_that_overtakes_its_entry_is_told_to_the_index_all_the_same(
    pulled: System, gateway: Pulls, late: LateMoves, answer: str
) -> None:
    """Here nobody sweeps, and ttr is longer than the test waits: nothing else mends what the move undoes."""
    pulled.center.submit(TOPIC, biz_id=1, delay=0.05)
    first = await one(gateway, ttr=30)
    if answer == "ack":
        assert await gateway.ack([first.key]) == [AckOutcome.ACKED]
    elif answer == "release":
        gateway.release([first])
    else:
        await gateway.nack([first.key], delay=0.1, dead=answer == "bury")
    await late.told(2)
    assert entries(pulled) == {"prepared": 1}
    late.answered.set()
    if answer in ("ack", "bury"):
        await settled(pulled, {} if answer == "ack" else {"dead": 1})
    else:
        assert (await one(gateway)).row.attempts == (2 if answer == "nack" else 1)


async def test_what_fails_after_the_outcome_of_an_ack_is_logged_and_changes_it_not(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled.center.submit(TOPIC, biz_id=1, delay=0.05)
    first = await one(gateway)
    monkeypatch.setattr(gateway._taker.mover, "ended", None)
    with structlog.testing.capture_logs() as logs:
        assert await gateway.ack([first.key]) == [AckOutcome.ACKED]
        async with asyncio.timeout(PATIENCE):
            while not gateway._batches._batchers["ack"][0].idle:
                await asyncio.sleep(0)
    assert [(line["event"], line["tasks"]) for line in logs] == [("batch_not_indexed", 1)]


@pytest.mark.parametrize("by", ["entry", "row"])
async def test_an_ack_that_comes_before_the_move_of_its_entry_is_prepared_leaves_no_entry(
    pulled: System, gateway: Pulls, late: LateMoves, by: str
) -> None:
    """Of a task that was handed out by its row, the entry was not taken: it is where it was."""
    job_id = pulled.center.submit(TOPIC, biz_id=1, delay=0.05)
    if by == "entry":
        got = [await one(gateway)]
    else:
        row = pulled.row(job_id)
        slot = pulled.center.catalog.get(TOPIC).slot(row.slot_crc, row.slot_amount)
        while time.time() * 1000 < row.next_time + 10:  # one take alone is under way
            await asyncio.sleep(0.01)
        got = await gateway.take(job_id, slot, ttr=30)
    assert await gateway.ack([got[0].key]) == [AckOutcome.ACKED]
    await late.told(2 if by == "entry" else 1)
    late.answered.set()
    await settled(pulled, {})


async def test_answers_that_wait_for_a_server_are_bounded(pulled: System, gateway: Pulls) -> None:
    held = pulled.center.submit(TOPIC, biz_id=1, delay=0.05)
    key = (await one(gateway)).key
    others = [key._replace(job_id=key.job_id + n) for n in range(1, MAX_WAITING)]
    store = pulled.center.store
    server, table = store._shards.servers[0], store._shards.names[store._shards.table_of(held)]
    locker = server._connect_within(5)
    try:
        locker.batch(["BEGIN", f"SELECT 1 FROM {table} WHERE job_id={held} FOR UPDATE"])
        (acks,) = gateway._batches._batchers["ack"]
        first = asyncio.create_task(gateway.ack([key]))
        async with asyncio.timeout(PATIENCE):
            while not acks._open:
                await asyncio.sleep(0)
        crowd = [asyncio.create_task(gateway.ack([one])) for one in others]
        async with asyncio.timeout(PATIENCE):
            while not any(one.done() for one in crowd):
                await asyncio.sleep(0)
        locker.batch(["ROLLBACK"])
    finally:
        locker.close()
    (ended,) = await first
    assert ended is AckOutcome.ACKED or isinstance(ended, TocError), "the row was locked for long"
    told = {type(what) for found in await asyncio.gather(*crowd) for what in found}
    assert told - {StoreUnavailable} == {Busy, AckOutcome}, "some may have run out of time"
    assert await gateway.ack([others[0]]) == [AckOutcome.UNKNOWN]


async def test_a_lease_that_is_repeated_holds_up_nobody_elses_answer(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    for biz_id in (1, 2):
        pulled.center.submit(TOPIC, biz_id=biz_id, delay=0.05)
    mine, other = await one(gateway), await one(gateway)
    pulls, asked = pulled.center.store.pulls, list[int]()

    def ack(leases: Iterable[PullLease], real: Any = pulls.ack) -> Any:
        asked.append(len(found := list(leases)))
        return real(found)

    monkeypatch.setattr(pulls, "ack", ack)
    many = asyncio.create_task(gateway.ack([mine.key] * 100))
    assert await gateway.ack([other.key]) == [AckOutcome.ACKED]
    assert asked[0] == 2
    assert len(asked) < 50, "the rest follows"
    assert Counter(await many) == {AckOutcome.ACKED: 1, AckOutcome.ALREADY: 99}


@either
async def test_one_consumer_gets_tasks_in_the_order_in_which_they_came_due(
    pulled: System, gateway: Pulls, other: Pulls
) -> None:
    """One by one at whichever gateway, and within an answer; from the first pull on."""
    for _ in range(2):
        base = datetime.now(UTC) + timedelta(seconds=1)
        job_ids = pulled.center.submit_many(
            [NewTask(TOPIC, n, action_time=base + timedelta(milliseconds=10 * n)) for n in range(40)]
        )
        await due(pulled, job_ids)
        got = [await one((gateway, other)[n % 3 == 1]) for n in range(20)]
        assert [delivered.task.job_id for delivered in got] == job_ids[:20]
        while len(got) < 40:
            some = await gateway.pull([TOPIC], most=20, wait=20)
            assert [delivered.row.action_time for delivered in some] == sorted(
                delivered.row.action_time for delivered in some
            )
            got += some
        await gateway.ack([delivered.key for delivered in got])


async def test_a_lease_is_what_was_handed_out(pulled: System, gateway: Pulls) -> None:
    pulled.center.submit(TOPIC, biz_id=1, delay=0.01)
    got = await one(gateway)
    for made_up in (
        got.key.text(bytes(32)),
        got.key._replace(nonce=bytes(16)).text(bytes(32)),
        got.key.text(b"").translate(str.maketrans("A", "B")),
    ):
        with pytest.raises(InvalidLease):
            gateway.parse(made_up)
    assert await gateway.ack([gateway.parse(got.lease)]) == [AckOutcome.ACKED]


async def test_without_redis_tasks_are_handed_out_from_their_rows(
    pulled: System, gateway: Pulls, clean_redis: RedisServer
) -> None:
    pulled.center.submit(TOPIC, biz_id=0, delay=0.01)
    assert await gateway.ack([(await one(gateway)).key]) == [AckOutcome.ACKED]
    call = asyncio.create_task(gateway.pull([TOPIC], most=100, wait=30))
    async with asyncio.timeout(PATIENCE):
        while not gateway._waiting.topics():
            await asyncio.sleep(0.01)
    with away(clean_redis):
        job_id = pulled.center.submit(TOPIC, biz_id=1, delay=0.1)
        (got,) = await call
        late = (datetime.now(UTC) - got.task.action_time).total_seconds()
        print(f"without Redis {late:.2f} s late")
        assert got.task.job_id == job_id
        assert await gateway.ack([got.key]) == [AckOutcome.ACKED]
        nacked = pulled.center.submit(TOPIC, biz_id=2, delay=0.1)
        again = await one(gateway, ttr=1)
        assert again.task.job_id == nacked
        assert (await one(gateway)).row.attempts == 2, "the end of ttr, by the row"
    later = pulled.center.submit(TOPIC, biz_id=3, delay=0.1)
    assert (await one(gateway)).task.job_id == later


@either
async def test_what_only_the_sweep_can_end_holds_up_nothing_behind_it(pulled: System, gateway: Pulls) -> None:
    """One whose last ttr is over, and one that has expired: nobody sweeps here."""
    job_ids = [pulled.center.submit(TOPIC, biz_id=1, delay=0.01) for _ in range(2)]
    change(pulled.center.store, job_ids[0], "tries=1")
    assert (await one(gateway, ttr=1)).task.job_id == job_ids[0]
    change(pulled.center.store, job_ids[1], "expires_at=next_time")
    await due(pulled, job_ids)
    later = pulled.center.submit(TOPIC, biz_id=2, delay=0.01)
    async with asyncio.timeout(PATIENCE):
        assert (await one(gateway, wait=LONG)).task.job_id == later
        assert await gateway.pull([TOPIC]) == []
    assert {pulled.row(job_id).status for job_id in job_ids} == {TaskStatus.PENDING}
    if pulled.center.queues.present:
        await settled(pulled, {"store": 1})


async def test_the_entry_of_a_task_that_is_dead_is_buried_by_who_reclaims_what_gateways_have_left(
    pulled: System, gateway: Pulls
) -> None:
    dead, lost = (pulled.center.submit(TOPIC, biz_id=n, delay=0.01) for n in range(2))
    change(pulled.center.store, dead, "status=4")
    pulled.center.store.cancel_many([lost])
    pulled.center.store.delete_ended({lost: -1})
    assert await gateway.pull([TOPIC], most=2, wait=1) == []
    await settled(pulled, {"prepared": 2})
    owner = Gateway(pulled)
    try:
        await settled(pulled, {"dead": 1})
    finally:
        assert owner.stop() == 0
    assert "orphan_dropped" in owner.log.read_text()


@contextmanager
def away(redis: RedisServer) -> Iterator[None]:
    redis.kill()
    try:
        yield
    finally:
        redis.start()


# Pulls where something fails to tell them: a Redis that stands still or is away, messages that are lost.

OTHER = "test.other"
LONG = 60.0
"""Seconds: longer than any limit here, and than any machine is slow."""


@pytest.fixture
def unswept(runner: asyncio.Runner, system: System) -> Iterator[Pulls]:
    """Two topics that are pulled, and nobody who sweeps."""
    for number, name in enumerate((TOPIC, OTHER)):
        topic = Topic(name, 9 + number, 4, retries=2, delivery=Delivery.PULL, max_runtime=120)
        system.center.store.topics.create(topic)
    system.center.catalog.refresh()
    with opened_pulls(runner, system.center) as pulls:
        yield pulls


async def entered(unswept: Pulls, count: int) -> None:
    async with asyncio.timeout(60):
        while len(set().union(*unswept._waiting._queues.values())) < count:
            await asyncio.sleep(0.01)


async def test_a_redis_that_stands_still_holds_up_neither_pulls_nor_acks(
    system: System, unswept: Pulls, clean_redis: RedisServer
) -> None:
    """For longer than its replies are waited for, once."""
    system.center.submit_many([NewTask(TOPIC, n, 0.01) for n in range(2)])
    held = [task for _ in range(2) for task in await unswept.pull([TOPIC], wait=LONG, ttr=LONG)]
    later = system.center.submit_many([NewTask(TOPIC, n, 2) for n in range(8)])
    call = asyncio.create_task(unswept.pull([TOPIC], most=8, wait=LONG, ttr=LONG))
    await entered(unswept, 1)
    clean_redis.pause()
    try:
        async with asyncio.timeout(LONG):
            got = await call
            while len(got) < len(later):
                got += await unswept.pull([TOPIC], most=8, wait=LONG, ttr=LONG)
            for one in held + got:
                assert await unswept.ack([one.key]) == [AckOutcome.ACKED]
    finally:
        clean_redis.resume()
    assert sorted(one.task.job_id for one in got) == sorted(later)
    last = system.center.submit(TOPIC, biz_id=1, delay=0.01)
    assert [one.task.job_id for one in await unswept.pull([TOPIC], wait=LONG)] == [last]


async def test_without_redis_no_topic_waits_behind_the_many_rows_of_another(
    system: System, unswept: Pulls, clean_redis: RedisServer
) -> None:
    clean_redis.kill()
    system.center.submit_many([NewTask(TOPIC, n, 0.1) for n in range(4000)])
    late = system.center.submit(OTHER, biz_id=1, delay=0.1)
    ended = asyncio.Event()

    async def slowly() -> int:
        count = 0
        while not ended.is_set():
            count += len(await unswept.pull([TOPIC], wait=1))
        return count

    slow = asyncio.create_task(slowly())
    try:
        got = await unswept.pull([OTHER], wait=40)
    finally:
        ended.set()
        count = await slow
        clean_redis.start()
    assert [one.task.job_id for one in got] == [late]
    assert 0 < count < 4000, "they were many, and have not been starved either"


@pytest.mark.parametrize("pulled", ["alone"], indirect=True)
async def test_without_an_index_tasks_that_a_transaction_has_locked_hide_none_behind_them(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor others' topics; and which are locked is asked only after some were."""
    monkeypatch.setattr("toc.pull.pulls.HASTY_SECONDS", 2 * PATIENCE)
    shards, other = pulled.center.store._shards, Topic(OTHER, 10, 4, delivery=Delivery.PULL)
    look = Mock(wraps=shards._unlocked)
    monkeypatch.setattr(shards, "_unlocked", look)
    pulled.center.store.topics.create(other)
    pulled.center.catalog.refresh()
    job_ids = [pulled.center.submit(TOPIC, biz_id=1, delay=0.01 + n / 100) for n in range(9)]
    await due(pulled, job_ids)
    assert ((await one(gateway)).task.job_id, look.call_count) == (job_ids.pop(0), 0)
    with raw(pulled.settings) as caller:
        table = pulled.center.store.name_of(shards.table_of(job_ids[0]))
        rows = f"{table} FORCE INDEX (PRIMARY) WHERE job_id IN {tuple(job_ids[:7])}"
        caller.exec_driver_sql("BEGIN")
        caller.exec_driver_sql(f"SELECT 1 FROM {rows} FOR UPDATE")
        assert (await one(gateway)).task.job_id == job_ids[7]
        later = pulled.center.submit(OTHER, biz_id=1, delay=0.01)
        await due(pulled, [later])
        (got,) = await gateway.pull([TOPIC, OTHER], wait=LONG)
        assert got.task.job_id == later
        async with asyncio.timeout(PATIENCE):
            assert await gateway.pull([OTHER]) == []
        caller.exec_driver_sql("ROLLBACK")
    assert [(await one(gateway)).task.job_id for _ in range(7)] == job_ids[:7]


@pytest.mark.parametrize("pulled", ["apart"], indirect=True)
async def test_without_an_index_a_database_server_that_hangs_holds_up_no_task_of_another(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, release = pulled.center.store, threading.Event()
    page, hanging = store.scans.page, store.tables_of_server()[0]

    def hangs(starts: Mapping[int, Position], *more: Any, **named: Any) -> Answers[list[DueRow]]:
        if not starts.keys().isdisjoint(hanging):
            release.wait()
        return page(starts, *more, **named)

    monkeypatch.setattr(store.scans, "page", hangs)
    job_ids = [pulled.center.submit(TOPIC, biz_id=biz_id, delay=0.01) for biz_id in range(20)]
    others = {job_id for job_id in job_ids if store.server_of(job_id) == 1}
    got: set[int] = set()
    try:
        async with asyncio.timeout(PATIENCE):
            while got != others:
                got |= {one.task.job_id for one in await gateway.pull([TOPIC], most=8, wait=LONG, ttr=LONG)}
    finally:
        release.set()
    async with asyncio.timeout(PATIENCE):
        while got != set(job_ids):
            got |= {one.task.job_id for one in await gateway.pull([TOPIC], most=8, wait=LONG, ttr=LONG)}


async def test_a_consumer_that_never_waits_gets_what_was_not_told(system: System, unswept: Pulls) -> None:
    assert await unswept.pull([TOPIC]) == []
    taker = unswept._taker
    taker._listener.stop()
    taker._listens.join(60)
    taker._watch_loop.stop(30)
    job_id = system.center.submit(TOPIC, biz_id=1, delay=0.01)
    got: list[HandedOut] = []
    async with asyncio.timeout(60):
        while not got:
            got = await unswept.pull([TOPIC])
            taker.watch()  # it hardly ever runs just while such a pull is there
            await asyncio.sleep(0.01)
    assert got[0].task.job_id == job_id


@either
async def test_what_was_taken_when_its_topic_is_paused_goes_back_and_is_not_handed_out(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch, center = gateway._taker._dispatch, pulled.center

    def pause(*given: Any) -> Any:
        center.store.topics.alter(TOPIC, paused=True)
        center.catalog.refresh()
        return dispatch(*given)

    monkeypatch.setattr(gateway._taker, "_dispatch", pause)
    job_id = center.submit(TOPIC, biz_id=1, delay=0.05)
    assert await gateway.pull([TOPIC], wait=3.0, ttr=30.0) == []
    assert center.catalog.paused
    row = pulled.row(job_id)
    assert (row.status, row.attempts) == (TaskStatus.PENDING, 0)
    if center.queues.present:
        await settled(pulled, {"store": 1})


@either
async def test_what_a_pull_was_given_when_its_call_is_broken_off_goes_to_the_next(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.create_task(gateway.pull([TOPIC], wait=60, ttr=600))
    progress = WaitingPull.progress

    def broken_off(pull: WaitingPull) -> None:
        progress(pull)
        if pull.done.done():
            asked.cancel()

    monkeypatch.setattr(WaitingPull, "progress", broken_off)
    job_id = pulled.center.submit(TOPIC, biz_id=1, delay=0.05)
    with pytest.raises(asyncio.CancelledError):
        await asked
    monkeypatch.undo()
    assert (await one(gateway)).task.job_id == job_id


async def test_a_pull_that_waits_gets_what_comes_into_slots_that_its_topic_did_not_have(
    system: System, unswept: Pulls
) -> None:
    call = asyncio.create_task(unswept.pull([TOPIC], wait=40))
    await entered(unswept, 1)
    system.center.store.topics.alter(TOPIC, slot_amount=64)
    topic = system.center.catalog.refresh()[TOPIC]
    biz_id = next(n for n in range(1000) if topic.slot(BizId.of(n).crc, 64).number >= 4)
    job_id = system.center.submit(TOPIC, biz_id=biz_id, delay=0.01)
    assert [one.task.job_id for one in await call] == [job_id]


async def test_a_gateway_that_could_not_start_all_threads_starts_the_others_with_the_next_pull(
    pulled: System, gateway: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads for one queue would take from it what the other has counted."""

    def refuse(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
        if thread.name == "toc-pull-watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = Counter(thread.name for thread in threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await one(gateway)
    job_id = pulled.center.submit(TOPIC, biz_id=1, delay=0.01)
    assert (await one(gateway)).task.job_id == job_id
    started = Counter(thread.name for thread in threading.enumerate()) - before
    assert {started[f"toc-pull-{name}"] for name in ("out-0", "take", "watch", "wake")} == {1}


def test_an_event_loop_that_ends_breaks_nothing() -> None:
    """The threads that tell its pulls end a little later."""

    async def enter() -> WaitingPulls:
        waiting = WaitingPulls(asyncio.get_running_loop())
        assert waiting.enter(WaitingPull([TOPIC], 1, 1000, hasty=False))
        return waiting

    asyncio.run(enter()).close_all()
