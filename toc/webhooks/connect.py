"""Connections of webhooks: which addresses they may have, and how names are looked up.

The resolver leaves out addresses that must not be connected to. The address is checked once more where its
socket is made, so nothing else can be connected to: no literal, which aiohttp does not look up, and no answer
from its cache.

A look-up that hangs keeps a thread, and nothing ends it. aiohttp looks each name up once at a time, and up to
MAX_LOOKUPS are looked up at once, a quarter of them in the name of one target or topic. So names which hang
hold up no others', unless there are very many; then what has no turn in time uses up no try.

An address may embed another one, to which a translator or a tunnel would pass the connection on. Every
embedded address is judged as well, and one that is refused refuses the whole. NAT64 for local use
(64:ff9b:1::/48, RFC 8215) is refused as a whole: only its network knows where they embed another one.

    64:ff9b::/96         NAT64                  the last 32 bits (RFC 6052)
    2002::/16            6to4                   bits 16 to 47 (RFC 3056)
    2001::/32            Teredo                 bits 32 to 63, and the last 32 inverted (RFC 4380)
    ::ffff:0:0/96        IPv4-mapped            the last 32 bits (RFC 4291)
    ::ffff:0:0:0/96      IPv4-translated        the last 32 bits (RFC 2765)
    ::/96                IPv4-compatible        the last 32 bits (RFC 4291)
    ...:0:5efe:a.b.c.d   ISATAP                 the last 32 bits (RFC 5214)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from aiohttp import ClientRequest, ClientTimeout, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from toc.store.servers.threads import Threads

MAX_LOOKUPS = 120
NAMES_SECONDS = 10
"""After this time a name is looked up again."""
NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
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
IN_NAME_OF: ContextVar[str] = ContextVar("in_name_of", default="")
"""Whose the present request is: the target, or the topic whose task has a URL of its own."""
REUSED: ContextVar[bool] = ContextVar("reused")
"""Whether the connection of the present request was used before."""


# --- addresses

Address = IPv4Address | IPv6Address
Allowed = Callable[[Address], bool]
"""Whether an address is listed: it may then be connected to, whatever it is."""

_SPECIAL = [
    (what, ip_network(text))
    for what, texts in {
        "unspecified": "0.0.0.0/8 ::/128",
        "private": "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7 fec0::/10",
        "shared by a carrier's customers": "100.64.0.0/10",
        "loopback": "127.0.0.0/8 ::1/128",
        "link-local": "169.254.0.0/16 fe80::/10",
        "for documentation": "192.0.2.0/24 198.51.100.0/24 203.0.113.0/24 2001:db8::/32 3fff::/20",
        "for benchmarks": "198.18.0.0/15 2001:2::/48",
        "multicast": "224.0.0.0/4 ff00::/8",
        "reserved": "192.0.0.0/24 192.88.99.0/24 240.0.0.0/4 2001::/23",
    }.items()
    for text in texts.split()
]
"""The first that fits counts. Of IPv6 what is outside _GLOBAL6 is reserved, too."""
_GLOBAL6 = IPv6Network("2000::/3")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_LAST_32 = tuple(map(IPv6Network, ("64:ff9b::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "::/96")))
_ISATAP = (0x00005EFE, 0x02005EFE)


def embedded(address: Address) -> list[IPv4Address]:
    """Return the IPv4 addresses that this one embeds; [] for a plain one."""
    number = int(address)
    if isinstance(address, IPv4Address) or number < 2:  # unspecified and loopback look IPv4-compatible
        return []
    inner: tuple[int, ...] = ()
    if address in _SIX_TO_FOUR:
        inner = (number >> 80,)
    elif address in _TEREDO:
        inner = (number >> 64, ~number)
    elif any(address in network for network in _LAST_32) or number >> 32 & 0xFFFFFFFF in _ISATAP:
        inner = (number,)
    return [IPv4Address(one & 0xFFFFFFFF) for one in inner]


def refusal(address: Address, allowed: Allowed) -> str | None:
    """Return why this address must not be connected to, or None if it may be.

    A listed address may be connected to, and so may one that embeds listed or public ones only.
    """
    if getattr(address, "scope_id", None) is not None:
        return "it is link-local"
    if allowed(address):
        return None
    inner = embedded(address)
    if inner:
        for one in inner:
            if not allowed(one) and (why := _special(one)) is not None:
                return f"it embeds {one}, which is {why}"
        if int(address) >> 32 & 0xFFFFFFFF not in _ISATAP:
            return None
        # only its interface part embeds an address: the network part is judged as well
    why = _special(address)
    return None if why is None else f"it is {why}"


def _special(address: Address) -> str | None:
    found = next((what for what, network in _SPECIAL if address in network), None)
    beyond = isinstance(address, IPv6Address) and address not in _GLOBAL6
    return found or ("reserved" if beyond else None)


class AddressRefused(OSError):
    """The address must not be connected to. No connection was made."""


def check_address(text: str, allowed: Allowed) -> None:
    """Raise AddressRefused for an address that must not be connected to."""
    why = refusal(ip_address(text), allowed)
    if why is not None:
        raise AddressRefused(f"{text} must not be reached: {why}; list its network in TOC_WEBHOOK_ALLOW")


class Resolver(AbstractResolver):
    """Looks names up and leaves out addresses that must not be connected to. Belongs to one event loop."""

    def __init__(self, allowed: Allowed, lookup: Lookup) -> None:
        self._allowed = allowed
        self._lookup = lookup
        self._threads = Threads(MAX_LOOKUPS, "toc-name")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self.waiting: set[tuple[str, int]] = set()
        """Names, with their ports, that have had no turn yet."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name that may be connected to. Raises OSError if there is none, and Busy
        if no thread can be started."""
        found: list[ResolveResult] = []
        refused: AddressRefused | None = None
        turns = self._turns.setdefault(IN_NAME_OF.get(), asyncio.Semaphore(MAX_LOOKUPS // 4))
        self.waiting.add((host, port))
        async with turns:
            infos = await asyncio.wrap_future(self._threads.soon(partial(self._look_up, host, port)))
        for kind, _type, proto, _name, address in infos:
            if family not in (socket.AF_UNSPEC, kind):
                continue
            try:
                check_address(address[0], self._allowed)
            except (AddressRefused, ValueError) as exc:
                refused = AddressRefused(f"{host}: {exc}")
                continue
            to = address[0]
            found.append(
                ResolveResult(hostname=host, host=to, port=port, family=kind, proto=proto, flags=NUMERIC)
            )
        if not found:
            raise refused or OSError(f"{host}: there is no address of this name")
        return found

    def _look_up(self, host: str, port: int) -> Infos:
        self.waiting.discard((host, port))
        return self._lookup(host, 0, type=socket.SOCK_STREAM)

    async def close(self) -> None:
        """End the threads, those that still look names up when they have the answer."""
        self._threads.close(wait=False)


class Bounded(asyncio.Protocol):
    """A protocol that is given ``left`` bytes more, and what comes together with the last of them.

    Interim answers have no end and take long to parse: by them one receiver could hold up all others.
    """

    def __init__(self, inner: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        assert isinstance(inner, asyncio.Protocol)  # noqa: S101 - aiohttp's
        self._inner = inner
        self._transport = transport
        for name in ("connection_lost", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(inner, name))
        self.left = 0

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
        transport = connection.transport
        REUSED.set(transport is not None and isinstance(transport.get_protocol(), Bounded))
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
