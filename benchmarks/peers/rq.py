"""RQ on Redis: each second a scheduler beside the workers moves the tasks that are due."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import redis
import rq
from rq.registry import ScheduledJobRegistry, StartedJobRegistry

from benchmarks.peer import NS, Peer
from benchmarks.record import started

RETRY = rq.Retry(max=3)


def start(number: int) -> None:
    started(number)


class Rq(Peer):
    def __init__(self) -> None:
        self._redis = redis.Redis.from_url(os.environ["BENCH_REDIS"])
        self._queue = rq.Queue("bench", connection=self._redis)

    def version(self) -> str:
        return f"RQ {version('rq')}"

    def commands(self, processes: int) -> list[list[str]]:
        worker = [sys.executable, "-m", "rq.cli", "worker", "bench", "--url", os.environ["BENCH_REDIS"]]
        options = ["--with-scheduler", "--worker-class", "rq.SimpleWorker", "--quiet"]
        return [[*worker, *options] for _ in range(processes)]

    def submit(self, number: int, due: int) -> None:
        self._queue.enqueue_at(_second(due), "benchmarks.peers.rq.start", number, result_ttl=0, retry=RETRY)

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        for first in range(0, len(numbers), 500):
            with self._redis.pipeline(transaction=False) as pipeline:
                part = zip(numbers[first : first + 500], dues[first : first + 500], strict=True)
                for number, due in part:
                    self._queue.enqueue_at(
                        _second(due),
                        "benchmarks.peers.rq.start",
                        number,
                        result_ttl=0,
                        retry=RETRY,
                        pipeline=pipeline,
                    )
                pipeline.execute()

    def pending(self) -> int:
        registries = ScheduledJobRegistry(queue=self._queue), StartedJobRegistry(queue=self._queue)
        return int(self._queue.count) + sum(int(registry.count) for registry in registries)

    def close(self) -> None:
        self._redis.close()


def _second(due: int) -> datetime:
    """Round up to whole seconds: RQ cuts them down, and no task may run early."""
    return datetime.fromtimestamp(-(-due // NS), UTC)


PEER = Rq
