"""The index comes back from the table: after FLUSHALL, after a kill -9, with a namespace."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.system import Contract

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask


@pytest.fixture
def named(tmp_path: Path, mariadb: MariaDB, database_prefix: str) -> Iterator[Contract]:
    """A system with a namespace, without a worker."""
    with RedisServer(tmp_path / "redis") as own:
        one = Contract(tmp_path, own, mariadb, database_prefix, namespace="green")
        try:
            one.create_topics()
            yield one
        finally:
            one.stop()


def test_every_key_carries_the_namespace_inside_the_hash_tag(named: Contract) -> None:
    named.start()
    running = named.center.submit("c.plain", biz_id=1, delay=0.05, attribute={"gate": "open"})
    named.wait(lambda: named.history(running), "it runs")
    slot = f"green:c.plain_{zlib.crc32(b'1') % 4}"
    assert list(named.scores(running)) == [f"prepare_{{{slot}}}"]
    named.open_gate("open")
    dead = named.center.submit("c.once", biz_id=1, delay=0.05, attribute={"raise": "error"})
    named.wait(lambda: list(named.scores(dead)) == ["dead_{green:c.once_0}"], "it is dead")
    assert all("green:" in key for key in named.redis.scan_iter("*"))


def test_after_flushall_what_is_due_runs_and_every_dead_task_is_listed_again(named: Contract) -> None:
    dead = named.center.submit_many([NewTask("c.once", n, delay=3600) for n in range(1300)])
    for n in range(8):
        named.query(
            f"UPDATE `{named.prefix}{n % 2}`.`timeout_task_{n:04d}` SET status = 4, attempts = 1, "
            f"last_error = 'x', next_time = UTC_TIMESTAMP(3), gmt_modified = UTC_TIMESTAMP(3) "
            f"WHERE biz_type = 4"
        )
    waiting = named.center.submit_many([NewTask("c.plain", n, delay=8) for n in range(100)])
    far = named.center.submit("c.plain", biz_id=1, delay=3600)
    named.redis.flushall()
    named.start()
    named.wait(lambda: all(named.status(job_id) == 2 for job_id in waiting), "all have run")
    assert sorted(start["job_id"] for start in named.history()) == sorted(waiting)
    named.wait(lambda: named.scores(far), "one due in an hour is back too")
    named.wait(
        lambda: named.redis.zcard("dead_{green:c.once_0}") == len(dead), "all dead tasks are listed", 150
    )
    assert named.redis.zcard("green:c.once_0") == 0


def test_redis_that_restarts_empty_under_a_running_worker_loses_nothing(named: Contract) -> None:
    named.start()
    failing = named.center.submit(
        "c.plain", biz_id=5, delay=0.05, attribute={"raise": "retry", "after": 5, "times": 1}
    )
    named.wait(lambda: named.row(failing)["attempts"] == 1, "it failed once")
    job_ids = named.center.submit_many([NewTask("c.plain", n, delay=5) for n in range(300)])
    named.redis.flushall()
    assert len(named.history()) == 1, "the loss came too late: what runs at that instant may run twice"
    named.wait(lambda: all(named.status(job_id) == 2 for job_id in [*job_ids, failing]), "all ran")
    starts = [start["job_id"] for start in named.history()]
    assert len(starts) == len(set(starts)) + 1
    assert [start["attempt"] for start in named.history(failing)] == [1, 2]
