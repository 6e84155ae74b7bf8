"""Pulls where something fails to tell them: a Redis that stands still or is away, messages that are lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest
from harness.pulls import Run, opened_pulls
from harness.system import System

from benchmarks.local import RedisServer
from toc import NewTask, Topic
from toc.model.pull import AckOutcome
from toc.model.sharding import BizId
from toc.model.topic import Delivery
from toc.pull.handed_out import HandedOut
from toc.pull.pulls import Pulls
from toc.pull.waiting_pulls import WaitingPull, WaitingPulls

TOPIC, OTHER = "test.pulled", "test.other"
LONG = 60.0
"""Seconds: longer than any limit here, and than any machine is slow."""


@pytest.fixture
def gateway(runner: asyncio.Runner, system: System) -> Iterator[Pulls]:
    """Two topics that are pulled, and nobody who sweeps."""
    for number, name in enumerate((TOPIC, OTHER)):
        topic = Topic(name, 9 + number, 4, retries=2, delivery=Delivery.PULL, max_runtime=120)
        system.center.store.topics.create(topic)
    system.center.catalog.refresh()
    with opened_pulls(runner, system.center) as pulls:
        yield pulls


async def entered(gateway: Pulls, count: int) -> None:
    async with asyncio.timeout(60):
        while len(set().union(*gateway._waiting._queues.values())) < count:
            await asyncio.sleep(0.01)


def test_a_redis_that_stands_still_holds_up_neither_pulls_nor_acks(
    system: System, gateway: Pulls, clean_redis: RedisServer, run: Run
) -> None:
    """For longer than its replies are waited for, once."""

    async def steps() -> None:
        system.center.submit_many([NewTask(TOPIC, n, 0.01) for n in range(2)])
        held = [task for _ in range(2) for task in await gateway.pull([TOPIC], wait=LONG, ttr=LONG)]
        later = system.center.submit_many([NewTask(TOPIC, n, 2) for n in range(8)])
        call = asyncio.create_task(gateway.pull([TOPIC], most=8, wait=LONG, ttr=LONG))
        await entered(gateway, 1)
        clean_redis.pause()
        try:
            async with asyncio.timeout(LONG):
                got = await call
                while len(got) < len(later):
                    got += await gateway.pull([TOPIC], most=8, wait=LONG, ttr=LONG)
                for one in held + got:
                    assert await gateway.ack([one.lease]) == [AckOutcome.ACKED]
        finally:
            clean_redis.resume()
        assert sorted(one.task.job_id for one in got) == sorted(later)
        last = system.center.submit(TOPIC, biz_id=1, delay=0.01)
        assert [one.task.job_id for one in await gateway.pull([TOPIC], wait=LONG)] == [last]

    run(steps)


def test_without_redis_no_topic_waits_behind_the_many_rows_of_another(
    system: System, gateway: Pulls, clean_redis: RedisServer, run: Run
) -> None:
    async def steps() -> None:
        clean_redis.kill()
        system.center.submit_many([NewTask(TOPIC, n, 0.1) for n in range(4000)])
        late = system.center.submit(OTHER, biz_id=1, delay=0.1)
        ended = asyncio.Event()

        async def slowly() -> int:
            count = 0
            while not ended.is_set():
                count += len(await gateway.pull([TOPIC], wait=1))
            return count

        slow = asyncio.create_task(slowly())
        try:
            got = await gateway.pull([OTHER], wait=40)
        finally:
            ended.set()
            count = await slow
            clean_redis.start()
        assert [one.task.job_id for one in got] == [late]
        assert 0 < count < 4000, "they were many, and have not been starved either"

    run(steps)


def test_a_consumer_that_never_waits_gets_what_no_message_told_of(
    system: System, gateway: Pulls, run: Run
) -> None:
    async def steps() -> None:
        assert await gateway.pull([TOPIC]) == []
        taker = gateway._taker
        taker._listener.stop()
        taker._listens.join(60)
        taker._watch_loop.stop(30)
        job_id = system.center.submit(TOPIC, biz_id=1, delay=0.01)
        got: list[HandedOut] = []
        async with asyncio.timeout(60):
            while not got:
                got = await gateway.pull([TOPIC])
                taker.watch()  # it hardly ever runs just while such a pull is there
                await asyncio.sleep(0.01)
        assert got[0].task.job_id == job_id

    run(steps)


def test_a_pull_that_waits_gets_what_comes_into_slots_that_its_topic_did_not_have(
    system: System, gateway: Pulls, run: Run
) -> None:
    async def steps() -> None:
        call = asyncio.create_task(gateway.pull([TOPIC], wait=40))
        await entered(gateway, 1)
        system.center.store.topics.alter(TOPIC, slot_amount=64)
        topic = system.center.catalog.refresh()[TOPIC]
        biz_id = next(n for n in range(1000) if topic.slot(BizId.of(n).crc, 64).number >= 4)
        job_id = system.center.submit(TOPIC, biz_id=biz_id, delay=0.01)
        assert [one.task.job_id for one in await call] == [job_id]

    run(steps)


def test_an_event_loop_that_ends_breaks_nothing() -> None:
    """The threads that tell its pulls end a little later."""

    async def enter() -> WaitingPulls:
        waiting = WaitingPulls(asyncio.get_running_loop())
        assert waiting.enter(WaitingPull([TOPIC], 1, 1000, hasty=False))
        return waiting

    asyncio.run(enter()).close_all()


TOPICS = 12
ROUNDS = 40


@pytest.mark.timeout(600)
def test_no_wake_up_is_lost_among_many_pulls(system: System) -> None:
    """Two processes' pulls come and go on shared topics, while others wait alone for one task each."""
    crowd(system, TOPICS, ROUNDS)


