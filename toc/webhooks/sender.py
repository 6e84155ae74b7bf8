"""Sends one request and reads the beginning of its answer.

No proxies of the environment, no cookies, no redirects, nothing is decompressed, and one time-out for all of
it, from the look-up of the name to the last byte that is read.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from toc.model.errors import InvalidTarget
from toc.model.target import Allow, check_url
from toc.webhooks.addresses import literal
from toc.webhooks.answers import NO_RETRY, Answer, retry_after, told
from toc.webhooks.connect import (
    REUSED,
    AddressRefused,
    AnswerTooLong,
    Connector,
    Lookup,
    Resolver,
    check_address,
)

MOST_BYTES = 1 << 16
"""How much of an answer is read."""
MOST_URLS = 2000
"""How many URLs are remembered as checked."""


class Sender:
    """Sends requests over connections that it keeps for a while. Belongs to the event loop that uses it."""

    def __init__(self, allow: Allow, lookup: Lookup = socket.getaddrinfo) -> None:
        self._allow = allow
        self._resolver = Resolver(allow.address, lookup)
        self._session: aiohttp.ClientSession | None = None
        self._checked: dict[str, URL] = {}
        """By their texts, URLs that may be sent to; that depends on nothing but the allow-list."""

    async def send(self, url: str, headers: Mapping[str, str], body: bytes, seconds: float) -> Answer:
        """POST ``body`` to ``url`` within ``seconds``. Raises nothing for what the receiver does."""
        began = time.monotonic()
        try:
            return await self._send(url, headers, body, seconds, began)
        except (aiohttp.ClientError, OSError, ValueError, InvalidTarget) as exc:
            why = reason(exc, seconds)
        return Answer(None, why, _ms(began))

    async def close(self) -> None:
        """Close the connections."""
        await self._resolver.close()
        if self._session is not None:
            await self._session.close()

    async def _send(
        self, url: str, headers: Mapping[str, str], body: bytes, seconds: float, began: float
    ) -> Answer:
        checked = self._checked.get(url) or self._check(url)
        session = self._opened()
        again = True
        while True:
            reused: list[bool] = []
            REUSED.set(reused)
            left = aiohttp.ClientTimeout(total=max(seconds - (time.monotonic() - began), 0.001))
            try:
                async with session.post(
                    checked,
                    data=body,
                    headers=headers,
                    timeout=left,
                    allow_redirects=False,
                ) as response:
                    return await _answer(response, began)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # A connection that was kept may have been closed by the receiver a moment before.
                if not (again and True in reused):
                    raise
                again = False

    def _check(self, url: str) -> URL:
        """Return a URL that may be sent to. Raises InvalidTarget, ValueError or AddressRefused."""
        check_url(url, self._allow)  # it may have been stored under another list
        if (address := literal(urlsplit(url).hostname or "")) is not None:
            check_address(str(address), self._allow.address)
        if len(self._checked) >= MOST_URLS:
            self._checked.clear()
        checked = self._checked[url] = URL(url, encoded=True)
        return checked

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=Connector(self._allow.address, self._resolver),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                read_bufsize=MOST_BYTES,
            )
        return self._session


async def _answer(response: aiohttp.ClientResponse, began: float) -> Answer:
    body = bytearray()
    while len(body) < MOST_BYTES:
        part = await response.content.read(MOST_BYTES - len(body))
        if not part:
            break
        body += part
    else:
        response.close()  # there may be more, which nobody reads
    return Answer(
        response.status,
        told(response.status, bytes(body)),
        _ms(began),
        retry_after(response.headers, int(time.time() * 1000)),
        no_retry=response.headers.get(NO_RETRY, "").strip() == "1",
    )


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
    if isinstance(error, aiohttp.ClientResponseError):
        return f"its answer is not HTTP: {error.message}"
    if isinstance(cause, OSError):
        return f"no connection: {cause.strerror or type(cause).__name__}"
    if isinstance(error, aiohttp.InvalidURL) or type(error) is ValueError:
        return "its URL cannot be used: the host is malformed"
    return type(error).__name__
