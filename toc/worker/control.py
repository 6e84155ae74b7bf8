"""The line between the daemon and one of its worker processes: JSON lines over a socket pair.

To the process: ``known`` (before it begins: what the daemon has read of the task table), ``take`` and
``drop`` (slots), ``dead`` (workers), ``stop``, ``force``. To the daemon:
``ready``, ``beat`` (``stuck``: internal loops that hang), ``met`` (workers with claims in slots of its own),
``dropped`` (slots), ``leaving`` (takes nothing more; with ``recycle``, which says why, it wants a successor),
``left`` (its last word, unless something ended it), ``unfit`` (instead of ``ready``: why it cannot work;
``wrong`` if that does not pass by itself).

How a process ended is told by what it said. Its exit code tells nothing: a handler may have chosen it.
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
    """One end. ``send`` may be called by any thread; ``receive`` by the one that waits on ``fileno``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._lock = threading.Lock()
        self._buffer = b""
        self._unsent = b""
        self.closed = False
        """Whether the other end is gone."""

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message, or as much of it as the other end takes now: it may be paused.

        ``flush`` sends the rest. Nobody at the other end is not an error: ``receive`` tells.
        """
        data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._unsent += data
        self.flush()

    def flush(self) -> bool:
        """Send what is left of earlier messages, without waiting; whether nothing is left."""
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
        return not self._unsent

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are there now; ``closed`` tells whether more can come.

        Raises ValueError for what is none.
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
        """The message that was sent before anybody listened at this end; None if there is none.

        To be called before ``receive``. Waits for the rest of a message that has come in part.
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
    """Slots as a message carries them."""
    return [(slot.topic, slot.number) for slot in slots]


def unpack(pairs: Iterable[Iterable[Any]]) -> set[Slot]:
    """The slots of a message."""
    return {Slot(topic, number) for topic, number in pairs}
