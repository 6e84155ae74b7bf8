"""Life without Redis, or without what it held: due tasks go on, none runs twice,
the way back is found by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.metrics import ANY_ADDRESS, samples
from harness.rows import known
from harness.system import DaemonProcess, System

from benchmarks.local import RedisServer
from toc import NewTask, TaskStatus
from toc.model.clock import to_ms
from toc.model.topic import Slot
from toc.operate import doctor

# Life without Redis: due tasks go on, none runs twice, and the way back is found by itself.


@pytest.fixture
def running(system: System) -> System:
    system.create_topics(prepare_timeout=3, backoff_base=0.1)
    system.start(env=ANY_ADDRESS)
    warm = system.center.submit("test.sync", biz_id=1, delay=0.1)
    system.wait(lambda: system.row(warm).status == TaskStatus.PROCESSED, "slots are taken", 10)
    return system


@contextmanager
def outage(redis: RedisServer) -> Iterator[None]:
    redis.kill()
    try:
        yield
    finally:
        redis.start()


@pytest.mark.slow
def test_what_ran_when_redis_vanished_is_written_once(running: System, clean_redis: RedisServer) -> None:
    center = running.center
    job_ids = [center.submit("test.sync", biz_id=n, delay=0.05, attribute={"sleep": 4}) for n in range(4)]
    running.wait(lambda: len(running.history()) >= 5, "they run", 5)
    with outage(clean_redis):
        running.wait(lambda: not running.pending(job_ids), "they have ended", 15)
    running.wait(lambda: _index_empty(running), "their entries are gone", 15)
    assert running.not_run_once(job_ids) == {}


@pytest.mark.slow
def test_a_long_try_that_began_without_redis_goes_on_after(running: System, clean_redis: RedisServer) -> None:
    center = running.center
    job_id = center.submit("test.sync", biz_id=1, delay=2, attribute={"sleep": 8})
    with outage(clean_redis):
        running.wait(lambda: bool(running.starts(job_id)), "it has begun", 10)
    running.wait(lambda: running.row(job_id).status == TaskStatus.PROCESSED, "it has ended", 20)
    running.wait(lambda: _index_empty(running), "its entry is gone", 15)
    assert len(running.starts(job_id)) == 1
    assert running.row(job_id).crashes == 0


@pytest.mark.slow
def test_an_empty_redis_after_an_outage_runs_nothing_twice(running: System, clean_redis: RedisServer) -> None:
    center = running.center
    job_ids = center.submit_many(
        [NewTask("test.sync", n, 1.5, attribute={"sleep": n % 4}) for n in range(24)]
    )
    later = center.submit("test.sync", biz_id=99, delay=9)
    with outage(clean_redis):
        running.wait(lambda: len(running.history()) > 20, "some run", 15)
        for path in (clean_redis.directory / "appendonlydir").iterdir():
            path.unlink()
    running.wait(lambda: not running.pending([*job_ids, later]), "all have ended", 40)
    assert running.not_run_once([*job_ids, later]) == {}


@pytest.mark.slow
def test_the_dead_of_an_outage_are_listed_after_it(running: System, clean_redis: RedisServer) -> None:
    with outage(clean_redis):
        doomed = running.center.submit("test.sync", biz_id=2, delay=0.5, attribute={"dead": True})
        running.wait(lambda: running.row(doomed).status == TaskStatus.DEAD, "it is dead", 15)
    running.wait(lambda: _dead(running) == 1, "the dead one is listed", 90)
    assert len(running.starts(doomed)) == 1


def test_a_worker_that_dies_without_redis_has_its_tries_run_again_at_once(
    running: System, clean_redis: RedisServer
) -> None:
    center = running.center
    with outage(clean_redis):
        job_id = center.submit("test.sync", biz_id=1, delay=0.5, attribute={"die": 1})
        running.wait(lambda: running.row(job_id).status == TaskStatus.PROCESSED, "it ran again", 20)
        first, second = running.starts(job_id)
        assert (first.attempt, second.attempt) == (1, 2)
        assert running.row(job_id).crashes == 1
        assert [line for line in doctor.examine(center) if "slots are out of reach" in line.what]
        running.wait(lambda: _sample(running, "toc_slots_without_redis") > 0, "the metrics tell", 5)
    running.wait(lambda: _sample(running, "toc_slots_without_redis") == 0, "it is over", 15)


@pytest.mark.slow
def test_a_daemon_stops_in_order_without_redis(running: System, clean_redis: RedisServer) -> None:
    daemon = running.daemons[0]
    with outage(clean_redis):
        job_ids = [
            running.center.submit("test.sync", biz_id=n, delay=0.5, attribute={"sleep": 1}) for n in range(40)
        ]
        running.wait(lambda: len(running.history()) > 6, "some run", 10)
        daemon.terminate()
        running.wait(lambda: daemon.process.poll() is not None, "it has stopped", 60)
        rows = [running.row(job_id) for job_id in job_ids]
        assert {(row.attempts, row.crashes) for row in rows} == {(0, 0)}
    running.start("host-b")
    running.wait(lambda: not running.pending(job_ids), "the others have run", 30)
    assert running.not_run_once(job_ids) == {}


def _sample(system: System, name: str) -> float:
    """What the first daemon shows of one series."""
    return samples(system.daemons[0].told()).get(name, 0.0)


def _index_empty(system: System) -> bool:
    peeks = system.peeks()
    return bool(peeks) and not any(peek.store + peek.prepared for peek in peeks)


def _dead(system: System) -> int:
    return sum(peek.dead for peek in system.peeks())


# Redis loses data under running workers: it is noticed, put back soonest first, and recorded.


def claims(system: System) -> set[str]:
    found = system.center.queues.claims(system.slots()).values()
    return {worker for held in found if isinstance(held, dict) for worker in held.values()}


@pytest.fixture
def recorded(system: System) -> System:
    """Two processes; their index is recorded as whole."""
    system.create_topics()
    system.start()
    system.wait(system.whole, "the first generation is recorded", 15)
    return system


def test_vanished_keys_of_a_slot_are_noticed_by_its_owner(recorded: System, clean_redis: RedisServer) -> None:
    recorded.center.submit_many([NewTask("test.sync", n, 600) for n in range(500)])
    keys = recorded.center.queues.keys(Slot("test.sync", 3))
    held = claims(recorded)
    clean_redis.call("DEL", keys.store, keys.generation, keys.claims)
    (daemon,) = recorded.daemons
    recorded.wait(lambda: bool(_lines(daemon, "index_lost_data")), "it is noticed", 5)
    recorded.wait(recorded.whole, "it is recorded again", 15)
    assert claims(recorded) == held


def _lines(daemon: DaemonProcess, about: str) -> list[str]:
    return [line for line in daemon.log.read_text().splitlines() if about in line]


def test_the_due_time_of_a_flushed_task_is_kept(recorded: System, clean_redis: RedisServer) -> None:
    job_id = recorded.center.submit("test.sync", biz_id=1, delay=5)
    task = known(recorded.center.get(job_id))
    clean_redis.call("FLUSHALL")
    recorded.wait(lambda: bool(recorded.starts(job_id)), "it has run", 10)
    assert recorded.starts(job_id)[0].at / 1e6 >= to_ms(task.action_time)
