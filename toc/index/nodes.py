"""The servers of the index: the connections to each, and which of them serves what.

A server that cannot be reached must not delay callers that also need others. So all callers get an error at
once for a node that cannot be reached or has not answered for the read timeout. While callers ask for it, a
background thread tries to reach it again.

A single server, a master behind sentinels and a cluster have the same interface: a map of the 16384 hash
slots to RedisNodes. They differ only in how the map is found. It is read on first use, and again when a
server says that it is wrong or cannot be reached.

Thread-safe: one thread at a time uses a connection. After a fork, the child opens its own.
"""

import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from toc.index.keys import HASH_SLOTS
from toc.index.url import Address, Location, Topology
from toc.index.wire import NONSENSE, Command, Disconnected, Refusal, TimedOut, Wire, meaning_of
from toc.model.errors import IndexUnavailable
from toc.model.fork import in_each_process
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
_MIN_MAP_AGE_S = 0.05
"""A map that was read less than this ago (seconds) is not read again."""

CLUSTER_READ_SECONDS = 0.25
"""Longest wait (seconds) for a reply of one of several nodes: calls to the others wait meanwhile."""


class Timeouts(NamedTuple):
    """Longest waits (s): for each step of connecting (reach, log in), and for a reply."""

    connect: float
    read: float


class ClientsFull(IndexUnavailable):
    """The node serves as many clients as its ``maxclients``. The connections that are open work."""


