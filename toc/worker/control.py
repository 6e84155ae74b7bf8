"""The channel between the daemon and one worker process: JSON lines over a socket pair.

    to the process
    take, drop    slots; which of those to take a former owner had ``handed`` over
    dead          workers
    sure          until when no other daemon has their slots; how many ``senders`` of webhooks there are
    run           a suspect, to the process that runs these alone; ``how`` it has ended that, if it has
    stop, force   to leave in good order; to leave without waiting for running tries

    to the daemon
    ready         it can work
    unfit         instead of ready: why it cannot work; ``wrong``: an operator must act
    beat          ``stuck``: internal loops that hang; ``out_of_reach``: servers that do not answer
    met           other workers with claims in its slots
    suspects      tasks that may run only alone
    begun, ran    the suspect's run is counted on its row (``crashes``); it is over, or not to be run
    dropped       slots
    leaving       it takes nothing more; ``recycle``: why it wants a successor, if it does
    left          its last message, unless something ended it

These messages tell how a process ended. Its exit code does not, because a handler may have set it.
"""

import argparse
import contextlib
import faulthandler
import json
import mmap
import os
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from toc.model.documents import parse_object
from toc.model.fork import call_in_children
from toc.model.topic import Slot
from toc.observe.board import BOARD_BYTES, SharedMetrics, write_to
from toc.observe.log import detach

SWITCH_INTERVAL_SECONDS = 0.0005
"""How often threads may switch. Python's default of 5 ms is more than a task, or an answer, may be late."""
BEAT_SECONDS = 1.0
"""How often a process sends a beat."""
MAX_LINE_BYTES = 64 * 1024 * 1024
"""A line that is longer than this is no message."""


class Suspect(NamedTuple):
    """A task that may run only alone, and the state of its row: whatever else may run it changes that."""

    job_id: int
    slot: Slot
    version: int
    attempts: int
    crashes: int

    @classmethod
    def of(cls, words: Sequence[Any]) -> Self:
        """Return a suspect in a message. Raises ValueError or TypeError if it is none."""
        job_id, (topic, number), *state = words
        return cls(int(job_id), Slot(str(topic), int(number)), *map(int, state))


class ControlPipe:
    """One end of the channel, which a forked child does not hold. Any thread may call ``send``; only the
    thread that waits on ``fileno`` calls ``receive``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._lock = threading.Lock()
        self._buffer = bytearray()
        """The beginning of a line whose end has not arrived."""
        self._unsent = b""
        self.closed = False
        """Whether the other end is closed."""
        call_in_children(self.close)

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message, or as much of it as the other end, which may be paused, accepts now.

        ``flush`` sends the rest. Nothing is sent once this end is closed; if the other is, only ``receive``
        reports it.
        """
        data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._unsent += data
        self.flush()

    def flush(self) -> bool:
        """Send the rest of earlier messages without waiting. Returns whether nothing is left."""
        with self._lock, contextlib.suppress(OSError):  # full, or closed at either end
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
        return not self._unsent

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Sets ``closed`` when no more can come.

        Raises ValueError if one of them is no JSON object with a ``kind``, or longer than
        MAX_LINE_BYTES; all that have arrived are lost then. Whether a message has the fields of
        its kind is for the caller to find out.
        """
        try:
            data = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed = True
            return []
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self._buffer.clear()
            raise ValueError("a line without an end")
        return [_message(bytes(line)) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, ControlPipe, dict[str, Any]]:
    """Begin a process that a daemon has started: parse its arguments, and let its numbers be seen.

    Returns also the channel to the daemon, and what that has read of the task table.
    """
    parser.add_argument("--worker-id", required=True)
    for name in ("link", "known", "board"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    write_to(SharedMetrics(mmap.mmap(arguments.board, BOARD_BYTES)))
    os.close(arguments.board)  # the mapping stays
    detach()
    faulthandler.enable(2)  # a crash in C leaves its place on it, unless the application says where
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    with os.fdopen(arguments.known, "rb") as file:
        known = parse_object(file.read(), most=MAX_LINE_BYTES)
    return arguments, ControlPipe(socket.socket(fileno=arguments.link)), known


def _message(line: bytes) -> dict[str, Any]:
    message = parse_object(line, most=MAX_LINE_BYTES)
    if not isinstance(message.get("kind"), str):
        raise ValueError("no message")  # noqa: TRY004 - the data is malformed, not our argument
    return message


def unpack(pairs: Iterable[Iterable[Any]]) -> set[Slot]:
    """Return the slots in a message. Raises ValueError if they are none."""
    return {Slot(str(topic), int(number)) for topic, number in pairs}
