"""Fault 56: idle connections that a proxy forgot without a word; the time-outs of green sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from subprocess import PIPE
from zlib import crc32

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import tasks
from fault.kit.proxy import Proxy, through
from harness.system import System

from benchmarks.local import MariaDB, RedisServer
from toc import Settings, TimeoutCenter
from toc.index.messages import Peek
from toc.model.topic import Slot
from toc.store.servers.health import MAX_PATIENCE_SECONDS

IDLE = 2.2
"""Seconds, more than toc.store.servers.server.IDLE_SECONDS."""
GREEN = """
from gevent import monkey
monkey.patch_all()
import datetime, sys
import toc
center = toc.TimeoutCenter()
submit = lambda: center.submit("test.sync", biz_id=1, delay=datetime.timedelta(hours=1))
job_id = submit()
print("open", flush=True)
sys.stdin.readline()
if sys.argv[1] == "redis":
    assert submit() > job_id
else:
    try:
        center.get(job_id)
    except toc.Unavailable:
        pass
    else:
        sys.exit("it answered")
"""
"""A program whose sockets wait in greenlets. Line by line it meets a server that hangs."""


def relayed(system: System, database: Proxy, redis: Proxy) -> dict[str, str]:
    """The settings with which a program reaches both servers through the proxies."""
    url = through(database, system.settings.database_urls[0])
    return {"database_urls": url, "redis_url": f"redis://127.0.0.1:{redis.port}"}


def test_nothing_that_a_caller_sends_vanishes_in_a_connection_that_a_proxy_forgot(
    build: Build, clean_redis: RedisServer, relay: Callable[..., Proxy], mariadb: MariaDB, verdict: Verdict
) -> None:
    line = verdict(56, "idle connections forgotten", "SDK")
    database, redis = relay(mariadb.port), relay(clean_redis.port)
    system = build()
    # Who waits for an answer that does not come waits for longer than a test may take.
    ways = relayed(system, database, redis)
    center = TimeoutCenter(Settings(**{**system.settings.model_dump(), **ways, "read_timeout": 600.0}))

    def submit(n: int) -> int:
        return center.submit("test.sync", biz_id=n, slot_basis="1", delay=timedelta(minutes=1))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(submit, range(60)))
        time.sleep(IDLE + 0.8)
        forgotten = database.forget(), redis.forget()
        stored = list(threads.map(submit, range(60, 66)))
    line.prove(
        min(forgotten) > 1 and database.stats.vanished > 0 and redis.stats.vanished > 0,
        f"{forgotten[0]} connections to MySQL and {forgotten[1]} to Redis forgotten",
    )
    assert all(center.get(job_id) for job_id in stored)
    (peek,) = system.center.queues.peek([Slot("test.sync", crc32(b"1") % 8)]).values()
    assert isinstance(peek, Peek)
    assert peek.store == 66, "all are in the index, too"
    center.close()


def test_due_tasks_run_though_the_idle_connections_of_their_worker_were_forgotten(
    build: Build, clean_redis: RedisServer, relay: Callable[..., Proxy], mariadb: MariaDB, verdict: Verdict
) -> None:
    line = verdict(56, "idle connections forgotten", "worker")
    database, redis = relay(mariadb.port), relay(clean_redis.port)
    system = build()
    ways = relayed(system, database, redis)
    # Who waits for an answer that does not come waits for longer than a test may take.
    env = {"TOC_READ_TIMEOUT": "600", **{f"TOC_{name.upper()}": url for name, url in ways.items()}}
    daemon = system.start(env=env)
    first = system.client.submit_many(tasks(300, ahead=(0.5, 0.6)))
    system.wait(lambda: not system.pending(first), "the first have run", 60)
    time.sleep(IDLE + 0.8)
    forgotten = database.forget(IDLE), redis.forget(IDLE)
    second = system.client.submit_many(tasks(300, ahead=(0.5, 0.6)))
    system.wait(lambda: not system.pending(second), "the second have run", 60)
    line.prove(
        database.stats.vanished + redis.stats.vanished > 0,
        f"{forgotten[0]} connections to MySQL and {forgotten[1]} to Redis forgotten",
    )
    if line.slack < MAX_PATIENCE_SECONDS:  # else an answer may be late for another reason
        for trouble in ("database_away", "rows_not_read", "rows_not_written", "prepare_failed"):
            assert not daemon.events(trouble)
    line.judge(system, within=4)


@pytest.fixture
def halted(mariadb: MariaDB, clean_redis: RedisServer) -> Iterator[dict[str, MariaDB | RedisServer]]:
    """Both servers, which go on after the test whatever happens."""
    try:
        yield {"mysql": mariadb, "redis": clean_redis}
    finally:
        mariadb.resume()
        clean_redis.resume()


@pytest.mark.parametrize("name", ["mysql", "redis"])
def test_a_program_of_greenlets_does_not_wait_for_ever_for_a_server_that_hangs(
    build: Build, halted: dict[str, MariaDB | RedisServer], verdict: Verdict, name: str
) -> None:
    line = verdict(56, "green sockets", name)
    system = build(connect_timeout=1.0, read_timeout=1.0)
    program = [sys.executable, "-c", GREEN, name]
    with subprocess.Popen(program, env=system.env, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as green:
        assert green.stdout is not None
        line.prove(green.stdout.readline() == "open\n", "its connections are open")
        halted[name].pause()
        try:
            _, errors = green.communicate("\n", timeout=60)
        except subprocess.TimeoutExpired:
            green.kill()
            pytest.fail("not within 60 s: the call ends")
    assert green.returncode == 0, errors
