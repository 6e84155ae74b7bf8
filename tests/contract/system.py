"""A system as an outsider sees it: its command line, its SDK, and raw clients that look at its servers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import pymysql
import pymysql.cursors
import redis
from harness import forks
from harness.secured import admin_url, root_url
from harness.system import Process, small_system
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisServer

HERE = Path(__file__).parent
T = TypeVar("T")

TOPICS: dict[str, list[str]] = {
    "c.plain": ["--biz-type", "1", "--slots", "4"],
    "c.now": ["--biz-type", "2", "--slots", "2", "--type", "instant"],
    "c.thrice": ["--biz-type", "3", "--slots", "2", "--retries", "3", "--backoff", "immediate"],
    "c.once": ["--biz-type", "4", "--slots", "1", "--retries", "1"],
    "c.async": ["--biz-type", "6", "--slots", "2", "--retries", "2", "--backoff", "immediate"],
    "c.batch": ["--biz-type", "7", "--slots", "1", "--retries", "2", "--backoff", "immediate"],
    "c.batch-whole": ["--biz-type", "8", "--slots", "1", "--retries", "2", "--backoff", "immediate"],
    "c.typed": ["--biz-type", "11", "--slots", "1", "--retries", "2", "--backoff", "immediate"],
    "c.expires": ["--biz-type", "10", "--slots", "1", "--expires-in", "2h"],
    "c.silent": ["--biz-type", "9", "--slots", "1", "--retries", "3", "--prepare-timeout", "3"],
}


class Contract:
    """A system of its own database prefix on shared servers; ``settings`` are some more of its own."""

    def __init__(
        self,
        directory: Path,
        redis_server: RedisServer | None,
        mariadb: MariaDB,
        prefix: str,
        **settings: object,
    ) -> None:
        self.directory = directory
        self.prefix = prefix
        self.system = small_system(directory, redis_server, mariadb, prefix, **settings)
        self.settings, self.center = self.system.settings, self.system.center
        self.namespace = self.settings.namespace
        self.env = {**self.system.env, "PYTHONPATH": str(HERE), "NO_COLOR": "1", "COLUMNS": "200"}
        self.redis: redis.Redis = redis.Redis.from_url(
            "redis://none" if redis_server is None else admin_url(redis_server), decode_responses=True
        )
        self.mysql_url = root_url(mariadb)
        self.mysql = self.connect()

    def connect(self) -> pymysql.Connection[pymysql.cursors.DictCursor]:
        """A raw connection to the database server."""
        url = make_url(self.mysql_url)
        return pymysql.connect(
            host=url.host,
            port=cast(int, url.port),
            user=url.username,
            password=url.password or "",
            autocommit=True,
            init_command="SET time_zone='+00:00'",
            cursorclass=pymysql.cursors.DictCursor,
        )

    def toc(self, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """The command line."""
        return forks.run(words, env={**self.env, **(env or {})}, directory=self.directory)

    def json(self, *words: str) -> Any:
        """What a command prints with --json."""
        done = self.toc(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def create_topics(self, names: Sequence[str] = tuple(TOPICS)) -> None:
        """By the command line."""
        for name in names:
            done = self.toc("topic", "create", name, *TOPICS[name])
            assert done.returncode == 0, done.stderr
        self.center.catalog.refresh()

    @property
    def daemons(self) -> list[Process]:
        """The daemons that were started."""
        return [daemon.process for daemon in self.system.daemons]

    def start(self, host: str = "one", processes: int = 1, *, whole: bool = False) -> Process:
        """A daemon, ready. ``whole``: its processes are started as in production, which takes longer."""
        daemon = self.system.start(
            host, processes=processes, threads=8, env=self.env, app="contract_app:center", whole=whole
        )
        return daemon.process

    def query(self, text: str, *values: Any) -> list[dict[str, Any]]:
        with self.mysql.cursor() as cursor:
            cursor.execute(text, values)
            return list(cursor.fetchall())

    def table(self, job_id: int) -> str:
        """The table of a job_id, by the contract's formula."""
        number = (job_id >> 12 & 1023) % 8
        return f"`{self.prefix}{number % 2}`.`timeout_task_{number:04d}`"

    def row(self, job_id: int) -> dict[str, Any]:
        (row,) = self.query(f"SELECT * FROM {self.table(job_id)} WHERE job_id = %s", job_id)
        return row

    def status(self, job_id: int) -> int:
        return int(self.row(job_id)["status"])

    def rows(self) -> int:
        """How many tasks are stored."""
        return sum(
            int(
                self.query(f"SELECT COUNT(*) AS n FROM `{self.prefix}{n % 2}`.`timeout_task_{n:04d}`")[0]["n"]
            )
            for n in range(8)
        )

    def now(self) -> datetime:
        """Its time, which has passed also where nothing else lets it pass."""
        return datetime.now(UTC)

    def end(self, job_id: int) -> None:
        """Have a task processed."""
        self.query(f"UPDATE {self.table(job_id)} SET status=2 WHERE job_id=%s", job_id)

    @property
    def has_index(self) -> bool:
        """Whether tasks are indexed in Redis."""
        return self.center.queues.present

    def keys(self) -> dict[str, int]:
        """Every sorted set of this system with its size."""
        found: dict[str, int] = {}
        if not self.has_index:
            return found
        for key in self.redis.scan_iter("*"):
            if self.redis.type(key) == "zset":
                found[key] = self.redis.zcard(key)
        return found

    def slot(self, topic: str, number: int) -> str:
        return f"{self.namespace}:{topic}_{number}" if self.namespace else f"{topic}_{number}"

    def scores(self, job_id: int) -> dict[str, float]:
        """Every sorted set that holds the id, with its score."""
        found: dict[str, float] = {}
        if not self.has_index:
            return found
        for key in self.redis.scan_iter("*"):
            if self.redis.type(key) == "zset":
                score = self.redis.zscore(key, str(job_id))
                if score is not None:
                    found[key] = score
        return found

    def history(self, job_id: int | None = None) -> list[dict[str, Any]]:
        lines = [
            json.loads(line)
            for path in (self.directory / "history").iterdir()
            for line in path.read_text().split("\n")[:-1]  # a line may be there in part as yet
        ]
        return sorted(
            (line for line in lines if job_id in (None, line["job_id"])), key=lambda line: line["at"]
        )

    def open_gate(self, name: str) -> None:
        (self.directory / name).touch()

    def wait(self, condition: Callable[[], T], what: str, seconds: float = 60) -> T:
        """Wait until something is so. The time is no promise: it lets a busy machine come to it."""
        return self.system.wait(condition, what, seconds)

    def wait_status(self, job_id: int, status: int, seconds: float = 60) -> None:
        """Wait until the row has this status."""
        self.wait(lambda: self.status(job_id) == status, f"{job_id} has status {status}", seconds)

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.directory.glob("*.log"))

    def stop(self) -> None:
        self.system.stop()
        self.redis.close()
        self.mysql.close()
