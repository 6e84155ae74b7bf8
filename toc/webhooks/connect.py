"""Connections of webhooks: names are looked up, and only to addresses that were checked is a connection made.

The resolver leaves out addresses that must not be connected to. The address is checked once more where its
socket is made, so nothing else can be connected to: no literal, which aiohttp does not look up, and no answer
from its cache.

A look-up that hangs keeps a thread, and nothing ends it. aiohttp looks each name up once at a time, and up to
MAX_LOOKUPS are looked up at once: so names which hang hold up no others, unless there are very many.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from weakref import WeakSet

from aiohttp import ClientRequest, ClientTimeout, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from toc.webhooks.addresses import Allowed, refusal

MAX_LOOKUPS = 120
NAMES_SECONDS = 10
"""After this time a name is looked up again."""
KEEP_SECONDS = 15.0
"""For how long an idle connection is kept."""
UNREAD_MS = 60_000
"""After this time a connection is broken off whose peer takes nothing of what was sent: closed, it would stay
until then too."""

HEAD_BYTES = 1 << 16
"""Most bytes of an answer before its body, with all interim answers."""
ALL_BYTES = 1 << 20
"""Most bytes of an answer, once its body is read: more than chunks of a byte each make of what is read."""
AT_ONCE_BYTES = 1 << 15
"""About how much is received at once."""

Infos = Sequence[tuple[Any, ...]]
Lookup = Callable[..., Infos]
"""``socket.getaddrinfo``, or its replacement."""


class AddressRefused(OSError):
    """The address must not be connected to. No connection was made."""


def check_address(text: str, allowed: Allowed) -> None:
    """Raise AddressRefused for an address that must not be connected to."""
    why = refusal(ip_address(text), allowed)
    if why is not None:
        raise AddressRefused(f"{text} must not be connected to: {why}; TOC_WEBHOOK_ALLOW may list it")


class Resolver(AbstractResolver):
    """Looks names up and leaves out addresses that must not be connected to. Belongs to one event loop."""

    def __init__(self, allowed: Allowed, lookup: Lookup) -> None:
        self._allowed = allowed
        self._lookup = lookup
        self._turns = asyncio.Semaphore(MAX_LOOKUPS)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name that may be connected to. Raises OSError if there is none."""
        found: list[ResolveResult] = []
        refused: AddressRefused | None = None
        for kind, _type, proto, _name, address in await self._look_up(host):
            if family not in (socket.AF_UNSPEC, kind):
                continue
            try:
                check_address(address[0], self._allowed)
            except (AddressRefused, ValueError) as exc:
                refused = AddressRefused(f"{host}: {exc}")
                continue
            found.append(
                {
                    "hostname": host,
                    "host": address[0],
                    "port": port,
                    "family": kind,
                    "proto": proto,
                    "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                }
            )
        if not found:
            raise refused or OSError(f"{host}: there is no address of this name")
        return found

    async def close(self) -> None:
        """Nothing: threads that still look names up keep no process alive."""

    async def _look_up(self, host: str) -> Infos:
        loop = asyncio.get_running_loop()
        async with self._turns:
            answer: asyncio.Future[Infos] = loop.create_future()
            try:
                threading.Thread(
                    target=self._ask, args=[host, loop, answer], name="toc-name", daemon=True
                ).start()
            except RuntimeError as exc:  # can't start new thread
                raise OSError(str(exc)) from exc
            return await answer

    def _ask(self, host: str, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Infos]) -> None:
        def give() -> None:
            if not answer.done():
                answer.set_exception(found) if isinstance(found, Exception) else answer.set_result(found)

        found: Infos | Exception
        try:
            found = self._lookup(host, 0, type=socket.SOCK_STREAM)
        except Exception as exc:
            found = exc
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(give)


class Bounded(asyncio.Protocol):
    """A protocol that is given ``left`` bytes more, and what comes together with the last of them.

    Interim answers have no end and take long to parse: by them one receiver could hold up all others.
    """

    def __init__(self, inner: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        assert isinstance(inner, asyncio.Protocol)  # noqa: S101 - aiohttp's
        self._inner = inner
        self._transport = transport
        self.left = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass it on."""
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Pass it on, or break the connection off."""
        if self.left <= 0:
            self._transport.abort()
            return
        self.left -= len(data)
        self._inner.data_received(data)

    def end(self) -> None:
        """Take nothing more: the answer is there, or nobody waits for it."""
        self.left = 0


def bound(connection: Connection, most: int) -> None:
    """Let ``most`` bytes more arrive over a connection, until it is released."""
    transport = connection.transport
    if transport is None:
        return
    bounded = transport.get_protocol()
    if not isinstance(bounded, Bounded):
        bounded = Bounded(bounded, transport)
        transport.set_protocol(bounded)
    bounded.left = most
    connection.add_callback(bounded.end)


class _Connector(TCPConnector):
    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        connection = await super().connect(req, traces, timeout)
        bound(connection, HEAD_BYTES)
        return connection


def connector(
    allowed: Allowed, resolver: Resolver, opened: WeakSet[socket.socket], *, keep: bool
) -> TCPConnector:
    """Return what makes connections, and keeps them for a while. Their sockets are in ``opened`` until they
    are closed."""

    def guarded(info: tuple[Any, ...]) -> socket.socket:
        family, kind, proto, _name, address = info
        check_address(address[0], allowed)
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, AT_ONCE_BYTES)
        opened.add(made)
        return made

    return _Connector(
        limit=0,
        ttl_dns_cache=NAMES_SECONDS,
        resolver=resolver,
        socket_factory=guarded,
        force_close=not keep,
        keepalive_timeout=KEEP_SECONDS if keep else None,
    )
