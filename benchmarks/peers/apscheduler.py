"""APScheduler 3 with its Redis job store.

A running scheduler does not notice jobs that another process writes into its store. So submits go to the one
process that schedules, over a Unix socket.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing.connection import Client, Listener
from pathlib import Path
from urllib.parse import urlsplit

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.redis import RedisJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from benchmarks.peer import NS, Peer
from benchmarks.record import started

SOCKET = Path(os.environ.setdefault("BENCH_APSCHEDULER", f"{tempfile.gettempdir()}/bench-{os.getpid()}.sock"))


def start(number: int) -> None:
    started(number)


class ApScheduler(Peer):
    def version(self) -> str:
        return f"APScheduler {version('apscheduler')}"

    def commands(self, processes: int) -> list[list[str]]:
        assert processes == 1
        return [[sys.executable, "-m", "benchmarks.peers.apscheduler"]]

    def submit(self, number: int, due: int) -> None:
        self._ask([(number, due)])

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        self._ask(list(zip(numbers, dues, strict=True)))

    def pending(self) -> int:
        return self._ask([])

    def _ask(self, tasks: list[tuple[int, int]]) -> int:
        until = time.monotonic() + 10
        while True:  # the scheduler may just be starting
            try:
                with Client(str(SOCKET)) as connection:
                    connection.send(tasks)
                    return int(connection.recv())
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def serve() -> None:
    """Schedule, and take submits."""
    from benchmarks.peers import apscheduler as module  # not __main__: the store keeps the handler's name

    server = urlsplit(os.environ["BENCH_REDIS"])
    store = RedisJobStore(host=server.hostname, port=server.port)
    scheduler = BackgroundScheduler(
        jobstores={"default": store},
        executors={"default": ThreadPoolExecutor(20)},
        job_defaults={"misfire_grace_time": None},
        timezone=UTC,
    )
    scheduler.start()
    SOCKET.unlink(missing_ok=True)
    with Listener(str(SOCKET), backlog=64) as listener:
        while True:
            with listener.accept() as connection:
                for number, due in connection.recv():
                    when = datetime.fromtimestamp(due / NS, UTC)
                    scheduler.add_job(module.start, "date", run_date=when, args=(number,))
                connection.send(int(store.redis.zcard(store.run_times_key)))


PEER = ApScheduler

if __name__ == "__main__":
    serve()
