"""Redis loses data under running workers: it is noticed, put back soonest first, and recorded."""

from __future__ import annotations

import pytest
from harness.system import DaemonProcess, System

from benchmarks.local import RedisServer
from toc import NewTask
from toc.model.clock import to_ms
from toc.model.topic import Slot


def slots(system: System) -> list[Slot]:
    return [slot for topic in system.center.store.topics.list() for slot in topic.slots()]


def claims(system: System) -> set[str]:
    found = system.center.queues.claims(slots(system)).values()
    return {worker for held in found if isinstance(held, dict) for worker in held.values()}


@pytest.fixture
def running(system: System) -> System:
    """Two processes; their index is recorded as whole."""
    system.create_topics()
    system.start()
    system.wait(system.whole, "the first generation is recorded", 15)
    return system


def test_the_keys_of_one_slot_that_vanish_are_noticed_by_its_owner(
    running: System, clean_redis: RedisServer
) -> None:
    running.center.submit_many([NewTask("test.sync", n, 600) for n in range(500)])
    keys = running.center.queues.keys(Slot("test.sync", 3))
    held = claims(running)
    clean_redis.call("DEL", keys.store, keys.generation, keys.claims)
    (daemon,) = running.daemons
    running.wait(lambda: bool(_lines(daemon, "index_lost_data")), "it is noticed", 5)
    running.wait(running.whole, "it is recorded again", 15)
    assert claims(running) == held


def _lines(daemon: DaemonProcess, about: str) -> list[str]:
    return [line for line in daemon.log.read_text().splitlines() if about in line]


def test_the_due_time_of_a_flushed_task_is_kept(running: System, clean_redis: RedisServer) -> None:
    job_id = running.center.submit("test.sync", biz_id=1, delay=5)
    task = running.center.get(job_id)
    assert task is not None
    clean_redis.call("FLUSHALL")
    running.wait(lambda: bool(running.starts(job_id)), "it has run", 10)
    assert running.starts(job_id)[0].at / 1e6 >= to_ms(task.action_time)
