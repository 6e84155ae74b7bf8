"""One connection of a client: bounds on the time and bytes until the application is called.

uvicorn has none. A Connection is a protocol of ours around an unmodified one of uvicorn's: it passes on
what arrives, and counts. What begins with the call of the application is bounded in ``exchange``.

    HEAD ── line and headers ──▶ BODY ── complete ──▶ WORK ── answered ──▶ IDLE ── first byte ──▶ HEAD
     └─────────────┴─ refused: the last answer is written ─▶ LEAVING ── the client closes ──▶ (closed)

A request that is refused before it has arrived whole ends its connection: the gateway answers, closes its own
end, and drops what the client still sends. If it closed at once, the kernel would answer those bytes by a
reset, and the client could lose the answer (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from toc.gateway.problems import HEADERS, SYNTAX, TIMEOUT, Kind, Problem
from toc.observe.metrics import CONNECTIONS_CLOSED

if TYPE_CHECKING:
    from toc.gateway.crowd import Crowd

HEAD_BYTES = 32 << 10
"""Most bytes of a request's line and headers."""
BESIDE_BYTES = 512 << 10
"""Most bytes of a body that bring the application no data: sizes of chunks, their extensions, trailers. More
than uvicorn and the event loop read ahead of the application."""
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
STATE = "toc.connection"
"""The connection of a request, in the ``state`` of its scope."""


class Phase(IntEnum):
    """What a connection waits for."""

    HEAD = 0
    """The rest of a request's line and headers, also the first byte of the first request."""
    BODY = 1
    """The rest of a body."""
    WORK = 2
    """The application."""
    UNREAD = 3
    """Beside another phase: the client reads nothing of an answer."""
    IDLE = 4
    """Another request."""
    LEAVING = 5
    """Its last answer is written; the client may go on sending, which is dropped."""


SECONDS = {Phase.HEAD: 10.0, Phase.BODY: 30.0, Phase.UNREAD: 30.0, Phase.IDLE: 75.0, Phase.LEAVING: 5.0}
"""How long a phase may last. That of the application is bounded by itself."""


class ClientGone(Exception):
    """The client has left before it was answered."""


