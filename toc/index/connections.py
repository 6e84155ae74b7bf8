"""Connections to one Redis server.

A server that cannot be reached must not delay callers that also need others. So all callers get an error at
once for a node that cannot be reached or has not answered for the read timeout. While callers ask for it, a
background thread tries to reach it again.

Thread-safe: one thread at a time uses a connection.
"""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from toc.index.refusals import Disconnected, Refusal, TimedOut, meaning_of
from toc.index.url import Address
from toc.index.wire import NONSENSE, Command, Wire
from toc.model.errors import IndexUnavailable
from toc.sockets import none_left

_REST_S = 0.1
_MAX_REST_S = 0.5
"""First and longest pause, in seconds, between attempts to reach a node again."""
_WANTED_S = 5.0
"""For how many seconds after the last request for a node the attempts continue."""
IDLE_SECONDS = 2.0
"""A connection that was idle for longer (no loop of a worker pauses so long) must answer a ping before it is
used: a proxy in between may have forgotten it, and what is sent over it then vanishes."""
PING_SECONDS = 0.5
"""Longest wait for that answer."""
TURN_SECONDS = 0.002
"""How often a caller without a connection of its own looks whether another one has given one back."""
_CLIENTS_FULL = "max number of clients reached"
"""Redis's words for a connection beyond its ``maxclients``; their code is ERR."""
FRESH_SECONDS = 0.05
"""A connection that was used within these seconds is reused without a check, unless another one to its server
has just broken. A check releases the interpreter, which other threads may then keep for a while."""


class ClientsFull(IndexUnavailable):
    """The node serves as many clients as its ``maxclients``. The connections that are open work."""


