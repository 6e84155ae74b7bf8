"""Redis loses data under running workers: it is noticed, put back soonest first, and recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime

import pytest
from fault.kit.proxy import Proxy
from harness.system import DaemonProcess, System
from sqlalchemy.engine import make_url

from toc import NewTask
from toc.dev.local.servers import MariaDB, RedisServer
from toc.index.messages import Generation, Peek
from toc.model.clock import to_ms
from toc.model.topic import Slot
from toc.worker.stages.index_watch import FILLING


def slots(system: System) -> list[Slot]:
    return [slot for topic in system.center.store.topics.list() for slot in topic.slots()]


def marked(system: System) -> int:
    """How many slots are marked as being filled."""
    found = system.center.queues.generations(slots(system)).values()
    return sum(
        isinstance(one, Generation) and (one.recorded or "").startswith(f"{FILLING} ") for one in found
    )


def waiting(system: System, topic: str | None = None) -> int:
    """How many entries stand in StoreQueues, of one topic or of all."""
    some = [slot for slot in slots(system) if topic in (None, slot.topic)]
    peeks = system.center.queues.peek(some).values()
    return sum(peek.store for peek in peeks if isinstance(peek, Peek))


def claims(system: System) -> set[str]:
    found = system.center.queues.claims(slots(system)).values()
    return {worker for held in found if isinstance(held, dict) for worker in held.values()}


@pytest.fixture
def distant_mariadb(mariadb: MariaDB) -> Iterator[Proxy]:
    """A way to MariaDB that can be made slow."""
    with Proxy(mariadb.port) as proxy:
        yield proxy


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


def test_data_that_is_lost_again_while_it_is_put_back_is_put_back_again(
    running: System, clean_redis: RedisServer
) -> None:
    job_ids = running.center.submit_many([NewTask("test.sync", n, 600) for n in range(2000)])
    for _ in range(3):
        clean_redis.call("FLUSHALL")
        running.wait(lambda: marked(running) == len(slots(running)), "it is being put back", 10)
    running.wait(running.whole, "it is recorded", 20)
    assert waiting(running) == len(job_ids)


@pytest.mark.chaos
def test_a_loss_during_a_refill_is_seen_before_the_refill_ends(
    system: System, clean_redis: RedisServer, mariadb: MariaDB, distant_mariadb: Proxy
) -> None:
    """Nobody waits for the end of the first refill to begin the second one."""
    running, center, many = system, system.center, 40_000
    running.create_topics()
    url = make_url(mariadb.url).set(port=distant_mariadb.port).render_as_string(hide_password=False)
    running.start(env={"TOC_DATABASE_URLS": url})
    running.wait(running.whole, "the first generation is recorded", 15)
    center.submit_many([NewTask("test.sync", n, 600 + n / 100) for n in range(many)])
    center.submit_many([NewTask("test.async", n, 50 + n / 100) for n in range(500)])
    distant_mariadb.delay(0.05)  # and so long a refill takes: 40 pages a worker, four times its time between
    clean_redis.call("FLUSHALL")
    running.wait(lambda: waiting(running, "test.async") == 500, "what is due soon is back", 5)
    running.wait(lambda: marked(running) == len(slots(running)), "every slot is marked", 5)
    time.sleep(1.1)  # every worker has looked at one of them
    assert waiting(running, "test.sync") < many, "the first refill is under way"
    lost_again = time.time()
    clean_redis.call("FLUSHALL")
    running.wait(lambda: waiting(running, "test.async") == 500, "what is due soon is back again", 5)
    running.wait(lambda: max(losses(running)) > lost_again, "the second loss is seen", 5)
    running.wait(running.whole, "it is recorded", 60)
    assert waiting(running, "test.sync") == many
    seen = max(losses(running)) + 1  # by then; one worker's first refill may have come to its end before
    first = lost_again - 0.5  # the first ones began more than a second before; the log rounds
    overtaken = [(began, ended) for began, ended in refills(running) if began < first and ended > seen]
    assert not overtaken, "a refill that had begun before the second loss was given up for another one"


def test_a_thousand_new_slots_are_recorded_without_a_storm(system: System) -> None:
    system.create_topics(slots=256)
    system.center.submit_many([NewTask("test.sync", n, 600) for n in range(5000)])
    daemon = system.start()
    system.wait(system.whole, "all are recorded", 15)
    assert waiting(system) == 5000
    assert daemon.log.read_text().count("index_refilled") < 30, "a pass for each time that slots were taken"


def _lines(daemon: DaemonProcess, about: str) -> list[str]:
    return [line for line in daemon.log.read_text().splitlines() if about in line]


def losses(system: System) -> list[float]:
    """When workers saw that data had been lost."""
    lines = [json.loads(line) for daemon in system.daemons for line in _lines(daemon, '"index_lost_data"')]
    return [datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines]


def refills(system: System) -> list[tuple[float, float]]:
    """When each refill that came to its end began and ended, to a tenth of a second."""
    lines = [json.loads(line) for daemon in system.daemons for line in _lines(daemon, '"index_refilled"')]
    ends = [(datetime.fromisoformat(line["timestamp"]).timestamp(), line["seconds"]) for line in lines]
    return [(ended - seconds, ended) for ended, seconds in ends]


def test_the_due_time_of_a_flushed_task_is_kept(running: System, clean_redis: RedisServer) -> None:
    job_id = running.center.submit("test.sync", biz_id=1, delay=5)
    task = running.center.get(job_id)
    assert task is not None
    clean_redis.call("FLUSHALL")
    running.wait(lambda: bool(running.starts(job_id)), "it has run", 10)
    assert running.starts(job_id)[0].at / 1e6 >= to_ms(task.action_time)
