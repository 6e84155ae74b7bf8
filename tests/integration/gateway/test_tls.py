"""TLS of the gateway's own port bounds and tells what a plain connection does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from harness.secured import Tls

from toc.gateway import connections, handshake
from toc.gateway.server import server as server_for
from toc.observe.metrics import CONNECTIONS_CLOSED

ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = 30 << 20  # of which sockets hold a few

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server over TLS on a port of its own. Its answers are small, or for ``/large`` LARGE."""

    def __init__(self, most: int) -> None:
        self.crowd = connections.Crowd(most)
        self.written: list[bool] = []
        """What ``sent`` said of each answer."""
        self._context = ssl.create_default_context(cafile=Tls.shared().ca)

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        size = LARGE if scope["path"] == "/large" else 2
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(size)})
        self.written.append(await scope["toc.connection"].sent())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        tls = Tls.shared()
        server = server_for(
            self, self.crowd, shutdown_deadline=1, certificate=str(tls.certificate), key=str(tls.key)
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = listener.getsockname()
        looking = asyncio.create_task(self.crowd.look_on())
        task = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(60):
                yield
        finally:
            looking.cancel()
            server.should_exit = True
            async with asyncio.timeout(60):  # of the one second that it may take
                await task

    async def connect(self, buffer: int | None = None) -> Streams:
        client = socket.socket()
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        return await asyncio.open_connection(
            sock=client, ssl=self._context, server_hostname="127.0.0.1", limit=1024
        )

    async def raw(self) -> Streams:
        """A connection whose client says nothing of TLS."""
        return await asyncio.open_connection(*self.address)

    async def secure(self, streams: Streams) -> None:
        """Begin with TLS over a raw connection."""
        await streams[1].start_tls(self._context, server_hostname="127.0.0.1")

    async def ask(self, streams: Streams, request: bytes = ASK) -> bytes:
        streams[1].write(request)
        head = await streams[0].readuntil(b"\r\n\r\n")
        await streams[0].readexactly(2)
        return head


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_handshakes_that_never_complete_are_bounded_in_number_and_keep_nobody_out() -> None:
    async def steps() -> None:
        served = Served(most=20)
        async with served.serving():
            opened = []
            for number in range(100):
                streams = await served.raw()
                if number % 2:  # the beginning of a record
                    streams[1].write(b"\x16\x03\x01\x02\x00")
                opened.append(streams)
                assert len(served.crowd.all) <= 20
            for streams in opened[:70]:  # the oldest are closed, the last ones are not
                with contextlib.suppress(ConnectionError):
                    assert await streams[0].read() == b""
            await until(lambda: len(served.crowd.all) == 20)
            opened.append(await served.connect())
            assert b"200 OK" in await served.ask(opened[-1])
            assert len(served.crowd.all) <= 20
            for _, writer in opened:
                writer.close()

    uvloop.run(steps())


def test_a_handshake_that_does_not_complete_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)

    async def steps() -> None:
        served = Served(most=20)
        async with served.serving():
            slow = await served.raw()
            await asyncio.sleep(0.3)  # it is looked at several times, and may still begin
            await served.secure(slow)
            assert b"200 OK" in await served.ask(slow)
            slow[1].close()
            await until(lambda: not served.crowd.all)
            CONNECTIONS_CLOSED.of("slow").take()
            silent = [await served.raw() for _ in range(5)]
            talking = await served.connect()
            await until(lambda: len(served.crowd.all) == 6)
            for reader, writer in silent:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            assert CONNECTIONS_CLOSED.of("slow").take() == len(silent), "TLS itself would wait for longer"
            assert b"200 OK" in await served.ask(talking), "only handshakes end"
            assert len(served.crowd.all) == 1
            talking[1].close()

    uvloop.run(steps())


def test_no_tls_ends_the_connection_and_a_stop_ends_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60.0)
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 60.0)

    async def steps() -> None:
        served = Served(most=20)
        async with served.serving():
            reader, writer = await served.raw()
            writer.write(ASK)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            await until(lambda: not served.crowd.all)
            writer.close()
            silent = await served.raw()
            await until(lambda: len(served.crowd.all) == 1)
        try:
            async with asyncio.timeout(60):  # the time-out of TLS is twice its time
                with contextlib.suppress(ConnectionError):
                    assert await silent[0].read() == b""
        finally:  # a loop with an open handshake does not end
            silent[1].transport.abort()
            await until(lambda: not served.crowd.all)

    uvloop.run(steps())


def test_a_connection_serves_many_requests_and_ends_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 1)

    async def steps() -> None:
        served = Served(most=20)
        async with served.serving():
            streams = await served.connect()
            assert b"200 OK" in await served.ask(streams)
            one = await _only(served)
            for _ in range(49):
                assert b"200 OK" in await served.ask(streams)
            for _ in range(2):  # both at once
                streams[1].write(ASK)
            for _ in range(2):
                assert b"200 OK" in await streams[0].readuntil(b"\r\n\r\n")
                await streams[0].readexactly(2)
            assert await _only(served) is one
            await until(lambda: served.written == [True] * 52)
            assert await streams[0].read() == b"", "idle"
            streams[1].close()
            await until(lambda: not served.crowd.all)
            last = await served.connect()
            assert b"connection: close" in await served.ask(last, ASK[:-2] + b"Connection: close\r\n\r\n")
            assert await last[0].read() == b""
            last[1].close()
            await until(lambda: served.written == [True] * 53)

    uvloop.run(steps())


async def _only(served: Served) -> Any:
    await until(lambda: len(served.crowd.all) == 1)
    (one,) = served.crowd.all
    return one


def test_what_a_client_does_not_read_counts_and_is_no_answer_that_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 1.0)

    async def steps() -> None:
        served = Served(most=20)
        async with served.serving():
            gone = await served.connect(buffer=4096)
            gone[1].write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await gone[0].readuntil(b"\r\n\r\n")
            one = await _only(served)
            await until(lambda: one in served.crowd.unread)
            assert LARGE // 2 < one.kept_back < 2 * LARGE
            assert served.written == []
            await until(lambda: served.written == [False])  # too slow
            assert not served.crowd.all
            gone[1].transport.abort()

            reset = await served.connect(buffer=4096)
            reset[1].write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in await reset[0].readuntil(b"\r\n\r\n")
            reset[1].get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            reset[1].transport.abort()
            await until(lambda: served.written == [False, False])

            reader, writer = await served.connect()
            for _ in range(2):
                writer.write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                left = LARGE
                while left:
                    left -= len(await reader.read(left))
            await until(lambda: served.written == [False, False, True, True])
            assert not served.crowd.unread
            writer.close()

    uvloop.run(steps())


def test_a_client_that_is_refused_while_it_sends_reads_why() -> None:
    async def steps() -> None:
        served = Served(10)
        async with served.serving():
            reader, writer = await served.connect()
            writer.write(b"nonsense\r\n\r\n")
            assert await reader.readuntil(b" ") == b"HTTP/1.1 "  # answered
            writer.write(bytes(4 << 20))
            await writer.drain()
            assert (await reader.read()).startswith(b"400 ")
            await until(lambda: not served.crowd.all)
            writer.close()

    uvloop.run(steps())
