"""The doors: how many requests a second, how soon, and the processor time of each.

``python -m benchmarks.doors [--seconds N] [--rounds N] [--only NAME]`` starts MariaDB (each commit on disk),
Redis and a gateway, loads it from this process, and prints the medians of all rounds as JSON. ``empty`` is a
route that does nothing (/healthz): the floor of the same stack in the same run. ``--only webhook`` measures
what begins so, and ``empty``. ``async SDK floor`` is what the servers alone need for as many tasks: the floor
of the asynchronous SDK. ``--peer`` measures BullMQ behind an equally thin route of node's http server
too; its Redis syncs its log once a second, not for each commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httptools
import pymysql
import uvloop
from cryptography.fernet import Fernet
from pymysql.constants import CLIENT
from sqlalchemy.engine import make_url

from benchmarks import processes, resp, stats, webhooks
from benchmarks.catalog import ENTRIES
from benchmarks.environment import python_of
from benchmarks.local import MariaDB, RedisServer
from toc import AsyncTimeoutCenter, NewTask, Settings, TimeoutCenter, Topic
from toc.dev.local import until
from toc.model.access import Role
from toc.model.clock import Clock
from toc.model.sharding import table_of_job
from toc.model.task import TaskRow
from toc.model.topic import Delivery
from toc.operate.tokens import create_token
from toc.sdk.submission import RowMaker
from toc.store.migrate import Migrator
from toc.store.servers.mysql import MySqlServer
from toc.store.tasks import rows as sql

CONNECTIONS = 64
RATE = 500
TABLES = 64
OTHERS = 2000
"""Pulls that wait for a topic of which nothing comes due."""
PAIRS = 256
"""Connections that pull and ack one by one."""
IN_FLIGHT = 256
"""Submits of the asynchronous SDK at once."""
FLOOR_RATE = 20_000
"""Tasks a second of its floor, about."""
IMPORT = "import time; a = time.perf_counter(); from toc import TimeoutCenter; print(time.perf_counter() - a)"
BULLMQ = Path(__file__).parent / "peers" / "bullmq"


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


async def awaited(settings: Settings, seconds: float) -> list[float]:
    """As many submits by the asynchronous SDK, each followed by the next."""
    took: list[float] = []

    async def work() -> None:
        while (began := time.perf_counter()) < end:
            await center.submit("bench", biz_id=random.randrange(10**9), delay=3600, attribute={"n": 1})
            took.append(time.perf_counter() - began)

    async with AsyncTimeoutCenter(settings) as center:
        await center.submit("bench", biz_id=1, delay=3600)
        end = time.perf_counter() + seconds
        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return took


async def floor(stage: Stage, seconds: float, mark: Mark) -> list[float]:
    """The INSERTs of as many tasks at once, written before, over one bare connection, and a ZADD after each
    commit."""
    topic, rows_of = stage.center.catalog.get("bench"), RowMaker(Clock(), 7200, 0)
    url = make_url(stage.mariadb.url)
    connection = pymysql.connect(
        host=url.host, port=url.port or 0, user=url.username, password=url.password or "",
        autocommit=True, client_flag=CLIENT.MULTI_STATEMENTS,
    )  # fmt: skip
    ready: list[tuple[str, list[str | int]]] = []
    dialect = MySqlServer(url, [])
    with connection.cursor() as cursor, socket.create_connection(("127.0.0.1", stage.redis.port)) as redis:
        for _ in range(int(FLOOR_RATE * seconds / IN_FLIGHT)):
            by_table: dict[int, list[TaskRow]] = {}
            entries: list[str | int] = []
            for _ in range(IN_FLIGHT):
                task = NewTask("bench", random.randrange(10**9), 3600, attribute={"n": 1})
                row = rows_of.submission(task, lambda _: topic).row
                by_table.setdefault(table_of_job(row.job_id, TABLES), []).append(row)
                entries += [row.next_time, row.job_id]
            inserts = [
                sql.insert(dialect, stage.center.store.name_of(one), by_table[one])
                for one in sorted(by_table)
            ]
            texts = [cursor.mogrify(insert.sql, insert.params) for insert in inserts]
            ready.append((";".join(["START TRANSACTION", *texts, "COMMIT"]), entries))
        stream = redis.makefile("rwb")
        mark()
        began = time.perf_counter()
        for text, entries in ready:
            cursor.execute(text)
            while cursor.nextset():
                pass
            resp.ask(stream, "ZADD", "floor", *entries)
        took = time.perf_counter() - began
        mark()
    connection.close()
    return [took / len(ready)] * (len(ready) * IN_FLIGHT)


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


Ask = Callable[[], bytes]
End = Callable[[bytes], bytes]
Mark = Callable[[], None]
"""Called when what is measured begins, and when it has ended."""


async def waiting_pulls(
    port: int,
    seconds: float,
    submit: Callable[[float], Any],
    pull: Ask,
    ends: End,
    due_of: Callable[[bytes], float],
    mark: Mark,
) -> list[float]:
    """How long after its due time each task was read by a consumer that waited for it (s).

    ``submit`` stores all of them, due at random instants from the time it is given on (s since 1970). What
    that costs is not measured, nor is the time until the first is due.
    """
    count = int(RATE * seconds)
    clients = await connect(port, CONNECTIONS)
    first_due = time.time() + 2.0
    await asyncio.to_thread(submit, first_due)
    late: list[float] = []
    done = 0
    all_done = asyncio.Event()

    async def work(client: Client) -> None:
        nonlocal done
        while done < count:
            assert await client.ask(pull()) == 200, client.body[:300]
            read = time.time()
            got = client.body
            if b"lease" not in got and b"id" not in got:
                continue
            late.append(read - due_of(got))
            assert await client.ask(ends(got)) == 200, client.body[:300]
            done += 1
        all_done.set()

    tasks = [asyncio.create_task(work(client)) for client in clients]
    ahead = first_due - time.time()
    assert ahead > 0.1, "storing the tasks took too long"
    await asyncio.sleep(ahead)
    mark()
    await ended(all_done, tasks)
    mark()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        client.transport.close()
    return late


async def ended(all_done: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Wait until all is done, or raise what a client's task has raised."""
    waiting = asyncio.create_task(all_done.wait())
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
    await waiting


