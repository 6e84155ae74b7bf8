"""A receiver of webhooks on loopback that misbehaves as it is told, and remembers what it was sent."""

import contextlib
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Got:
    """One request. ``at`` is seconds since 1970, when all of it was there."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def message_id(self) -> str:
        """Its ``webhook-id``."""
        return self.headers["webhook-id"]


@dataclass
class Reply:
    """What is sent back: these bytes, or a misbehaviour."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False
    """Answer nothing, until the receiver is closed."""
    reset: bool = False
    """Break the connection off."""
    drip: float = 0.0
    """Seconds between two bytes."""
    after: float = 0.0
    """Seconds until the answer begins."""

    def encoded(self) -> bytes:
        headers = {"Content-Length": str(len(self.body)), **self.headers}
        lines = [f"HTTP/1.1 {self.status} X", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def bomb(size: int = 50 << 20) -> Reply:
    """Zeros that are small as long as nobody unpacks them."""
    packed = gzip.compress(bytes(size))
    return Reply(body=packed, headers={"Content-Encoding": "gzip"})


Behaviour = Callable[[Got], Reply]


class Receiver:
    """Listens on a port of loopback. ``reply`` may be replaced at any time."""

    def __init__(
        self,
        reply: Behaviour | Reply = Reply(),  # noqa: B008 - it is never changed
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.reply = reply
        self._tls = tls
        self.got: list[Got] = []
        self.connections = 0
        self._closed = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.settimeout(0.05)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    @property
    def origin(self) -> str:
        """What TOC_WEBHOOK_ALLOW must list, besides 127.0.0.1."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def url(self, path: str = "/hook") -> str:
        """A URL of it."""
        return self.origin + path

    def of(self, path: str) -> list[Got]:
        """The requests to a path, in order."""
        return [one for one in self.got if one.path == path]

    def close(self) -> None:
        """Break everything off."""
        self._closed.set()
        self._listener.close()
        for one in list(self._sockets):
            with _ignored():
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections += 1
            self._sockets.add(client)
            self._start(lambda client=client: self._serve(client))  # type: ignore[misc]

    def _serve(self, client: socket.socket) -> None:
        with _ignored(), client:
            client.settimeout(60)
            if self._tls:
                client = self._tls.wrap_socket(client, server_side=True)
            buffered = b""
            while not self._closed.is_set():
                found = self._read(client, buffered)
                if found is None:
                    break
                got, buffered = found
                self.got.append(got)
                reply = self.reply if isinstance(self.reply, Reply) else self.reply(got)
                if not self._send(client, reply):
                    break
        self._sockets.discard(client)

    def _read(self, client: socket.socket, data: bytes) -> tuple[Got, bytes] | None:
        while b"\r\n\r\n" not in data:
            part = client.recv(65536)
            if not part:
                return None
            data += part
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        length = int(headers.get("content-length", "0"))
        while len(rest) < length:
            part = client.recv(65536)
            if not part:
                return None
            rest += part
        return Got(first.split(" ")[1], headers, rest[:length], time.time()), rest[length:]

    def _send(self, client: socket.socket, reply: Reply) -> bool:
        if reply.after:
            self._closed.wait(reply.after)
        if reply.hang:
            self._closed.wait()
            return False
        if reply.reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return False
        data = reply.encoded()
        if not reply.drip:
            client.sendall(data)
            return True
        for number in range(len(data)):
            if self._closed.wait(reply.drip):
                return False
            client.sendall(data[number : number + 1])
        return True


def _ignored() -> contextlib.suppress:
    return contextlib.suppress(OSError, ValueError)  # the other side has gone


Receive = Callable[..., Receiver]
"""Starts receivers, which end with the test: the fixture ``receive``."""