class Connection(asyncio.Protocol):
    """One connection of a client."""

    crowd: Crowd
    port: str
    """The name of the port."""

    def __init__(self, *, app_state: dict[str, Any], **about: Any) -> None:
        self._inner = HttpToolsProtocol(app_state={**app_state, STATE: self}, **about)
        self._loop = asyncio.get_running_loop()
        self.phase = Phase.HEAD
        self.lost = False
        """Whether it is there no more."""
        self._in_head = True
        """Whether what arrives is a head."""
        self._begun = b""
        """A head that has not arrived whole: nothing of it is passed on before."""
        self._fields = -1
        """How many headers the next request to be answered has, -1 if that is not known."""
        self._beside = 0
        """Bytes of a body since the application was last given any of its data."""
        self._waiting: set[asyncio.Task[Any]] = set()

    # --- what the event loop tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection in."""
        self.transport = transport
        self.address = self.crowd.address_of(transport)
        self.names = (f"port {self.port}", f"address {self.address}")[: 2 if self.address else 1]
        """What its requests count for (``Shares``)."""
        self.outlet = _Outlet(transport, self)
        self._inner.connection_made(self.outlet)
        self.crowd.join(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let it go."""
        self.lost = True
        self.crowd.left(self)
        self._inner.connection_lost(exc)
        for task in self._waiting:
            task.cancel()

    def eof_received(self) -> None:
        """Let the transport close itself."""
        self._inner.eof_received()

    def data_received(self, data: bytes) -> None:
        """Take what has arrived."""
        if self.phase is Phase.LEAVING:
            return
        if self._in_head:
            data = self._arrives(data)
        elif self.phase is Phase.BODY:
            self._beside += len(data)
        if len(self._begun) > HEAD_BYTES or self._beside > BESIDE_BYTES:
            self.refuse(HEADERS, f"at most {HEAD_BYTES} bytes are allowed")
        elif data:
            self.outlet.feeding = True
            self._inner.data_received(data)
            self.outlet.feeding = False

    def _arrives(self, data: bytes) -> bytes:
        """Take bytes of a head. Returns what can be passed on: nothing before the head is whole."""
        known = len(self._begun)
        data = self._begun + data if known else data.lstrip(b"\r\n")  # RFC 9112, 2.2
        end = data.find(b"\r\n\r\n", max(0, known - 3), HEAD_BYTES + 4)
        if end < 0 and (known or data[:1].isalpha() or not data):
            if data and not known and self.phase is not Phase.WORK:
                self._enter(Phase.HEAD)
            self._begun = data
            return b""
        head = data[: end + 4]
        self._begun, self._in_head = b"", False
        if self.phase is not Phase.WORK:
            self._enter(Phase.BODY)
        # Java's client asks for HTTP/2 at first. The parser would take the body for that protocol.
        if b"\r\nupgrade:" in head.lower():
            head = _UPGRADE.sub(b"", head)
            data = head + data[end + 4 :]
        self._fields = head.count(b"\r\n") - 2
        return data

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        self.crowd.unread[self] = self._loop.time()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Note that the client reads."""
        self.crowd.unread.pop(self, None)
        self._inner.resume_writing()

    # --- what the application tells

    def called(self) -> int:
        """The application is called with the next request. Returns how many headers that has, -1 if it is
        not known: uvicorn adds the trailers of a body to the headers."""
        fields, self._fields = self._fields, -1
        self._in_head, self._beside = False, 0
        if self.phase is not Phase.BODY and self.phase is not Phase.LEAVING:
            self._enter(Phase.BODY)
        return fields

    def given(self) -> None:
        """The application was given data of the body."""
        self._beside = 0

    def complete(self) -> None:
        """The request is there whole: what arrives now is the head of another."""
        self._in_head = True
        if self.phase is not Phase.LEAVING:
            self._enter(Phase.WORK)

    def answered(self) -> None:
        """The whole answer is written."""
        if self.phase is not Phase.LEAVING:
            self._enter(Phase.HEAD if self._begun else Phase.IDLE if self._in_head else Phase.BODY)

    @property
    def left(self) -> bool:
        """Whether the client is known to have left, or was sent away."""
        return self.lost or self.phase is Phase.LEAVING or self.transport.is_closing()

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

    # --- its end

    def refuse(self, kind: Kind, detail: str) -> None:
        """Answer beside the application, which has not begun to answer, and close."""
        if self.phase not in (Phase.HEAD, Phase.BODY) or self.transport.is_closing():  # it is answered
            self.close("slow")
            return
        if self._begun or self.phase is Phase.BODY:
            body = to_json(Problem(kind, detail).body())
            head = (
                b"content-type: application/problem+json\r\ncache-control: no-store\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            self.transport.write(STATUS_LINE[kind.status] + head + body)
        self.leave()

    def leave(self) -> None:
        """Close it after its last answer. While more may arrive, close this end alone.

        TLS does so by itself: it waits for the client's farewell.
        """
        if self.phase is Phase.LEAVING:
            return
        arriving = self.phase is Phase.BODY or self._begun or not self._in_head
        if not arriving or self.transport.is_closing() or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._enter(Phase.LEAVING)
        self.transport.resume_reading()
        self.transport.write_eof()
        for task in self._waiting:
            task.cancel()

    def close(self, reason: str) -> None:
        """Close it without an answer."""
        CONNECTIONS_CLOSED.of(reason).add()
        if self.transport.get_write_buffer_size():  # else the kernel keeps megabytes for who does not read
            with contextlib.suppress(OSError):
                peer = self.transport.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.crowd.left(self)
        self.transport.abort()

    def late(self, phase: Phase) -> None:
        """Close it: its phase has lasted too long."""
        if phase is Phase.BODY or (phase is Phase.HEAD and self._begun):
            CONNECTIONS_CLOSED.of("slow").add()
            self.refuse(TIMEOUT, "the request did not arrive in time")
        elif phase is Phase.LEAVING:
            self.transport.close()
        else:
            self.close("slow")

    def _enter(self, phase: Phase) -> None:
        if not self.lost:
            self.crowd.phases[self.phase].pop(self, None)
            self.phase = phase
            self.crowd.phases[phase][self] = self._loop.time()


class _Outlet(asyncio.Transport):
    """What uvicorn takes for the transport. Its close lets a client that still sends read its last answer.

    While it is ``corked`` it keeps what is written: head and body of a short answer leave in one call of the
    kernel, which a second one would make a quarter dearer. What is written while uvicorn is ``feeding`` on
    what has arrived is its answer to bytes that are no HTTP: ours takes its place.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__()
        self._transport = transport
        self._connection = connection
        self.corked = self.feeding = False
        self._kept: list[bytes] = []

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def write(self, data: Any) -> None:
        """Drop what comes after the last answer: uvicorn does not tell the application of earlier requests
        of the pipeline."""
        if self._connection.phase is Phase.LEAVING:
            return
        if self.feeding:
            self._connection.refuse(SYNTAX, "this is no HTTP/1.1 request")
        elif self.corked:
            self._kept.append(data)
        else:
            self._transport.write(data)

    def uncork(self) -> None:
        """Write what was kept, and keep nothing more."""
        self.corked = False
        if self._kept:
            self.write(b"".join(self._kept))
            self._kept.clear()

    def close(self) -> None:
        self.uncork()
        self._connection.leave()

    def is_closing(self) -> bool:
        return self._connection.phase is Phase.LEAVING or self._transport.is_closing()

    def pause_reading(self) -> None:
        if self._connection.phase is not Phase.LEAVING:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
