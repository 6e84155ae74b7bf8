"""How much memory, disk and connections a cluster takes: ``make sizing``, some three minutes.

Starts a private cluster with the layout of production (a Redis Cluster of three, MariaDB with 1,024 tables in
8 databases, an ensemble of three ZooKeepers, two daemons with two processes each), stores tasks, gives the
workers work, and prints what that took.

Connections are counted at the servers' end and attributed to the process at the other end. The servers' own
totals are printed beside them.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql
from kazoo.client import KazooClient  # type: ignore[import-untyped]  # it comes without types

from benchmarks import processes
from benchmarks.cluster import LocalCluster
from benchmarks.resp import call
from toc import NewTask, Settings, Task, TaskStatus, TimeoutCenter, Topic
from toc.coordination.operator import Operator
from toc.coordination.views import SlotState
from toc.observe.log import configure
from toc.store.migrate import Migrator

TASKS = 200_000
SLOTS = 64
SMALL = 50
"""Tasks per slot of the topic with few tasks: Redis stores small sets in fewer bytes."""
WORK = 100_000
BATCH = 10_000
LOAD_SECONDS = 10
RATE = 1000
NARROW = 8
"""Tables of the layout with many rows per table, in which half-empty pages do not count."""

center = TimeoutCenter()


@center.handler("sizing.task")
@center.handler("sizing.few")
def work(_task: Task) -> None:
    """Do nothing."""


def main() -> int:
    """Measure and print."""
    configure("warning")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # the daemons load this module
    with tempfile.TemporaryDirectory(prefix="toc-sizing-") as directory:
        local = LocalCluster(Path(directory), app="benchmarks.sizing:center")
        try:
            settings = Settings(**local.start(_prepare))
            with TimeoutCenter(settings) as own:
                Sizing(local, settings, own).measure()
        finally:
            local.stop()
    return 0


def _prepare(settings: dict[str, Any]) -> None:
    began = time.monotonic()
    _upgrade(Settings(**settings))
    say("toc db upgrade, 8 databases with 1,024 tables", f"{time.monotonic() - began:.0f} s")
    with TimeoutCenter(Settings(**settings)) as one:
        one.store.topics.create(Topic("sizing.task", 1, SLOTS))
        one.store.topics.create(Topic("sizing.few", 2, SLOTS))


def _upgrade(settings: Settings) -> None:
    Migrator(
        settings.database_urls,
        databases=settings.databases,
        tables=settings.tables,
        prefix=settings.database_prefix,
    ).upgrade()


class Sizing:
    """The measured cluster. ``own`` is the producer: this process."""

    def __init__(self, local: LocalCluster, settings: Settings, own: TimeoutCenter) -> None:
        self._local, self._settings, self._own = local, settings, own
        self._daemons = [daemon.pid for daemon in local.daemons]
        self._servers = {server.port: re.sub(r"\d", "", name) for name, server in local.servers.items()}
        self._nodes = [port for port, name in self._servers.items() if name == "redis"]

    def measure(self) -> None:
        """Measure everything, one thing after the other."""
        data = self._local.directory / "mariadb" / "data"
        empty = sum(path.stat().st_size for path in data.glob("toc_*/*"))
        say("MariaDB, disk of the empty tables", f"{empty / 1e6:.0f} MB")
        self._wait_for_owners()
        self._memory("idle")
        self._connections("idle")
        self._znodes()

        self._index(TASKS, "sizing.task", 3600, f"each of {TASKS:,} tasks due within a day, {SLOTS} slots")
        self._index(SMALL * SLOTS, "sizing.few", 3600, f"each of {SMALL} tasks to a slot, {SLOTS} slots")
        self._index(TASKS // 4, "sizing.task", 48 * 3600, "each task beyond the horizon")
        self._table(
            "toc_", TASKS + TASKS // 4 + SMALL * SLOTS, "1,024 tables, 13 + 6 characters of attribute"
        )
        for text in ("unpaid", "x" * 500):
            self._narrow(text)

        self._work()
        self._memory(f"after {WORK:,} tasks")
        self._load()
        self._memory("after that load")

    def _wait_for_owners(self) -> None:
        """Wait until every slot and table has its owner, and 15 s longer."""
        with Operator(self._settings.zookeeper or "", cluster=self._settings.cluster) as operator:
            until = time.monotonic() + 120
            while [row.state for row in operator.slots()].count(SlotState.OWNED) < 2 * SLOTS + 1024:
                assert time.monotonic() < until, "the slots have no owners yet"
                time.sleep(0.5)
        time.sleep(15)

    # --- Redis

    def _index(self, count: int, topic: str, delay: int, what: str) -> None:
        before = self._redis_memory()
        for first in range(0, count, BATCH):
            self._own.submit_many(_tasks(topic, min(BATCH, count - first), first, delay))
        say(f"Redis, {what}", f"{max(0, self._redis_memory() - before) / count:.0f} bytes")

    def _redis_memory(self) -> int:
        return sum(self._redis(port, "memory", "used_memory") for port in self._nodes)

    def _redis(self, port: int, section: str, name: str) -> int:
        found = re.search(rf"^{name}:(\d+)", str(call(("127.0.0.1", port), "INFO", section)), re.MULTILINE)
        assert found, name
        return int(found[1])

    # --- MariaDB

    def _table(self, prefix: str, count: int, what: str) -> None:
        pattern = prefix.replace("_", "\\_") + "%"
        tables = self._sql(
            "SELECT CONCAT(table_schema, '.', table_name) FROM information_schema.tables "
            "WHERE table_schema LIKE %s AND table_name LIKE 'timeout\\_task\\_%%'",
            pattern,
        )
        self._sql(f"ANALYZE TABLE {', '.join(name for (name,) in tables)}")
        [(rows, indexes)] = self._sql(
            "SELECT SUM(data_length), SUM(index_length) FROM information_schema.tables "
            "WHERE table_schema LIKE %s AND table_name LIKE 'timeout\\_task\\_%%'",
            pattern,
        )
        each, of_indexes = float(rows + indexes) / count, float(indexes) / count
        say(
            f"MariaDB, each of {count:,} rows, {what}",
            f"{each:.0f} bytes, {of_indexes:.0f} of them in indexes",
        )

    def _narrow(self, text: str) -> None:
        """Measure rows with this attribute in tables that are as full as after a year."""
        prefix = f"rows_{len(text)}_"
        changed = {"tables": NARROW, "database_prefix": prefix, "namespace": "rows"}
        narrow = Settings(**{**self._settings.model_dump(), **changed})
        _upgrade(narrow)
        with TimeoutCenter(narrow) as one:
            one.store.topics.create(Topic("sizing.task", 1, SLOTS, horizon=60))
            for first in range(0, TASKS, BATCH):
                one.submit_many(_tasks("sizing.task", BATCH, first, 3600, text))
        self._table(prefix, TASKS, f"{NARROW} tables, 13 + {len(text)} characters of attribute")

    def _sql(self, statement: str, *parameters: Any) -> list[Any]:
        url = urlsplit(self._settings.database_urls[0])
        connection = pymysql.connect(
            host=url.hostname or "", port=url.port or 0, user=url.username, password=url.password or ""
        )
        with connection, connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())

    # --- ZooKeeper

    def _znodes(self) -> None:
        client = KazooClient(str(self._settings.zookeeper))
        client.start(timeout=10)
        counts: Counter[str] = Counter()
        largest = 0
        try:
            todo = ["/toc"]
            while todo:
                path = todo.pop()
                data, _ = client.get(path)
                largest = max(largest, len(data))
                parts = path.split("/")
                counts["/".join(parts[3:4]) or "top"] += 1
                todo += [f"{path}/{name}" for name in client.get_children(path)]
        finally:
            client.stop()
            client.close()
        hosts = len(self._daemons)
        say(
            f"ZooKeeper, nodes of {hosts} hosts, {2 * hosts} workers, {2 * SLOTS} slots, 1,024 tables",
            ", ".join(f"{name} {count}" for name, count in sorted(counts.items())),
        )
        say("ZooKeeper, the largest node", f"{largest} bytes")

    # --- work

    def _work(self) -> None:
        began = time.monotonic()
        job_ids: list[int] = []
        for first in range(0, WORK, BATCH):
            job_ids += self._own.submit_many(_tasks("sizing.task", BATCH, first, 0.5, spread=1))
        left = job_ids
        while left:
            time.sleep(0.5)
            read = self._own.store.read(left[:BATCH])
            left = [job for job in left[:BATCH] if read[job].status == TaskStatus.PENDING] + left[BATCH:]
        say(f"{WORK:,} tasks, from the first submit to the last end", f"{time.monotonic() - began:.0f} s")

    def _load(self) -> None:
        with self._peaks() as peaks, ThreadPoolExecutor(16) as pool:
            until = time.monotonic() + LOAD_SECONDS
            number = 0
            while time.monotonic() < until:
                first = number
                list(
                    pool.map(
                        lambda n: self._own.submit("sizing.task", biz_id=n, delay=0.5),
                        range(first, first + 16),
                    )
                )
                number += 16
                time.sleep(16 / RATE)
        say(f"submitted one by one from 16 threads, {number / LOAD_SECONDS:.0f} a second; most connections:")
        for kind, most in peaks.items():
            say(f"  {kind}", _named(most))

    # --- processes

    def _memory(self, when: str) -> None:
        for pid in processes.tree(self._daemons[0]):
            pss = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            assert pss
            say(f"memory, {when}: {self._kind(pid)}", f"{int(pss[1]) / 1000:.0f} MB")

    def _connections(self, when: str) -> None:
        found = self._ends()
        for pid in processes.tree(self._daemons[0]):
            say(f"connections, {when}: {self._kind(pid)}", _named(found.get(pid, Counter())))
        total = sum(found.values(), Counter[str]())
        say(f"connections, {when}: all, at the servers' ends", _named(total))
        [(_, connected)] = self._sql("SHOW GLOBAL STATUS LIKE 'Threads\\_connected'")
        clients = sum(self._redis(port, "clients", "connected_clients") for port in self._nodes)
        say("  as the servers tell, with the one that asks", f"mariadb {connected}, redis {clients}")

    def _kind(self, pid: int) -> str:
        if pid == os.getpid():
            return "producer"
        return "daemon" if pid in self._daemons else "worker process"

    @contextlib.contextmanager
    def _peaks(self) -> Iterator[dict[str, Counter[str]]]:
        """Yield the highest number of connections that any process of a kind had to each kind of server."""
        peaks: dict[str, Counter[str]] = {}
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.2):
                for pid, counts in self._ends().items():
                    peaks[self._kind(pid)] = peaks.get(self._kind(pid), Counter()) | counts

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            yield peaks
        finally:
            over.set()
            watcher.join()

    def _ends(self) -> dict[int, Counter[str]]:
        """Return by pid the number of connections to each kind of server, counted at the servers' ends."""
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]  # Java listens on IPv6
        sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
        standing = [
            (int(fields[1].partition(":")[2], 16), int(fields[2].partition(":")[2], 16), fields[9])
            for fields in sockets
            if fields[3] == "01"
        ]
        at_servers = {remote: self._servers[own] for own, remote, _ in standing if own in self._servers}
        server_of = {inode: at_servers[own] for own, _, inode in standing if own in at_servers}
        found: dict[int, Counter[str]] = {}
        for root in (os.getpid(), *self._daemons):
            for pid in [root] if root == os.getpid() else processes.tree(root):
                servers = (server_of.get(inode) for inode in processes.sockets(pid))
                found[pid] = Counter(server for server in servers if server is not None)
        return found


def _tasks(
    topic: str, count: int, first: int, delay: float, text: str = "unpaid", *, spread: int = 6 * 3600
) -> list[NewTask]:
    """Return ``count`` tasks, biz_ids from ``first`` on, due within ``spread`` seconds after ``delay``."""
    return [
        NewTask(topic, first + n, delay + n * spread / count, attribute={"reason": text})
        for n in range(count)
    ]


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in ("mariadb", "redis", "zookeeper"))


def say(what: str, value: str = "") -> None:
    """Print a line of the result."""
    print(f"{what:<90} {value}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
