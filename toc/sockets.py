"""Socket timeouts kept by the kernel, and a check whether the process can open more sockets.

Python needs two system calls for a socket with a timeout: one that waits and one that reads or writes. Around
each it releases the interpreter lock and must win it back from other threads, which under load takes longer
than the call. With the kernel's timeout one call is enough.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct


def keep_timeouts(sock: socket.socket, read: float, write: float) -> bool:
    """Let the kernel end each read and write after this many seconds, with BlockingIOError.

    Returns whether it does. It does not for TLS, whose library would retry forever.
    """
    if isinstance(sock, ssl.SSLSocket):
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(read))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(write))
    sock.settimeout(None)
    return True


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
