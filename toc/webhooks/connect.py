"""Connections of webhooks: names are looked up, and only to addresses that were checked is a connection made.

The resolver leaves out addresses that must not be connected to. The address is checked once more where its
socket is made, so nothing else can be connected to: no literal, which aiohttp does not look up, and no answer
from a cache.

A look-up that hangs keeps a thread, and nothing ends it. So that names which hang hold up no others,

    each name is looked up once at a time, and its last good answer serves meanwhile
    MAX_LOOKUPS names are looked up at once, but of those that took longer than HUNG_SECONDS before, MAX_SLOW
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from weakref import WeakSet

from aiohttp import TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult

from toc.webhooks.addresses import Allowed, refusal

MAX_LOOKUPS, MAX_SLOW = 120, 8
HUNG_SECONDS = 0.5
NAMES_SECONDS = 10.0
"""After this time a name is looked up again."""
LAST_GOOD_SECONDS = 600.0
"""For how long the last good answer serves while the name is looked up, or its server fails."""
PATIENCE_SECONDS = 0.1
"""How long a newer answer is waited for before that."""
_PASSING = (socket.EAI_AGAIN, socket.EAI_SYSTEM, socket.EAI_MEMORY)
"""Failures of a look-up that say nothing of the name."""
MAX_NAMES = 10_000
"""How many names are remembered."""
KEEP_SECONDS = 15.0
"""For how long an idle connection is kept."""
UNREAD_MS = 60_000
"""After this time a connection is broken off whose peer takes nothing of what was sent: closed, it would stay
until then too."""

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


@dataclass(eq=False, slots=True)
class Name:
    """What is known of a name. Times are those of the event loop."""

    infos: Infos = ()
    """The last good answer, of ``at``."""
    at: float = float("-inf")
    look_up: asyncio.Task[Infos] | None = None
    """The look-up that waits or is under way."""
    slow: bool = False
    """Whether its last look-up took longer than HUNG_SECONDS."""


class Resolver(AbstractResolver):
    """Looks names up and leaves out addresses that must not be connected to. Belongs to one event loop."""

    def __init__(self, allowed: Allowed, lookup: Lookup) -> None:
        self._allowed = allowed
        self._lookup = lookup
        self._names: dict[str, Name] = {}
        self._turns = {False: asyncio.Semaphore(MAX_LOOKUPS), True: asyncio.Semaphore(MAX_SLOW)}
        """By whether the name is slow."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name that may be connected to. Raises OSError if there is none."""
        found: list[ResolveResult] = []
        refused: AddressRefused | None = None
        for kind, _type, proto, _name, address in await self._infos(host):
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

    async def _infos(self, host: str) -> Infos:
        now = asyncio.get_running_loop().time()
        name = self._names.get(host)
        if name is None:
            if len(self._names) >= MAX_NAMES:
                self._names = {host: one for host, one in self._names.items() if one.look_up is not None}
            name = self._names[host] = Name()
        if now - name.at < NAMES_SECONDS:
            return name.infos
        if name.look_up is None:
            name.look_up = asyncio.create_task(self._look_up(host, name))
            name.look_up.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody may wait
        look_up = name.look_up
        if now - name.at < LAST_GOOD_SECONDS:
            await asyncio.wait([look_up], timeout=PATIENCE_SECONDS)
            if name.infos:
                return name.infos
        return await asyncio.shield(look_up)

    async def _look_up(self, host: str, name: Name) -> Infos:
        """Look a name up when its turn has come."""
        loop = asyncio.get_running_loop()
        async with self._turns[name.slow]:
            began, answer = loop.time(), loop.create_future()
            try:
                threading.Thread(
                    target=self._ask, args=[host, loop, answer], name="toc-name", daemon=True
                ).start()
                name.infos = await answer
                name.at = loop.time()
            except socket.gaierror as exc:
                if exc.errno not in _PASSING:
                    name.infos, name.at = (), float("-inf")
                raise
            except RuntimeError as exc:  # can't start new thread
                raise OSError(str(exc)) from exc
            finally:
                name.slow = loop.time() - began > HUNG_SECONDS
                name.look_up = None
        return name.infos

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
        opened.add(made)
        return made

    return TCPConnector(
        limit=0,
        use_dns_cache=False,
        resolver=resolver,
        socket_factory=guarded,
        force_close=not keep,
        keepalive_timeout=KEEP_SECONDS if keep else None,
    )
