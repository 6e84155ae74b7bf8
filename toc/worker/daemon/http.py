"""The daemon's HTTP server: /metrics for Prometheus, /livez and /readyz for supervisors."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from socketserver import TCPServer
from typing import Any, NamedTuple

from toc.model.errors import ConfigError

REQUEST_SECONDS = 5.0
"""How long a client may take to send its request, and how long to receive the answer."""


class Answer(NamedTuple):
    """What a request gets."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Pages = Mapping[str, Callable[[str], Answer]]
"""Maps each path to what answers it, given the request's Accept header."""

_NO_PAGE = Answer(b"there are /metrics, /livez and /readyz\n", status=HTTPStatus.NOT_FOUND)


class Server(ThreadingHTTPServer):
    """Serves the pages of one address, each request on a thread of its own."""

    daemon_threads = True
    pages: Pages

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the own name, which the library would make."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "toc", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing for a client that hung up."""


class _Received(io.RawIOBase):
    """What a client sends. A read after REQUEST_SECONDS in all raises TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + REQUEST_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = f"toc/{version('timeout-center')}"
    sys_version = ""

    def setup(self) -> None:
        """Begin a request: there is one per connection."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Received(self.connection))

    def do_GET(self) -> None:
        """Answer a request."""
        page = self.server.pages.get(self.path.partition("?")[0])
        answer = _NO_PAGE if page is None else page(self.headers.get("Accept", ""))
        self.connection.settimeout(REQUEST_SECONDS)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its signature
        """Log nothing for scrapes."""


def listen(address: str, pages: Pages) -> Server:
    """Bind to TOC_METRICS_ADDRESS; the caller runs ``serve_forever``. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    kind = type("_Server6", (Server,), {"address_family": socket.AF_INET6}) if ":" in host else Server
    try:
        server: Server = kind((host, int(port)), _Handler)
    except OSError as exc:
        raise ConfigError(
            f"TOC_METRICS_ADDRESS={address}: cannot listen there: {exc.strerror or exc}"
        ) from exc
    server.pages = pages
    return server
