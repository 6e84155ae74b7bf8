"""Sends one request and reads the beginning of its answer.

It uses no proxies of the environment, no cookies and no redirects, and decompresses nothing. One time-out
covers everything, from the look-up of the name to the last byte that is read. Interim answers and extensions
of chunks count among the bytes that an answer may have (``connect``). aiohttp takes no answer that comes
together with bytes that do not belong to it.
"""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import socket
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

import aiohttp
from yarl import URL

from toc.model.errors import Busy, InvalidTarget
from toc.model.target import Allow, Target, TargetSecrets, check_url, literal
from toc.webhooks import connect
from toc.webhooks.answers import NO_RETRY, Response, excerpt, retry_after
from toc.webhooks.connect import AddressRefused, Lookup, Resolver, check_address
from toc.webhooks.request import JSON, signed

MAX_BYTES = 1 << 16
"""How much of an answer's body is read."""
MAX_URLS = 2000
"""How many URLs are remembered as checked."""

TEST_TOPIC = "toc.test"

_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""Only the time-out of the whole request counts."""
_STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientResponseError)
"""How a request may fail because its connection was used before."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What could end a header."""
_OURS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp adds unless it is told not to."""


class Sender:
    """Sends requests over connections that it keeps for a while. Belongs to the event loop that uses it.

    No connection is kept while there are ``most`` of them.
    """

    def __init__(self, allow: Allow, lookup: Lookup = socket.getaddrinfo, most: int = 100) -> None:
        self._allow = allow
        self._most = most
        self._sockets: WeakSet[socket.socket] = WeakSet()
        """Those of its connections."""
        self._resolver = Resolver(allow.address, lookup)
        self._checked = lru_cache(MAX_URLS)(self._check)
        """Whether a URL may be sent to depends only on the allow-list."""
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """By whether it keeps connections."""

    async def send(self, url: str, headers: Mapping[str, str], body: bytes, seconds: float) -> Response:
        """POST ``body`` to ``url`` within ``seconds``. Raises nothing for what the receiver does, and Busy if
        its name had no turn to be looked up."""
        began = time.monotonic()
        connect.REUSED.set(False)

        async def post(*, keep: bool) -> Response:
            data = io.BytesIO(body) if len(body) > MAX_BYTES else body  # which is not written as a whole
            text = bytearray()
            session = self._session(keep=keep)
            answer = await session.post(to, data=data, headers=headers, allow_redirects=False)
            if answer.connection is not None:  # the answer is not there whole
                connect.bound(answer.connection, connect.ALL_BYTES)
            try:
                while len(text) < MAX_BYTES and (part := await answer.content.read(MAX_BYTES - len(text))):
                    text += part
            finally:
                answer.close()  # if it has ended, its connection is kept already
            told, after = answer.headers, retry_after(answer.headers, int(time.time() * 1000))
            dead = told.get(NO_RETRY, "").strip() == "1"
            return Response(answer.status, excerpt(answer.status, bytes(text)), _ms(began), after, dead)

        try:
            to = self._checked(url)
            check_headers(headers)
            async with asyncio.timeout(seconds):
                try:
                    return await post(keep=len(self._sockets) < self._most)
                except _STALE:
                    # The receiver may have closed a kept connection a moment before, or what came may be the
                    # rest of the answer before: this costs no try.
                    if not connect.REUSED.get():
                        raise
                return await post(keep=False)
        except (aiohttp.ClientError, OSError, ValueError, InvalidTarget) as exc:
            if isinstance(exc, TimeoutError) and (to.raw_host, to.port) in self._resolver.waiting:
                raise Busy("too many names are looked up") from None
            return Response(None, reason(exc, seconds), _ms(began))

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions.values():
            await session.close()
        self._sessions = {}
        await self._resolver.close()

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        """Return what uses connections again, or makes one for each request."""
        session = self._sessions.get(keep)
        if session is None:
            session = self._sessions[keep] = aiohttp.ClientSession(
                connector=connect.connector(self._allow.address, self._resolver, self._sockets, keep=keep),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=_NO_TIMEOUT,
                auto_decompress=False,
                trust_env=False,
                skip_auto_headers=_OURS,
                # aiohttp's own limits would take an answer that ``connect`` lets through for none.
                max_line_size=connect.HEAD_BYTES,
                max_field_size=connect.HEAD_BYTES,
                max_headers=connect.HEAD_BYTES,
            )
        return session

    def _check(self, url: str) -> URL:
        """Return a URL that may be sent to. Raises InvalidTarget, ValueError or AddressRefused."""
        check_url(url, self._allow)  # it may have been stored under another list
        if (address := literal(urlsplit(url).hostname or "")) is not None:
            check_address(str(address), self._allow.address)
        return URL(url, encoded=True)


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise InvalidTarget if a header holds a control character, which could end the header early."""
    if any(map(_CONTROL.search, (*headers, *headers.values()))):
        raise InvalidTarget("a header holds a control character")


def _ms(began: float) -> int:
    return round((time.monotonic() - began) * 1000)


def reason(error: Exception, seconds: float) -> str:
    """Return why there was no answer, without the URL: it may hold a secret."""
    cause = error.__cause__ or error
    if isinstance(error, TimeoutError):
        return f"no complete answer within {seconds:g} s"
    if isinstance(cause, AddressRefused | InvalidTarget):
        return str(cause)
    if isinstance(cause, socket.gaierror) or isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"its name cannot be looked up: {cause.strerror if isinstance(cause, OSError) else cause}"
    if isinstance(cause, OSError) and cause.strerror:
        return f"no connection: {cause.strerror}"
    return type(cause).__name__


class TestAnswer(NamedTuple):
    """What a target has answered. ``status`` is None without an answer, and ``error`` says why.

    ``text`` is the beginning of the answer, ``seconds`` how long it took.
    """

    status: int | None
    seconds: float
    text: str
    error: str


def send_test(target: Target, opened: TargetSecrets, allow: Allow) -> TestAnswer:
    """Send a target a request that is signed as all are. Raises nothing for what the receiver does."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # run would unset the thread's loop
        return runner.run(_send(target, opened, allow))


async def _send(target: Target, opened: TargetSecrets, allow: Allow) -> TestAnswer:
    body = b'{"test":true}'
    now = time.time()
    keys, named = opened.signing(target, int(now * 1000)), {"toc-topic": TEST_TOPIC, "toc-attempt": "1"}
    test_id = f"test_{secrets.token_hex(12)}"
    headers = signed(named, test_id, body, JSON, keys=keys, timestamp=int(now), own=opened.headers)
    sender = Sender(allow)
    try:
        answer = await sender.send(target.url, headers, body, target.timeout)
    finally:
        await sender.close()
    text, error = (answer.text, "") if answer.status is not None else ("", answer.text)
    return TestAnswer(answer.status, answer.ms / 1000, text, error)
