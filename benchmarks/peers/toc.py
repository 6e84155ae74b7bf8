"""toc: durable rows in MariaDB, the index in Redis, one daemon with worker processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import sqlalchemy

from benchmarks import calls
from benchmarks.peer import NS, Peer
from benchmarks.record import started
from toc import NewTask, Task, TimeoutCenter, Topic
from toc.model.errors import TopicExists
from toc.store.migrate import Migrator

BATCH = 10_000
SLOTS = int(os.environ.get("BENCH_SLOTS", "16"))
TOPICS = [f"bench.order-{number}" for number in range(int(os.environ.get("BENCH_TOPICS", "1")))]
"""Tasks go to these topics in turn."""
NEIGHBOUR = "bench.neighbour"
"""A second topic: numbers with the bit NEIGHBOURS go there."""
NEIGHBOURS = 1 << 51
ASYNC_WAIT, THREAD_WAIT = "bench.async-wait", "bench.thread-wait"
"""Topics whose handlers wait WAIT_SECONDS, as for an answer; numbers with the bits below go there."""
ASYNC_WAITS, THREAD_WAITS = 1 << 50, 1 << 49
WAIT_SECONDS = 0.05
SCHEDULED = 1 << 48
TEXTS, TEXT = 1 << 46, "order-"
"""A number with this bit has a text as biz_id: this one and the number."""
"""A number with this bit is no task but a schedule that fires each day from its due time on."""
THREADS = os.environ.get("BENCH_THREADS", "4")
IDLE_SLOTS = [64] * 13 + [32] * 4 if "BENCH_IDLE_TOPICS" in os.environ else []
"""Slots of further topics without tasks: with the four above, 21 topics of 1,024 slots."""

center = TimeoutCenter()


if calls.DIRECTORY in os.environ:
    calls.install()


def handle(task: Task) -> None:
    number = task.biz_id if isinstance(task.biz_id, int) else int(task.biz_id.removeprefix(TEXT))
    started(number)
    if number & calls.SNAPSHOT:
        calls.write(number)


@center.handler(NEIGHBOUR)
def handle_neighbour(task: Task) -> None:
    started(int(task.biz_id))


@center.handler(ASYNC_WAIT)
async def handle_waiting(task: Task) -> None:
    started(int(task.biz_id))
    await asyncio.sleep(WAIT_SECONDS)


@center.handler(THREAD_WAIT)
def handle_waiting_thread(task: Task) -> None:
    started(int(task.biz_id))
    time.sleep(WAIT_SECONDS)


for _topic_name in (*TOPICS, *(f"bench.idle-{number}" for number in range(len(IDLE_SLOTS)))):
    center.handler(_topic_name)(handle)


class Toc(Peer):
    def __init__(self) -> None:
        settings = center.settings
        Migrator(
            settings.database_urls,
            databases=settings.databases,
            tables=settings.tables,
            prefix=settings.database_prefix,
        ).upgrade()
        topics = dict.fromkeys(TOPICS, SLOTS) | dict.fromkeys((NEIGHBOUR, ASYNC_WAIT, THREAD_WAIT), 16)
        topics |= {f"bench.idle-{number}": slots for number, slots in enumerate(IDLE_SLOTS)}
        for number, (topic, slots) in enumerate(topics.items(), 1):
            with suppress(TopicExists):  # a database that is measured again
                center.store.topics.create(Topic(topic, number, slots))
        self._engine = sqlalchemy.create_engine(settings.database_urls[0])
        counts = (
            f"SELECT COUNT(*) AS n FROM {settings.database_prefix}{table % settings.databases}"
            f".timeout_task_{table:04d} WHERE status=0"
            for table in range(settings.tables)
        )
        self._count = sqlalchemy.text(f"SELECT SUM(n) FROM ({' UNION ALL '.join(counts)}) AS counts")

    def version(self) -> str:
        return f"toc {version('timeout-center')}"

    def commands(self, processes: int) -> list[list[str]]:
        worker = [sys.executable, "-m", "toc", "worker", "--app", "benchmarks.peers.toc:center"]
        worker += ["--threads", THREADS]
        if "BENCH_DAEMONS" not in os.environ:
            return [[*worker, "--processes", str(processes)]]
        # One daemon per process: to the cluster each is a host of its own.
        return [
            ["env", f"TOC_HOST=host-{number}", *worker, "--processes", "1"] for number in range(processes)
        ]

    def submit(self, number: int, due: int) -> None:
        center.submit(_topic(number), biz_id=number, action_time=_instant(due))

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        tasks = []
        for number, due in zip(numbers, dues, strict=True):
            if number & SCHEDULED:
                center.schedules.create(
                    str(number), topic=_topic(number), every=timedelta(days=1), anchor=_instant(due)
                )
            else:
                biz_id = f"{TEXT}{number}" if number & TEXTS else number
                tasks.append(NewTask(_topic(number), biz_id, action_time=_instant(due)))
        for first in range(0, len(tasks), BATCH):
            center.submit_many(tasks[first : first + BATCH])

    def pending(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.execute(self._count).scalar_one())

    def close(self) -> None:
        self._engine.dispose()
        center.close()


def _topic(number: int) -> str:
    for bits, topic in ((NEIGHBOURS, NEIGHBOUR), (ASYNC_WAITS, ASYNC_WAIT), (THREAD_WAITS, THREAD_WAIT)):
        if number & bits:
            return topic
    return TOPICS[number % len(TOPICS)]


def _instant(due: int) -> datetime:
    return datetime.fromtimestamp(due // NS, UTC).replace(microsecond=due % NS // 1000)


PEER = Toc
