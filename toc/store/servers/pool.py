"""The connections of a process to one server, each lent to one thread at a time."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from toc.model.fork import in_each_process

if TYPE_CHECKING:
    from toc.store.servers.mysql import MySqlConnection
    from toc.store.servers.sqlite import SqliteConnection

CHECK_SECONDS = 0.05
"""Seconds between a waiter's checks for connections that were abandoned without notice."""
UNUSED_SECONDS = 60.0
"""After how long a connection that nobody uses is closed. Many processes with many servers each would
otherwise keep what one busy moment has opened."""


class PooledConnection:
    """A connection, for one thread at a time, and its place in the pool."""

    __slots__ = ("__weakref__", "connection", "opened", "place", "used")
    connection: MySqlConnection | SqliteConnection
    """Its methods raise the driver's errors."""

    def __init__(self) -> None:
        self.place: weakref.ref[PooledConnection] | None = None
        self.opened = time.monotonic()
        """When it began to be opened (monotonic)."""
        self.used: float | None = None
        """When it was last given back, on the monotonic clock; None if it is new."""

    @property
    def idle(self) -> float:
        """Seconds since it was last given back; 0 if it is new."""
        return 0.0 if self.used is None else time.monotonic() - self.used


class Pool:
    """Connections to one server, each lent to one thread at a time: at most ``size``, opened by ``connect``
    on demand; the most recently used goes first. ``take`` waits up to ``wait_seconds`` for one. Thread- and
    fork-safe.

    An exception can come between any two steps of the borrowing thread: from a signal handler, or from code
    that limits a call's time. So nothing here is counted up and down. A connection's place is free again
    after it was given back or dropped, or when no reference to it is left: Python then closes it and clears
    its weak reference. Waiters and locks use queues and locks written in C, which such an exception finds
    free or taken, never in between.
    """

    def __init__(self, connect: Callable[[], Any], size: int, wait_seconds: float) -> None:
        self._connect = connect
        self._size = size
        self._wait_seconds = wait_seconds
        self._idle: deque[PooledConnection] = deque()
        self._inherited: list[PooledConnection] = []
        """In a forked child the idle connections of its parent, which are not the child's to close."""
        in_each_process(self._start_anew)

    def _start_anew(self) -> None:
        self._inherited += self._idle
        self._idle.clear()
        self._places: set[weakref.ref[PooledConnection]] = set()
        self._lock = threading.RLock()
        self._renewed_at = float("-inf")
        """Connections that were opened before this are closed when they are given back (monotonic)."""
        self._freed: SimpleQueue[None] = SimpleQueue()
        """Wakes waiters; may wake them more often than needed."""

    def take(self, *, wait: bool = True) -> PooledConnection | None:
        """Take a connection, to be given back or dropped; None if all are lent, also after a ``wait``. Raises
        what ``connect`` raises."""
        until = time.monotonic() + wait * self._wait_seconds
        while True:
            link = self.take_idle()
            if link is not None:
                return link
            link = self._new()
            if link is not None:
                try:
                    link.connection = self._connect()
                except BaseException:
                    self.drop(link)
                    raise
                return link
            left = until - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(Empty):
                self._freed.get(timeout=min(left, CHECK_SECONDS))

    def take_idle(self, within: float = inf) -> PooledConnection | None:
        """Take an idle connection that was used ``within`` so many seconds, or return None."""
        try:
            link = self._idle.pop()
        except IndexError:
            return None
        if link.idle <= within:
            return link
        self._put_back(link)
        return None

    def give(self, link: PooledConnection) -> None:
        """Take back a connection whose answers have all been read and whose transaction has ended."""
        if link.opened <= self._renewed_at:
            self.drop(link)
            return
        link.used = time.monotonic()
        self._put_back(link)
        self.close(UNUSED_SECONDS)

    def _put_back(self, link: PooledConnection) -> None:
        """Take back an idle connection that was not used."""
        self._idle.append(link)
        self._tell()

    def drop(self, link: PooledConnection) -> None:
        """Close a connection in any state."""
        self._places.discard(link.place)
        with contextlib.suppress(Exception):  # also if none was opened
            link.connection.close()
        self._tell()

    def renew(self) -> None:
        """Close all connections: the idle ones now, those that are lent when they are given back."""
        self._renewed_at = time.monotonic()
        self.close()

    def close(self, unused: float = 0.0) -> None:
        """Close the connections that have been idle for so many seconds. The pool opens others if it is used
        again."""
        with contextlib.suppress(IndexError):
            while self._idle[0].idle >= unused:
                self.drop(self._idle.popleft())

    def _new(self) -> PooledConnection | None:
        """Return a place for another connection, or None if all are taken."""
        with self._lock:
            if len(self._places) >= self._size:
                return None
            link = PooledConnection()
            link.place = weakref.ref(link, self._places.discard)
            self._places.add(link.place)
        return link

    def _tell(self) -> None:
        if self._freed.qsize() < self._size:
            self._freed.put(None)
