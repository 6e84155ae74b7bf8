"""One request and its answer over ASGI, for every door: what HTTP demands of the one, and the bounds on both.

check ─▶ body (time, bytes, memory) ─▶ begin: a place ─▶ the door's answer ─▶ sent in parts
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

from pydantic_core import to_json

from toc.gateway.connections import STATE, ClientGone, Connection
from toc.gateway.problems import CODING, MEDIA_TYPE, SYNTAX, Problem
from toc.gateway.shares import Shares
from toc.model.errors import BodyTooLarge, Busy
from toc.observe.metrics import REQUEST_SECONDS, REQUESTS
from toc.pull.handed_out import HandedOut

PART = 64 << 10
"""A longer answer is given to the connection in parts, each once the client has read of those before."""
ESCAPED = 6
"""Most bytes of JSON for one byte of a text."""

CURRENT: ContextVar[Exchange] = ContextVar("exchange")
"""What the current task answers."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]


class Answer(NamedTuple):
    """An answer of any door. ``content`` is bytes of ``media_type``, or is sent as JSON.

    ``handed`` are the tasks that it hands out: if it cannot be written, they are taken back. ``ends``: they
    are processed once all of it was given to the connection. ``parts`` are sent instead of ``content``, each
    when it comes, to a client that takes one of the places of those that wait. ``name`` names the call of a
    dialect in metrics: one of few.
    """

    content: Any
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = {}
    handed: Sequence[HandedOut] = ()
    ends: bool = False
    parts: AsyncIterator[bytes] | None = None
    name: str = "other"

    @property
    def head(self) -> list[tuple[bytes, bytes]]:
        """Its headers, as ASGI has them, without its length."""
        kind = {"content-type": self.media_type} if self.media_type else {}
        every = {"cache-control": "no-store", "x-content-type-options": "nosniff", **kind, **self.headers}
        return [(key.encode(), value.encode("latin-1")) for key, value in every.items()]


