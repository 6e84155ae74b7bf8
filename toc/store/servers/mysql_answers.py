"""Reads a MySQL server's answers to a batch of statements from the wire.

The driver makes an object of every packet and wakes up for each: to read two rows it reads 13 packets. Here
one read takes everything received, and values are cut out of it in place. Logging in, TLS and errors are the
driver's. The format: MySQL's "Client/Server Protocol, Text Protocol".

Answers may be truncated or damaged. Any mismatch, to the last byte, raises the driver's error for a malformed
packet; the outcome of the statements is then unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pymysql.constants import CR, FIELD_TYPE
from pymysql.err import OperationalError, raise_mysql_exception

from toc.store.servers.server import Result

_OK, _NULL, _EOF, _ERROR = 0x00, 0xFB, 0xFE, 0xFF
_EOF_BELOW = 9
"""An end packet begins with _EOF and is shorter than this; a longer one is a row with a very long value."""
_MORE_RESULTS = 0x08
"""Status flag: the answer to another statement follows."""
_WIDTHS = {0xFC: 2, 0xFD: 3, 0xFE: 8}
"""Number of bytes of a length that does not fit in one byte."""
WHOLE = 0xFFFFFF
"""A packet of this size continues in the next one."""
_MAX_COLUMNS = 4096
"""Most columns of a MySQL result."""
_FIRST_CODE = 1000
"""Lowest error code of a server."""
_BINARY = 63
_TEXTS = frozenset({
    FIELD_TYPE.VARCHAR, FIELD_TYPE.VAR_STRING, FIELD_TYPE.STRING,
    FIELD_TYPE.TINY_BLOB, FIELD_TYPE.BLOB, FIELD_TYPE.MEDIUM_BLOB, FIELD_TYPE.LONG_BLOB,
})  # fmt: skip
_NUMBERS = {FIELD_TYPE.TINY, FIELD_TYPE.SHORT, FIELD_TYPE.INT24, FIELD_TYPE.LONG, FIELD_TYPE.LONGLONG}

_header = struct.Struct("<I").unpack_from
Convert = Callable[[bytes], Any]


def read_answers(
    receive: Callable[[], bytes], decoders: Mapping[int, Any], count: int, sequence: int = 1,
    begin: Callable[[], object] = lambda: None,
) -> list[Result]:  # fmt: skip
    """Return the results of all ``count`` statements of a query that was sent, and leave nothing unread.

    ``receive`` returns the bytes received, at least one. ``decoders`` are the driver's, by column type, for
    values that are neither text nor integer. ``sequence`` is the number of packets of the query: the answer's
    packets are numbered from it. ``begin`` is called before each result. Raises the driver's error for the
    first statement that failed.
    """
    try:
        return _read_answers(_Packets(receive, sequence), decoders, count, begin)
    except (ValueError, LookupError, TypeError, ArithmeticError, struct.error) as exc:
        raise _malformed(f"{type(exc).__name__}") from exc


def _read_answers(
    packets: _Packets, decoders: Mapping[int, Any], count: int, begin: Callable[[], object]
) -> list[Result]:
    results = []
    more = True
    while more:
        begin()
        first = packets.next()
        if first[0] == _OK:
            matched, at = _length(first, 1)
            _, at = _length(first, at)  # the last AUTO_INCREMENT value
            more = bool(first[at] & _MORE_RESULTS)
            results.append(Result((), matched))
            continue
        columns, at = _length(first, 0)
        if at != len(first) or columns > _MAX_COLUMNS:
            raise _malformed("a packet that is neither a result nor OK")
        converts = [_convert(packets.next(), decoders) for _ in range(columns)]
        end = packets.next()
        if end[0] != _EOF or len(end) >= _EOF_BELOW:
            raise _malformed("no end after the columns")
        one = converts[0] if len(converts) == 1 else None
        rows = []
        while (packet := packets.next())[0] != _EOF or len(packet) >= _EOF_BELOW:
            if one is not None and packet[0] == len(packet) - 1 < _NULL:  # the usual case: one short text
                rows.append((one(packet[1:]),))
            else:
                rows.append(_row(packet, converts))
        more = bool(packet[3] & _MORE_RESULTS)
        results.append(Result(rows, len(rows)))
    if len(results) != count or packets.left():
        raise _malformed(f"{len(results)} results for {count} statements")
    return results


def ends_left(data: bytes, at: int, ends: int) -> tuple[int, int]:
    """Return up to where packets are whole, from ``at`` on, and how many of ``ends`` are yet to come: 0 after
    an error. An answer with rows has two, of its columns and of its rows. One without is OK, for both."""
    size = len(data)
    while ends and (start := at + 4) < size:
        end = start + (_header(data, at)[0] & WHOLE)
        if end > size:
            break
        if data[start] == _ERROR:
            ends = 0
        elif data[start] == _EOF and end - start < _EOF_BELOW:
            ends -= 1
        elif data[start] == _OK and ends % 2 == 0:  # else a row that begins with an empty text
            ends -= 2
        at = end
    return at, ends


def _malformed(what: str) -> OperationalError:
    return OperationalError(CR.CR_MALFORMED_PACKET, f"the server's answer cannot be parsed: {what}")


class _Packets:
    """Cuts the received bytes into packets."""

    __slots__ = ("_at", "_data", "_receive", "_sequence")

    def __init__(self, receive: Callable[[], bytes], sequence: int) -> None:
        self._receive = receive
        self._data = b""
        self._at = 0
        self._sequence = sequence & 0xFF

    def next(self) -> bytes:
        """Return the next packet. Raises the error that it holds, if any."""
        data, start = self._data, self._at + 4
        received = len(data)
        header = _header(data, self._at)[0] if start <= received else 0
        size = header & WHOLE
        if header >> 24 == self._sequence and start + size <= received and 0 < size < WHOLE:
            # The usual case, decided in one call: a row check has five packets, and all have arrived.
            packet = data[start : start + size]
            self._at = start + size
            self._sequence = (self._sequence + 1) & 0xFF
        else:
            packet = self._joined()
        if packet[0] == _ERROR:
            # A server's error has a state and a code from 1000. A damaged packet without them must not count
            # as proof that nothing was done.
            if packet[3:4] != b"#" or int.from_bytes(packet[1:3], "little") < _FIRST_CODE:
                raise _malformed("an invalid error packet")
            raise_mysql_exception(packet)
        return packet

    def left(self) -> bool:
        """Whether more bytes were received than read."""
        return self._at != len(self._data)

    def _joined(self) -> bytes:
        """Return the next packet, which may have yet to arrive, and may continue in others."""
        parts = [self._one()]
        while len(parts[-1]) == WHOLE:
            parts.append(self._one())
        return b"".join(parts)

    def _one(self) -> bytes:
        data, at = self._data, self._at
        while len(data) < at + 4:
            data, at = data[at:] + self._receive(), 0
        (header,) = _header(data, at)
        end = at + 4 + (header & WHOLE)
        if end > len(data):
            parts = [data[at:]]
            missing = end - len(data)
            while missing > 0:
                parts.append(self._receive())
                missing -= len(parts[-1])
            data, end, at = b"".join(parts), end - at, 0
        if header >> 24 != self._sequence:
            if header >> 24:
                raise OperationalError(CR.CR_COMMANDS_OUT_OF_SYNC, "the server's answers are out of order")
            raise OperationalError(CR.CR_SERVER_LOST, "the server is shutting down")
        self._sequence = (self._sequence + 1) & 0xFF
        self._data, self._at = data, end
        return data[at + 4 : end]


def _length(packet: bytes, at: int) -> tuple[int, int]:
    """Return a number of variable width, and its end."""
    first = packet[at]
    if first < _NULL:
        return first, at + 1
    end = at + 1 + _WIDTHS[first]
    return int.from_bytes(packet[at + 1 : end], "little"), end


def _row(packet: bytes, converts: Sequence[Convert]) -> tuple[Any, ...]:
    values: list[Any] = []
    at = 0
    for convert in converts:
        if packet[at] == _NULL:
            at += 1
            values.append(None)
            continue
        size, at = _length(packet, at)
        values.append(convert(packet[at : at + size]))
        at += size
    if at != len(packet):
        raise _malformed("a row whose values have wrong lengths")
    return tuple(values)


def _convert(column: bytes, decoders: Mapping[int, Any]) -> Convert:
    """Return how to read a column's values, from the end of its description: character set, length, type,
    ..."""
    kind = column[-6]
    if kind in _NUMBERS:
        return int
    if kind in _TEXTS:
        return bytes if int.from_bytes(column[-12:-10], "little") == _BINARY else bytes.decode
    decode = decoders.get(kind, str)
    return lambda value: decode(value.decode())
