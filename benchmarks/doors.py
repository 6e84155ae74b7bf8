"""The doors: how many requests a second, how soon, and the processor time of each.

``python -m benchmarks.doors [--seconds N] [--rounds N]`` starts MariaDB (each commit on disk), Redis and a
gateway, loads it from this process, and prints the medians of all rounds as JSON. ``empty`` is a route that
does nothing (/healthz): the floor of the same stack in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httptools
import uvloop

from benchmarks import processes, stats
from toc import NewTask, Settings, TimeoutCenter, Topic
from toc.dev.local.process import until
from toc.dev.local.servers import MariaDB, RedisServer
from toc.model.access import Role
from toc.operate.tokens import create_token
from toc.store.migrate import Migrator

CONNECTIONS = 64
RATE = 500
TABLES = 64


class Client(asyncio.Protocol):
    """One connection that makes one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.parser = httptools.HttpResponseParser(self)
        self.answered: asyncio.Future[int] | None = None
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body = b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(self.parser.get_status_code())

    def ask(self, request: bytes) -> asyncio.Future[int]:
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answered


def request(method: str, path: str, token: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {token}\r\n"
    if body:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


async def connect(port: int, count: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]


async def closed(
    port: int,
    seconds: float,
    next_request: Callable[[], bytes],
    expected: int,
    connections: int = CONNECTIONS,
) -> list[float]:
    """Each connection asks again as soon as it is answered. Returns the times of all answers (s)."""
    clients = await connect(port, connections)
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def work(client: Client) -> None:
        while (began := time.perf_counter()) < end:
            status = await client.ask(next_request())
            assert status == expected, (status, client.body[:300])
            took.append(time.perf_counter() - began)

    await asyncio.gather(*map(work, clients))
    for client in clients:
        client.transport.close()
    return took


async def open_loop(
    port: int, seconds: float, next_request: Callable[[], bytes], expected: int, rate: int = RATE
) -> list[float]:
    """Requests at random instants, whatever is answered. A time counts from when a request was to be sent."""
    idle = await connect(port, CONNECTIONS)
    took: list[float] = []
    free = asyncio.Queue[Client]()
    for client in idle:
        free.put_nowait(client)

    async def one(at: float) -> None:
        client = await free.get()
        status = await client.ask(next_request())
        assert status == expected, (status, client.body[:300])
        took.append(time.perf_counter() - at)
        free.put_nowait(client)

    at = time.perf_counter()
    end = at + seconds
    asked = []
    while at < end:
        at += random.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        asked.append(asyncio.create_task(one(at)))
    await asyncio.gather(*asked)
    for client in idle:
        client.transport.close()
    return took


class Stage:
    """The servers and a gateway."""

    def __init__(self, http_processes: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="toc-doors-")
        directory = Path(self._directory.name)
        self.mariadb = MariaDB(directory / "mariadb")
        self.redis = RedisServer(directory / "redis")
        self.mariadb.start()
        self.redis.start()
        values: dict[str, Any] = {
            "database_urls": [self.mariadb.url],
            "databases": 8,
            "tables": TABLES,
            "redis_url": self.redis.url,
        }
        Migrator(values["database_urls"], databases=8, tables=TABLES, prefix="toc_").upgrade()
        self.center = TimeoutCenter(Settings(**values))
        self.center.store.topics.create(Topic("bench", 1, 16))
        made = create_token(
            self.center.store, "bench", roles=[Role.ADMIN], topics=["*"], clock=self.center.clock, by="bench"
        )
        self.token = made.secret
        env = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        env |= {
            f"TOC_{name.upper()}": ",".join(value) if isinstance(value, list) else str(value)
            for name, value in values.items()
        }
        log = directory / "gateway.log"
        with log.open("wb") as output:
            self.gateway = subprocess.Popen(
                [sys.executable, "-m", "toc", "gateway", "--port", "0", "--processes", str(http_processes)],
                env=env, stdout=output, stderr=output,
            )  # fmt: skip
        assert until(lambda: log.read_text().count("worker_ready") > http_processes, 60), log.read_text()
        found = re.search(r":(\d+), its doc", log.read_text())
        assert found
        self.port = int(found[1])

    def cpu(self) -> dict[str, float]:
        """The processor seconds used so far, by who used them."""
        http = [pid for pid in processes.tree(self.gateway.pid) if _is_http(pid)]
        pid = self.mariadb.process.pid if self.mariadb.process else 0
        return {"gateway": processes.cpu_seconds(http), "mariadb": processes.cpu_seconds(processes.tree(pid))}

    def stop(self) -> None:
        self.gateway.send_signal(signal.SIGTERM)
        self.gateway.wait(30)
        self.center.close()
        self.redis.stop()
        self.mariadb.stop()
        self._directory.cleanup()


def _is_http(pid: int) -> bool:
    return b"toc.gateway.process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def measure(stage: Stage, seconds: float) -> dict[str, Any]:
    """One round of all workloads."""
    port, token = stage.port, stage.token

    def post() -> bytes:
        body = b'{"biz_id":%d,"delay":3600,"attribute":{"order":%d}}'
        number = random.randrange(10**9)
        return request("POST", "/v1/topics/bench/tasks", token, body % (number, number))

    def batch() -> bytes:
        tasks = [
            {"biz_id": random.randrange(10**9), "delay": 3600, "attribute": {"n": n}} for n in range(1000)
        ]
        return request("POST", "/v1/topics/bench/tasks:batch", token, json.dumps({"tasks": tasks}).encode())

    job_ids = stage.center.submit_many(
        [NewTask("bench", n, 3600, attribute={"order": n}) for n in range(2000)]
    )

    def get() -> bytes:
        return request("GET", f"/v1/tasks/{random.choice(job_ids)}", token)

    ready = [batch() for _ in range(40)]
    batches: Iterator[bytes] = iter(ready * 1000)
    work: dict[str, Callable[[], Any]] = {
        "empty": lambda: closed(port, seconds, lambda: request("GET", "/healthz", token), 200),
        "post": lambda: closed(port, seconds, post, 201),
        "post, open loop": lambda: open_loop(port, seconds, post, 201),
        "post 1,000": lambda: closed(port, seconds, lambda: next(batches), 200, connections=2),
        "get": lambda: closed(port, seconds, get, 200),
    }
    found = {}
    for name, load in work.items():
        before, began = stage.cpu(), time.perf_counter()
        took = sorted(uvloop.run(load()))
        passed, after = time.perf_counter() - began, stage.cpu()
        found[name] = {
            "a second": len(took) / passed,
            "p50 ms": 1000 * stats.percentile(took, 0.5),
            "p99 ms": 1000 * stats.percentile(took, 0.99),
            **{f"{who} us": 1e6 * (after[who] - before[who]) / len(took) for who in after},
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="HTTP processes")
    arguments = parser.parse_args()
    stage = Stage(arguments.processes)
    try:
        rounds = [measure(stage, arguments.seconds) for _ in range(arguments.rounds)]
    finally:
        stage.stop()
    about = {"connections": CONNECTIONS, "open loop a second": RATE, "processes": arguments.processes}
    print(json.dumps(about | stats.medians(rounds), indent=2))


if __name__ == "__main__":
    main()
