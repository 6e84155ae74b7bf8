"""A client of lmstfy's API that shows raw answers, on a gateway that speaks it."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from harness.gateway import Gateway

ULID = r"[0-9A-HJKMNP-TV-Z]{26}"
OPTIONS = ("--lmstfy", "127.0.0.1:0", "--lmstfy-admin", "127.0.0.1:0")


_OPEN: deque[socket.socket] = deque()


class Raw(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return json.loads(self.body)


def port_of(gateway: Gateway, name: str, host: str = "127.0.0.1") -> int:
    """The port of a dialect, as the gateway has told it."""
    found = re.search(rf"^{name} at http://{host}:(\d+)$", gateway.told(), re.MULTILINE)
    assert found, gateway.told()
    return int(found[1])


def basic(gateway: Gateway, token: str = "all") -> str:
    """The header by which the admin port knows a token of the gateway, or one given as it is."""
    secret = gateway.tokens.get(token, token)
    return f"Authorization: Basic {base64.b64encode(f'any:{secret}'.encode()).decode()}"


def exchange(port: int, request: bytes, timeout: float = 60, host: str = "127.0.0.1") -> Raw:
    """Send a request as it is, and read the whole answer. The connection stays open for a while, as
    connections of real clients do: an answer whose client has left at once counts as lost."""
    connection = socket.create_connection((host, port), timeout=timeout)
    _OPEN.append(connection)
    if len(_OPEN) > 20:
        _OPEN.popleft().close()
    connection.sendall(request)
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65_536)
        assert part, received
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    line, *rest = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in rest)}
    while len(body) < int(headers.get("content-length", 0)):
        part = connection.recv(65_536)
        assert part, received
        body += part
    return Raw(int(line.split(" ")[1]), headers, body)


class Client:
    """Calls the API with one token."""

    def __init__(self, port: int, token: str, namespace: str = "ns") -> None:
        self.port, self.token, self.namespace = port, token, namespace

    def call(
        self, method: str, path: str, body: bytes = b"", *, token: str | None = None, **headers: str
    ) -> Raw:
        """Make a request; headers are given with underscores."""
        sent = {"Host": "localhost", "X-Token": self.token if token is None else token}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items() if value)]
        if body or method == "PUT":
            lines.append(f"Content-Length: {len(body)}")
        return exchange(self.port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def publish(self, queue: str, body: bytes = b"hello", **query: int) -> str:
        """Publish a job and return its id."""
        answer = self.call("PUT", self.path(queue, **query), body)
        assert answer.status == 201, answer
        return str(answer.content["job_id"])

    def consume(self, queues: str, **query: int) -> Any:
        """Return the job or jobs, None if there are none."""
        answer = self.call("GET", self.path(queues, **query))
        assert answer.status in (200, 404), answer
        return answer.content if answer.status == 200 else None

    def path(self, rest: str, **query: int) -> str:
        """The path of a queue, or of what is below it."""
        return f"/api/{self.namespace}/{rest}?" + "&".join(f"{name}={value}" for name, value in query.items())


def data_of(job: Any) -> bytes:
    """The body of a consumed job."""
    return base64.b64decode(job["data"])
