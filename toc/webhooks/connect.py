"""Connections of webhooks: names are looked up, and only to addresses that were checked is a connection made.

The resolver leaves out addresses that must not be connected to. The address is checked once more where its
socket is made, so nothing else can be connected to: no literal, which aiohttp does not look up, and no answer
from a cache.

A look-up that hangs keeps a thread, and nothing ends it. So that names which hang hold up no others,

    each name is looked up once at a time, and its last good answer serves meanwhile
    YOUNG names are looked up at once; one that takes longer than HUNG_SECONDS gives its turn to another
    a name that took so long goes last the next time: SLOW of these are looked up at once
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from weakref import WeakSet

from aiohttp import TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult

from toc.webhooks.addresses import Allowed, refusal

YOUNG, SLOW, MAX_LOOKUPS = 64, 8, 128
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
    answer: asyncio.Future[Infos] | None = None
    """The look-up that waits or is under way."""
    began: float = 0.0
    slow: bool = False
    """Whether its last look-up took longer than HUNG_SECONDS."""
    young: asyncio.TimerHandle | None = None
    """Ends its turn, while it has one."""


class Resolver(AbstractResolver):
    """Looks names up and leaves out addresses that must not be connected to. Belongs to one event loop."""

    def __init__(self, allowed: Allowed, lookup: Lookup) -> None:
        self._allowed = allowed
        self._lookup = lookup
        self._names: dict[str, Name] = {}
        self._waiting: dict[bool, deque[str]] = {False: deque(), True: deque()}
        """Names whose turn has not come, by whether they are slow."""
        self._young = self._slow = self._all = 0
        """Look-ups under way: those of the last HUNG_SECONDS, those of slow names, and all."""

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
                self._names = {host: one for host, one in self._names.items() if one.answer is not None}
            name = self._names[host] = Name()
        if now - name.at < NAMES_SECONDS:
            return name.infos
        if name.answer is None:
            name.answer = asyncio.get_running_loop().create_future()
            name.answer.add_done_callback(asyncio.Future.exception)  # perhaps nobody waits for it
            self._waiting[name.slow].append(host)
            self._start()
        answer = name.answer
        if now - name.at < LAST_GOOD_SECONDS:
            await asyncio.wait([answer], timeout=PATIENCE_SECONDS)
            if name.infos:
                return name.infos
        return await asyncio.shield(answer)

    def _start(self) -> None:
        """Begin look-ups whose turn it is."""
        while self._all < MAX_LOOKUPS:
            slow = self._young >= YOUNG or not self._waiting[False]
            if not self._waiting[slow] or (slow and self._slow >= SLOW):
                return
            self._begin(self._waiting[slow].popleft(), slow=slow)

    def _begin(self, host: str, *, slow: bool) -> None:
        loop, name = asyncio.get_running_loop(), self._names[host]

        def look_up() -> None:
            infos: Infos = ()
            error: Exception | None = None
            try:
                infos = self._lookup(host, 0, type=socket.SOCK_STREAM)
            except Exception as exc:
                error = exc
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._end, name, infos, error, slow)

        name.began = loop.time()
        self._all += 1
        if slow:
            self._slow += 1
        else:
            self._young += 1
            name.young = loop.call_later(HUNG_SECONDS, self._give_turn, name)
        try:
            threading.Thread(target=look_up, name="toc-name", daemon=True).start()
        except RuntimeError as exc:  # can't start new thread
            self._end(name, (), OSError(str(exc)), slow)

    def _give_turn(self, name: Name) -> None:
        """Let others be looked up beside a name that takes long."""
        name.young = None
        self._young -= 1
        self._start()

    def _end(self, name: Name, infos: Infos, error: Exception | None, slow: int) -> None:
        now = asyncio.get_running_loop().time()
        self._all -= 1
        self._slow -= slow
        if name.young is not None:
            name.young.cancel()
            name.young = None
            self._young -= 1
        name.slow = now - name.began > HUNG_SECONDS
        answer, name.answer = name.answer, None
        assert answer is not None  # noqa: S101 - for the type checker
        if error is None:
            name.infos, name.at = infos, now
            answer.set_result(infos)
        else:
            if isinstance(error, socket.gaierror) and error.errno not in _PASSING:
                name.infos, name.at = (), float("-inf")
            answer.set_exception(error)
        self._start()


def connector(allowed: Allowed, resolver: Resolver, opened: WeakSet[socket.socket]) -> TCPConnector:
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
        keepalive_timeout=KEEP_SECONDS,
    )
