"""SAQ on Redis: each second one of the workers moves the tasks that are due."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

import saq

from benchmarks.peer import NS
from benchmarks.peers.loops import AsyncPeer
from benchmarks.record import started

queue = saq.Queue.from_url(os.environ["BENCH_REDIS"], name="bench")


async def start(_context: dict[str, Any], *, number: int) -> None:
    started(number)


settings = {
    "queue": queue,
    "functions": [("start", start)],
    "concurrency": 100,
    "timers": {"schedule": 1, "sweep": 1},
}


class Saq(AsyncPeer):
    def version(self) -> str:
        return f"SAQ {version('saq')}"

    def commands(self, processes: int) -> list[list[str]]:
        worker = [sys.executable, "-m", "saq", "benchmarks.peers.saq.settings", "--quiet"]
        return [worker for _ in range(processes)]

    async def store(self, number: int, due: int) -> None:
        # scheduled is in whole seconds; rounded up, because a task must not run early
        await queue.enqueue("start", number=number, scheduled=-(-due // NS), ttl=-1, retries=3)

    def pending(self) -> int:
        return int(self.runner.run(queue.count("incomplete")))

    def close(self) -> None:
        self.runner.run(queue.disconnect())
        super().close()


PEER = Saq
