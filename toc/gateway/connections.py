"""Bounds on connections of clients, which uvicorn lacks.

uvicorn does not bound the size of headers, the time that a request may take to arrive, the time that its
answer may take to be read, or the number of idle connections and TLS handshakes. Here all connections are
checked once a second.

    TLS handshake ──▶
     │ HEAD_SECONDS
    idle ── first byte ──▶ arriving ── complete ──▶ answered by the app ── answer read ──▶ idle
     │ KEEP_ALIVE_SECONDS     │ HEAD_SECONDS, BODY_SECONDS       │ READ_SECONDS
     └────────────────────────┴──────────────── closed ──────────┘

A request that is refused before it has arrived whole ends its connection: the gateway answers, closes its
own end, and drops what the client still sends, for LINGER_SECONDS at most. If it closed at once, the kernel
would answer those bytes by a reset, and the client could lose the answer (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httptools
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from toc.gateway.answer_writer import AnswerWriter
from toc.gateway.handshake import Handshake
from toc.gateway.problems import HEADERS, SYNTAX, TIMEOUT, Kind, Problem
from toc.observe.metrics import CONNECTIONS, CONNECTIONS_CLOSED

KEEP_ALIVE_SECONDS = 75
HEAD_SECONDS = 10.0
"""How long the line and headers of a request may take to arrive."""
BODY_SECONDS = 30.0
"""How long the rest of a request may take to arrive."""
READ_SECONDS = 30.0
"""How long a client may leave an answer unread."""
HEAD_BYTES = 32 << 10
"""Most bytes of a request's line and headers, and of what a chunked body has beside its data: the sizes of
chunks, their extensions, trailers."""
LINGER_SECONDS = 5.0
"""How long a client may continue to send, or leave its end open, after a last answer."""
MOST_UNREAD = 64 << 20
"""Most bytes of answers that all clients of a process together may leave unread. Beyond it, the connection
whose client has read nothing for longest is closed."""
MOST_CONNECTIONS = 4096
"""Most connections of a process. One more closes a connection that is leaving, or else the longest idle
one."""
LOOK_SECONDS = 1.0
TCP_ESTABLISHED = 1
"""The kernel's state of a connection of which neither end is closed."""
TCP_CLOSE_WAIT = 8
"""The state of a connection whose client has closed its end."""


_DROPPED: Any = deque(maxlen=0)
"""A list of headers that stays empty."""


