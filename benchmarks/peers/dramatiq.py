"""Dramatiq on Redis: delayed messages are fetched from a delay queue and wait in the worker's memory."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import version

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peer import Peer
from benchmarks.record import started

broker = RedisBroker(url=os.environ["BENCH_REDIS"])
dramatiq.set_broker(broker)
os.environ["dramatiq_delay_queue_prefetch"] = "65535"  # noqa: SIM112 - read when a worker starts
os.environ["dramatiq_worker_timeout"] = "5"  # noqa: SIM112


def _start(number: int) -> None:
    started(number)


start = dramatiq.actor(_start, actor_name="start")


class Dramatiq(Peer):
    def __init__(self) -> None:
        self._redis = redis.Redis.from_url(os.environ["BENCH_REDIS"])

    def version(self) -> str:
        return f"Dramatiq {version('dramatiq')}"

    def commands(self, processes: int) -> list[list[str]]:
        worker = [sys.executable, "-m", "dramatiq", "benchmarks.peers.dramatiq"]
        return [[*worker, "--processes", str(processes), "--threads", "4"]]

    def submit(self, number: int, due: int) -> None:
        delay = -(-(due - time.time_ns()) // 1_000_000)
        start.send_with_options(args=(number,), delay=max(delay, 0))

    def pending(self) -> int:
        return int(self._redis.hlen("dramatiq:default.msgs")) + int(
            self._redis.hlen("dramatiq:default.DQ.msgs")
        )

    def close(self) -> None:
        self._redis.close()


PEER = Dramatiq
