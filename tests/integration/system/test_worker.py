"""How worker processes treat handlers that take long, crash or never end, and how they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
from harness.hands import Hands
from harness.system import System
from sqlalchemy import create_engine

from toc import CancelOutcome, TaskStatus
from toc.coordination.coordinator import SlotState
from toc.coordination.operator import Operator
from toc.dev.local.servers import MariaDB, RedisServer
from toc.model.errors import WrongShardConnection


@pytest.mark.parametrize("topic", ["test.sync", "test.async"])
def test_a_handler_that_runs_past_prepare_timeout_is_kept_alive_and_not_doubled(
    system: System, topic: str
) -> None:
    system.create_topics(prepare_timeout=3)
    system.start(processes=2)
    job_id = system.center.submit(topic, biz_id=1, delay=0.1, attribute={"sleep": 5})
    system.wait(lambda: system.row(job_id).status == TaskStatus.PROCESSED, "it has ended", 15)
    assert len(system.starts(job_id)) == 1
    assert system.row(job_id).attempts == 0


def test_a_thread_past_max_runtime_fails_its_try_and_its_process_is_replaced(system: System) -> None:
    system.create_topics(max_runtime=2, backoff_base=0.1)
    daemon = system.start(processes=1)
    (before,) = daemon.workers()
    neighbour = system.center.submit("test.async", biz_id=1, delay=0.1)
    stuck = system.center.submit("test.sync", biz_id=2, delay=0.1, attribute={"sleep": 3.5})
    system.wait(lambda: system.row(stuck).attempts >= 1, "the try has failed", 10)
    assert "max_runtime" in (system.row(stuck).last_error or "")
    system.wait(lambda: daemon.workers() not in ([], [before]), "another process serves", 10)
    assert len(system.starts(neighbour)) == 1
    assert system.row(neighbour).status == TaskStatus.PROCESSED, "it ended long before its own max_runtime"


def test_a_coroutine_past_max_runtime_is_cancelled_and_its_process_lives(system: System) -> None:
    system.create_topics(max_runtime=1, retries=2, backoff_base=0.1)
    daemon = system.start(processes=1)
    before = daemon.workers()
    job_id = system.center.submit("test.async", biz_id=1, delay=0.1, attribute={"sleep": 60})
    system.wait(lambda: system.row(job_id).status == TaskStatus.DEAD, "both tries were cancelled", 15)
    assert daemon.workers() == before


def test_sigterm_finishes_what_runs_and_gives_back_what_waits_without_burning_retries(system: System) -> None:
    system.create_topics()
    daemon = system.start(processes=1, threads=2)
    center = system.center
    job_ids = [
        center.submit("test.sync", biz_id=n, delay=0.2 + n / 1000, attribute={"sleep": 1}) for n in range(20)
    ]
    system.wait(lambda: bool(system.history()), "the first has started", 5)
    daemon.terminate()
    assert daemon.process.wait(60) == 0, system.logs()
    started = {event.job_id for event in system.history()}
    assert 0 < len(started) < 20
    for job_id in job_ids:
        row = system.row(job_id)
        assert (row.attempts, row.crashes) == (0, 0)
        assert row.status == (TaskStatus.PROCESSED if job_id in started else TaskStatus.PENDING)
        slot = center.catalog.get("test.sync").slot(row.slot_crc)
        peek = center.queues.peek([slot])[slot]
        assert not isinstance(peek, Exception)
        assert peek.prepared == 0
    system.start("host-b")
    system.wait(lambda: not system.pending(job_ids), "the others have run", 20)
    starts = [event.job_id for event in system.history() if event.event == "start"]
    assert sorted(starts) == sorted(job_ids)


def test_a_second_sigterm_gives_back_what_runs_at_once(system: System) -> None:
    system.create_topics()
    daemon = system.start(processes=1)
    job_id = system.center.submit("test.sync", biz_id=1, delay=0.1, attribute={"sleep": 20})
    system.wait(lambda: bool(system.history()), "it has started", 5)
    daemon.terminate()
    system.wait(lambda: "daemon_stopping" in daemon.log.read_text(), "it is stopping", 5)
    daemon.terminate()
    daemon.process.wait(60)
    row = system.row(job_id)
    assert (row.status, row.attempts, row.crashes) == (TaskStatus.PENDING, 0, 0)
    slot = system.center.catalog.get("test.sync").slot(row.slot_crc)
    peek = system.center.queues.peek([slot])[slot]
    assert not isinstance(peek, Exception)
    assert (peek.store, peek.prepared) == (1, 0)


def test_worker_processes_work_on_for_a_while_when_their_daemon_is_killed_and_then_leave(
    system: System,
) -> None:
    system.create_topics()
    daemon = system.start(processes=2)
    workers = daemon.workers()
    first = system.center.submit("test.sync", biz_id=1, delay=0.1)
    system.wait(lambda: system.row(first).status == TaskStatus.PROCESSED, "the slots are taken", 5)
    os.kill(daemon.process.pid, signal.SIGKILL)
    daemon.process.wait()
    job_id = system.center.submit("test.sync", biz_id=1, delay=1)
    system.wait(lambda: system.row(job_id).status == TaskStatus.PROCESSED, "it has run", 5)
    system.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "they are gone", 20)


def test_an_idle_daemon_costs_next_to_no_cpu(cluster: System) -> None:
    cluster.create_topics(slots=256)
    daemon = cluster.start(processes=2)
    center = cluster.center
    job_id = center.submit("test.sync", biz_id=1, delay=3)  # until then the first sweep has ended
    cluster.wait(lambda: cluster.row(job_id).status == TaskStatus.PROCESSED, "it has run", 10)
    settings = cluster.settings
    with Operator(settings.zookeeper or "", cluster=settings.cluster) as operator:
        cluster.wait(
            lambda: {row.state for row in operator.slots()} == {SlotState.OWNED}, "all are claimed", 20
        )
    pids = [daemon.process.pid, *daemon.workers()]
    before, began = sum(map(_cpu_seconds, pids)), time.monotonic()
    time.sleep(3)  # what is measured
    share = (sum(map(_cpu_seconds, pids)) - before) / (time.monotonic() - began)
    assert share < 0.1, f"{share} of a core"


def test_a_paused_topic_waits_and_runs_when_it_is_resumed(system: System) -> None:
    system.create_topics()
    system.start()
    topics = system.center.store.topics
    topics.alter("test.sync", paused=True)
    for _ in range(30):  # until the process that has the slot has read the topics
        job_id = system.center.submit("test.sync", biz_id=1, delay=0.1)
        other = system.center.submit("test.batch", biz_id=1, delay=1.0)
        system.wait(lambda: system.row(other).status == TaskStatus.PROCESSED, "the other topic goes on", 5)  # noqa: B023
        if not system.starts(job_id):
            break
    assert not system.starts(job_id)
    topics.alter("test.sync", paused=False)
    system.wait(lambda: system.row(job_id).status == TaskStatus.PROCESSED, "it runs now", 8)


def test_submits_while_redis_is_down_are_acknowledged_and_run_when_it_is_back(
    system: System, clean_redis: RedisServer
) -> None:
    system.create_topics()
    system.start()
    clean_redis.kill()
    try:
        # Cancelled before anything of it can run; the last of the others is due after it would have been.
        cancelled = system.center.submit("test.sync", biz_id=50, delay=3)
        assert system.center.cancel(cancelled) is not CancelOutcome.UNKNOWN
        job_ids = [system.center.submit("test.sync", biz_id=n, delay=0.5 + n / 15) for n in range(50)]
    finally:
        clean_redis.start()
    system.wait(lambda: not system.pending(job_ids), "all have run", 20)
    started = [event.job_id for event in system.history() if event.event == "start"]
    assert sorted(started) == sorted(job_ids)


def test_a_task_written_in_the_callers_transaction_runs_after_its_commit(
    system: System, mariadb: MariaDB
) -> None:
    system.create_topics()
    system.start()
    engine = create_engine(mariadb.url)
    with engine.connect() as connection:
        rolled_back = system.center.submit("test.sync", biz_id=1, delay=1.0, connection=connection)
        connection.rollback()
        with connection.begin():
            committed = system.center.submit(
                "test.sync", biz_id=2, delay=timedelta(seconds=1), connection=connection
            )
    engine.dispose()
    system.wait(lambda: system.row(committed).status == TaskStatus.PROCESSED, "it has run", 6)
    assert system.center.get(rolled_back) is None


def test_a_connection_to_another_server_is_refused(system: System) -> None:
    system.create_topics()
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(WrongShardConnection):
        system.center.submit("test.sync", biz_id=1, delay=1.0, connection=connection)
    engine.dispose()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_who_finds_that_a_process_must_be_replaced_does_not_mind_a_main_thread_that_is_busy(
    hands: tuple[Hands, Hands],
) -> None:
    """It has not read its wake-ups for long."""
    worker, _ = hands
    with contextlib.suppress(BlockingIOError):
        while True:
            worker.worker._wake_sender.send(b"\0" * 4096)
    worker.worker._recycle("as the test wants")