class ClientGone(Exception):
    """The client has left before it was answered."""


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    crowd: Crowd
    below: asyncio.Transport | None = None
    """Over TLS: the transport below, to which ``transport`` passes what it has encrypted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in."""
        super().connection_made(transport)
        if self.below is not None:
            self.below.set_write_buffer_limits(0)  # so it reports when the socket has taken the last byte
        self.head_bytes = 0
        """Bytes that have arrived since the last that were a body's or completed a head."""
        self.arriving_since = 0.0
        """When the first byte of an incomplete request came; 0.0 while there is none."""
        self.in_head = True
        self.unread_since = 0.0
        """Since when the client reads nothing of an answer; 0.0 while it reads."""
        self.idle_since = self.loop.time()
        """Since when it is idle: no request is under way or arriving; 0.0 otherwise."""
        self.leaving_since = 0.0
        """Since when the last answer is written and further bytes are dropped; 0.0 before."""
        self.lost = False
        """Whether the client has left or was sent away, so that unread bytes are lost."""
        self._took_all = False
        """Whether the client had received every byte of its answers when it left."""
        self._closed = asyncio.Event()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._writer = AnswerWriter(transport, self.below, self._leave)
        self.crowd.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let it go."""
        # Without an error it was closed after everything was sent, or a client left without TLS's farewell.
        self.lost = self.lost or exc is not None or not (self.below is None or self._writer.closed)
        self._closed.set()
        self.crowd.left(self)
        super().connection_lost(exc)
        for task in self._waiting:
            task.cancel()

    def eof_received(self) -> None:
        """Note that the client has left; after the last answer, only that it sends nothing more."""
        if not self.leaving_since:
            self._took_all = self._answered_all() and _took_all(self.transport)
            self.lost = True
        super().eof_received()

    def on_message_begin(self) -> None:
        """Let the application ask whether the client is still there."""
        super().on_message_begin()
        self.scope["toc.connection"] = self  # type: ignore[typeddict-unknown-key]

    @property
    def left(self) -> bool:
        """Whether unsent bytes are lost because the client has left, which the kernel knows first."""
        return self.lost or self.transport.is_closing() or _hung_up(self.transport)

    async def earlier_read(self) -> None:
        """Wait until the client has read earlier answers, so that its next requests take no memory until
        then."""
        if self.flow.write_paused:
            await self.flow.drain()

    @contextlib.contextmanager
    def leaving_cancels(self) -> Iterator[None]:
        """Cancel the current task if the client leaves meanwhile; the block then raises ClientGone."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - each request is answered by a task
        if self.left:
            raise ClientGone
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.left:
                raise ClientGone from None
            raise
        finally:
            self._waiting.discard(task)

    def unanswered(self) -> None:
        """Answer nothing: the client has left. uvicorn would write an answer of its own."""
        self._writer.end()

    @property
    def kept_back(self) -> int:
        """How many bytes of its answers the socket has not taken yet."""
        below = 0 if self.below is None else self.below.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + below

    async def sent(self) -> bool:
        """Wait until the socket has taken the whole answer. Returns whether the client is still there, or
        left after it had received everything."""
        await asyncio.sleep(0)  # lets the loop write and read once more
        if not self._over:
            if self.below is None:  # otherwise the first byte kept back counts
                self.transport.set_write_buffer_limits(0)
            await self.flow.drain()
            if not self._over:
                if self.below is None:
                    self.transport.set_write_buffer_limits()
                return not self.left or self._took_all or _took_all(self.transport)
        if self.below is not None and not (self.kept_back or self.lost or _hung_up(self.below)):
            return True  # TLS waits only for the client's farewell, which many do not send
        with contextlib.suppress(TimeoutError):  # an answer after which its connection ends
            async with asyncio.timeout(READ_SECONDS):
                await self._closed.wait()
        if not self._closed.is_set():
            self.close("slow")
        return not self.lost or self._took_all

    def _answered_all(self) -> bool:
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and not self.kept_back

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        if self.leaving_since:
            return
        if not self.arriving_since:
            if not data.lstrip(b"\r\n"):  # some clients send an empty line after a body (RFC 9112, 2.2)
                return
            self.arriving_since = self.loop.time()
            self.idle_since = 0.0
            self.crowd.idle.pop(self, None)
        self.head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        # Only a head that is still incomplete is checked, and what follows the last data of a body.
        if self.head_bytes > HEAD_BYTES:
            self._refuse(HEADERS, f"at most {HEAD_BYTES} bytes are allowed")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if self._over:
                return
            # The request also asks for another protocol, as Java's client does at first. The parser
            # takes all further bytes for that protocol. So the request is parsed again, without its
            # Upgrade header.
            line = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            others = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self._parse(b"".join((b"%b %b HTTP/%b\r\n" % line, *others, b"\r\n", data[exc.args[0] :])))
        except httptools.HttpParserError:
            self.send_400_response("")

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's line."""
        super().on_url(url)
        if len(self.url) > HEAD_BYTES:
            self._refuse(HEADERS, f"at most {HEAD_BYTES} bytes are allowed")

    def on_headers_complete(self) -> None:
        """Begin with a request."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(SYNTAX, "this is not a proxy")
        if self.parser.should_upgrade():
            return
        self.in_head = False
        self.head_bytes = 0
        if self._over:
            return
        if sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES:
            self._refuse(HEADERS, f"at most {HEAD_BYTES} bytes are allowed")
            return
        super().on_headers_complete()
        self.cycle.transport = self._writer  # its task has not begun
        self.headers = _DROPPED  # trailers are no headers

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self.head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is complete."""
        if self.parser.should_upgrade():
            return
        self.head_bytes = 0
        self.in_head = True
        self.arriving_since = 0.0
        super().on_message_complete()
        self._rest()

    def on_response_complete(self) -> None:
        """Note that a request is answered."""
        self._writer.flush()
        if not self.leaving_since:
            super().on_response_complete()
            self._rest()

    def _rest(self) -> None:
        """Become idle if no request is under way. A request may be answered before all of it has arrived."""
        answered = self.cycle is None or self.cycle.response_complete
        if answered and not self.arriving_since and not self.pipeline and not self.leaving_since:
            self.idle_since = self.loop.time()
            self.crowd.idle[self] = None

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        self.unread_since = self.loop.time()
        super().pause_writing()
        self.crowd.unread.pop(self, None)
        self.crowd.unread[self] = None
        self.crowd.bound_unread()

    def resume_writing(self) -> None:
        """Note that the client reads."""
        if self.below is not None:
            if self.below.get_write_buffer_size():  # what was written meanwhile is kept back again
                self.transport.set_write_buffer_limits(0)
                return
            self.transport.set_write_buffer_limits()
        self.unread_since = 0.0
        self.crowd.unread.pop(self, None)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - its signature
        """Answer bytes that are not HTTP."""
        self._refuse(SYNTAX, "this is no HTTP/1.1 request")

    def look(self, now: float) -> None:
        """Close it if its client is too slow."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.leaving_since and now - self.leaving_since > LINGER_SECONDS and not self.unread_since:
            self.transport.close()
            return
        # uvicorn's own time-out is cancelled by late bytes of a request that was answered early.
        if (self.unread_since and now - self.unread_since > READ_SECONDS) or (
            self.idle_since and now - self.idle_since > KEEP_ALIVE_SECONDS
        ):
            self.close("slow")
        elif self.arriving_since and now - self.arriving_since > (
            HEAD_SECONDS if self.in_head else BODY_SECONDS
        ):
            CONNECTIONS_CLOSED.of("slow").add()
            if answering and self.cycle.response_started:
                self.lost = True
                self.transport.abort()
            else:
                self._refuse(TIMEOUT, "the request did not arrive in time")

    def close(self, reason: str) -> None:
        """Close it without an answer."""
        self.lost = True
        CONNECTIONS_CLOSED.of(reason).add()
        if self.unread_since:  # reset: else the kernel keeps megabytes for a client that does not read
            with contextlib.suppress(OSError):
                peer = self.transport.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _refuse(self, kind: Kind, detail: str) -> None:
        """Answer beside the app, and close."""
        if self._over:
            return
        self.lost = True
        body = to_json(Problem(kind, detail).body())
        head = (
            b"content-type: application/problem+json\r\ncache-control: no-store\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(STATUS_LINE[kind.status] + head + body)
        self.pipeline.clear()
        if self.cycle is not None:  # as if the connection were lost: what the app still sends is dropped
            self.cycle.disconnected = not self.cycle.response_complete
            self.cycle.message_event.set()
        for task in self._waiting:
            task.cancel()
        self._linger()

    @property
    def _over(self) -> bool:
        """Whether nothing is read or answered any more."""
        return bool(self.leaving_since) or self.transport.is_closing()

    def _leave(self) -> None:
        """Close it after its last answer, so that a client that still sends can read the answer."""
        if self.arriving_since:
            self._linger()
        elif not self.leaving_since:
            self.transport.close()

    def _linger(self) -> None:
        """Close this end alone. TLS does so by itself: it waits for the client's farewell."""
        if self._over:
            return
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.leaving_since = self.loop.time()
        self.arriving_since = self.idle_since = 0.0
        self.crowd.idle.pop(self, None)
        self.crowd.leaving[self] = None
        self.flow.resume_reading()
        self._writer.end()
        self.transport.write_eof()


