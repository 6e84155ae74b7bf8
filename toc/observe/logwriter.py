"""Writes a process's lines to its log without making anybody wait, and counts the lines that are lost.

The log's disk may be full, its reader gone, or the log a pipe that nobody reads any more. None of that may
delay or end a process that runs tasks. So each line goes into a bounded queue, which one thread writes out.
A line is dropped, and counted, if the queue is full or if the log refuses it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

QUEUE_BYTES = 8 << 20
"""How many bytes may wait."""


class LogWriter:
    """Writes to a copy of ``descriptor``, in the order of the calls. Thread-safe.

    Calls ``dropped`` with the number of lines whenever it drops some. In a forked process, which is not
    toc's, it writes directly, as Python does. Raises OSError or RuntimeError when no file descriptor or
    thread is left.
    """

    def __init__(self, descriptor: int, *, dropped: Callable[[int], object]) -> None:
        self._descriptor = os.dup(descriptor)
        self._file = os.fstat(descriptor)
        self._dropped = dropped
        self._pid = os.getpid()
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._count = threading.RLock()  # reentrant: a signal handler or finalizer may write during a write
        self._bytes = 0
        """How many bytes wait in the queue."""
        self._torn = False
        """Whether the last line in the log lacks its end."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="toc-log", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue this, or drop it. Returns at once and never raises."""
        if os.getpid() != self._pid:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, data)
            return
        with self._count:
            if self._closed or self._bytes + len(data) > QUEUE_BYTES:
                self._drop(data)
            else:
                self._bytes += len(data)
                self._queue.put(data)

    def close(self, seconds: float) -> None:
        """Take nothing more, and wait at most ``seconds`` for what is queued. May be called twice."""
        if os.getpid() != self._pid:
            return
        with self._count:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(seconds)

    def _drop(self, data: bytes) -> None:
        if data:
            self._dropped(data.count(b"\n") or 1)

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            # Together: after each write the thread may wait 5 ms for a busy interpreter.
            with contextlib.suppress(Empty):
                while lines[-1] is not None:
                    lines.append(self._queue.get_nowait())
            ended = lines[-1] is None
            data = b"".join(line for line in lines if line is not None)
            self._drop(self._write_out(data))
            with self._count:
                self._bytes -= len(data)
        if self._is_log():
            os.close(self._descriptor)

    def _is_log(self) -> bool:
        """Whether it is still the log's: a handler may have closed it, and its number be a connection's."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file)
        except OSError:
            return False

    def _write_out(self, data: bytes) -> bytes:
        """Write it whole, however long that takes. Returns what the log refuses."""
        left = memoryview(b"\n" + data if self._torn else data)
        try:
            while left and self._is_log():
                written = os.write(self._descriptor, left)
                left = left[written:]
                self._torn = left.nbytes > 0
        except OSError:
            pass
        return bytes(left)
