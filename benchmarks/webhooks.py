"""Webhooks: how soon after its due time a receiver has a request, and how many a second.

``python -m benchmarks.webhooks`` is the receiver: one process as thin as can be, which prints its port. It
answers each POST with 204 and remembers when it had all of it; a GET returns what it remembers, and forgets
it.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import httptools
import uvloop

from benchmarks import processes, stats
from toc import NewTask, TimeoutCenter, Topic
from toc.dev.local import until
from toc.model.topic import Delivery

TOPIC = "sent"
RATE = 500
FLAT_OUT = 4000
"""Tasks due at one instant, for each second that a workload is to take."""
CONCURRENCY = 256
"""Requests in flight to the target, over all processes."""
LEAD = 2.0
"""Seconds between storing the tasks and the first of them."""

BARE_HEADERS = {
    "Accept-Encoding": "identity", "Content-Type": "application/json", "User-Agent": "bare",
    "toc-attempt": "1", "toc-action-time": "2026-11-23T07:00:00.000Z", "toc-biz-id": "1", "toc-topic": TOPIC,
    "traceparent": f"00-{'a' * 32}-{'b' * 16}-00", "webhook-id": "1_0", "webhook-timestamp": "1",
    "webhook-signature": f"v1,{'c' * 44}",
}  # fmt: skip
"""As many and as long as those of a task."""

Got = list[tuple[float, str, str]]
"""When each request was there (s), the due time of its task, and its webhook-id."""


class Receiving(asyncio.Protocol):
    """One connection of a sender."""

    got: Got = []  # noqa: RUF012 - that of all connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"toc-action-time":
            self.due = value.decode()
        elif name == b"webhook-id":
            self.message_id = value.decode()

    def on_message_complete(self) -> None:
        if self.parser.get_method() == b"POST":
            self.got.append((time.time(), self.due, self.message_id))
            self.transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            return
        body = json.dumps(self.got).encode()
        self.got.clear()
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


async def serve() -> None:
    """Receive until killed."""
    server = await asyncio.get_running_loop().create_server(Receiving, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Receiver:
    """The receiver's process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.webhooks"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def origin(self) -> str:
        """The beginning of its URLs."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def allow(self) -> Sequence[str]:
        """What TOC_WEBHOOK_ALLOW must list."""
        return "127.0.0.1", self.origin

    def taken(self) -> Got:
        """What has come since the last call."""
        with urllib.request.urlopen(self.origin, timeout=60) as answer:
            found: Got = json.load(answer)
        return found

    def cpu(self) -> float:
        """The processor seconds that it has used."""
        return processes.cpu_seconds([self._process.pid])

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def bare(receiver: Receiver, seconds: float) -> dict[str, Any]:
    """Send requests of the same form by aiohttp's client and nothing else, in this process: the floor."""

    async def whole() -> tuple[int, float, float]:
        connector = aiohttp.TCPConnector(limit=0)
        cookies = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, cookie_jar=cookies) as session:
            began, used = time.monotonic(), time.process_time()
            sent = 0

            async def work() -> None:
                nonlocal sent
                while time.monotonic() < began + seconds:
                    async with session.post(receiver.origin, data=b"{}", headers=BARE_HEADERS) as answer:
                        await answer.read()
                    sent += 1

            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
            return sent, time.monotonic() - began, time.process_time() - used

    count, took, used = asyncio.run(whole())
    receiver.taken()
    return {"a second": count / took, "sender us": 1e6 * used / count}


def prepare(center: TimeoutCenter, receiver: Receiver) -> None:
    """Make the target and its topic."""
    center.targets.create("thin", f"{receiver.origin}/", concurrency=CONCURRENCY)
    center.store.topics.create(Topic(TOPIC, 9, 16, delivery=Delivery.WEBHOOK, target="thin"))


@contextmanager
def sending(env: Mapping[str, str], log: Path, count: int) -> Iterator[int]:
    """Run a worker of so many processes that sends. Gives its pid."""
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "toc", "worker", "--webhooks", "--processes", str(count)],
            env=env, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        assert until(lambda: log.read_text().count("worker_ready") >= count, 60), log.read_text()
        yield worker.pid
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(30)


def sent(
    center: TimeoutCenter, receiver: Receiver, servers: Mapping[str, int], count: int, spread: float
) -> dict[str, Any]:
    """Send so many tasks, due at random instants within ``spread`` seconds (0: at one instant).

    ``servers``: whose processor time is given besides, by name, and their pids.
    """
    begin = time.time() + LEAD + count / 20_000  # stored by then
    dues = [datetime.fromtimestamp(begin + random.random() * spread, UTC) for _ in range(count)]
    center.submit_many([NewTask(TOPIC, number, action_time=due) for number, due in enumerate(dues)])
    assert time.time() < begin, "storing took too long"

    def cpu() -> dict[str, float]:
        used = {name: processes.cpu_seconds(processes.tree(pid)) for name, pid in servers.items()}
        return used | {"receiver": receiver.cpu()}

    time.sleep(max(begin - 0.2 - time.time(), 0.0))
    before, got = cpu(), receiver.taken()
    end = time.monotonic() + spread + 60
    time.sleep(begin + spread - time.time())
    while len(got) < count and time.monotonic() < end:
        time.sleep(0.1)
        got += receiver.taken()
    time.sleep(0.5)  # the last rows are written
    after = cpu()
    assert len(got) == len({message_id for _, _, message_id in got}) == count, f"{len(got)} of {count}"
    late = sorted(at - datetime.fromisoformat(due).timestamp() for at, due, _ in got)
    assert late[0] > -0.001, "early"
    return {
        "a second": count / (max(at for at, _, _ in got) - begin),
        "p50 ms": 1000 * stats.percentile(late, 0.5),
        "p99 ms": 1000 * stats.percentile(late, 0.99),
        **{f"{who} us": 1e6 * (after[who] - before[who]) / count for who in after},
    }


if __name__ == "__main__":
    uvloop.run(serve())
