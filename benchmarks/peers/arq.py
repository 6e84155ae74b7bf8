"""arq on Redis: each worker polls a sorted set."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import arq
from arq.connections import RedisSettings

from benchmarks.peer import NS
from benchmarks.peers.loops import AsyncPeer
from benchmarks.record import started

QUIET = {"version": 1, "loggers": {"arq": {"level": "ERROR"}}}
SERVER = RedisSettings.from_dsn(os.environ["BENCH_REDIS"])


async def start(_context: dict[Any, Any], number: int) -> None:
    started(number)


class WorkerSettings:
    functions = (start,)
    redis_settings = SERVER
    max_jobs = 100
    poll_delay = 0.005
    keep_result = 0
    log_results = False


class Arq(AsyncPeer):
    def __init__(self) -> None:
        super().__init__()
        self._redis = self.runner.run(arq.create_pool(SERVER))

    def version(self) -> str:
        return f"arq {version('arq')}"

    def commands(self, processes: int) -> list[list[str]]:
        worker = [sys.executable, "-m", "arq", "benchmarks.peers.arq.WorkerSettings"]
        worker += ["--custom-log-dict", "benchmarks.peers.arq.QUIET"]
        return [worker for _ in range(processes)]

    async def store(self, number: int, due: int) -> None:
        await self._redis.enqueue_job("start", number, _defer_until=datetime.fromtimestamp(due / NS, UTC))

    def pending(self) -> int:
        return int(self.runner.run(self._redis.zcard("arq:queue")))

    def close(self) -> None:
        self.runner.run(self._redis.aclose())
        super().close()


PEER = Arq