class RedisNode:
    """One server, with its idle connections. ``connect`` opens one; ``read_timeout`` is that of each.

    ``on_away`` runs on a background thread before each attempt to reach the server again.
    """

    def __init__(
        self,
        address: Address,
        connect: Callable[[], Wire],
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
        self._renewed_at = float("-inf")
        """Connections that were opened before this are closed when they are given back (monotonic)."""

    def __repr__(self) -> str:
        return str(self.address)

    def take(self) -> Wire:
        """Take an open connection, for one thread until it gives it back. Raises IndexUnavailable."""
        self._refuse()
        if (wire := self._idle_wire(ping=True)) is not None:
            return wire
        try:
            return self._opened()
        except IndexUnavailable as exc:
            # The connections that this process has must do: the node is not out of reach.
            until = time.monotonic() + (PING_SECONDS if isinstance(exc, ClientsFull) else 0.0)
            while time.monotonic() < until:
                with suppress(IndexError):
                    return self._idle.pop()
                time.sleep(TURN_SECONDS)
            if not none_left():  # without a free descriptor, open connections still work
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
            if wire.is_quiet(PING_SECONDS if idle >= IDLE_SECONDS else 0):
                return wire
            wire.close()
            if idle >= IDLE_SECONDS:
                self._close_idle()  # the others were idle for even longer
        return None

    def _refuse(self) -> None:
        if failure := self.failure:
            self._wanted = time.monotonic()
            raise IndexUnavailable(failure)

    def _opened(self) -> Wire:
        try:
            return self._connect()
        except Refusal as exc:
            if _CLIENTS_FULL in str(exc):
                raise ClientsFull(
                    f'Redis at {self.address} said "{_CLIENTS_FULL}": raise its maxclients, or see in CLIENT '
                    f"LIST who has that many connections"
                ) from exc
            advice = meaning_of(exc)[1] or "check the user, its permissions and the database number"
            # The server's text may hold the password, so it is not passed on.
            raise IndexUnavailable(
                f"Redis at {self.address} refused the connection ({exc.code}): {advice}"
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
            if closed.is_set():
                self._close_idle()

    def ask(self, *commands: Command) -> list[Any]:
        """Return the reply to each command, or the server's error as a value. Raises IndexUnavailable."""
        wire = self.take()
        try:
            wire.send(commands)
            replies = [wire.read() for _ in commands]
        except Disconnected as exc:
            self.drop(wire)
            self.lost(exc)
            raise IndexUnavailable(f"Redis at {self.address} {_no_connection(exc)}") from exc
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
        if wire.opened <= self._renewed_at:
            self._close_idle()

    def drop(self, wire: Wire) -> None:
        """Close a connection that broke. Other connections are then checked before reuse."""
        self._broke = time.monotonic()
        wire.close()

    def renew(self) -> None:
        """Close all connections: the idle ones now, those that are lent when they are given back."""
        self._renewed_at = time.monotonic()
        self._close_idle()

    def close(self) -> None:
        """Close all connections, as ``renew``, and stop reconnecting."""
        self._closed.set()
        self.renew()

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


class RedisNodes:
    """The servers behind one URL."""

    def __init__(self, location: Location, timeouts: Timeouts) -> None:
        self.location = location
        self._timeouts = timeouts
        self._read_timeout = min(timeouts.read, CLUSTER_READ_SECONDS) if self.clustered else timeouts.read
        self.refusal: str | None = None
        """Why no call may be sent to any server, or None."""
        in_each_process(self._start_anew)

    def _start_anew(self) -> None:
        self._lock = threading.RLock()
        self._nodes: dict[Address, RedisNode] = {}
        self._map: list[RedisNode] | None = None
        self._mapped_at = 0.0

    def master(self, hash_slot: int) -> RedisNode:
        """Return the node that serves ``hash_slot``.

        Raises IndexUnavailable if the map cannot be read or calls are refused (``refusal``).
        """
        if self.refusal is not None:
            raise IndexUnavailable(self.refusal)
        served = self._map
        if served is None:
            served = self.rediscover()
        return served[hash_slot]

    def known(self, hash_slot: int) -> RedisNode | None:
        """Return the node that serves ``hash_slot``; None if that is not known or calls are refused."""
        served = self._map
        return None if served is None or self.refusal is not None else served[hash_slot]

    @property
    def clustered(self) -> bool:
        """Whether the keys of one call must share a hash slot."""
        return self.location.kind is Topology.CLUSTER

    def masters(self) -> list[RedisNode]:
        """Return every node that serves a hash slot. Raises IndexUnavailable."""
        self.master(0)
        return list(dict.fromkeys(self._map or ()))

    def at(self, address: Address, *, sentinel: bool = False) -> RedisNode:
        """Return the node at an address."""
        node = self._nodes.get(address)
        if node is None:
            opened = partial(self.location.open, address, self._timeouts.connect)
            connect = partial(Wire, opened, self.location.login(sentinel=sentinel), self._read_timeout)
            node = self._nodes.setdefault(
                address, RedisNode(address, connect, self._read_timeout, self.try_rediscover)
            )
        return node

    def redirected(self, error: Refusal, asked: RedisNode) -> RedisNode:
        """Return the node that a MOVED or ASK of ``asked`` points to: ``MOVED 3999 10.0.0.7:6381``.

        Raises Disconnected for a damaged one.
        """
        try:
            host, _, port = str(error).split(" ")[2].rpartition(":")
            return self.at(Address(host or asked.address.host, int(port)))
        except (ValueError, IndexError) as exc:
            raise Disconnected("a redirection that cannot be parsed") from exc

    def moved(self, hash_slot: int, node: RedisNode) -> None:
        """Correct one entry of the map."""
        if self._map is not None:
            self._map[hash_slot] = node

    def try_rediscover(self) -> None:
        """Read the map again after a node became unreachable: another one may have taken its place.

        If this fails, the old map stays, and calls to its servers show the error.
        """
        with suppress(IndexUnavailable):
            self.rediscover()

    def rediscover(self) -> list[RedisNode]:
        """Read the map again, unless another thread just did. Raises IndexUnavailable."""
        with self._lock:
            if self._map is not None and time.monotonic() - self._mapped_at < _MIN_MAP_AGE_S:
                return self._map
            served = self._discover()
            self._map = served
            self._mapped_at = time.monotonic()
            wanted = {node.address for node in served} | set(self.location.addresses)
            for address in list(self._nodes):
                if address not in wanted:
                    self._nodes.pop(address).close()
            return served

    def _discover(self) -> list[RedisNode]:
        kind = self.location.kind
        if kind is Topology.SINGLE:
            return [self.at(self.location.addresses[0])] * HASH_SLOTS
        addresses = list(self.location.addresses)
        random.shuffle(addresses)
        if kind is Topology.CLUSTER:
            addresses = [*{node.address: None for node in self._map or ()}, *addresses]
            question: Command = ("CLUSTER", "SLOTS")
            read: Callable[[Any, RedisNode], list[RedisNode]] = self._of_cluster
        else:
            question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.location.service or "")
            read = self._of_sentinel
        trouble = None
        nodes = [self.at(address, sentinel=kind is Topology.SENTINEL) for address in dict.fromkeys(addresses)]
        for node in nodes:
            if node.failure:  # take() would mark it as wanted, and two failed nodes would be tried forever
                trouble = IndexUnavailable(node.failure)
                continue
            try:
                (reply,) = node.ask(question)
                if isinstance(reply, Refusal):
                    raise reply
                return read(reply, node)
            except IndexUnavailable as exc:
                trouble = exc
            except (Refusal, *NONSENSE) as exc:
                trouble = IndexUnavailable(
                    f"Redis at {node.address} does not report which node serves what ({type(exc).__name__}); "
                    f"check that it is part of a {kind.value} and the user's permissions"
                )
                trouble.__cause__ = exc
        raise trouble or IndexUnavailable("TOC_REDIS_URL names no server")

    def _of_cluster(self, reply: Any, asked: RedisNode) -> list[RedisNode]:
        served: list[RedisNode | None] = [None] * HASH_SLOTS
        for first, last, (host, port, *_), *_replicas in reply:
            name = host.decode() if host else ""
            node = self.at(Address(asked.address.host if name in ("", "?") else name, port))
            served[first : last + 1] = [node] * (last + 1 - first)
        if not reply:  # it has left the cluster, or has not joined it; others may be in it
            raise LookupError("it names no node")
        # Calls for a hash slot without a node go to the node that was asked, which answers CLUSTERDOWN.
        return [node or asked for node in served]

    def _of_sentinel(self, reply: Any, _asked: RedisNode) -> list[RedisNode]:
        if reply is None:
            service = self.location.service
            raise IndexUnavailable(f"the sentinels do not know the service {service!r}; check TOC_REDIS_URL")
        host, port = reply
        return [self.at(Address(host.decode(), int(port)))] * HASH_SLOTS

    def close(self) -> None:
        """Close all connections, those that are in use once they are not. The object stays usable."""
        with self._lock:
            for node in list(self._nodes.values()):
                node.close()
