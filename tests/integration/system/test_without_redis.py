"""Life without Redis, or without what it held: due tasks go on, none runs twice,
the way back is found by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.metrics import ANY_ADDRESS, samples
from harness.system import System

from benchmarks.local import RedisServer
from toc import TaskStatus
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
def test_what_runs_begins_or_dies_while_redis_is_away_is_written_once(
    running: System, clean_redis: RedisServer
) -> None:
    center = running.center
    job_ids = [center.submit("test.sync", biz_id=n, delay=0.05, attribute={"sleep": 4}) for n in range(4)]
    long = center.submit("test.sync", biz_id=5, delay=2, attribute={"sleep": 8})
    running.wait(lambda: len(running.history()) >= 5, "they run", 5)
    with outage(clean_redis):
        doomed = center.submit("test.sync", biz_id=2, delay=0.5, attribute={"dead": True})
        running.wait(lambda: bool(running.starts(long)), "the long one has begun", 10)
        running.wait(lambda: not running.pending([*job_ids, doomed]), "the others have ended", 15)
    running.wait(lambda: not running.pending([long]), "it has ended, with Redis", 20)
    running.wait(lambda: _index_empty(running), "their entries are gone", 15)
    assert running.not_run_once([*job_ids, long]) == {}
    assert (running.row(long).crashes, running.row(doomed).status) == (0, TaskStatus.DEAD)
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
        assert any(line.part == "redis" for line in doctor.problems(doctor.examine(center)))
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