class RedisNode:
    """One server, with its idle connections. ``connect`` opens one, with this read timeout.

    ``on_away`` runs on a background thread before each attempt to reach the server again.
    """

    def __init__(
        self,
        address: Address,
        connect: Callable[[float], Wire],
        read_timeout: float,
        on_away: Callable[[], object] = lambda: None,
    ) -> None:
        self.address = address
        self._connect = connect
        self.read_timeout = read_timeout
        """For how many seconds a reply is waited for."""
        self._on_away = on_away
        self._idle: deque[Wire] = deque()
        self._broke = 0.0
        """When a connection last broke, on the monotonic clock."""
        self._lock = threading.RLock()
        self.failure = ""
        """Why the node cannot be used, while a thread tries to reach it again; empty otherwise."""
        self._wanted = 0.0
        """When a caller last asked for the failed node, on the monotonic clock."""
        self._closed = threading.Event()
        """Ends the reconnect thread."""

    def __repr__(self) -> str:
        return f"Node({self.address})"

    def __str__(self) -> str:
        return str(self.address)

    def take(self) -> Wire:
        """Take an open connection, for one thread until it gives it back. Raises IndexUnavailable."""
        self._refuse()
        if (wire := self._idle_wire(ping=True)) is not None:
            return wire
        try:
            return self.open()
        except ClientsFull as exc:
            # The connections that this process has must do: the node is not out of reach.
            until = time.monotonic() + PING_SECONDS
            while time.monotonic() < until:
                with suppress(IndexError):
                    return self._idle.pop()
                time.sleep(TURN_SECONDS)
            self.failed(str(exc))
            raise

    def take_idle(self) -> Wire | None:
        """Take a connection that can be used at once, or return None. Raises IndexUnavailable."""
        self._refuse()
        return self._idle_wire(ping=False)

    def _idle_wire(self, *, ping: bool) -> Wire | None:
        """Take an idle connection, or None. One that was idle for long must answer a ping, if there is time
        for that."""
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:
                break
            idle = time.monotonic() - wire.used
            if idle < FRESH_SECONDS and wire.used > self._broke:
                return wire
            if idle >= IDLE_SECONDS and not ping:
                self._idle.append(wire)
                return None
            if wire.is_quiet() and (idle < IDLE_SECONDS or wire.answers_ping(PING_SECONDS)):
                return wire
            wire.close()
            if idle >= IDLE_SECONDS:
                self._close_idle()  # the others were idle for even longer
        return None

    def open(self) -> Wire:
        """Open a new connection. Raises IndexUnavailable."""
        self._refuse()
        try:
            return self._opened()
        except IndexUnavailable as exc:
            # Without a free descriptor or place, open connections still work.
            if not isinstance(exc, ClientsFull) and not none_left():
                self.failed(str(exc))
            raise

    def _refuse(self) -> None:
        if failure := self.failure:
            self._wanted = time.monotonic()
            raise IndexUnavailable(failure)

    def _opened(self) -> Wire:
        try:
            return self._connect(self.read_timeout)
        except Refusal as exc:
            if _CLIENTS_FULL in str(exc):
                raise ClientsFull(
                    f'Redis at {self.address} said "{_CLIENTS_FULL}": raise its maxclients, or see in CLIENT '
                    f"LIST who has that many connections"
                ) from exc
            code, _, advice = meaning_of(exc)
            advice = advice or "check the user, its permissions and the database number"
            # The server's text may hold the password, so it is not passed on.
            raise IndexUnavailable(
                f"Redis at {self.address} refused the connection ({code}): {advice}"
            ) from None
        except (Disconnected, OSError, *NONSENSE) as exc:
            raise IndexUnavailable(f"Redis at {self.address} {_no_connection(exc)}") from exc

    # --- trouble

    def lost(self, exc: Exception) -> None:
        """Record that a connection broke with this error. After a timeout the node is out of reach."""
        if isinstance(exc, TimedOut):
            self.failed(
                f"Redis at {self.address} cannot be reached (no answer within {self.read_timeout:g} s); "
                f"check that it runs and the network to it"
            )

    def failed(self, failure: str) -> None:
        """Mark the node as out of reach: callers get this failure at once until it is back."""
        with self._lock:
            if self.failure:
                return
            self.failure, self._wanted = failure, time.monotonic()
            self._broke = self._wanted
            self._closed = threading.Event()
        try:
            threading.Thread(
                target=self._come_back, args=(self._closed,), name="toc-reconnect", daemon=True
            ).start()
        except RuntimeError:  # no thread is left, or the interpreter is ending
            self.failure = ""

    def _come_back(self, closed: threading.Event) -> None:
        rest = _REST_S
        try:
            while not closed.wait(rest * random.uniform(0.75, 1.0)):  # noqa: S311 - spreads load, guards nothing
                if time.monotonic() - self._wanted > _WANTED_S:
                    return  # the next caller tries to connect
                self._on_away()
                if closed.is_set():
                    return  # the node was closed: the map that on_away has read does not name it
                try:
                    self.give(self._opened())
                except IndexUnavailable as exc:
                    if isinstance(exc, ClientsFull) and self._idle:
                        return  # one has been given back since
                    self.failure = str(exc)
                else:
                    return
                rest = min(2 * rest, _MAX_REST_S)
        finally:
            self.failure = ""

    def ask(self, *commands: Command) -> list[Any]:
        """Return the reply to each command, or the server's error as a value. Raises IndexUnavailable."""
        wire = self.take()
        try:
            wire.send(commands)
            replies = [wire.read() for _ in commands]
        except Disconnected as exc:
            self.drop(wire)
            self.lost(exc)
            raise IndexUnavailable(
                f"Redis at {self.address} cannot be reached ({type(exc).__name__}); "
                "check that it runs and its log"
            ) from exc
        self.give(wire)
        return replies

    def clock(self) -> float:
        """Return its clock minus this machine's, in seconds, as exactly as one round trip can tell.

        Raises IndexUnavailable.
        """
        before = time.time()
        (reply,) = self.ask(("TIME",))
        after = time.time()
        try:
            seconds, microseconds = map(int, reply)
        except NONSENSE as exc:
            raise IndexUnavailable(f"Redis at {self.address} does not tell its time") from exc
        return seconds + microseconds / 1e6 - (before + after) / 2

    def give(self, wire: Wire) -> None:
        """Take back a connection whose replies have all been read."""
        wire.used = time.monotonic()
        self._idle.append(wire)

    def drop(self, wire: Wire) -> None:
        """Close a connection that broke. Other connections are then checked before reuse."""
        self._broke = time.monotonic()
        wire.close()

    def close(self) -> None:
        """Close idle connections and stop reconnecting."""
        self._closed.set()
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


def _no_connection(exc: BaseException) -> str:
    """Say why there is no connection and what to check."""
    cause: BaseException | None = exc
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"is not trusted ({cause.verify_message}); compare its certificate with the CA and the host that "
            f"TOC_REDIS_URL names"
        )
    kind = cause.reason if cause is not None and cause.reason else type(exc).__name__
    return f"cannot be reached ({kind}); check that it runs and the network to it"