def _hung_up(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its end, even if the event loop has not noticed it yet."""
    with contextlib.suppress(OSError):
        state: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] != TCP_ESTABLISHED
    return True


def _took_all(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its end in good order, and its kernel has acknowledged all bytes.

    A client that leaves bytes unread does not close in good order: its kernel resets the connection.
    """
    with contextlib.suppress(OSError):
        peer = transport.get_extra_info("socket")
        state: bytes = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        unacknowledged = fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, bytes(4))
        return state[0] == TCP_CLOSE_WAIT and not any(unacknowledged)
    return False


class Crowd:
    """All connections of a process. ``most`` bounds their number."""

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self.most = most
        self.all: set[Connection | Handshake] = set()
        self.idle: dict[Connection | Handshake, None] = {}
        """Idle connections, the longest idle first."""
        self.leaving: dict[Connection, None] = {}
        """Connections whose last answer is written and whose clients have not closed their ends."""
        self.unread: dict[Connection, None] = {}
        """Connections whose clients do not read, the longest first."""

    def joined(self, connection: Connection | Handshake) -> None:
        """Add a new connection. If there are too many, close one that is leaving or idle, or else the new
        one."""
        if len(self.all) >= self.most:
            victim = next(chain(self.leaving, self.idle), connection)
            self.left(victim)
            victim.close("crowded")
            if victim is connection:
                return
        self.all.add(connection)
        self.idle[connection] = None

    def left(self, connection: Connection | Handshake) -> None:
        """Forget a connection."""
        self.all.discard(connection)
        self.idle.pop(connection, None)
        if isinstance(connection, Connection):
            self.leaving.pop(connection, None)
            self.unread.pop(connection, None)

    def bound_unread(self) -> None:
        """Close connections whose clients have read nothing for longest, until few enough bytes are
        unread."""
        held = {one: one.kept_back for one in self.unread}
        total = sum(held.values())
        for victim, size in held.items():
            if total <= MOST_UNREAD:
                return
            total -= size
            self.left(victim)
            victim.close("unread")

    async def look_on(self) -> None:
        """Check all connections once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = loop.time()
            for connection in list(self.all):
                connection.look(now)
            CONNECTIONS.of().set(len(self.all))