class Exchange:
    """One request, and its answer. ``end`` it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, memory: Shares) -> None:
        self._arrived = time.perf_counter()
        self.connection: Connection = scope["state"][STATE]
        self._fields = self.connection.called()
        self._scope = scope
        self._receive = receive
        self._send = send
        self._memory = memory
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        if self._fields >= 0 and b"transfer-encoding" in self._headers:  # without trailers
            scope["headers"] = scope["headers"][: self._fields]
            self._headers = dict(reversed(scope["headers"]))
        self._whole = not self.has_body
        self._ends = False
        """Whether its connection is of no use after it."""
        self._begun = False
        self._places: tuple[str, ...] = ()
        self._held = 0
        self.sender = ""
        """Who sends it: the name of a token, or an address."""
        CURRENT.set(self)

    # --- the request

    def header(self, name: bytes) -> str | None:
        """Return the first header of this name."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def has_body(self) -> bool:
        """Whether the request has a body that may be more than empty."""
        return self._headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in self._headers

    def check(self) -> None:
        """Raise Problem for what no door takes: no host or several, a coding that was not undone."""
        if b"upgrade" in self._headers:  # whose head the connection did not see: the parser gives no body
            self._ends = True
            raise Problem(SYNTAX, "send a request with Upgrade after the answer to the one before")
        hosts, codings, coded = (
            [value.strip().lower() for name, value in self._scope["headers"] if name == wanted]
            for wanted in (b"host", b"transfer-encoding", b"content-encoding")
        )
        old = self._scope["http_version"] == "1.0"
        if len(hosts) > 1 or not (hosts or old):
            raise Problem(SYNTAX, "send one Host header")
        if set(coded) - {b"identity"}:
            raise Problem(MEDIA_TYPE, "send the body without a content encoding")
        if codings and self._fields < 0:
            raise Problem(SYNTAX, "send a chunked request after the answer to the one before")
        if codings and old:
            raise Problem(SYNTAX, "HTTP/1.0 has no Transfer-Encoding")
        if codings and codings != [b"chunked"]:
            raise Problem(CODING, "the only Transfer-Encoding that is known is chunked")

    async def body(self, most: int) -> bytes:
        """Return the whole body, of at most ``most`` bytes.

        Raises BodyTooLarge, Busy or ClientGone, perhaps before all of it has come.
        """
        declared = self._headers.get(b"content-length", b"")
        held = int(declared[:20]) if declared.isdigit() else 0
        if held > most:
            raise BodyTooLarge(f"at most {most} bytes are allowed")
        self.hold(held)
        parts: list[bytes] = []
        size = 0
        while not self._whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self.connection.given()
            self._whole = not message.get("more_body", False)
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise BodyTooLarge(f"at most {most} bytes are allowed")
            if size > held:  # without a Content-Length
                self.hold(size - held)
                held = size
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def hold(self, size: int) -> None:
        """Take memory until the end of the exchange. Raises Busy."""
        if size > 0:
            self._memory.take(self.sender, size=size)
            self._held += size

    # --- the work

    def begin(self, *names: str) -> None:
        """Take a place for the work on the request, which is whole. ``names``: its token. Raises Busy."""
        names = (*self.connection.names, *names)
        self.connection.crowd.work.take(*names)
        self._places = names
        self._work()

    def _work(self) -> None:
        if not self._begun:
            self._begun = True
            self.connection.complete()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Take a place among those that wait for tasks. The block ends with ClientGone once the client is
        known to have left. Raises Busy."""
        waits, names = self.connection.crowd.waits, self._places
        waits.take(*names)
        try:
            with self.connection.leaving_cancels():
                yield
        finally:
            waits.give(*names)

    def ready(self, answer: Answer) -> Answer:
        """Return an answer as bytes. Takes memory for one that is long: its client may read slowly. Raises
        Busy, and ClientGone if the client is known to have left."""
        body = answer.content if isinstance(answer.content, bytes) else to_json(answer.content)
        if len(body) > PART:
            self.hold(len(body))
        if self.connection.left:
            raise ClientGone
        return answer._replace(content=body)

    def end(self) -> None:
        """Give back place and memory."""
        self._leave_place()
        if self._held:
            self._memory.give(self.sender, size=self._held)
            self._held = 0

    def _leave_place(self) -> None:
        if self._places:
            self.connection.crowd.work.give(*self._places)
            self._places = ()

    # --- the answer

    async def answer(self, name: str, answer: Answer, *, close: bool = False) -> bool:
        """Send the answer, which is bytes, to the call of this name, count it, and end the exchange. Returns
        whether the connection was given all of it, for a client that was not known to have left by then."""
        self._leave_place()  # what it does not read is bounded otherwise
        status, headers, body = answer.status, answer.head, answer.content
        connection, size = self.connection, len(body)
        if status != 204:
            headers.append((b"content-length", b"%d" % size))
        if close or self._ends or not self._whole:
            headers.append((b"connection", b"close"))
        if self._whole:
            self._work()
        connection.outlet.corked = size <= PART
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            rest: bytes | memoryview = body if size <= PART else memoryview(body)
            while len(rest) > PART and not connection.left:
                part, rest = rest[:PART], rest[PART:]
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            there = not connection.left  # the end of the answer may close the connection
            await self._send({"type": "http.response.body", "body": rest})
        finally:
            self.end()
        connection.outlet.uncork()
        connection.answered()
        REQUESTS.of(name, f"{status // 100}xx").add()
        REQUEST_SECONDS.of(name).observe([time.perf_counter() - self._arrived])
        return there and not connection.lost

    async def stream(self, answer: Answer, parts: AsyncIterator[bytes]) -> None:
        """Send the parts of an answer as they come, until they end, one is too long for the memory that is
        left, or the client leaves. Raises Busy before the first, if too many wait already."""
        with suppress(ClientGone, asyncio.CancelledError), self.waiting():
            start = {"type": "http.response.start", "status": answer.status, "headers": answer.head}
            await self._send(start)
            held = PART
            async for part in parts:
                try:
                    self.hold(len(part) - held)
                except Busy:
                    break
                held = max(held, len(part))
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await self._send({"type": "http.response.body", "body": b""})
            self.connection.answered()


def current_sender() -> str:
    """Return who sent the request that the current task answers; empty if it answers none."""
    exchange = CURRENT.get(None)
    return "" if exchange is None else exchange.sender
