"""One connection to a Redis server: commands out, replies in, over a socket of our own."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hiredis

from toc.index.refusals import Disconnected, Refusal, TimedOut
from toc.sockets import keep_timeouts, limit_reads, readable

Command = Sequence[str | bytes | int | float]

NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that a malformed reply raises."""

_READ_BYTES = 65536
PARTIAL = object()
"""In place of a reply that is not complete."""


class Wire:
    """An open connection to one server process.

    ``connect`` opens the socket, with the timeout of the handshake; ``login`` are the commands that come
    first; ``read_timeout`` (seconds) applies to every later reply. ``run_id`` is that of the process; it
    cannot change during the connection. Raises OSError; Refusal, also for the login; Disconnected.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], login: Iterable[Command], read_timeout: float
    ) -> None:
        self._sock = sock = connect()
        self._reader = hiredis.Reader(protocolError=Disconnected, replyError=Refusal, notEnoughData=PARTIAL)
        self.used = 0.0
        """When it was last given back, on the monotonic clock."""
        try:
            for command in login:
                self.ask(*command)
            info = str(self.ask("INFO", "server"), errors="replace")
            self._read_timeout = read_timeout
            self._kernel = keep_timeouts(sock, read_timeout, read_timeout)
            if not self._kernel:
                sock.settimeout(read_timeout)
        except BaseException:
            sock.close()
            raise
        self.run_id = next((line[7:].strip() for line in info.splitlines() if line.startswith("run_id:")), "")

    def send(self, commands: Iterable[Command]) -> None:
        """Write commands at once. Raises Disconnected; some may then have been executed."""
        if threading.current_thread() is threading.main_thread():
            # A signal handler may run while an int is turned into text. If it raises then, hiredis 3.5
            # continues without the text, and the process dies of SIGSEGV. So Python makes the texts here.
            commands = [[w if isinstance(w, (str, bytes)) else repr(w) for w in words] for words in commands]
        data = b"".join(map(hiredis.pack_command, map(tuple, commands)))  # type: ignore[arg-type]  # its stub says 1-tuple
        try:
            self._sock.sendall(data)
        except OSError as exc:
            raise _broken(exc) from exc

    def read(self) -> Any:
        """Return the next reply, or the server's error as a value. Raises Disconnected."""
        while (reply := self.received()) is PARTIAL:
            self.receive()
        return reply

    def received(self) -> Any:
        """Return the next reply of what has been received, or PARTIAL. Raises Disconnected."""
        try:
            return self._reader.gets()
        except NONSENSE as exc:  # a damaged reply may have any type, such as a map with lists as keys
            raise Disconnected(f"a reply that cannot be parsed ({type(exc).__name__})") from exc

    def ask(self, *command: str | bytes | int | float) -> Any:
        """Send one command and return its reply. Raises Refusal, Disconnected."""
        self.send([command])
        reply = self.read()
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def left(self) -> bool:
        """Whether more has been received than read."""
        return self._reader.has_data()

    def is_quiet(self) -> bool:
        """Whether the connection can be reused: it is open, and nothing is left to read."""
        try:
            return not self.has_reply()
        except Disconnected:
            return False

    def answers_ping(self, seconds: float) -> bool:
        """Whether the server answers within ``seconds``."""
        try:
            self.send([("PING",)])
            return self.has_reply(seconds) and self.read() == b"PONG"
        except Disconnected:
            return False

    def has_reply(self, seconds: float = 0) -> bool:
        """Whether a reply begins to arrive within ``seconds``. Raises Disconnected if the server has hung
        up."""
        if not self._reader.has_data():
            return self.receive_within(seconds)
        return True

    def arrives(self, seconds: float) -> bool:
        """Whether there is something to receive within ``seconds``."""
        decrypted = isinstance(self._sock, ssl.SSLSocket) and self._sock.pending()
        return bool(decrypted) or readable(self._sock, max(seconds, 0))

    def receive(self) -> None:
        """Receive what has arrived; wait if nothing has. Raises Disconnected."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as exc:
            raise _broken(exc) from exc
        if not data:
            raise Disconnected("the server has hung up")
        self._reader.feed(data)

    def receive_within(self, seconds: float) -> bool:
        """Receive what arrives within ``seconds``. Returns whether something has. Raises Disconnected."""
        if not self._kernel or seconds <= 0:
            if not self.arrives(seconds):
                return False
            self.receive()
            return True
        limit_reads(self._sock, seconds)  # one release of the interpreter, not two
        try:
            self.receive()
        except TimedOut:
            return False
        finally:
            limit_reads(self._sock, self._read_timeout)
        return True

    def fileno(self) -> int:
        """Return the socket's file descriptor, for poll."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def __del__(self) -> None:  # idle ones of an index that nobody closed, and of an interrupted call
        if hasattr(self, "_sock"):
            self._sock.close()


def _broken(exc: OSError) -> Disconnected:
    if isinstance(exc, (TimeoutError, BlockingIOError)):  # the latter is the kernel's timeout
        return TimedOut("no answer in time")
    return Disconnected(str(exc))
