"""The measured systems and their settings. One entry per system; the table shows the settings in words.

The rule for a peer's settings: the best that its documentation offers for delay; at-least-once delivery if it
has that; and servers as durable as toc's (Redis: append-only file, synced each second).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One system. ``packages`` go into its own environment; empty: toc's environment."""

    name: str
    module: str
    settings: str
    servers: tuple[str, ...] = ("redis",)
    packages: tuple[str, ...] = ()
    npm: bool = False
    redis_config: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 2
    """Worker processes for workloads that do not set their number."""
    most_processes: int = 4


_INDEXES = {"redis": "one Redis", "redis-cluster": "Redis Cluster of 3", "": "no index"}


def _toc(name: str, tables: int, slots: int, index: str = "redis") -> Entry:
    return Entry(
        name,
        "toc",
        f"{tables} tables in 8 databases of one MariaDB (innodb_flush_log_at_trx_commit=1), "
        f"{_INDEXES[index]}; {slots} slots, 4 threads a process, all else default",
        servers=("mariadb", index) if index else ("mariadb",),
        environment={"TOC_DATABASES": "8", "TOC_TABLES": str(tables), "BENCH_SLOTS": str(slots)},
    )


ENTRIES = (
    Entry(
        "bare loop",
        "bare_loop",
        "the floor: sleeps to the due time, one Lua call takes 1,000 ids; no table, no retry, "
        "lost at a crash",
        processes=1,
    ),
    _toc("toc", 64, 16),
    _toc("toc, 1024 tables", 1024, 128),
    _toc("toc, Redis Cluster", 64, 16, "redis-cluster"),
    _toc("toc, the database alone", 64, 16, ""),
    Entry(
        "BullMQ",
        "bullmq",
        "Redis hz 500 (its workers sleep in a blocking call), concurrency 100 a process, removeOnComplete",
        npm=True,
        redis_config=("hz 500",),
    ),
    Entry(
        "Celery",
        "celery",
        "ETA tasks wait in the worker's memory (prefetch unlimited), prefork, acks_late, "
        "reject_on_worker_lost, no results, no gossip",
        packages=("celery[redis]", "hiredis"),
    ),
    Entry(
        "Dramatiq",
        "dramatiq",
        "delayed messages wait in the worker's memory (delay prefetch 65,535), worker_timeout 5 ms, "
        "4 threads a process",
        packages=("dramatiq[redis]", "hiredis"),
    ),
    Entry(
        "Huey",
        "huey",
        "scheduler_interval 1 s (its least), 2 worker processes, blocking pop",
        packages=("huey", "redis", "hiredis"),
    ),
    Entry(
        "RQ",
        "rq",
        "--with-scheduler (looks each second; due times are whole seconds, rounded up), SimpleWorker "
        "(no fork per job), result_ttl 0",
        packages=("rq", "hiredis"),
    ),
    Entry("arq", "arq", "poll_delay 5 ms, max_jobs 100, no results kept", packages=("arq",)),
    Entry(
        "taskiq",
        "taskiq",
        "ListRedisScheduleSource, scheduler update and loop interval 1 s (their least), stream broker",
        packages=("taskiq", "taskiq-redis", "hiredis"),
    ),
    Entry(
        "SAQ",
        "saq",
        "schedule timer 1 s (its least: whole seconds), concurrency 100",
        packages=("saq[redis,hiredis]", "typing-extensions"),
    ),
    Entry(
        "APScheduler",
        "apscheduler",
        "3.x, RedisJobStore, 20 threads; submits reach the one process that schedules through a pipe",
        packages=("apscheduler>=3.10,<4", "redis", "hiredis"),
        processes=1,
        most_processes=1,
    ),
    Entry(
        "procrastinate",
        "procrastinate",
        "PostgreSQL (synchronous_commit on), polling interval 20 ms, concurrency 20, jobs deleted when done",
        servers=("postgres",),
        packages=("procrastinate", "psycopg[binary,pool]"),
    ),
    Entry(
        "beanstalkd",
        "beanstalkd",
        "write-ahead log, fsync each second; delays are whole seconds, rounded up; a worker per process",
        servers=("beanstalkd",),
        packages=("greenstalk",),
    ),
)
