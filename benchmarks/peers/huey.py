"""Huey on Redis: each second a scheduler moves the tasks that are due."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from importlib.metadata import version

import huey

from benchmarks.peer import NS, Peer
from benchmarks.record import started

app = huey.RedisHuey("bench", url=os.environ["BENCH_REDIS"], results=False)


def _start(number: int) -> None:
    started(number)


start = app.task(name="start")(_start)


class Huey(Peer):
    def version(self) -> str:
        return f"Huey {version('huey')}"

    def commands(self, processes: int) -> list[list[str]]:
        consumer = [sys.executable, "-m", "huey.bin.huey_consumer", "benchmarks.peers.huey.app", "-q"]
        return [[*consumer, "-k", "process", "-w", str(processes), "-s", "1", "-n"]]

    def submit(self, number: int, due: int) -> None:
        # aware, because Huey cuts naive times down to the second
        start.schedule((number,), eta=datetime.fromtimestamp(due / NS, UTC))

    def pending(self) -> int:
        return int(app.pending_count()) + int(app.scheduled_count())


PEER = Huey
