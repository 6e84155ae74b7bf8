"""Pull consumers on real servers: what is handed out, how that ends, and who dies in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from harness.system import System

from toc import CancelOutcome, NewTask, RescheduleOutcome, TaskStatus, Topic
from toc.dev.local.servers import RedisServer
from toc.index.messages import Peek
from toc.model.errors import InvalidLease, NotPulled
from toc.model.pull import LEASE_ENDED, AckOutcome, LeaseOutcome
from toc.model.topic import Backoff, Slot
from toc.pull.hall import Delivered
from toc.pull.pulls import Pulls

TOPIC = "test.pulled"


@pytest.fixture
def pulled(system: System) -> System:
    """One topic of two tries that is pulled, and nobody who sweeps."""
    topic = Topic(TOPIC, 9, 4, retries=2, backoff=Backoff.IMMEDIATE, delivery="pull", max_runtime=30)
    system.center.store.topics.create(topic)
    system.center.catalog.refresh()
    return system


@pytest.fixture
def gateway(pulled: System) -> Iterator[Pulls]:
    pulls = Pulls(pulled.center)
    yield pulls
    pulls.stop()


@pytest.fixture
def other(pulled: System) -> Iterator[Pulls]:
    pulls = Pulls(pulled.center)
    yield pulls
    pulls.stop()


def run(steps: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(steps())


async def one(gateway: Pulls, *, wait: float = 20.0, ttr: float = 30.0) -> Delivered:
    (delivered,) = await gateway.pull([TOPIC], wait=wait, ttr=ttr)
    return delivered


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
    until = time.monotonic() + 20
    while entries(system) != wanted and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert entries(system) == wanted


def test_a_task_is_pulled_when_it_is_due_and_ends_by_its_ack(pulled: System, gateway: Pulls) -> None:
    async def steps() -> None:
        job_id = pulled.center.submit(TOPIC, biz_id=1, delay=0.3, attribute={"a": 1})
        assert await gateway.pull([TOPIC]) == [], "not yet due"
        got = await one(gateway)
        now = datetime.now(UTC)
        assert (got.task.job_id, got.task.attribute, got.attempt, got.last) == (job_id, {"a": 1}, 1, False)
        assert got.task.action_time <= now < got.lease_until <= now + timedelta(seconds=30)
        await settled(pulled, {"store": 1})
        assert await gateway.pull([TOPIC]) == [], "somebody has it"
        assert pulled.center.cancel(job_id + 1) is CancelOutcome.UNKNOWN
        assert await gateway.ack([got.lease, got.lease]) == [AckOutcome.ACKED, AckOutcome.ALREADY]
        assert pulled.row(job_id).status == TaskStatus.PROCESSED
        await settled(pulled, {})

    run(steps)
