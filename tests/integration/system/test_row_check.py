"""What a worker takes, and what it finds in the row before a handler starts."""

from __future__ import annotations

import time

from harness.system import System
from sqlalchemy import create_engine, text

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, TaskStatus
from toc.model.sharding import table_of_job

MOVED_MS = 3000


def test_an_action_time_that_was_moved_in_the_table_itself_is_kept(system: System, mariadb: MariaDB) -> None:
    """By whomever: the row decides, whatever its next_time and the index say."""
    system.create_topics()
    center = system.center
    job_id = center.submit("test.sync", biz_id=1, delay=0.5)
    settings = system.settings
    table = table_of_job(job_id, settings.tables)
    place = f"{settings.database_prefix}{table % settings.databases}.timeout_task_{table:04d}"
    engine = create_engine(mariadb.url)
    with engine.begin() as connection:
        moved = f"UPDATE {place} SET action_time = action_time + INTERVAL {MOVED_MS} * 1000 MICROSECOND"
        assert connection.execute(text(moved)).rowcount == 1
    engine.dispose()
    system.start()
    system.wait(lambda: bool(system.starts(job_id)), "it has run", 30)
    assert system.starts(job_id)[0].at / 1e6 >= center.store.read([job_id])[job_id].action_time
    system.wait(lambda: center.store.read([job_id])[job_id].status == TaskStatus.PROCESSED, "it is done", 10)
    assert len(system.starts(job_id)) == 1


def test_a_worker_whose_handlers_are_all_busy_does_not_ask_for_more(
    system: System, clean_redis: RedisServer
) -> None:
    """It is told when there is room; until then a slot that is known to be full is left alone."""
    system.create_topics(slots=1, concurrency=1)
    system.start(processes=1)
    enough = system.directory / "enough"
    tasks = [NewTask("test.sync", n, 0.5, attribute={"until": str(enough)}) for n in range(200)]
    system.center.submit_many(tasks)
    system.wait(lambda: bool(system.history()), "the first runs", 30)
    asked = []
    for _ in range(5):  # the first of them may count what was asked before it ran
        before = _scripts_run(clean_redis)
        time.sleep(0.5)
        asked.append(_scripts_run(clean_redis) - before)
    assert len(system.history()) == 1, "it runs all the time"
    enough.touch()
    assert asked[-1] < 100, asked


def _scripts_run(server: RedisServer) -> int:
    reply = server.call("INFO", "commandstats")
    lines = reply.decode().splitlines() if isinstance(reply, bytes) else str(reply).splitlines()
    return sum(
        int(line.partition("calls=")[2].partition(",")[0])
        for line in lines
        if line.startswith("cmdstat_evalsha:")
    )
