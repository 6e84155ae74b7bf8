"""A minimal Redis client over a plain socket, for what the start of a server needs.

It keeps ``toc.index`` the only importer of the client library.
"""

from __future__ import annotations

import socket
from io import BufferedRWPair

Reply = str | int | None | list["Reply"]


class Refused(Exception):
    """The server answered with an error."""


def call(address: str | tuple[str, int], *words: str | int, password: str | None = None) -> Reply:
    """Send one command to the path of a Unix socket or to a (host, port); return the reply.

    Raises Refused for an error reply, OSError when the server does not answer.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(address)
        with connection.makefile("rwb") as stream:
            if password is not None:
                ask(stream, "AUTH", password)
            return ask(stream, *words)


def ask(stream: BufferedRWPair, *words: str | int) -> Reply:
    """Send one command over a connection and return the reply. Raises Refused or OSError."""
    _send(stream, *words)
    return _receive(stream)


def _send(stream: BufferedRWPair, *words: str | int) -> None:
    stream.write(b"*%d\r\n" % len(words))
    for word in words:
        data = str(word).encode()
        stream.write(b"$%d\r\n%s\r\n" % (len(data), data))
    stream.flush()


def _receive(stream: BufferedRWPair) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionResetError("the server closed the connection")
    kind, text = line[:1], line[1:-2].decode()
    if kind == b"+":
        return text
    if kind == b"-":
        raise Refused(text)
    if kind == b":":
        return int(text)
    if kind == b"$":
        return None if int(text) < 0 else stream.read(int(text) + 2)[:-2].decode()
    if kind == b"*":
        return None if int(text) < 0 else [_receive(stream) for _ in range(int(text))]
    raise Refused(f"not a RESP2 reply: {line[:40]!r}")
