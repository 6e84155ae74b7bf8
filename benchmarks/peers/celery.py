"""Celery on Redis: a task with an ETA is fetched at once and waits in the worker's memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import celery
import redis

from benchmarks.peer import NS, Peer
from benchmarks.record import started

app = celery.Celery("bench", broker=os.environ["BENCH_REDIS"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 7200},  # longer than any ETA, or it runs twice
    task_acks_late=True,
    task_ignore_result=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=0,
)


def _start(number: int) -> None:
    started(number)


start = app.task(name="start")(_start)


class Celery(Peer):
    def __init__(self) -> None:
        self._redis = redis.Redis.from_url(os.environ["BENCH_REDIS"])
        self._producer = app.amqp.Producer(app.connection_for_write())

    def version(self) -> str:
        return f"Celery {version('celery')}"

    def commands(self, processes: int) -> list[list[str]]:
        worker = [sys.executable, "-m", "celery", "-A", "benchmarks.peers.celery", "worker", "-l", "ERROR"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return [[*worker, *quiet, "--pool", "prefork", "--concurrency", str(processes)]]

    def submit(self, number: int, due: int) -> None:
        eta = datetime.fromtimestamp(due / NS, UTC)
        start.apply_async((number,), eta=eta, producer=self._producer)

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        for number, due in zip(numbers, dues, strict=True):  # it has no way to send many at once
            self.submit(number, due)

    def pending(self) -> int:
        return int(self._redis.llen("celery")) + int(self._redis.hlen("unacked"))

    def close(self) -> None:
        self._redis.close()


PEER = Celery