async def pairs(port: int, connections: int, count: int, pull: Ask, ends: End, mark: Mark) -> list[float]:
    """Pull what is due and ack it, until so many tasks are done. Returns the time for each.

    Whoever finds nothing any more waits for the rest of its pull: that is not measured.
    """
    clients = await connect(port, connections)
    done = 0
    all_done = asyncio.Event()
    mark()
    began = time.perf_counter()

    async def work(client: Client) -> None:
        nonlocal done
        while done < count:
            assert await client.ask(pull()) == 200, client.body[:300]
            got = client.body
            if number := got.count(b'"lease":'):
                assert await client.ask(ends(got)) == 200, client.body[:300]
                done += number
        all_done.set()

    tasks = [asyncio.create_task(work(client)) for client in clients]
    await ended(all_done, tasks)
    took = time.perf_counter() - began
    mark()
    await asyncio.gather(*tasks)
    for client in clients:
        client.transport.close()
    return [took / done] * done


class Stage:
    """The servers and a gateway; by default with as many databases and tables as in production."""

    def __init__(self, http_processes: int, *, databases: int = 8, tables: int = TABLES) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="toc-doors-")
        directory = self.directory = Path(self._directory.name)
        self.receiver = webhooks.Receiver()
        self.mariadb = MariaDB(directory / "mariadb")
        self.redis = RedisServer(directory / "redis")
        self.mariadb.start()
        self.redis.start()
        values: dict[str, Any] = {
            "database_urls": [self.mariadb.url],
            "databases": databases,
            "tables": tables,
            "redis_url": self.redis.url,
            "secret_key": [Fernet.generate_key().decode()],
            "webhook_allow": [*self.receiver.allow],
        }
        Migrator(values["database_urls"], databases=databases, tables=tables, prefix="toc_").upgrade()
        self.center = TimeoutCenter(Settings(**values))
        self.center.store.topics.create(Topic("bench", 1, 16))
        for number, name in enumerate(("pulled", "quiet"), 2):
            topic = Topic(name, number, 16, delivery=Delivery.PULL)
            self.center.store.topics.create(topic)
        webhooks.prepare(self.center, self.receiver)
        self.center.catalog.refresh()
        made = create_token(self.center, "bench", roles=[Role.ADMIN], topics=["*"], by="bench")
        self.token = made.secret
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        self.env |= {
            f"TOC_{name.upper()}": ",".join(value) if isinstance(value, list) else str(value)
            for name, value in values.items()
        }
        log = directory / "gateway.log"
        with log.open("wb") as output:
            self.gateway = subprocess.Popen(
                [sys.executable, "-m", "toc", "gateway", "--port", "0", "--processes", str(http_processes)],
                env=self.env, stdout=output, stderr=output,
            )  # fmt: skip
        assert until(lambda: log.read_text().count("worker_ready") > http_processes, 60), log.read_text()
        found = re.search(r":(\d+), its doc", log.read_text())
        assert found
        self.port = int(found[1])

    def cpu(self) -> dict[str, float]:
        """The processor seconds used so far, by who used them."""
        http = [pid for pid in processes.tree(self.gateway.pid) if _is_http(pid)]
        mariadb = processes.tree(self.pids()["mariadb"])
        used = {"gateway": processes.cpu_seconds(http), "mariadb": processes.cpu_seconds(mariadb)}
        redis = processes.cpu_seconds([self.pids()["redis"]])
        return used | {"redis": redis, "client": time.process_time()}

    def pids(self) -> dict[str, int]:
        """The servers' pids."""
        servers = {"mariadb": self.mariadb, "redis": self.redis}
        return {name: one.process.pid for name, one in servers.items() if one.process}

    def stop(self) -> None:
        self.gateway.send_signal(signal.SIGTERM)
        self.gateway.wait(30)
        self.center.close()
        self.redis.stop()
        self.mariadb.stop()
        self.receiver.stop()
        self._directory.cleanup()


