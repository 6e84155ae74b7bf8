"""Connections of webhooks: only to addresses that were checked, and with a bound on what is read.

The resolver drops addresses that must not be connected to. The address is checked once more where its socket
is made, so nothing else can be connected to: no literal, no answer from a cache, no redirection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any, cast

from aiohttp import TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

from toc.webhooks.addresses import Allowed, refusal

RESOLVER_THREADS = 32
"""Names that may be looked up at once. Lookups of one name are shared: one that hangs takes one."""
NAMES_SECONDS = 10
"""For how long an answer of the resolver is used."""
MOST_RAW_BYTES = 1 << 17
"""How much of an answer is read from the network: interim answers, head, body and its framing."""
_END = b"\r\n\r\n"
"""What ends a head."""

Lookup = Callable[..., Sequence[tuple[Any, ...]]]
"""``socket.getaddrinfo``, or its replacement."""


class AddressRefused(OSError):
    """The address must not be connected to. No connection was made."""


def check_address(text: str, allowed: Allowed) -> None:
    """Raise AddressRefused for an address that must not be connected to."""
    why = refusal(ip_address(text), allowed)
    if why is not None:
        raise AddressRefused(f"{text} must not be connected to: {why}; TOC_WEBHOOK_ALLOW may list it")


class Resolver(AbstractResolver):
    """Looks names up and leaves out addresses that must not be connected to."""

    def __init__(self, allowed: Allowed, lookup: Lookup) -> None:
        self._allowed = allowed
        self._lookup = lookup
        self._executor = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="toc-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of a name that may be connected to. Raises OSError if there is none."""
        loop = asyncio.get_running_loop()
        infos = await loop.run_in_executor(
            self._executor, lambda: self._lookup(host, port, family=family, type=socket.SOCK_STREAM)
        )
        found: list[ResolveResult] = []
        refused: AddressRefused | None = None
        for kind, _type, proto, _name, address in infos:
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
        """Stop looking names up."""
        self._executor.shutdown(wait=False)


class AnswerTooLong(ClientPayloadError):
    """The head of an answer does not end within MOST_RAW_BYTES."""


class Bounded(ResponseHandler):
    """Reads an answer up to MOST_RAW_BYTES, then ends it.

    HTTP sets no bound itself: an extension of a chunk, or a row of interim answers, may never end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.made = loop.time()
        """When it was made (loop time)."""
        self._raw = 0
        self.answers = 0
        """How many answers it was prepared for."""
        self._resting = False
        self.told = False
        """Whether the head of an answer has come, even of an interim one."""
        self._head = True
        """Whether the head of the answer itself is still to come."""
        self._seam = b""
        """The last bytes, in case the end of a head is split over two reads."""

    def expect(self, most_bytes: int) -> None:
        """Prepare for another answer. About ``most_bytes`` of its body may wait to be read."""
        self._raw = 0
        self.answers += 1
        self._resting = self.told = False
        self._head, self._seam = True, b""
        if self._parser is None:  # one reads all answers of a connection: making it costs as much as its work
            self.set_response_params(
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=most_bytes,
                # Only the bound on the whole counts: a receiver that answers 2xx has the task, however long
                # or many its headers are.
                max_line_size=MOST_RAW_BYTES,
                max_field_size=MOST_RAW_BYTES,
                max_headers=MOST_RAW_BYTES,
            )

    def rest(self) -> None:
        """Expect nothing until the next request: any byte, even part of a head, ends the connection."""
        self._resting = True

    def give_up(self) -> None:
        """Raise TimeoutError where the answer is awaited."""
        error = TimeoutError()
        self.set_exception(error)
        if self._payload is not None:
            self._payload.set_exception(error)

    def data_received(self, data: bytes) -> None:
        """Take what is within the bound. Beyond it the connection cannot be used again."""
        if self._resting:
            self.force_close()
            return
        if self._raw > MOST_RAW_BYTES:
            return
        self._raw += len(data)
        # The parser forgets a head that it was given together with bytes that are not HTTP. Some 204s have a
        # body, which they must not have, and an answer may be followed by bytes that were not asked for.
        begin = 0
        while self._head and (end := self._end_of_head(data, begin)):
            super().data_received(data[begin:end])
            begin = end
        if begin < len(data):
            super().data_received(data[begin:] if begin else data)
        if self._raw > MOST_RAW_BYTES:
            self.force_close()
            if self._payload is not None and not self._payload.is_eof():
                self._payload.feed_eof()
            else:  # where there is an answer already, this changes nothing
                self.set_exception(AnswerTooLong(f"its head does not end within {MOST_RAW_BYTES} bytes"))

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Take an answer whose head has come."""
        self.told = True
        self._head = is_interim(data[0].code)
        super().feed_data(data, size)

    @property
    def silent(self) -> bool:
        """Whether nothing has come since the request."""
        return self._raw == 0

    def _end_of_head(self, data: bytes, begin: int) -> int:
        """Return where the head that continues at ``begin`` ends; 0 if it does not end in ``data``."""
        seam, self._seam = self._seam, b""
        if seam and (end := (seam + data[begin : begin + 3]).find(_END)) >= 0:
            return begin + end + len(_END) - len(seam)
        end = data.find(_END, begin)
        if end >= 0:
            return end + len(_END)
        self._seam = (seam + data[begin:])[1 - len(_END) :]
        return 0


def is_interim(status: int) -> bool:
    """Whether an answer of this status is followed by another one."""
    return 100 <= status < 200 and status != HTTPStatus.SWITCHING_PROTOCOLS


class Connector(TCPConnector):
    """Makes connections and keeps them for a while. The Limiter decides how many there are."""

    def __init__(self, allowed: Allowed, resolver: Resolver) -> None:
        def guarded(info: tuple[Any, ...]) -> socket.socket:
            family, kind, proto, _name, address = info
            check_address(address[0], allowed)
            return socket.socket(family, kind, proto)

        super().__init__(limit=0, ttl_dns_cache=NAMES_SECONDS, resolver=resolver, socket_factory=guarded)
        # aiohttp has no argument for it.
        bounded = partial(Bounded, loop=asyncio.get_running_loop())
        self._factory = cast("partial[ResponseHandler]", bounded)
