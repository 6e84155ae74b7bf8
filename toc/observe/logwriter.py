"""Writes a process's lines to its log without waiting, and counts the lines that the log does not accept.

The log's disk may be full, its reader gone, or the log may be a pipe that nobody reads any more. None of that
may delay or end a process that runs tasks.

    write -> at once, if the kernel takes it without waiting (a pipe or a socket that has room)
          -> else into a queue, which a thread writes out; that thread may wait as long as it takes
          -> else dropped and counted: the queue is full, or the log refuses

A notice marks each gap at its place, as soon as lines can be written again.

``RWF_NOWAIT`` tells whether the kernel would have to wait. ``O_NONBLOCK`` would do without a thread, but it
belongs to the open file, which other processes share. A forked process writes as Python does.
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
"""How much may wait. A queue that was full takes nothing until it is half empty, so that gaps are few."""
NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""The flag for one write that must not wait; 0 on systems without it (macOS, where the SDK runs too)."""
RETRY_SECONDS = 1.0
"""After how many seconds a log that refused is tried again. Lines in between are dropped at no cost."""


@dataclass
class Gap:
    """Lines that were dropped in a row: how many, since when (seconds since 1970), and why."""

    lines: int
    since: float
    reason: str


class LogWriter:
    """Writes to a copy of ``descriptor``, in the order of the calls. Thread-safe.

    Calls ``dropped`` with the number of lines whenever it drops some; ``notice`` makes the line that reports
    a gap, or returns nothing. In a forked process it writes directly, as Python does: that process is not
    toc's. Raises OSError or RuntimeError when no file descriptor or thread is left.
    """

    def __init__(
        self, descriptor: int, *, dropped: Callable[[int], object], notice: Callable[[Gap], bytes]
    ) -> None:
        self._descriptor = os.dup(descriptor)  # if that is closed, its number may become another file's
        self._given = descriptor
        self._file = os.fstat(descriptor)
        self._dropped = dropped
        self._notice = notice
        self._pid = os.getpid()
        self._changed = threading.Condition()  # reentrant: a finalizer may write during a write
        self._queue: deque[bytes | Gap] = deque()
        """The first item stays while it is being written: nothing overtakes it."""
        self._bytes = 0
        """How many bytes of lines the queue holds."""
        self._full = False
        self._begun = 0
        """How many bytes of the first item are written already."""
        self._torn = False
        """Whether the last line in the log lacks its end."""
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
        """Write or queue this, or drop it. Returns at once and never raises."""
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
        """Take nothing more, and drop what is not written within ``seconds``. May be called twice.

        Without ``seconds`` it waits for nothing and drops nothing.
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
            while len(self._queue) > 1:  # the first is being written, nobody knows how far
                left = self._queue.pop()
                if not isinstance(left, Gap):
                    self._dropped(_lines(left))

    # --- the caller's side

    def _write_at_once(self, data: bytes) -> int:
        """Return how many bytes the kernel took without waiting."""
        if not self._takes_at_once or self._torn or self._closed or not self._is_log(self._descriptor):
            return 0
        try:
            return os.pwritev(self._descriptor, [data], -1, NOWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # most files do not support it; the thread finds real trouble
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
        if self._is_log(self._descriptor):
            os.close(self._descriptor)

    def _told(self, gap: Gap) -> bytes:
        with contextlib.suppress(Exception):  # the format of lines is the application's choice
            return self._notice(gap)
        return b""

    def _write_out(self, data: bytes) -> str | None:
        """Write it whole, however long that takes. Returns the reason if the log refuses it."""
        if self._torn:
            data = b"\n" + data
        out, trouble = self._begun, None
        try:
            if not self._is_log(self._descriptor):
                self._open_again()
            while out < len(data):
                try:
                    out += os.write(self._descriptor, memoryview(data)[out:])
                except BlockingIOError:  # another program that has the same log open made it non-blocking
                    poll = select.poll()
                    poll.register(self._descriptor, select.POLLOUT)
                    poll.poll()
        except OSError as exc:
            trouble = exc.strerror or str(exc)
        self._torn = out < len(data) and (self._torn or out > 0)
        self._begun = 0
        return trouble

    def _is_log(self, number: int) -> bool:
        """Whether this descriptor still refers to the log.

        After it was closed, its number may belong to a connection.
        """
        try:
            return os.path.samestat(os.fstat(number), self._file)
        except OSError:
            return False

    def _open_again(self) -> None:
        """Duplicate the given descriptor again after the copy was closed. Raises OSError."""
        if not self._is_log(self._given):
            raise OSError(errno.EBADF, "its descriptor was closed")
        self._descriptor = os.dup(self._given)

    def _refused(self, reason: str) -> None:
        """Drop everything that waits, together with what was refused, as one gap."""
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
