"""The console: how soon each page is there, what a first visit weighs, and what an open page costs.

``python -m benchmarks.console [--pending N] [--dead N] [--seconds N]`` starts MariaDB, Redis, a gateway and a
worker, asks for each page one by one, on a small system and then with so many tasks pending and dead, and
prints milliseconds from request to last byte as JSON. The small system has the default number of tables, the
other that of production. Of an open page it tells the share of a core that the
gateway, the worker and the servers use more than just before, without it. Some tasks of a paused topic are
overdue, as the page of late tasks reads those.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from benchmarks import processes, stats
from benchmarks.doors import Stage
from toc import Dead, NewTask, Task, TimeoutCenter, Topic
from toc.dev.local import until

ROUNDS = 40
AT_ONCE = 10_000
WEEK = 7 * 86_400
ERRORS = 20
"""How many kinds of errors the dead tasks have."""
HELD = 5000
"""How many tasks of the paused topic are overdue."""
OPEN = ("", "/late", "/running", "/workers", "/health", "/topics/bench", "/tasks?topic=bench")
"""Pages that are kept open; of the last only the age is brought up to date."""

center = TimeoutCenter()


@center.handler("dies")
def die(task: Task) -> None:
    """Fail for good, for one of several reasons."""
    raise Dead(f"payment provider {int(task.biz_id) % ERRORS} has no such order")


class Reader:
    """A browser that runs no scripts, logged in."""

    def __init__(self, stage: Stage) -> None:
        self._port = stage.port
        self._connection = http.client.HTTPConnection("127.0.0.1", stage.port, timeout=120)
        self._headers = {"Accept-Encoding": "gzip"}
        form = urlencode({"token": stage.token})
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        self._connection.request("POST", "/console/login", form, kind)
        answer = self._connection.getresponse()
        answer.read()
        self._headers["Cookie"] = answer.headers["set-cookie"].partition(";")[0]

    def get(self, path: str) -> bytes:
        """Return a page as it comes over the wire."""
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body)
        return body

    @contextmanager
    def stream(self, path: str) -> Iterator[None]:
        """Keep a page open."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        connection.request("GET", f"/console/live?of={path}", headers=self._headers)
        answer = connection.getresponse()
        ended = threading.Event()

        def read() -> None:
            while not ended.is_set() and answer.readline():
                pass

        thread = threading.Thread(target=read)
        thread.start()
        yield
        ended.set()
        thread.join()
        connection.close()


def pages(stage: Stage, paths: list[str]) -> dict[str, str]:
    """How long each page took: its median and its 95th percentile, the processor time of the gateway and the
    servers, and its bytes."""
    reader, found = Reader(stage), {}
    pids = [*processes.tree(stage.gateway.pid), *stage.pids().values()]
    for path in paths:
        took = []
        used = processes.cpu_seconds(pids)
        for _ in range(ROUNDS):
            began = time.perf_counter()
            body = reader.get(path)
            took.append((time.perf_counter() - began) * 1000)
        used = (processes.cpu_seconds(pids) - used) * 1000 / ROUNDS
        took.sort()
        p50, p95 = stats.percentile(took, 0.5), stats.percentile(took, 0.95)
        found[path] = f"p50 {p50:.1f} ms, p95 {p95:.1f} ms, cpu {used:.1f} ms, {len(body):,} bytes"
    return found


def first_visit(reader: Reader) -> int:
    """Bytes of the first page and all that it loads, without headers."""
    page = reader.get("/console")
    assets = set(re.findall(r'(?:src|href)="(/console/static/[^"]+)"', gzip.decompress(page).decode()))
    return len(page) + sum(len(reader.get(one)) for one in assets)


def opened(stage: Stage, worker: int, seconds: float) -> dict[str, str]:
    """What each page costs while it is open."""
    found = {}
    for path in OPEN:
        rest = share(stage, worker, seconds)
        with Reader(stage).stream(f"/console{path}"):
            time.sleep(1)  # its first reading is that of any page
            more = share(stage, worker, seconds) - rest
        found[f"/console{path}"] = f"{more:.1f} % of a core (at rest {rest:.1f})"
    return found


def share(stage: Stage, worker: int, seconds: float) -> float:
    """Percent of a core that the gateway, the worker and the servers use now."""
    pids = [*processes.tree(stage.gateway.pid), *processes.tree(worker), *stage.pids().values()]
    before, began = processes.cpu_seconds(pids), time.perf_counter()
    time.sleep(seconds)
    return 100 * (processes.cpu_seconds(pids) - before) / (time.perf_counter() - began)


def fill(stage: Stage, topic: str, count: int, delay: float, spread: float) -> None:
    """Store so many tasks, due between ``delay`` and ``delay + spread`` seconds from now."""
    for first in range(0, count, AT_ONCE):
        some = range(first, min(first + AT_ONCE, count))
        stage.center.submit_many([NewTask(topic, n, delay=delay + spread * n / count) for n in some])


def settle(stage: Stage, worker: int, dead: int) -> None:
    """Wait until so many tasks have died, and the servers are at rest."""
    assert until(lambda: _dead(stage) >= dead, 1200), _dead(stage)
    until(lambda: share(stage, worker, 2) < 25, 120)


def _dead(stage: Stage) -> int:
    peeks = stage.center.queues.peek(
        [slot for one in stage.center.store.topics.list() for slot in one.slots()]
    )
    return sum(getattr(one, "dead", 0) for one in peeks.values())


def measure(stage: Stage, pending: int, dead: int, seconds: float) -> dict[str, Any]:
    """Measure with so many tasks."""
    stage.center.store.topics.create(Topic("dies", 900, 16, retries=1))
    stage.center.store.topics.create(Topic("held", 901, 16, paused=True))
    stage.center.catalog.refresh()
    app = ["--app", "benchmarks.console:center", "--processes", "1"]
    log = (stage.directory / "worker.log").open("wb")
    worker = subprocess.Popen(
        [sys.executable, "-m", "toc", "worker", *app],
        env={**stage.env, "TOC_HOST": "worker"}, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        fill(stage, "bench", pending, 60, WEEK)
        fill(stage, "dies", dead, 5, 60)
        fill(stage, "held", min(HELD, pending // 10), 1, 1)
        settle(stage, worker.pid, dead)
        return {
            "first visit, bytes": first_visit(Reader(stage)),
            "pages": _of(stage),
            "open": opened(stage, worker.pid, seconds),
        }
    finally:
        worker.terminate()
        worker.wait(60)
        log.close()


def _of(stage: Stage) -> dict[str, str]:
    first = stage.center.find(biz_id=1, topic="dies")[0].job_id
    paths = [
        "", "/health", "/topics", "/topics/bench", "/tasks", "/tasks?topic=bench",
        "/tasks?topic=bench&biz_id=7",
        "/tasks?topic=dies&status=dead", f"/tasks/{first}", "/running", "/late", "/dead", "/dead?topic=dies",
        "/dead?topic=dies&error=provider%203%20", "/workers", "/schedules", "/targets", "/tokens", "/audit",
        "/bulk", "/do/cancel-all?topic=bench", "/what-if?topic=bench&pause=2h",
    ]  # fmt: skip
    return pages(stage, [f"/console{one}" for one in paths])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--dead", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    sizes = [(100, 100, {"databases": 1, "tables": 4}), (arguments.pending, arguments.dead, {})]
    found = {}
    for pending, dead, layout in sizes:
        stage = Stage(1, **layout)
        try:
            what = f"{pending:,} pending, {dead:,} dead"
            found[what] = measure(stage, pending, dead, arguments.seconds)
        finally:
            stage.stop()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
