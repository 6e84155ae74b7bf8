"""Connections that no request uses any more end, however their last request came."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from toc.gateway import connections
from toc.gateway.server import server as server_for


async def refuse(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("rest", [b"{}", b""], ids=["the body comes after the answer", "no body"])
def test_a_connection_whose_request_was_answered_before_it_was_complete_ends_too(
    monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_SECONDS", 1)

    async def steps() -> None:
        crowd = connections.Crowd()
        server = server_for(refuse, crowd, shutdown_deadline=1, certificate=None, key=None)
        listener = socket.create_server(("127.0.0.1", 0))
        tasks = [asyncio.create_task(crowd.look_on()), asyncio.create_task(server.serve([listener]))]
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(rest))
        assert await reader.readuntil(b"\r\n\r\n")
        writer.write(rest)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        assert not crowd.all
        writer.close()
        server.should_exit = True
        await tasks[1]
        tasks[0].cancel()

    asyncio.run(steps())


async def answer_large(_scope: Any, _receive: Any, send: Any) -> None:
    size = 30 << 20  # of which sockets hold a few
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    await send({"type": "http.response.body", "body": bytes(size)})


def test_of_clients_that_do_not_read_that_one_is_closed_that_has_read_nothing_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MOST_UNREAD", 70 << 20)

    async def steps() -> None:
        crowd = connections.Crowd()
        server = server_for(answer_large, crowd, shutdown_deadline=1, certificate=None, key=None)
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        clients = []
        for number in range(1, 5):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, listener.getsockname())
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            clients.append((client, client.getsockname()))
            async with asyncio.timeout(60):
                while len(crowd.unread) != min(number, 2) or len(crowd.all) != min(number, 2):
                    await asyncio.sleep(0.01)
        left = {one.transport.get_extra_info("peername") for one in crowd.all}
        assert left == {name for _, name in clients[2:]}, "the last two"
        for client, _ in clients:
            client.close()
        server.should_exit = True
        await serving

    asyncio.run(steps())


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[connections.Crowd, Any]]:
    """A server of an application, and its address."""
    crowd = connections.Crowd()
    server = server_for(app, crowd, shutdown_deadline=1)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield crowd, listener.getsockname()
    finally:
        server.should_exit = True
        await task


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"] * int(scope["query_string"] or b"1")
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
    await send(head)
    await send({"type": "http.response.body", "body": body})


def data_segments(client: Any) -> int:
    """How many segments with data a socket has received."""
    info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return int(struct.unpack_from("=I", info, 152)[0])


def test_head_and_body_of_an_answer_leave_together() -> None:
    async def steps() -> None:
        async with serving(echo) as (_, address), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            for number in range(1, 4):
                writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
                assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(2) == b"hi"
                assert data_segments(writer.get_extra_info("socket")) == number
            writer.close()

    uvloop.run(steps())


def test_every_kind_of_answer_arrives_whole_and_in_order() -> None:
    async def steps() -> None:
        async with serving(echo) as (_, address), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"HTTP/1.1 ")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(9) == b"HTTP/1.1 "
            writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
            assert b"content-length: 2" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"POST /?90000 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(180_000) == b"hi" * 90_000
            writer.write(2 * b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")  # one waits for the other
            for _ in range(2):
                assert b"content-length: 0" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert b"connection: close" in await reader.read()
            writer.close()

    uvloop.run(steps())


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_trailers_are_no_headers() -> None:
    async def steps() -> None:
        seen: list[Any] = []

        async def read(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                pass
            seen.append(scope["headers"])
            await refuse(scope, receive, send)

        async with serving(read) as (_, address), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                writer.write(CHUNKED + b"2;x=y\r\nhi\r\n0\r\nAuthorization: Bearer a\r\n\r\n")
                assert await reader.readuntil(b"\r\n\r\n")
                writer.write(b"GET / HTTP/1.1\r\nHost: b\r\n\r\n")
                assert await reader.readuntil(b"\r\n\r\n")
        assert seen == [[(b"host", b"a"), (b"transfer-encoding", b"chunked")], [(b"host", b"b")]]

    uvloop.run(steps())


@pytest.mark.parametrize("endless", [b"a:\r\n", b"a"], ids=["many", "a long one"])
@pytest.mark.parametrize("begun", [b"0\r\na: ", b"2\r\nhi\r\n0\r\na: ", b"2;"])
def test_what_a_chunked_body_has_beside_its_data_is_bounded(begun: bytes, endless: bytes) -> None:
    async def steps() -> None:
        async with serving(echo) as (crowd, address), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                writer.write(CHUNKED + begun)
                sent = 0
                while not any(one.leaving_since for one in crowd.all):  # type: ignore[union-attr]
                    writer.write(1000 * endless)
                    await writer.drain()
                    sent += 1000 * len(endless)
                    await asyncio.sleep(0.001)
                    assert sent < 1 << 20
                assert b"HTTP/1.1 4" in await reader.read()

    uvloop.run(steps())


def test_data_in_many_small_chunks_arrives_whole() -> None:
    async def steps() -> None:
        async def count(_scope: Any, receive: Any, send: Any) -> None:
            size, more = 0, True
            while more:
                part = await receive()
                size, more = size + len(part["body"]), part["more_body"]
            body = b"%d" % size
            headers = [(b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        async with serving(count) as (_, address), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                writer.write(CHUNKED + 100_000 * b"1\r\nx\r\n" + b"0\r\n\r\n")
                assert await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(6) == b"100000"

    uvloop.run(steps())


def test_an_empty_line_between_requests_begins_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.01)

    async def steps() -> None:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(0.3)  # far longer than a head may take
            await refuse(scope, receive, send)

        async with serving(answer) as (crowd, address), asyncio.timeout(60):
            looking = asyncio.create_task(crowd.look_on())
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                for _ in range(2):
                    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
                    await asyncio.sleep(0.05)
                    writer.write(b"\r\n")
                    assert b"HTTP/1.1 401 " in await reader.readuntil(b"\r\n\r\n")
                looking.cancel()

    uvloop.run(steps())


async def refuse_and_close(_scope: Any, _receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


BEGUN = {
    "an endless head": (b"GET /" + b"a" * 40_000, b"HTTP/1.1 431 "),
    "no HTTP": (b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
    "no HTTP behind requests": (2 * b"GET / HTTP/1.1\r\n\r\n" + b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
    "an unwanted body": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n", b"HTTP/1.1 413 "),
}


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("begun", BEGUN)
def test_a_client_that_is_refused_while_it_sends_reads_why(run: Any, begun: str) -> None:
    sent, status = BEGUN[begun]

    async def steps() -> None:
        async with serving(refuse_and_close) as (crowd, address), asyncio.timeout(60):
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, address)
                await loop.sock_sendall(client, sent)
                while not client_has(client):  # answered, and closed at the other end
                    await asyncio.sleep(0.01)
                await loop.sock_sendall(client, bytes(4 << 20))
                answer = b""
                while part := await loop.sock_recv(client, 65536):
                    answer += part
            assert answer.startswith(status)
            while crowd.all:
                await asyncio.sleep(0.01)

    run(steps())


def client_has(client: socket.socket) -> bool:
    """Whether an answer has arrived."""
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_a_client_that_goes_on_sending_after_it_was_refused_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)

    async def steps() -> None:
        async with serving(refuse_and_close) as (crowd, address), asyncio.timeout(60):
            looking = asyncio.create_task(crowd.look_on())
            _, writer = await asyncio.open_connection(*address)
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"nonsense\r\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            assert not crowd.all
            looking.cancel()

    uvloop.run(steps())


@pytest.mark.parametrize("resets", [False, True], ids=["is read", "is not read"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_last_answer_reaches_a_client_that_has_sent_more_than_its_request(run: Any, resets: bool) -> None:
    async def steps() -> None:
        asked, may_answer, sent = asyncio.Event(), asyncio.Event(), list[bool]()

        async def hand_out(scope: Any, _receive: Any, send: Any) -> None:
            asked.set()
            await may_answer.wait()
            await refuse(scope, _receive, send)
            sent.append(await scope["toc.connection"].sent())

        async with serving(hand_out) as (crowd, address), asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await asked.wait()
            [connection] = crowd.all
            writer.write(b"G")
            while not connection.arriving_since:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            may_answer.set()
            if resets:
                while not connection.leaving_since:  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
                peer = writer.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
                writer.close()
            while not sent:
                await asyncio.sleep(0.01)
            assert sent == [not resets]

    run(steps())


def test_of_too_many_connections_one_that_was_refused_goes_before_one_that_is_idle() -> None:
    async def steps() -> None:
        async with serving(refuse) as (crowd, address), asyncio.timeout(60):
            crowd.most = 2
            idle, idle_writer = await asyncio.open_connection(*address)
            refused, refused_writer = await asyncio.open_connection(*address)
            refused_writer.write(b"nonsense\r\n\r\n")
            assert await refused.read()  # to its end, but this end is open
            last, last_writer = await asyncio.open_connection(*address)
            for reader, writer in ((last, last_writer), (idle, idle_writer)):
                writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                assert await reader.readuntil(b"\r\n\r\n")
            for writer in (idle_writer, refused_writer, last_writer):
                writer.close()

    uvloop.run(steps())
