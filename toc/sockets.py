"""What sockets lack: time-outs that the kernel keeps, and a way to tell that there can be no more of them.

Python waits for a socket with a time-out in two system calls: one until something can be read or sent, one
that does it. Around each it gives the interpreter away and must win it back from other threads, which under
load takes longer than the call. The kernel can keep the time-out itself; then there is one call.
"""

from __future__ import annotations

import io
import socket
import ssl
import struct
from typing import Any

READ_BYTES = 1 << 16
"""How much one read takes at most."""


def keep_timeouts(sock: socket.socket, read: float, write: float) -> bool:
    """Let the kernel end each read and each write after so many seconds, with BlockingIOError.

    Returns whether it does. Not where TLS lies between: its library would try again for ever.
    """
    if isinstance(sock, ssl.SSLSocket):
        return False
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(read))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(write))
    sock.settimeout(None)
    return True


def reader(sock: socket.socket) -> io.BufferedReader:
    """A file of what such a socket receives. Its reads raise TimeoutError."""
    return io.BufferedReader(_Raw(sock, "r"), READ_BYTES)


def none_left() -> bool:
    """Whether this process can open no socket: then it is no server's trouble that none could be reached.

    Asked of the kernel, as drivers and name resolution have errors of their own for it.
    """
    try:
        socket.socket(socket.AF_UNIX).close()
    except OSError:
        return True
    return False


class _Raw(socket.SocketIO):
    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        if count is None:
            raise TimeoutError("timed out")
        return count


def _timeval(seconds: float) -> bytes:
    microseconds = max(1, round(seconds * 1e6))  # none at all would mean for ever
    return struct.pack("@ll", *divmod(microseconds, 1_000_000))