def _is_http(pid: int) -> bool:
    return b"toc.gateway.process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def measure(stage: Stage, seconds: float, only: str) -> dict[str, Any]:
    """One round of the workloads whose names begin with ``only``, and of the empty route."""
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

    def pull(topic: str, most: int = 1, wait: float = 30.0) -> bytes:
        body = json.dumps({"max": most, "wait": wait, "ttr": 60}).encode()
        return request("POST", f"/v1/topics/{topic}:pull", token, body)

    def ack(got: bytes) -> bytes:
        leases = [task["lease"] for task in json.loads(got)["tasks"]]
        return request("POST", "/v1/leases:ack", token, json.dumps({"leases": leases}).encode())

    def due_of(got: bytes) -> float:
        text = json.loads(got)["tasks"][0]["action_time"]
        return datetime.fromisoformat(text).timestamp()

    def submit(begin: float) -> None:
        dues = [
            datetime.fromtimestamp(begin + random.random() * seconds, UTC) for _ in range(int(RATE * seconds))
        ]
        stage.center.submit_many([NewTask("pulled", n, action_time=due) for n, due in enumerate(dues)])

    marks: list[tuple[float, dict[str, float]]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), stage.cpu()))

    few, many = int(1000 * seconds), int(5000 * seconds)

    def fill(count: int) -> None:
        for first in range(0, count, 1000):
            stage.center.submit_many([NewTask("pulled", first + n, 0.001) for n in range(1000)])

    async def beside_others() -> list[float]:
        others = await connect(port, OTHERS)
        asked = [client.ask(pull("quiet", wait=60.0)) for client in others]
        late = await waiting_pulls(port, seconds, submit, lambda: pull("pulled"), ack, due_of, mark)
        assert not any(one.done() for one in asked)
        for client in others:
            client.transport.close()
        return late

    async def idle() -> list[float]:
        others = await connect(port, OTHERS)
        for client in others:
            client.ask(pull("quiet", wait=60.0))
        await asyncio.sleep(2.0)
        before, began = stage.cpu()["gateway"], time.perf_counter()
        await asyncio.sleep(max(10.0, seconds))
        share = (stage.cpu()["gateway"] - before) / (time.perf_counter() - began)
        for client in others:
            client.transport.close()
        found["2,000 idle pulls"] = {"share of a core": share}
        return []

    work: dict[str, Callable[[], Any]] = {
        "empty": lambda: closed(port, seconds, lambda: request("GET", "/healthz", token), 200),
        "post": lambda: closed(port, seconds, post, 201),
        "post, open loop": lambda: open_loop(port, seconds, post, 201),
        "post 1,000": lambda: closed(port, seconds, lambda: next(batches), 200, connections=2),
        "get": lambda: closed(port, seconds, get, 200),
        "waiting pull": lambda: waiting_pulls(
            port, seconds, submit, lambda: pull("pulled"), ack, due_of, mark
        ),
        "waiting pull beside 2,000": beside_others,
        "pull and ack": lambda: pairs(port, PAIRS, few, lambda: pull("pulled", wait=1.0), ack, mark),
        "pull and ack in hundreds": lambda: pairs(
            port, 16, many, lambda: pull("pulled", 100, 1.0), ack, mark
        ),
        "2,000 idle pulls": idle,
        "async SDK": lambda: awaited(stage.center.settings, seconds),
        "async SDK floor": lambda: floor(stage, seconds, mark),
    }
    first = {"pull and ack": few, "pull and ack in hundreds": many}
    found: dict[str, Any] = {}
    for name, load in work.items():
        if name != "empty" and not name.startswith(only):
            continue
        fill(first.get(name, 0))
        marks.clear()
        mark()
        took = sorted(uvloop.run(load()))
        mark()
        # Of a workload that marks what is measured of it, that.
        (began, before), (end, after) = marks[1:-1] or marks
        passed = end - began
        if took:
            found[name] = {
                "a second": len(took) / passed,
                "p50 ms": 1000 * stats.percentile(took, 0.5),
                "p99 ms": 1000 * stats.percentile(took, 0.99),
                **{f"{who} us": 1e6 * (after[who] - before[who]) / len(took) for who in after},
            }
    if "async SDK" in found:
        found["async SDK"]["of its floor"] = (
            found["async SDK"]["a second"] / found["async SDK floor"]["a second"]
        )
    if "import toc".startswith(only):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        found["import toc"] = {"seconds": float(done.stdout)}
    return found


