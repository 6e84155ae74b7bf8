"""One connection to a Redis server: commands out, replies in, over a socket of our own.

Here is also the table of error replies: what each means and what to do. Their first word is a code.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

import hiredis

from toc.sockets import READ_BYTES, keep_timeouts, receive

Command = Sequence[str | bytes | int | float]

NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that a malformed reply raises."""

PARTIAL = object()
"""In place of a reply that is not complete."""


class Refusal(Exception):
    """The server's error reply: the command was not executed."""

    @property
    def code(self) -> str:
        """The first word of the server's text, such as NOPERM."""
        return str(self).partition(" ")[0]


class Disconnected(Exception):
    """The connection broke: what was sent may or may not have been executed."""


class TimedOut(Disconnected):
    """The server did not answer in time."""


class Then(Enum):
    """What to do with a refused call. It was not executed, so it may be sent again."""

    GIVE_UP = auto()
    SEND_SCRIPT = auto()
    FOLLOW_MOVED = auto()
    FOLLOW_ASK = auto()
    PAUSE = auto()
    REDISCOVER = auto()
    """Read the map again, pause, send again."""


_LOG_IN = "check the user and password in TOC_REDIS_URL"

_ERROR_TABLE: dict[str, tuple[Then, str]] = {
    "NOSCRIPT": (Then.SEND_SCRIPT, "it does not know the script; try again"),
    "MOVED": (Then.FOLLOW_MOVED, "its nodes disagree about who serves this slot; check CLUSTER SLOTS"),
    "ASK": (Then.FOLLOW_ASK, "this slot is being moved between nodes; try again"),
    "TRYAGAIN": (Then.PAUSE, "this slot is being moved between nodes; try again"),
    "CLUSTERDOWN": (Then.REDISCOVER, "the cluster does not serve this slot; check CLUSTER INFO"),
    "MASTERDOWN": (Then.REDISCOVER, "it has lost its master; wait for the failover"),
    "READONLY": (Then.REDISCOVER, "it is a replica; await the failover, or name the master in TOC_REDIS_URL"),
    "LOADING": (Then.PAUSE, "it is loading its data; wait"),
    "BUSY": (Then.PAUSE, "another program's script blocks it; see SLOWLOG, or use SCRIPT KILL"),
    "MISCONF": (Then.PAUSE, "it cannot save to disk and refuses writes; check its disk and log"),
    "NOREPLICAS": (Then.PAUSE, "it has fewer replicas than min-replicas-to-write; check them"),
    "OOM": (Then.GIVE_UP, "its memory is full (maxmemory); give it more, or let it drain"),
    "WRONGTYPE": (Then.GIVE_UP, "toc did not write a key of this slot; `toc doctor` names it: remove it"),
    "NOPERM": (Then.GIVE_UP, "the user lacks a permission; see the grants in the documentation"),
    "NOAUTH": (Then.GIVE_UP, _LOG_IN),
    "WRONGPASS": (Then.GIVE_UP, _LOG_IN),
}


def meaning_of(error: Refusal) -> tuple[Then, str | None]:
    """Return what to do, and advice for operators (None: only the server's text explains it).

    With a code that is not in the table, the call is given up.
    """
    return _ERROR_TABLE.get(error.code, (Then.GIVE_UP, None))


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
        self.opened = time.monotonic()
        self.used = 0.0
        """When it was last given back, on the monotonic clock."""
        self._read_timeout, self._kernel = read_timeout, False
        try:
            for command in login:
                self.ask(*command)
            info = str(self.ask("INFO", "server"), errors="replace")
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
        until = time.monotonic() + self._read_timeout
        while (reply := self.received()) is PARTIAL:
            if not self.receive(None if time.monotonic() < until else 0):  # it comes byte by byte
                raise TimedOut("no answer in time")
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

    def is_quiet(self, ping: float = 0) -> bool:
        """Whether the connection can be reused: it is open, and nothing is left to read. With ``ping``, the
        server must also answer one within so many seconds."""
        try:
            if not ping or self.has_reply():
                return not self.has_reply()
            self.send([("PING",)])
            return self.has_reply(ping) and self.read() == b"PONG"
        except Disconnected:
            return False

    def has_reply(self, seconds: float = 0) -> bool:
        """Whether a reply begins to arrive within ``seconds``. Raises Disconnected if the server has hung
        up."""
        return self._reader.has_data() or self.receive(seconds)

    def receive(self, seconds: float | None = None) -> bool:
        """Receive what arrives within ``seconds``, or the timeout. Returns whether something has. Raises
        Disconnected."""
        data: bytes | None
        try:
            if seconds is None:
                data = self._sock.recv(READ_BYTES)
            else:
                data = receive(self._sock, seconds, self._read_timeout, kernel=self._kernel)
        except OSError as exc:
            raise _broken(exc) from exc
        if data == b"":
            raise Disconnected("the server has hung up")
        if data:
            self._reader.feed(data)
        return data is not None

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
