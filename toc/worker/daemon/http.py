"""The daemon's HTTP server: /metrics for Prometheus, /livez and /readyz for supervisors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from socketserver import TCPServer
from typing import Any, NamedTuple

from toc.model.errors import ConfigError

WAIT_SECONDS = 5.0
"""How long a client may let the server wait."""


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


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = f"toc/{version('timeout-center')}"
    sys_version = ""
    timeout = WAIT_SECONDS

    def do_GET(self) -> None:
        """Answer a request."""
        page = self.server.pages.get(self.path.partition("?")[0])
        answer = _NO_PAGE if page is None else page(self.headers.get("Accept", ""))
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
