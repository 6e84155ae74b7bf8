"""The HTTP server of a gateway process: uvicorn, with a protocol of ours around its own."""

from __future__ import annotations

import contextlib
from typing import Any

from uvicorn.config import Config
from uvicorn.server import Server

from toc.gateway.connections import SECONDS, Connection, Crowd, Phase


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
    port: str = "native",
    certificate: str | None = None,
    key: str | None = None,
) -> GatewayServer:
    """Return a server for the application; ``port`` names it. Raises OSError or ssl.SSLError for a bad
    certificate."""
    config = Config(
        app,
        http=type("OwnConnection", (Connection,), {"crowd": crowd, "port": port}),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=round(SECONDS[Phase.IDLE]),
        timeout_graceful_shutdown=max(1, round(shutdown_deadline)),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    config.load()
    return GatewayServer(config)
