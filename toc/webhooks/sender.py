"""Sends one request and reads the beginning of its answer.

It uses no proxies of the environment, no cookies and no redirects, and decompresses nothing. One time-out
covers everything, from the look-up of the name to the last byte that is read.

aiohttp makes the connections and parses the answers. The requests are written here, and idle connections are
kept here: aiohttp's client would make a request, a writer with a task and a response for each, which costs
more than everything else that a webhook needs in its process.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError
from yarl import URL

from toc.model.errors import InvalidTarget
from toc.model.target import Allow, check_url, literal
from toc.webhooks.answers import NO_RETRY, Answer, retry_after, told
from toc.webhooks.connect import (
    AddressRefused,
    AnswerTooLong,
    Bounded,
    Connector,
    Lookup,
    Resolver,
    check_address,
    is_interim,
)

MOST_BYTES = 1 << 16
"""How much of an answer is read."""
MOST_URLS = 2000
"""How many URLs are remembered as checked."""
KEEP_SECONDS = 15.0
"""For how long an idle connection is kept."""
MOST_AGE_SECONDS = 60.0
"""After this age no connection is kept, however busy: its name may lead elsewhere by now."""

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""For connections: only the time-out of the whole request counts."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What could end a header."""
_BODILESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
"""Answers that end with their head, whatever it announces."""


class Destination(NamedTuple):
    """A URL that may be sent to. ``place`` tells aiohttp where to connect and is never sent."""

    place: aiohttp.ClientRequest
    origin: ConnectionKey
    first: str
    """The first lines of a request: the request line and Host."""


