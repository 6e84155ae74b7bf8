"""What a worker takes, and what it finds in the row before a handler starts."""

from __future__ import annotations

import time

from harness.system import System

from benchmarks.local import RedisServer
from toc import NewTask


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