def measure_webhooks(stage: Stage, seconds: float, only: str) -> dict[str, Any]:
    """One round of what a worker of one process sends, and of what one of two sends, beside aiohttp alone."""
    found = {}
    if "webhook".startswith(only) or only.startswith("webhook"):
        found["webhooks, aiohttp alone"] = webhooks.bare(stage.receiver, seconds)
    for count in 1, 2:
        work = {
            "webhook, due to received": (webhooks.RATE, seconds),
            "webhooks flat out": (webhooks.FLAT_OUT, 0.0),
        }
        work = {name: how for name, how in work.items() if name.startswith(only)}
        if not work:
            continue
        with webhooks.sending(stage.env, stage.directory / "worker.log", count) as worker:
            servers = {"worker": worker, **stage.pids()}
            for name, (rate, spread) in work.items():
                found[f"{name}, {count} processes"] = webhooks.sent(
                    stage.center, stage.receiver, servers, int(rate * seconds), spread
                )
    return found


class Peer:
    """BullMQ behind node's http server, one process."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="toc-doors-")
        entry = next(entry for entry in ENTRIES if entry.name == "BullMQ")
        python_of(entry)  # installs it
        self.redis = RedisServer(Path(self._directory.name) / "redis", config=entry.redis_config)
        self.redis.start()
        self._node = subprocess.Popen(
            ["node", BULLMQ / "http.mjs"],
            env={**os.environ, "BENCH_REDIS": self.redis.url},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._node.stdout is not None
        self.port = int(self._node.stdout.readline())

    def measure(self, seconds: float) -> dict[str, Any]:
        """One round of what toc's gateway is measured with too."""
        port = self.port
        marks: list[float] = []

        def mark() -> None:
            marks.append(time.perf_counter())

        def ask(path: str, **body: Any) -> bytes:
            return request("POST", path, "none", json.dumps(body).encode())

        def post() -> bytes:
            return ask("/add", delay=3_600_000, order=random.randrange(10**9))

        def submit(begin: float) -> None:
            async def go() -> None:
                clients = await connect(port, CONNECTIONS)
                left = int(RATE * seconds)

                async def work(client: Client) -> None:
                    nonlocal left
                    while left > 0:
                        left -= 1
                        due = begin + random.random() * seconds
                        await client.ask(ask("/add", delay=round((due - time.time()) * 1000), due=due))

                await asyncio.gather(*map(work, clients))
                for client in clients:
                    client.transport.close()

            asyncio.run(go())

        work: dict[str, Callable[[], Any]] = {
            "empty": lambda: closed(port, seconds, lambda: request("GET", "/healthz", "none"), 200),
            "post": lambda: closed(port, seconds, post, 201),
            "post, open loop": lambda: open_loop(port, seconds, post, 201),
            "waiting pull": lambda: waiting_pulls(
                port,
                seconds,
                submit,
                lambda: ask("/pull"),
                lambda got: ask("/ack", id=json.loads(got)["id"]),
                lambda got: float(json.loads(got)["due"]),
                mark,
            ),
        }
        found = {}
        for name, load in work.items():
            marks.clear()
            mark()
            took = sorted(uvloop.run(load()))
            mark()
            began, end = marks[1:-1] or marks
            found[name] = {
                "a second": len(took) / (end - began),
                "p50 ms": 1000 * stats.percentile(took, 0.5),
                "p99 ms": 1000 * stats.percentile(took, 0.99),
            }
        return found

    def stop(self) -> None:
        self._node.terminate()
        self._node.wait()
        self.redis.stop()
        self._directory.cleanup()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="HTTP processes")
    parser.add_argument("--only", default="", metavar="NAME", help="only workloads that begin so, and empty")
    parser.add_argument("--peer", action="store_true", help="measure BullMQ behind a thin route too")
    arguments = parser.parse_args()
    stage = Stage(arguments.processes)
    try:
        what = arguments.seconds, arguments.only
        rounds = [measure(stage, *what) | measure_webhooks(stage, *what) for _ in range(arguments.rounds)]
    finally:
        stage.stop()
    about = {"connections": CONNECTIONS, "open loop a second": RATE, "processes": arguments.processes}
    found = about | stats.medians(rounds)
    if arguments.peer:
        peer = Peer()
        try:
            found["BullMQ"] = stats.medians(
                [peer.measure(arguments.seconds) for _ in range(arguments.rounds)]
            )
        finally:
            peer.stop()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
