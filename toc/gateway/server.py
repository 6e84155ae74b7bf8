"""The HTTP server of a gateway process: uvicorn, with our connections."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server

from toc.gateway import connections
from toc.gateway.connections import Connection, Crowd
from toc.gateway.handshake import Handshake


class GatewayServer(Server):
    """uvicorn's server, which its owner stops, not a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Leave signals alone."""
        yield


def server(
    app: Any,
    crowd: Crowd,
    *,
    shutdown_deadline: float,
    certificate: str | None = None,
    key: str | None = None,
) -> GatewayServer:
    """Return a server for the application. Raises OSError or ssl.SSLError for a bad certificate."""
    protocol: type[asyncio.Protocol] = type("OwnConnection", (Connection,), {"crowd": crowd})
    config = Config(
        app,
        http=protocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=connections.KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(shutdown_deadline)),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    config.load()
    if config.ssl is not None:  # uvicorn would leave handshakes, and what is below TLS, to the event loop
        about = {"crowd": crowd, "context": config.ssl, "secured": protocol}
        config.http_protocol_class, config.ssl = type("OwnHandshake", (Handshake,), about), None
    return GatewayServer(config)
