"""Gateways with clients of theirs: what the tests of the doors share."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from harness.gateway import Gateway, Reply
from harness.history import History
from harness.system import System
from harness.threads import beside

from toc import Topic
from toc.model.topic import Backoff, Delivery

PULLED, ONCE = "test.pulled", "test.once"
"""Topics that are pulled: of three tries, and of a single one."""
BROKEN = (http.client.HTTPException, OSError)
"""What a client sees of a gateway that dies."""


def create_pulled(system: System, *, slots: int = 4) -> None:
    """Create the two topics."""
    for number, (name, retries) in enumerate({PULLED: 3, ONCE: 1}.items()):
        topic = Topic(
            name,
            90 + number,
            slots,
            retries=retries,
            backoff=Backoff.IMMEDIATE,
            delivery=Delivery.PULL,
            max_runtime=60,
            prepare_timeout=3,
        )
        system.center.store.topics.create(topic)
    system.center.catalog.refresh()


class Clients:
    """Clients that know several gateways. ``gateways`` may change while they run."""

    def __init__(self, gateways: Sequence[Gateway], history: History) -> None:
        self.gateways = list(gateways)
        self.broken = 0
        """Calls that a gateway did not answer."""
        self.waiting = 0
        """Pulls that have been asked and are not answered."""
        self.started: list[tuple[int, int]] = []
        """job_id and attempt of each task that a consumer has heard of."""
        self._history = history
        self._lock = threading.Lock()

    def ask(
        self, turn: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply | None:
        """Make one call; None if it was not answered, or is to be repeated."""
        gateway = self.gateways[turn % len(self.gateways)]
        try:
            reply = gateway.call(method, path, body, headers=headers, attempts=1)
        except BROKEN:
            with self._lock:
                self.broken += 1
            return None
        return None if reply.status in (429, 503) else reply

    def insist(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None,
        turn: int = 0, seconds: float = 60.0,
    ) -> Reply:  # fmt: skip
        """Repeat one call, at one gateway after the other, until it is answered."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            reply = self.ask(turn, method, path, body, headers)
            if reply is not None:
                return reply
            turn += 1
            time.sleep(0.02)
        raise AssertionError(f"{method} {path} is not answered for {seconds} s")

    @contextmanager
    def consuming(self, count: int, topics: str, *, most: int = 1, ttr: float = 5.0) -> Iterator[None]:
        """So many consumers pull and ack meanwhile; an ack is repeated until it is answered."""
        with beside(partial(self._consume, n, topics, most, ttr) for n in range(count)):
            yield

    def _consume(self, turn: int, topics: str, most: int, ttr: float, over: threading.Event) -> None:
        wanted = {"max": most, "wait": 2, "ttr": ttr}
        while not over.is_set():
            with self._lock:
                self.waiting += 1
            reply = self.ask(turn, "POST", f"/v1/topics/{topics}:pull", wanted)
            with self._lock:
                self.waiting -= 1
            if reply is None:
                turn += 1
                over.wait(0.05)
                continue
            assert reply.status == 200, reply
            for task in reply.body["tasks"]:
                job_id, attempt = int(task["job_id"]), task["attempt"]
                names = {"job": job_id, "try": attempt}
                until = round(datetime.fromisoformat(task["lease_until"]).timestamp() * 1000) * 1_000_000
                if until <= time.time_ns():  # a busy machine: it is another consumer's by now
                    continue
                self._history.write("start", **names, v=task["version"], biz=task["biz_id"], until=until)
                self.started.append((job_id, attempt))
                self._history.write("end", **names, out="ok")
                self.insist("POST", "/v1/leases:ack", {"lease": task["lease"]}, turn=turn)


def raw(gateway: Gateway, method: str, path: str, body: Any = None, *, token: str = "all") -> bytes:
    """A request as bytes."""
    content = b"" if body is None else json.dumps(body).encode()
    return (
        f"{method} {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {gateway.tokens[token]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content


def connect(gateway: Gateway, *, buffer: int = 0) -> socket.socket:
    """A connection. ``buffer``: bytes that its kernel takes of what nobody reads."""
    client = socket.socket()
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.settimeout(20)
    client.connect(("127.0.0.1", gateway.port))
    return client


def reset(client: socket.socket) -> None:
    """Leave at once, whatever is under way."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()


def memory(pid: int) -> int:
    """Bytes of memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def p99(found: Sequence[float]) -> float:
    """What a hundredth of them exceed."""
    return sorted(found)[len(found) * 99 // 100]
