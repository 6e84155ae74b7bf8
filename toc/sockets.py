"""Sockets: timeouts and probes that the kernel keeps, and whether the process can open more.

Python needs two system calls for a socket with a timeout: one that waits and one that reads or writes. Around
each it releases the interpreter lock and must win it back from other threads, which under load takes longer
than the call. With the kernel's timeout one call is enough.
"""

import os
import socket
import ssl
import struct
from collections.abc import Callable
from functools import lru_cache, partial
from math import ceil
from typing import Any

READ_BYTES = 1 << 16
"""Most bytes of one read."""
URL_FLAGS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
"""Values of a flag in a server URL, in lower case."""
KEEPALIVE_SECONDS = 15
"""After how many idle seconds the kernel probes a connection."""


def keep_timeouts(sock: socket.socket, read: float, write: float) -> bool:
    """Let the kernel end each read and write after this many seconds, with BlockingIOError.

    Returns whether it does; otherwise the socket is as before. It does not for TLS, whose library would retry
    forever, nor for the sockets of gevent and eventlet: their descriptors never block.
    """
    if isinstance(sock, ssl.SSLSocket):
        return False
    before = sock.gettimeout()
    sock.settimeout(None)
    if not os.get_blocking(sock.fileno()):
        sock.settimeout(before)
        return False
    limit_reads(sock, read)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(ceil(write * 1000)))
    return True


def limit_reads(sock: socket.socket, seconds: float) -> None:
    """Let the kernel, which keeps the timeouts, end each further read after this many seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(ceil(seconds * 1000)))


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel probe a TCP connection that has been idle, and send each write at once.

    Proxies and firewalls then do not forget it; if one has, the connection ends after three lost probes.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = dict.fromkeys((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL), KEEPALIVE_SECONDS)
    for option, value in {socket.TCP_NODELAY: 1, socket.TCP_KEEPCNT: 3, **every}.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def receive(sock: socket.socket, seconds: float, timeout: float | None, *, kernel: bool) -> bytes | None:
    """Return what arrives within ``seconds``: b"" if the other side has hung up, None if it is silent.

    ``timeout`` is that of other reads (seconds), which the kernel keeps if ``kernel``. Raises OSError.
    """
    limit: Callable[[Any], object] = partial(limit_reads, sock) if kernel else sock.settimeout
    try:
        if kernel and seconds <= 0:
            return sock.recv(READ_BYTES, socket.MSG_DONTWAIT)
        limit(max(seconds, 0.0))  # one release of the interpreter, not two
        try:
            return sock.recv(READ_BYTES)
        finally:
            limit(timeout)
    except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
        return None


def none_left() -> bool:
    """Whether this process can open no further socket.

    If so, a connection that fails says nothing about the server.

    Asks the kernel, because drivers and name resolution report this with errors of their own.
    """
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError:
        return True
    return False


def is_open(descriptor: int) -> bool:
    """Whether a file descriptor is open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@lru_cache
def _timeval(milliseconds: int) -> bytes:
    milliseconds = max(1, milliseconds)  # 0 would mean no timeout
    return struct.pack("@ll", milliseconds // 1000, milliseconds % 1000 * 1000)
