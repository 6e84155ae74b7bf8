"""taskiq on Redis: each second a scheduler process reads schedules and sends due tasks to the workers."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from importlib.metadata import version

import redis
import taskiq
import taskiq_redis

from benchmarks.peer import NS
from benchmarks.peers.loops import AsyncPeer
from benchmarks.record import started

URL = os.environ["BENCH_REDIS"]
broker = taskiq_redis.RedisStreamBroker(URL)
source = taskiq_redis.ListRedisScheduleSource(URL, buffer_size=500)
scheduler = taskiq.TaskiqScheduler(broker, [source])


async def _start(number: int) -> None:
    started(number)


start = broker.task(task_name="start")(_start)


class Taskiq(AsyncPeer):
    def __init__(self) -> None:
        super().__init__()
        self._redis = redis.Redis.from_url(URL)

    def version(self) -> str:
        return f"taskiq {version('taskiq')}, taskiq-redis {version('taskiq-redis')}"

    def commands(self, processes: int) -> list[list[str]]:
        cli, app = [sys.executable, "-m", "taskiq"], "benchmarks.peers.taskiq"
        quiet = ["--log-level", "ERROR"]
        intervals = ["--update-interval", "1", "--loop-interval", "1"]
        return [
            [*cli, "scheduler", f"{app}:scheduler", *intervals, *quiet],
            [*cli, "worker", f"{app}:broker", "--workers", str(processes), *quiet],
        ]

    async def store(self, number: int, due: int) -> None:
        await start.kicker().schedule_by_time(source, datetime.fromtimestamp(due / NS, UTC), number)

    def pending(self) -> int:
        waiting = sum(1 for _ in self._redis.scan_iter("schedule:data:*", count=1000))
        groups = self._redis.xinfo_groups("taskiq") if self._redis.exists("taskiq") else []
        return waiting + sum(int(group["pending"]) + int(group["lag"] or 0) for group in groups)

    def close(self) -> None:
        self._redis.close()
        super().close()


PEER = Taskiq
