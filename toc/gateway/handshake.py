"""Bounds TLS handshakes, in number and in time."""

from __future__ import annotations

import asyncio
import ssl
from functools import partial
from typing import TYPE_CHECKING, Any

from uvicorn.server import ServerState

from toc.observe.metrics import CONNECTIONS_CLOSED

if TYPE_CHECKING:
    from toc.gateway.connections import Connection, Crowd

HANDSHAKE_SECONDS = 10.0
"""How long a handshake may take."""


class Handshake(asyncio.Protocol):
    """A connection whose TLS handshake is under way. Bounded in number like idle connections, and in time
    like the head of a request."""

    crowd: Crowd
    context: ssl.SSLContext
    secured: type[Connection]

    def __init__(self, *, server_state: ServerState, **about: Any) -> None:
        self._make = partial(self.secured, server_state=server_state, **about)
        self._connections: set[Any] = server_state.connections
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake."""
        self.transport = transport
        self._since = self._loop.time()
        self._connections.add(self)
        self.crowd.joined(self)
        if transport.is_closing():
            return
        # The first step runs now, because a task would begin later: from here on all bytes must reach TLS.
        self._tls = self._loop.start_tls(
            transport, self, self.context, server_side=True, ssl_handshake_timeout=2 * HANDSHAKE_SECONDS
        )
        self._tls.send(None).add_done_callback(self._done)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Let it go."""
        self.crowd.left(self)
        self._connections.discard(self)

    def _done(self, _handshake: asyncio.Future[None]) -> None:
        self.connection_lost(None)  # its handshake is over: forget it here
        try:
            self._tls.send(None)
        except StopIteration as exc:
            transport = exc.value
        except OSError:  # also of TLS
            return
        if not transport.is_closing():
            connection = self._make()
            connection.below = self.transport
            transport.set_protocol(connection)
            connection.connection_made(transport)

    def look(self, now: float) -> None:
        """Close it if its client is too slow."""
        if now - self._since > HANDSHAKE_SECONDS:
            self.close("slow")

    def close(self, reason: str) -> None:
        """Close it without an answer."""
        CONNECTIONS_CLOSED.of(reason).add()
        self.transport.abort()

    def shutdown(self) -> None:
        """Close it, as the server stops."""
        self.transport.abort()
