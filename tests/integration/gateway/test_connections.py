"""Connections: what is bounded of them, which one goes first, and that answers arrive whole."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_network
from typing import Any

import pytest
import uvloop
from harness.secured import Tls

from toc.gateway import crowd
from toc.gateway.connections import SECONDS, ClientGone, Phase
from toc.gateway.crowd import Crowd
from toc.gateway.crowd import server as server_for
from toc.gateway.exchange import PART, Answer, Exchange
from toc.gateway.problems import Problem
from toc.gateway.shares import Shares, memory
from toc.model.errors import BodyTooLarge, Busy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Do = Callable[[Exchange], Awaitable[tuple[int, bytes]]]

ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = 30 << 20  # of which sockets hold a few
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
TLS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])


def app(do: Do) -> Any:
    """The application whose answers ``do`` gives, as status and body."""
    held = memory()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        one = Exchange(scope, receive, send, held)
        try:
            try:
                one.check()
                status, body = await do(one)
            except Problem as exc:
                status, body = exc.kind.status, b""
            await one.answer("other", Answer(body, status))
        except ClientGone:
            return
        finally:
            one.end()

    return answer


async def refuse(_: Exchange) -> tuple[int, bytes]:
    """Answer without a look at the body."""
    return 401, b""


async def echo(one: Exchange) -> tuple[int, bytes]:
    return 200, await one.body(1 << 20)


async def large(_: Exchange) -> tuple[int, bytes]:
    return 200, bytes(LARGE)


class Served:
    """A server on a port of its own."""

    def __init__(self, address: Any, tls: bool) -> None:
        self.address = address
        self._context = ssl.create_default_context(cafile=Tls.shared().ca) if tls else None

    async def connect(self, buffer: int | None = None) -> Streams:
        client = socket.socket()
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, self.address)
        name = None if self._context is None else "127.0.0.1"
        return await asyncio.open_connection(sock=client, ssl=self._context, server_hostname=name, limit=1024)


@contextlib.asynccontextmanager
async def serving(do: Do, crowd: Crowd | None = None, *, tls: bool = False) -> AsyncIterator[Served]:
    """Serve for a minute at most."""
    crowd = crowd or Crowd()
    files = (str(Tls.shared().certificate), str(Tls.shared().key)) if tls else (None, None)
    server = server_for(app(do), crowd, shutdown_deadline=1, tls=files)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    address = listener.getsockname()
    looking = asyncio.create_task(crowd.look_on())
    task = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(60):
            yield Served(address, tls)
    finally:
        looking.cancel()
        server.should_exit = True
        await task


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


async def answer_to(streams: Streams, request: bytes) -> bytes:
    """The status and headers of an answer."""
    streams[1].write(request)
    return await streams[0].readuntil(b"\r\n\r\n")


async def ended(streams: Streams) -> bytes:
    """What came until the end."""
    with contextlib.suppress(ConnectionError):
        return await streams[0].read()
    return b""


# --- who goes first


@pytest.mark.parametrize("begun", [b"", b"G", POST, POST + b"Content-Length: 9\r\n\r\nx"])
async def test_who_is_still_arriving_goes_before_new_ones_and_before_who_rests(begun: bytes) -> None:
    crowd = Crowd(most=20)
    async with serving(echo, crowd) as served:
        resting = await served.connect()
        assert b" 200 " in await answer_to(resting, ASK)
        arriving = []
        for number in range(100):
            arriving.append(await served.connect())
            arriving[-1][1].write(begun)
            if not number % 10:
                new = await served.connect()
                assert b" 200 " in await answer_to(new, ASK)
                new[1].close()
        for streams in arriving[:70]:  # the oldest are closed
            assert await ended(streams) == b""
        assert b" 200 " in await answer_to(resting, ASK)
        assert len(crowd.all) <= 20
        for _, writer in (resting, *arriving):
            writer.close()


async def test_of_many_that_rest_the_longest_goes_and_not_who_arrives() -> None:
    async with serving(echo, Crowd(most=10)) as served:
        resting = []
        for _ in range(9):
            resting.append(await served.connect())
            assert b" 200 " in await answer_to(resting[-1], ASK)
        await asyncio.sleep(1.0)  # what makes the difference: rests count less than arrivals
        slow = await served.connect()
        slow[1].write(ASK[:10])
        for _ in range(5):
            resting.append(await served.connect())
            assert b" 200 " in await answer_to(resting[-1], ASK)
        assert b" 200 " in await answer_to(slow, ASK[10:])
        for streams in resting[:5]:
            assert await ended(streams) == b""
        for _, writer in (slow, *resting):
            writer.close()


def test_an_address_has_a_bound_of_its_own_unless_it_is_a_proxy() -> None:
    async def steps(proxies: list[Any], left: int) -> None:
        crowd = Crowd(most=100, per_address=10, proxies=proxies)
        async with serving(echo, crowd) as served:
            opened = [await served.connect() for _ in range(30)]
            await until(lambda: len(crowd.all) == left)
            assert b" 200 " in await answer_to(opened[-1], ASK)
            for _, writer in opened:
                writer.close()

    uvloop.run(steps([], 10))
    uvloop.run(steps([ip_network("127.0.0.0/8")], 30))


def _take_all(places: Shares, *names: str) -> int:
    """Take as many places in these names as one gets."""
    before = places._all
    with contextlib.suppress(Busy):
        while True:
            places.take(*names)
    return places._all - before


def test_what_is_worked_on_leaves_places_for_others_and_no_port_takes_all() -> None:
    places = Crowd(most=4096).waits
    assert _take_all(places, "port a", "address x") > 2000, "waiting pulls of one consumer"
    for port in "abcdef":
        _take_all(places, f"port {port}", "address x")
    assert places._all < places.most * 7 / 8, "at no port"
    assert _take_all(places, "port a", "address y") > 50
    places.take("port a", "address z")
    for _ in range(400):
        places.give("port a", "address x")
    places.take("port a", "address x")


async def test_a_waiting_request_never_yields_to_a_new_one_and_the_last_places_are_not_for_it() -> None:
    crowd = Crowd(most=16)
    over = asyncio.Event()

    async def wait(one: Exchange) -> tuple[int, bytes]:
        if one.header(b"wait") is None:
            return 200, b""
        try:
            one.begin("token t")
            with one.waiting():
                await over.wait()
        except Busy:
            return 503, b""
        return 200, b""

    async with serving(wait, crowd) as served:
        held = [await served.connect() for _ in range(40)]
        for _, writer in held:
            writer.write(ASK[:-2] + b"wait: 1\r\n\r\n")
        await asyncio.sleep(0.1)
        new = await served.connect()
        assert b" 200 " in await answer_to(new, ASK), "there is a place for a probe"
        assert 0 < crowd.waits._all < crowd.waits.most < crowd.work.most
        over.set()
        for _, writer in (new, *held):
            writer.close()
        await until(lambda: not crowd.all)
    assert not crowd.work._all + crowd.waits._all


# --- time


@pytest.mark.parametrize("rest", [b"{}", b""], ids=["the body comes after the answer", "no body"])
async def test_a_connection_ends_that_rests(monkeypatch: pytest.MonkeyPatch, rest: bytes) -> None:
    monkeypatch.setitem(SECONDS, Phase.IDLE, 1.0)
    crowd = Crowd()
    async with serving(refuse, crowd) as served:
        streams = await served.connect()
        await answer_to(streams, POST + b"Content-Length: %d\r\n\r\n" % len(rest))
        streams[1].write(rest)
        assert await ended(streams) == b""
        streams[1].close()
        await until(lambda: not crowd.all)


@pytest.mark.parametrize("begun", [b"G", POST, POST + b"Content-Length: 9\r\n\r\nx"])
async def test_a_request_that_never_arrives_is_told(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setitem(SECONDS, Phase.HEAD, 0.2)
    monkeypatch.setitem(SECONDS, Phase.BODY, 0.2)
    monkeypatch.setattr(crowd, "LOOK_SECONDS", 0.05)
    async with serving(echo) as served:
        streams = await served.connect()
        streams[1].write(begun)
        assert b"HTTP/1.1 408 " in await ended(streams)
        streams[1].close()
        silent = await served.connect()
        assert await ended(silent) == b""
        silent[1].close()


# --- answers that are not read


@TLS
async def test_who_does_not_read_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    monkeypatch.setitem(SECONDS, Phase.UNREAD, 3.0)
    crowd = Crowd()
    async with serving(large, crowd, tls=tls) as served:
        slow = await served.connect(buffer=4096)
        assert b"200 OK" in await answer_to(slow, ASK)
        await until(lambda: crowd.unread)
        (one,) = crowd.all
        assert one.transport.get_write_buffer_size() < 1 << 20, "the rest is held where it is counted"
        await until(lambda: not crowd.all)
        slow[1].transport.abort()
        reader, writer = await served.connect()
        for _ in range(2):
            assert b"200 OK" in await answer_to((reader, writer), ASK)
            left = LARGE
            while left:
                left -= len(await reader.read(left))
        await until(lambda: not crowd.unread)
        writer.close()


# --- answers that arrive


@TLS
async def test_every_kind_of_answer_arrives_whole_and_in_order(tls: bool) -> None:
    async def repeated(one: Exchange) -> tuple[int, bytes]:
        return 200, await one.body(9) * int(one.header(b"times") or "1")

    crowd = Crowd()
    async with serving(repeated, crowd, tls=tls) as served:
        reader, writer = streams = await served.connect()
        head = await answer_to(streams, POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        assert head == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert b"200 OK" in await answer_to(streams, b"HTTP/1.1 ")
        assert await reader.readexactly(9) == b"HTTP/1.1 "
        head = await answer_to(streams, b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi")
        assert b"content-length: 2" in head
        head = await answer_to(streams, POST + b"times: 90000\r\nContent-Length: 2\r\n\r\nhi")
        assert b"200 OK" in head
        assert await reader.readexactly(180_000) == b"hi" * 90_000
        writer.write(3 * ASK)  # one waits for the other
        for _ in range(3):
            assert b"content-length: 0" in await reader.readuntil(b"\r\n\r\n")
        # As Java's client asks at first, and goes on when nobody switches.
        upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
        for _ in range(2):
            head = await answer_to(streams, POST + upgrade + b"Content-Length: 2\r\n\r\nhi")
            assert b"200 OK" in head
            assert await reader.readexactly(2) == b"hi"
            assert b"200 OK" in await answer_to(streams, ASK[:-2] + upgrade + b"\r\n")
        assert len(crowd.all) == 1
        writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"connection: close" in await reader.read()
        writer.close()
        await until(lambda: not crowd.all)


async def test_a_request_that_asks_for_another_protocol_before_the_last_answer_is_refused() -> None:
    # The parser takes what follows its head for that protocol: the application would see no body.
    seen: list[bytes] = []

    async def read(one: Exchange) -> tuple[int, bytes]:
        seen.append(await one.body(9))
        return 200, b""

    async with serving(read) as served:
        streams = await served.connect()
        streams[1].write(ASK + POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi")
        assert b"200 OK" in await streams[0].readuntil(b"\r\n\r\n")
        assert b" 400 " in await ended(streams)
        streams[1].close()
    assert seen == [b""]


async def test_trailers_are_no_headers() -> None:
    seen: list[Any] = []

    async def read(one: Exchange) -> tuple[int, bytes]:
        await one.body(9)
        seen.append((one.header(b"authorization"), one.header(b"host")))
        return 200, b""

    async with serving(read) as served:
        streams = await served.connect()
        await answer_to(streams, CHUNKED + b"2;x=y\r\nhi\r\n0\r\nAuthorization: Bearer a\r\n\r\n")
        await answer_to(streams, ASK)
        streams[1].close()
    assert seen == [(None, "a"), (None, "a")]


@pytest.mark.parametrize("endless", [b"a:\r\n", b"a"], ids=["many", "a long one"])
@pytest.mark.parametrize("begun", [CHUNKED + b"0\r\na: ", CHUNKED + b"2\r\nhi\r\n0\r\na: ", CHUNKED + b"2;"])
async def test_what_a_request_has_beside_its_data_is_bounded(begun: bytes, endless: bytes) -> None:
    crowd = Crowd()
    async with serving(echo, crowd) as served:
        streams = await served.connect()
        streams[1].write(begun)
        sent = 0
        await until(lambda: crowd.all)
        while crowd.all and not any(one.phase is Phase.LEAVING for one in crowd.all):
            streams[1].write(1000 * endless)
            with contextlib.suppress(ConnectionError):
                await streams[1].drain()
            sent += 1000 * len(endless)
            await asyncio.sleep(0.001)
            assert sent < 2 << 20
        assert b"HTTP/1.1 4" in await ended(streams)
        streams[1].close()


# --- requests that are refused


FRAMING = {
    "two hosts": (ASK[:-2] + b"Host: b\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "no host, which HTTP/1.0 does not know": (b"GET / HTTP/1.0\r\n\r\n", 200),
    "gzip": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "gzip, in two headers": (
        POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "twice chunked": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked": (POST + b"Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n", 200),
    "not chunked": (POST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "identity": (POST + b"Transfer-Encoding: identity\r\n\r\n", 400),
    "chunked in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "both lengths": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", 400),
    "two lengths in one": (POST + b"Content-Length: 1, 1\r\n\r\na", 400),
    "a signed length": (POST + b"Content-Length: +1\r\n\r\na", 400),
    "an encoded body": (POST + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\na", 415),
    "an encoded body, named second": (
        POST + b"Content-Encoding: identity\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\na",
        415,
    ),
    "a plain body": (POST + b"Content-Encoding: Identity\r\nContent-Length: 1\r\n\r\na", 200),
    "a proxy": (b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", FRAMING)
async def test_a_request_is_read_in_one_way_or_refused(case: str) -> None:
    sent, status = FRAMING[case]
    async with serving(echo) as served:
        streams = await served.connect()
        assert (await answer_to(streams, sent)).startswith(b"HTTP/1.1 %d " % status)
        streams[1].close()


async def too_large(one: Exchange) -> tuple[int, bytes]:
    with contextlib.suppress(BodyTooLarge):
        return 200, await one.body(9)
    return 413, b""


BEGUN = {
    "an endless head": (b"GET /" + b"a" * 40_000, b"HTTP/1.1 431 "),
    "no HTTP": (b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
    "no HTTP behind requests": (2 * ASK + b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
    "an unwanted body": (POST + b"Content-Length: 99999999\r\n\r\n", b"HTTP/1.1 413 "),
}


@LOOPS
@pytest.mark.parametrize("begun", BEGUN)
def test_a_client_that_is_refused_while_it_sends_reads_why(run: Any, begun: str) -> None:
    sent, status = BEGUN[begun]

    async def steps() -> None:
        crowd = Crowd()
        async with serving(too_large, crowd) as served:
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, served.address)
                await loop.sock_sendall(client, sent)
                await until(lambda: client_has(client))  # answered, and closed at the other end
                await loop.sock_sendall(client, bytes(4 << 20))
                answer = b""
                while part := await loop.sock_recv(client, 65536):
                    answer += part
            assert answer.startswith(status)
            await until(lambda: not crowd.all)

    run(steps())


def client_has(client: socket.socket) -> bool:
    """Whether an answer has arrived."""
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_a_stream_takes_memory_for_its_longest_part_and_ends_without() -> None:
    held = memory(1000)

    async def parts() -> AsyncIterator[bytes]:
        for more in (0, 400, 100, 700, 0):
            yield b"x" * (PART + more)

    async def streams(scope: Any, receive: Any, send: Any) -> None:
        one = Exchange(scope, receive, send, held)
        one.sender = "a"
        one.begin()
        await one.stream(Answer(b""), parts())
        with pytest.raises(Busy):
            held.take("b", size=400)  # until its end
        one.end()

    async def steps() -> None:
        config = server_for(streams, Crowd(), shutdown_deadline=1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(config.serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(ASK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            async with asyncio.timeout(60):
                answer = await reader.read()
            writer.close()
            config.should_exit = True
            await serving
        assert answer.partition(b"\r\n\r\n")[2].count(b"x") == 3 * PART + 500
        assert answer.endswith(b"0\r\n\r\n"), "it ends as a whole"

    asyncio.run(steps())
    held.take("b", size=450)
