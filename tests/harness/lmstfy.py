"""A client of lmstfy's API that shows raw answers, on a gateway that speaks it."""

import base64
import socket
from collections import deque
from typing import Any

from harness.dialect import Raw, port_of, receive
from harness.gateway import Gateway

__all__ = ["OPTIONS", "ULID", "Client", "Raw", "basic", "data_of", "exchange", "port_of"]

ULID = r"[0-9A-HJKMNP-TV-Z]{26}"
OPTIONS = ("--lmstfy", "127.0.0.1:0", "--lmstfy-admin", "127.0.0.1:0")


_OPEN: deque[socket.socket] = deque()


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
    return receive(connection)


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
        return str(answer.json["job_id"])

    def consume(self, queues: str, **query: int) -> Any:
        """Return the job or jobs, None if there are none."""
        answer = self.call("GET", self.path(queues, **query))
        assert answer.status in (200, 404), answer
        return answer.json if answer.status == 200 else None

    def path(self, rest: str, **query: int) -> str:
        """The path of a queue, or of what is below it."""
        return f"/api/{self.namespace}/{rest}?" + "&".join(f"{name}={value}" for name, value in query.items())


def data_of(job: Any) -> bytes:
    """The body of a consumed job."""
    return base64.b64decode(job["data"])
