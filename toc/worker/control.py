"""The channel between the daemon and one worker process: JSON lines over a socket pair.

To the process: ``known`` (first of all: what the daemon has read of the task table), ``take`` and ``drop``
(slots), ``dead`` (workers), ``stop``, ``force``. To the daemon: ``ready``, ``beat`` (the heartbeat;
``stuck``: internal loops that hang, ``out_of_reach``: servers that do not answer, ``reached``: others that
do), ``crowding`` (``crowded``: whether its threads hardly get the interpreter; sent when that changes),
``met`` (workers with claims in slots of its own), ``dropped`` (slots),
``leaving`` (takes nothing more; ``recycle`` is the reason if it wants a successor), ``left`` (its last
message, unless something ended it), ``unfit`` (instead of ``ready``: why it cannot work; ``wrong`` if that
does not pass by itself).

These messages tell how a process ended. Its exit code does not: a handler may have set it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterable
from typing import Any

from toc.model.topic import Slot


class ControlPipe:
    """One end. Any thread may call ``send``; only the thread that waits on ``fileno`` calls ``receive``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._lock = threading.Lock()
        self._buffer = b""
        self._unsent = b""
        self.closed = False
        """Whether the other end is closed."""

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message, or as much of it as the other end accepts now: it may be paused.

        ``flush`` sends the rest. A closed other end is no error here: ``receive`` reports it.
        """
        data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._unsent += data
        self.flush()

    def flush(self) -> bool:
        """Send the rest of earlier messages without waiting. Returns whether nothing is left."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
        return not self._unsent

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. ``closed`` says whether more can come.

        Raises ValueError for malformed data.
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
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def first(self) -> dict[str, Any] | None:
        """The message that was sent before this end was used. None if there is none.

        Call before ``receive``. Waits for the rest of a partial message.
        """
        line, wait = b"", socket.MSG_DONTWAIT
        while not line.endswith(b"\n"):
            try:
                data = self._socket.recv(1 << 20, socket.MSG_PEEK | wait)
            except (BlockingIOError, ConnectionResetError):
                return None
            if not data:
                return None
            line += self._socket.recv(data.find(b"\n") + 1 or len(data))
            wait = socket.MsgFlag(0)
        return dict(json.loads(line))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def pack(slots: Iterable[Slot]) -> list[tuple[str, int]]:
    """Slots in the form of a message."""
    return [(slot.topic, slot.number) for slot in slots]


def unpack(pairs: Iterable[Iterable[Any]]) -> set[Slot]:
    """The slots of a message."""
    return {Slot(topic, number) for topic, number in pairs}