class Sender:
    """Sends requests over connections that it keeps for a while. Belongs to the event loop that uses it."""

    def __init__(self, allow: Allow, lookup: Lookup = socket.getaddrinfo) -> None:
        self._allow = allow
        self._resolver = Resolver(allow.address, lookup)
        self._connector: Connector | None = None
        self._checked: dict[str, Destination] = {}
        """URLs that may be sent to, by their text. This depends only on the allow-list."""
        self._idle: dict[ConnectionKey, list[tuple[Connection, float]]] = {}
        """Idle connections by origin, with the start of their rest (loop time), newest last. aiohttp's own
        pool costs several times as much."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._flying: dict[Bounded, float] = {}
        """The connections over which an answer is awaited, and until when. One timer serves all of them:
        one for each would cost more than reading the answer."""
        self._ending: asyncio.TimerHandle | None = None

    async def send(self, url: str, headers: Mapping[str, str], body: bytes, seconds: float) -> Answer:
        """POST ``body`` to ``url`` within ``seconds``. Raises nothing for what the receiver does."""
        began = time.monotonic()
        until = asyncio.get_running_loop().time() + seconds
        try:
            to = self._checked.get(url) or self._check(url)
            return await self._send(to, encoded(to.first, headers, body), began, until)
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, InvalidTarget) as exc:
            why = reason(exc, seconds)
        return Answer(None, why, _ms(began))

    async def close(self) -> None:
        """Close the connections."""
        for timer in (self._sweeping, self._ending):
            if timer is not None:
                timer.cancel()
        for connections in self._idle.values():
            for connection, _ in connections:
                connection.close()
        self._idle.clear()
        await self._resolver.close()
        if self._connector is not None:
            await self._connector.close()

    async def _send(self, to: Destination, request: bytes, began: float, until: float) -> Answer:
        again = True
        while True:
            connection = self._kept(to.origin) if again else None
            if connection is None:
                async with asyncio.timeout_at(until):
                    connection = await self._opened().connect(to.place, [], _NO_TIMEOUT)
            protocol = connection.protocol
            assert isinstance(protocol, Bounded)  # noqa: S101 - the connector makes no others
            kept = protocol.answers > 0
            ended = False
            self._end_by(protocol, until)
            try:
                answer, ended = await _exchanged(protocol, request, began)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, HttpProcessingError) as exc:
                # The receiver may have closed a kept connection a moment before, or what came may still
                # belong to the answer before. A receiver that has begun to answer has the request.
                unanswered = not protocol.told if isinstance(exc, HttpProcessingError) else protocol.silent
                if not (again and kept and unanswered):
                    raise
                again = False
            else:
                return answer
            finally:
                self._flying.pop(protocol, None)
                if ended and not protocol.should_close:
                    protocol.rest()
                    self._keep(to.origin, connection, protocol)
                else:
                    connection.close()

    def _end_by(self, protocol: Bounded, until: float) -> None:
        self._flying[protocol] = until
        if self._ending is None or until < self._ending.when():
            if self._ending is not None:
                self._ending.cancel()
            self._ending = asyncio.get_running_loop().call_at(until, self._end)

    def _end(self) -> None:
        """Give up the answers that take too long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for protocol in [one for one, until in self._flying.items() if until <= now]:
            del self._flying[protocol]
            protocol.give_up()
        following = min(self._flying.values(), default=None)
        self._ending = None if following is None else loop.call_at(following, self._end)

    # --- connections that are kept

    def _kept(self, origin: ConnectionKey) -> Connection | None:
        """Take the connection to this origin that was used last and is still good."""
        connections = self._idle.get(origin)
        if not connections:
            return None
        oldest = asyncio.get_running_loop().time() - KEEP_SECONDS
        while connections:
            connection, since = connections.pop()
            protocol = connection.protocol
            # What came while it was idle is not the answer to the next request.
            good = protocol is not None and protocol.is_connected() and not protocol.should_close
            if good and since > oldest:
                return connection
            connection.close()
        return None

    def _keep(self, origin: ConnectionKey, connection: Connection, protocol: Bounded) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - protocol.made > MOST_AGE_SECONDS:
            connection.close()
            return
        self._idle.setdefault(origin, []).append((connection, now))
        if self._sweeping is None:
            self._sweeping = loop.call_later(KEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        """Close connections that have been idle for too long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEP_SECONDS
        for origin, connections in list(self._idle.items()):
            young = [one for one in connections if one[1] > oldest]
            for connection, _ in connections[: len(connections) - len(young)]:
                connection.close()
            if young:
                self._idle[origin] = young
            else:
                del self._idle[origin]
        self._sweeping = loop.call_later(KEEP_SECONDS, self._sweep) if self._idle else None

    def _check(self, url: str) -> Destination:
        """Return a URL that may be sent to. Raises InvalidTarget, ValueError or AddressRefused."""
        check_url(url, self._allow)  # it may have been stored under another list
        if (address := literal(urlsplit(url).hostname or "")) is not None:
            check_address(str(address), self._allow.address)
        place = aiohttp.ClientRequest("POST", URL(url, encoded=True), loop=asyncio.get_running_loop())
        first = f"POST {place.url.raw_path_qs} HTTP/1.1\r\nHost: {place.headers['Host']}\r\n"
        if len(self._checked) >= MOST_URLS:
            self._checked.clear()
        checked = self._checked[url] = Destination(place, place.connection_key, first)
        return checked

    def _opened(self) -> Connector:
        if self._connector is None:
            self._connector = Connector(self._allow.address, self._resolver)
        return self._connector


def encoded(first: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return a request as it is sent.

    Raises InvalidTarget if a header holds a control character, which could end the header early.
    """
    lines = [f"{name}: {value}" for name, value in headers.items()]
    text = "".join(lines)
    if not text.isprintable() and _CONTROL.search(text):  # the first is much faster
        raise InvalidTarget("a header holds a control character")
    lines.append(f"Content-Length: {len(body)}\r\n\r\n")
    return (first + "\r\n".join(lines)).encode() + body


async def _exchanged(protocol: Bounded, request: bytes, began: float) -> tuple[Answer, bool]:
    """Send a request and read its answer. Also returns whether the answer has ended."""
    protocol.expect(MOST_BYTES)
    transport = protocol.transport
    if transport is None:
        raise aiohttp.ServerDisconnectedError
    transport.write(request)
    try:
        while True:
            head, content = await protocol.read()
            if not is_interim(head.code):
                break
        body = bytearray()
        while len(body) < MOST_BYTES and (part := await content.read(MOST_BYTES - len(body))):
            body += part
        ended = len(body) < MOST_BYTES  # otherwise more may come, which is not read
        if head.code in _BODILESS and _announces_body(head.headers):
            ended = False  # nor a body that must not be there
    finally:
        unsent = transport.get_write_buffer_size() > 0
        if unsent:
            transport.abort()  # the receiver does not want the rest, and closing would wait until it has it
    answer = Answer(
        head.code,
        told(head.code, bytes(body)),
        _ms(began),
        retry_after(head.headers, int(time.time() * 1000)),
        no_retry=head.headers.get(NO_RETRY, "").strip() == "1",
    )
    return answer, ended and not unsent


def _announces_body(headers: Mapping[str, str]) -> bool:
    return "Transfer-Encoding" in headers or headers.get("Content-Length", "0").strip() != "0"


def _ms(began: float) -> int:
    return round((time.monotonic() - began) * 1000)


def reason(error: Exception, seconds: float) -> str:
    """Return why there was no answer, without the URL: it may hold a secret."""
    cause = getattr(error, "os_error", None) or error
    if isinstance(error, TimeoutError):
        return f"no complete answer within {seconds:g} s"
    if isinstance(cause, AddressRefused | InvalidTarget):
        return str(cause)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        cause = error.certificate_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"TLS: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or type(cause).__name__}"
    if isinstance(cause, socket.gaierror) or isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"its name cannot be looked up: {cause.strerror if isinstance(cause, OSError) else cause}"
    if isinstance(error, AnswerTooLong):
        return f"its answer is not HTTP: {error}"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "the connection was closed before a complete answer"
    if isinstance(error, HttpProcessingError):
        return f"its answer is not HTTP: {error.message}"
    if isinstance(cause, OSError):
        return f"no connection: {cause.strerror or type(cause).__name__}"
    if isinstance(error, aiohttp.InvalidURL) or type(error) is ValueError:
        return "its URL cannot be used: the host is malformed"
    return type(error).__name__
