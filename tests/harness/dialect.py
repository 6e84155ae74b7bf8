"""A plain client of a dialect's port: whole requests out, whole answers in, as bytes."""

import json
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.gateway import Gateway
from harness.patience import until

T = TypeVar("T")

ESTABLISHED = "01"
"""How the kernel writes the state of an open connection."""


class Raw(NamedTuple):
    """An answer as it came."""

    status: int
    media_type: str
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def port_of(gateway: Gateway, name: str) -> int:
    """The port on which a gateway speaks a dialect."""
    found = re.search(rf"^.*{re.escape(name)} at http://\S+:(\d+)", gateway.told(), re.MULTILINE)
    assert found, gateway.told()
    return int(found[1])


def send(
    port: int, method: str, target: str, body: bytes = b"", headers: Iterable[str] = ()
) -> socket.socket:
    """Send one request, and return its connection."""
    link = socket.create_connection(("127.0.0.1", port), timeout=200)
    lines = list(headers)
    if not any(line.lower().startswith("host:") for line in lines):
        lines.append(f"Host: 127.0.0.1:{port}")
    head = "\r\n".join([f"{method} {target} HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""])
    with suppress(BrokenPipeError, ConnectionResetError):  # it is answered before it is all there
        link.sendall(head.encode() + body)
    return link


def arrived(port: int, count: int) -> bool:
    """Whether ``count`` connections to a port are open at least, and their server has read all that was sent
    over them."""
    ours, opened = f":{port:04X}", 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_ = line.split()
        unsent, unread = queues.split(":")
        if state == ESTABLISHED and local.endswith(ours):
            opened += 1
            if int(unread, 16):
                return False
        elif state == ESTABLISHED and remote.endswith(ours) and int(unsent, 16):
            return False
    return opened >= count


def popped(pop: Callable[[], T | None]) -> T:
    """Pop until something comes."""
    found: list[T] = []

    def came() -> bool:
        found.extend(one for one in (pop(),) if one is not None)
        return bool(found)

    assert until(came), "nothing came"
    return found[0]


def receive(link: socket.socket) -> Raw:
    """Read one answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = link.recv(65536)
        assert part, data
        data += part
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", 0))
    while len(rest) < length:
        part = link.recv(65536)
        assert part, "the answer ends early"
        rest += part
    return Raw(int(first.split()[1]), headers.get("content-type", ""), rest, headers)


def ask(
    port: int, method: str, target: str, body: bytes | dict[str, Any] = b"", headers: Iterable[str] = ()
) -> Raw:
    """Make one request over a connection of its own. What is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with send(port, method, target, data, headers) as link:
        return receive(link)
