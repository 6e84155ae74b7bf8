"""The way of a process's lines to its log: nobody waits for it, and what the log does not take is counted.

A log's disk may be full, its reader gone, or it is a pipe that nobody empties any more. None of that may hold
up or end what serves tasks.

    write -> at once, where the kernel takes it without waiting (a pipe or a socket that has room)
          -> else into the queue, which a thread empties; that may wait as long as it takes
          -> else dropped and counted: the queue is full, or the log refuses

A gap is told where it is, as soon as lines can be written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

QUEUE_BYTES = 1 << 20
"""How much may wait. Once it was full, half of it has to go first, so that gaps are few."""
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Not to wait, for one write alone; 0 where there is no such thing (macOS, where the SDK runs too)."""
RETRY_SECONDS = 1.0
"""How often a log that refuses is tried. What comes in between is dropped: nothing is spent on it."""


@dataclass
class Gap:
    """Lines that were dropped in a row: how many, since when (seconds since 1970), and why."""

    lines: int
    since: float
    reason: str


class LogWriter:
    """Writes to a copy of ``descriptor``, in the order in which it is told to. Any thread may call it.

    ``dropped`` is called with the number of lines whenever some are dropped; ``notice`` makes the line that
    tells of a gap, or nothing. In a process that was forked it writes as Python does, without a queue: what
    runs there is not toc's. Raises OSError or RuntimeError where there is no file or thread left.
    """

    def __init__(
        self, descriptor: int, *, dropped: Callable[[int], object], notice: Callable[[Gap], bytes]
    ) -> None:
        self._descriptor = os.dup(descriptor)  # should that be closed, its number may become another file's
        self._given = descriptor
        self._file = os.fstat(descriptor)
        self._dropped = dropped
        self._notice = notice
        self._pid = os.getpid()
        self._changed = threading.Condition()  # reentrant: a finalizer may write in the middle of a write
        self._queue: deque[bytes | Gap] = deque()
        """The first one stays while it is being written: nothing overtakes it."""
        self._bytes = 0
        """How much in the queue are lines."""
        self._full = False
        self._begun = 0
        """How much of the first one is written already."""
        self._torn = False
        """Whether the last line in the log has no end."""
        self._refuses = False
        self._takes_at_once = NOWAIT != 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="toc-log", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, data: bytes) -> None:
        """Write this, or drop it. Returns at once, and raises no error."""
        if os.getpid() != self._pid:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, data)
            return
        with self._changed:
            begun = 0 if self._queue else self._write_at_once(data)
            if begun == len(data):
                return
            if not self._refuses and not self._closed and self._has_room(len(data)):
                if begun:
                    self._begun = begun
                self._queue.append(data)
                self._bytes += len(data)
                self._changed.notify_all()
            else:
                self._torn = self._torn or begun > 0
                self._drop(_lines(data), "the log is not read in time")

    def close(self, seconds: float | None = None) -> None:
        """Take nothing more, and drop what cannot be written within so long. May be called twice.

        Without ``seconds``: wait for nothing, and drop nothing.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if seconds is None:
            return
        self._thread.join(seconds)
        with self._changed:
            while len(self._queue) > 1:  # the first one is being written, who knows how far
                left = self._queue.pop()
                if not isinstance(left, Gap):
                    self._dropped(_lines(left))

    # --- whoever writes

    def _write_at_once(self, data: bytes) -> int:
        """How many bytes the kernel has taken without making anybody wait."""
        if not self._takes_at_once or self._torn or self._closed or not self._stands(self._descriptor):
            return 0
        try:
            return os.pwritev(self._descriptor, [data], -1, NOWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # most files know nothing of it; real trouble is the thread's to find
            self._takes_at_once = False
            return 0

    def _has_room(self, size: int) -> bool:
        if self._full and self._bytes > QUEUE_BYTES // 2:
            return False
        self._full = self._bytes > 0 and self._bytes + size > QUEUE_BYTES
        return not self._full

    def _drop(self, lines: int, reason: str) -> None:
        self._dropped(lines)
        if self._closed:
            return
        last = self._queue[-1] if self._queue else None
        if isinstance(last, Gap):
            last.lines += lines
        else:
            self._queue.append(Gap(lines, time.time(), reason))

    # --- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._refuses:
                    self._changed.wait_for(lambda: self._closed, RETRY_SECONDS)
                else:
                    self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                first = self._queue[0]
                told = first.lines if isinstance(first, Gap) else 0
            trouble = self._write_out(self._told(first) if isinstance(first, Gap) else first)
            with self._changed:
                self._refuses = trouble is not None
                if trouble is not None:
                    self._refused(trouble)
                elif isinstance(first, Gap):
                    first.lines -= told
                else:
                    self._bytes -= len(first)
                if trouble is None and not (isinstance(first, Gap) and first.lines):
                    self._queue.popleft()
            if self._refuses and self._closed:
                break
        if self._stands(self._descriptor):
            os.close(self._descriptor)

    def _told(self, gap: Gap) -> bytes:
        with contextlib.suppress(Exception):  # how lines look is the application's choice
            return self._notice(gap)
        return b""

    def _write_out(self, data: bytes) -> str | None:
        """Write it to its end, however long that takes. Returns why the log refuses it, if it does."""
        if self._torn:
            data = b"\n" + data
        out, trouble = self._begun, None
        try:
            if not self._stands(self._descriptor):
                self._open_again()
            while out < len(data):
                try:
                    out += os.write(self._descriptor, memoryview(data)[out:])
                except BlockingIOError:  # another program that has the same log open wants it so
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
        except OSError as exc:
            trouble = exc.strerror or str(exc)
        self._torn = out < len(data) and (self._torn or out > 0)
        self._begun = 0
        return trouble

    def _stands(self, number: int) -> bool:
        """Whether this number is still the log: one that was closed may be a connection a moment later."""
        try:
            return os.path.samestat(os.fstat(number), self._file)
        except OSError:
            return False

    def _open_again(self) -> None:
        """Somebody has closed the copy: make another one. Raises OSError."""
        if not self._stands(self._given):
            raise OSError(errno.EBADF, "its descriptor was closed")
        self._descriptor = os.dup(self._given)

    def _refused(self, reason: str) -> None:
        """What waits is dropped with what was refused: one gap."""
        lines = sum(_lines(each) for each in self._queue if not isinstance(each, Gap))
        gap = Gap(0, time.time(), reason)
        for each in reversed(self._queue):
            if isinstance(each, Gap):
                gap = Gap(gap.lines + each.lines, each.since, reason)
        gap.lines += lines
        self._queue.clear()
        self._queue.append(gap)
        self._bytes = 0
        if lines:
            self._dropped(lines)


def _lines(data: bytes) -> int:
    return data.count(b"\n") or 1
