"""The answers of MySQL, and which server holds which table."""

import random
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from pymysql.converters import decoders
from pymysql.err import MySQLError, OperationalError, ProgrammingError
from sqlalchemy.engine import make_url

from toc.model.clock import Clock
from toc.model.errors import ConfigError
from toc.store.servers.mysql import _parsed, connector
from toc.store.servers.mysql_answers import ends_left, read_answers
from toc.store.servers.server import Result
from toc.store.servers.shards import Layout
from toc.store.store import Store

# The answers of a MySQL server, however the network cuts them: packets as the protocol describes them.

LONGLONG, VAR_STRING, DATETIME = 8, 253, 12
UTF8, BINARY = 45, 63
MORE = 0x08
NULL = b"\xfb"


def packets(*bodies: bytes) -> bytes:
    """As they go over the wire: length, number, body; what is too long for one goes on in the next."""
    wire = b""
    number = 1
    for body in bodies:
        while True:
            part, body = body[:0xFFFFFF], body[0xFFFFFF:]
            wire += struct.pack("<I", len(part))[:3] + bytes([number & 0xFF]) + part
            number += 1
            if len(part) < 0xFFFFFF:
                break
    return wire


def length(number: int) -> bytes:
    if number < 0xFB:
        return bytes([number])
    for mark, size in ((0xFC, 2), (0xFD, 3), (0xFE, 8)):
        if number < 1 << 8 * size:
            return bytes([mark]) + number.to_bytes(size, "little")
    raise AssertionError(number)


def value(text: bytes) -> bytes:
    return length(len(text)) + text


def ok(matched: int, status: int = 0) -> bytes:
    return b"\x00" + length(matched) + length(0) + struct.pack("<HH", status, 0)


def column(kind: int, charset: int = UTF8) -> bytes:
    names = b"".join(value(name) for name in (b"def", b"", b"t", b"t", b"c", b"c"))
    return names + b"\x0c" + struct.pack("<HIBHB2x", charset, 255, kind, 0, 0)


def end(status: int = 0) -> bytes:
    return b"\xfe" + struct.pack("<HH", 0, status)


def error(code: int, text: str) -> bytes:
    return b"\xff" + struct.pack("<H", code) + b"#42S02" + text.encode()


def from_wire(wire: bytes, size: int) -> Callable[[], bytes]:
    """A connection that gives so many bytes at a time."""
    parts = iter([wire[at : at + size] for at in range(0, len(wire), size)])
    return lambda: next(parts)


def from_wire_that_breaks(wire: bytes, size: int) -> Callable[[], bytes]:
    """The same; where more is wanted than there is, the connection has broken."""
    receive = from_wire(wire, size)

    def next_part() -> bytes:
        try:
            return receive()
        except StopIteration:
            raise OperationalError(2013, "lost") from None

    return next_part


LONG = "ä" * 40_000  # its length takes three bytes, and it spans several reads
TABLE = (
    b"\x04", column(LONGLONG), column(VAR_STRING), column(VAR_STRING, BINARY), column(DATETIME),
    end(MORE),
)  # fmt: skip
WIRE = packets(
    ok(0, MORE),
    *TABLE,
    value(b"-7") + value(LONG.encode()) + value(b"\xff\x00") + value(b"2026-01-02 03:04:05"),
    value(b"9223372036854775807") + NULL + NULL + NULL,
    value(b"1") + value(b"") + value(b"x" * 251) + NULL,
    end(MORE),
    *TABLE,
    end(MORE),
    ok(300, MORE),
    ok(70_000),
)
RESULTS = [
    Result((), 0),
    Result(
        [
            (-7, LONG, b"\xff\x00", datetime(2026, 1, 2, 3, 4, 5)),  # noqa: DTZ001 - as the driver gives it
            (9223372036854775807, None, None, None),
            (1, "", b"x" * 251, None),
        ],
        3,
    ),
    Result([], 0),
    Result((), 300),
    Result((), 70_000),
]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000, 1 << 16, 1 << 20])
def test_answers_are_read_however_the_network_cuts_them(size: int) -> None:
    assert read_answers(from_wire(WIRE, size), decoders, len(RESULTS)) == RESULTS


def test_a_value_longer_than_a_packet_goes_on_in_the_next() -> None:
    text = b"y" * (0xFFFFFF + 10)
    wire = packets(b"\x01", column(VAR_STRING), end(), value(text), end())
    assert read_answers(from_wire(wire, 1 << 20), decoders, 1) == [Result([(text.decode(),)], 1)]


def test_the_first_error_ends_the_batch_as_the_driver_would_raise_it() -> None:
    wire = packets(ok(1, MORE), error(1146, "Table 'x' doesn't exist"))
    with pytest.raises(ProgrammingError, match="doesn't exist") as raised:
        read_answers(from_wire(wire, 7), decoders, 2)
    assert raised.value.args[0] == 1146


