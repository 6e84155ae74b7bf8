"""Writes the head and the body of an answer in one call of the kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

MOST_JOINED = 64 << 10
"""A longer body is not copied behind its head."""


class AnswerWriter(asyncio.Transport):
    """Where uvicorn writes answers to: the head waits for the body, and both leave in one write.

    Each write is a call of the kernel, a packet, and over TLS a record: a second one costs a quarter of all
    that a short request takes.
    """

    def __init__(
        self, transport: asyncio.Transport, below: asyncio.Transport | None, leave: Callable[[], None]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._below = below
        self._leave = leave
        """How the connection is closed."""
        self._head = b""
        self._ended = False
        self.closed = False
        """Whether the connection ends with an answer."""

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """Keep a head back, or write what follows a head. Drops what comes after the end."""
        if self._ended:
            return
        if self._head:
            head, self._head = self._head, b""
            if len(data) > MOST_JOINED:
                self._transport.write(head)
            else:
                data = head + data
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(STATUS_LINE[100]):
            self._head = data
            return
        self._transport.write(data)
        if self._below is not None and self._below.get_write_buffer_size():
            # TLS has passed it on and does not count what the socket keeps back. A limit of 0 makes it pause
            # until all is taken; if nothing were kept back, nothing would end the pause.
            self._transport.set_write_buffer_limits(0)

    def end(self) -> None:
        """Write nothing more. uvicorn does not tell earlier requests of the pipeline that the connection was
        closed, so their answers may still come."""
        self._ended = True

    def flush(self) -> None:
        """Write a head that no body follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Close the connection after all was written."""
        self.flush()
        self.closed = True
        self._leave()

    def is_closing(self) -> bool:
        """Whether the connection is closed or closing."""
        return self._transport.is_closing()
