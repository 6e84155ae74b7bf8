"""procrastinate on PostgreSQL: workers poll for scheduled jobs (notified of immediate ones only)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import procrastinate
import psycopg

from benchmarks.peer import NS, Peer
from benchmarks.record import started

URL = os.environ["BENCH_POSTGRES"]
app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))


async def _start(number: int) -> None:
    started(number)


start = app.task(name="start")(_start)


class Procrastinate(Peer):
    def __init__(self) -> None:
        app.open()
        app.schema_manager.apply_schema()
        self._connection = psycopg.connect(URL, autocommit=True)

    def version(self) -> str:
        return f"procrastinate {version('procrastinate')}"

    def commands(self, processes: int) -> list[list[str]]:
        program = [sys.executable, "-m", "procrastinate", "--log-level", "error"]
        worker = [*program, "--app", "benchmarks.peers.procrastinate.app", "worker"]
        options = ["--concurrency", "20", "--fetch-job-polling-interval", "0.02", "--delete-jobs", "always"]
        return [[*worker, *options] for _ in range(processes)]

    def submit(self, number: int, due: int) -> None:
        self._task(due).defer(number=number)

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        for first in range(0, len(numbers), 1000):
            part = zip(numbers[first : first + 1000], dues[first : first + 1000], strict=True)
            jobs = [self._task(due).make_new_job(number=number) for number, due in part]
            app.job_manager.batch_defer_jobs(jobs)

    def pending(self) -> int:
        row = self._connection.execute(
            "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        ).fetchone()
        assert row is not None
        return int(row[0])

    def close(self) -> None:
        self._connection.close()
        app.close()

    def _task(self, due: int) -> procrastinate.jobs.JobDeferrer:
        return app.configure_task("start", schedule_at=datetime.fromtimestamp(due / NS, UTC))


PEER = Procrastinate