def test_an_answer_out_of_order_is_not_taken_for_ours() -> None:
    wire = bytearray(packets(ok(1)))
    wire[3] = 9
    with pytest.raises(OperationalError, match="out of order") as raised:
        read_answers(from_wire(bytes(wire), 100), decoders, 1)
    assert raised.value.args[0] == 2014, "a code that means: nobody knows whether it took effect"
    wire[3] = 0  # as MariaDB says that it shuts down
    with pytest.raises(OperationalError, match="shutting down") as raised:
        read_answers(from_wire(bytes(wire), 100), decoders, 1)
    assert raised.value.args[0] == 2013, "the same"


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_answer_is_a_drivers_error_or_an_answer(seed: int) -> None:
    """A byte is changed, many times over; not all of it can be seen: a name of a column may be any text."""
    dice = random.Random(seed)
    wire = packets(ok(1, MORE), *TABLE, value(b"5") + value(b"text") + NULL + NULL, end(MORE), ok(2))
    told = 0
    for _ in range(3000):
        damaged = bytearray(wire)
        damaged[dice.randrange(len(wire))] ^= dice.randrange(1, 256)
        try:
            results = read_answers(from_wire_that_breaks(bytes(damaged), 64), decoders, 3)
        except MySQLError:
            told += 1
        else:
            assert len(results) == 3
    assert told > 600


def test_what_is_left_after_the_answers_is_not_left_to_the_next() -> None:
    for wire, count in ((packets(ok(1), ok(2)), 1), (packets(ok(1, MORE), ok(2)), 1), (packets(ok(1)), 2)):
        with pytest.raises(OperationalError, match="cannot be parsed") as raised:
            read_answers(from_wire(wire, 100), decoders, count)
        assert raised.value.args[0] == 2027, "a code that means: nobody knows whether it took effect"


@pytest.mark.parametrize("last", [end(), error(1146, "no such table")])
@pytest.mark.parametrize("first", [(), (ok(300, MORE),)])
def test_answers_have_all_come_with_their_last_packet(first: tuple[bytes, ...], last: bytes) -> None:
    row = value(b"") + value(b"x" * 251) + NULL + NULL
    wire = packets(*first, *TABLE, row, end(MORE), *first, *TABLE, row, last)
    at, left = 0, 4 + 4 * len(first)
    for size in range(len(wire)):
        at, left = ends_left(wire[:size], at, left)
        assert left, size
    assert ends_left(wire, at, left) == (len(wire), 0)


def test_a_greeting_that_ends_too_soon_is_a_drivers_error() -> None:
    def greet(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            greeting = packets(b"\n5.5\0" + bytes(15))
            client.sendall(greeting[:3] + b"\0" + greeting[4:])

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(greet, server)
        url = make_url(f"mysql+pymysql://u@127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(OperationalError, match="its greeting cannot be parsed"):
            connector(url, 5, 5, 5)()


def test_what_a_signal_handler_raises_in_a_greeting_is_the_applications() -> None:
    class Interrupted(Exception):
        pass

    with pytest.raises(Interrupted), _parsed("greeting"):
        raise Interrupted


def test_what_the_drivers_library_raises_is_a_drivers_error() -> None:
    with pytest.raises(OperationalError, match="its greeting cannot be parsed"), _parsed("greeting"):
        raise UnsupportedAlgorithm("of the server's key")


# Which server holds which database and table, and what is refused.

ONE, TWO = "mysql+pymysql://u:s3cret@h1:3306", "mysql+pymysql://u:s3cret@h2"


def test_servers_take_blocks_of_databases_in_order() -> None:
    layout = Layout([ONE, TWO], 8, 1024, "toc_")
    assert [list(layout.databases_of(server)) for server in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(layout.tables_of(3))[:3] == [3, 11, 19]
    assert len(layout.tables_of(3)) == 128
    assert layout.database_name(7) == "toc_7"


def test_every_table_belongs_to_one_server() -> None:
    store = Store([ONE, TWO], databases=8, tables=64, clock=Clock())
    first, second = store.tables_of_server()
    assert sorted(first + second) == list(range(64))
    assert {table % 8 for table in first} == {0, 1, 2, 3}
    store.close()


@pytest.mark.parametrize("url", [
    "sqlite://", "sqlite:///:memory:", "u:s3cret@h", "mysql+pymysql://u:s3cret@h:port",
    ONE + "/s3cret", ONE + "?ssl_cq=x", ONE + "?ssl_verify_identity=ture", ONE + "?ssl_ca=/nowhere/ca.pem",
    ONE + "?ssl_disabled=true&ssl_disabled=false", "mysql+pymysql://u:pw@s3cret@h",
])  # fmt: skip
def test_a_url_that_no_server_can_have_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Store([url], databases=1, tables=4, clock=Clock())
    assert "s3cret" not in str(caught.value)


def test_nothing_connects_before_it_is_used() -> None:
    store = Store(["mysql+pymysql://u:s3cret@127.0.0.1:1"], databases=1, tables=4, clock=Clock())
    store.close()