def crowd(system: System, topics: int, rounds: int) -> int:
    """Run ``rounds`` for each topic; return how many tasks were handed out. Half of the topics are shared."""
    center = system.center
    names = [f"test.crowd{number}" for number in range(topics)]
    for number, name in enumerate(names):
        center.store.topics.create(Topic(name, 30 + number, 4, delivery=Delivery.PULL, max_runtime=120))
    center.catalog.refresh()
    shared, lonely = names[: topics // 2], names[topics // 2 :]
    dice = random.Random(1)
    submitted: set[int] = set()
    got: list[int] = []
    done = threading.Event()

    def submit(name: str, count: int) -> list[int]:
        job_ids = center.submit_many(
            [NewTask(name, dice.randrange(10**6), 0.01 + dice.random() / 5) for _ in range(count)]
        )
        submitted.update(job_ids)
        return job_ids

    async def settle(pulls: Pulls, some: list[HandedOut]) -> None:
        got.extend(one.task.job_id for one in some)
        assert set(await pulls.ack([one.lease for one in some])) <= {AckOutcome.ACKED}

    async def come_and_go(pulls: Pulls) -> None:
        while not done.is_set() or not submitted <= set(got):
            some = await pulls.pull(
                dice.sample(shared, dice.randint(1, 3)),
                most=dice.choice((1, 1, 5, 100)),
                wait=dice.choice((0, 0.01, 0.1, 0.5)),
                ttr=LONG,
            )
            await settle(pulls, some)
            await asyncio.sleep(dice.random() / 50)

    async def wait_alone(pulls: Pulls, name: str) -> None:
        for _ in range(rounds):
            call = asyncio.create_task(pulls.pull([name], wait=LONG, ttr=LONG))
            await asyncio.sleep(dice.random() / 20)
            (job_id,) = await asyncio.to_thread(submit, name, 1)
            some = await call
            assert [one.task.job_id for one in some] == [job_id]
            await settle(pulls, some)

    async def feed() -> None:
        for _ in range(rounds):
            for name in shared:
                await asyncio.to_thread(submit, name, dice.randint(1, 3))
            await asyncio.sleep(dice.random() / 10)

    async def steps() -> None:
        secret = center.store.identity.lease_secret()
        first, second = gateways = Pulls(center, secret), Pulls(center, secret)
        guests = [asyncio.create_task(come_and_go(pulls)) for pulls in (first, second) for _ in range(6)]
        waiting = [wait_alone(dice.choice((first, second)), name) for name in lonely]
        await asyncio.gather(feed(), *waiting)
        done.set()
        async with asyncio.timeout(LONG):
            await asyncio.gather(*guests)
        for pulls in gateways:
            await pulls.stop()

    asyncio.run(steps())
    assert sorted(got) == sorted(submitted), "each once"
    return len(got)
