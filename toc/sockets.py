"""Sockets: timeouts and probes that the kernel keeps, and whether the process can open more.

Python needs two system calls for a socket with a timeout: one that waits and one that reads or writes. Around
each it releases the interpreter lock and must win it back from other threads, which under load takes longer
than the call. With the kernel's timeout one call is enough.
"""

import os
import select
import socket
import ssl
import struct

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
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(write))
    return True


def limit_reads(sock: socket.socket, seconds: float) -> None:
    """Let the kernel, which keeps the timeouts, end each further read after this many seconds."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel probe a TCP connection that has been idle, and send each write at once.

    Proxies and firewalls then do not forget it; if one has, the connection ends after three lost probes.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = dict.fromkeys((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL), KEEPALIVE_SECONDS)
    for option, value in {socket.TCP_NODELAY: 1, socket.TCP_KEEPCNT: 3, **every}.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether data or the end of the connection can be read within ``seconds``."""
    if not hasattr(select, "poll"):  # eventlet removes it
        return bool(select.select([sock], [], [], seconds)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


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


def _timeval(seconds: float) -> bytes:
    microseconds = max(1, round(seconds * 1e6))  # 0 would mean no timeout
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))
