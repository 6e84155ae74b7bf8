"""Connections to Redis, and the map from hash slots to servers.

A single server, a master behind sentinels and a cluster have the same interface: a map of the 16384 hash
slots to RedisNodes. Only the way to find the map differs. It is read on first use, and again when a server
reports that it is wrong or cannot be reached.

One unreachable server must not delay callers that also need others. So a node that cannot be reached, or has
not answered for the read timeout, is refused at once to all callers; while callers ask for it, a background
thread tries to reach it again. Callers of several nodes set a patience: they do not wait for a node that has
been silent for longer (``IndexSlow``), even if its reply is still to come.

Thread-safe: one thread at a time uses a connection. Fork-safe: a child opens its own.
"""

from __future__ import annotations

import os
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import hiredis
from redis.exceptions import AskError, InvalidResponse, RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from toc.index.refusals import REPLIES, meaning_of
from toc.index.url import Address, Location, Topology
from toc.model.errors import IndexUnavailable
from toc.sockets import keep_timeouts, none_left

HASH_SLOTS = 16384
Command = Sequence[str | bytes | int | float]

NONSENSE = (ValueError, TypeError, LookupError, AttributeError)
"""Exceptions, of this code or the driver, that a malformed reply raises."""

_REST_S = 0.1
_MAX_REST_S = 0.5
"""First and longest pause, in seconds, between attempts to reach a node again."""
_WANTED_S = 5.0
"""Seconds after the last request for a node during which reconnecting continues."""
_MIN_MAP_AGE_S = 0.05
FRESH_SECONDS = 0.05
"""A connection used within these seconds is not checked before reuse, unless another one to its server has
just broken: each check is a moment in which other threads take the interpreter."""


class IndexSlow(IndexUnavailable):
    """The node has not answered yet, and the caller serves other nodes too. It may answer in a moment."""


class Wire:
    """An open connection to one server process.

    ``run_id`` is that of the process; it cannot change during the connection. The connection comes with the
    timeout of the handshake; ``read_timeout`` (seconds) applies to every later reply.
    """

    def __init__(self, connection: Any, read_timeout: float) -> None:
        self._connection = connection
        self.used = 0.0
        """When it was last given back, on the monotonic clock."""
        connection.connect()
        info = str(self.ask("INFO", "server"), errors="replace")
        self.run_id = next((line[7:].strip() for line in info.splitlines() if line.startswith("run_id:")), "")
        if not keep_timeouts(self._socket(), read_timeout, read_timeout):
            self._socket().settimeout(read_timeout)

    def send(self, commands: Iterable[Command]) -> None:
        """Write commands at once. Raises RedisError; some may then have been executed."""
        if threading.current_thread() is threading.main_thread():
            # Python signal handlers may run while an int is turned into text. If one raises then, hiredis 3.5
            # continues without the text, and the process dies of SIGSEGV. Python itself handles this case.
            commands = [[w if isinstance(w, (str, bytes)) else repr(w) for w in words] for words in commands]
        self._connection.send_packed_command(
            [b"".join(hiredis.pack_command(tuple(command)) for command in commands)]  # type: ignore[arg-type]  # its stub says 1-tuple
        )

    def read(self) -> Any:
        """Return the next reply, or the server's error as a value. Raises RedisError if the connection
        broke."""
        try:
            return self._connection.read_response(disconnect_on_error=False)
        except REPLIES as exc:
            return exc
        except NONSENSE as exc:  # a damaged reply may have any type, such as a map with lists as keys
            raise InvalidResponse(f"a reply that cannot be parsed ({type(exc).__name__})") from exc

    def ask(self, *command: str | bytes | int | float) -> Any:
        """Send one command and return its reply. Raises RedisError, also for an error reply."""
        self.send([command])
        reply = self.read()
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def left(self) -> bool:
        """Whether more has been received than read."""
        return bool(self._connection._parser._reader.has_data())  # the driver's public way asks the kernel

    def is_quiet(self) -> bool:
        """Whether the connection is open with nothing left to read, so that it can be reused."""
        try:
            return not self._connection.can_read(0)
        except (RedisError, OSError):
            return False

    def has_reply(self, seconds: float = 0) -> bool:
        """Whether data can be read within ``seconds``. Raises RedisError if the server has hung up."""
        return bool(self._connection.can_read(max(seconds, 0)))

    def fileno(self) -> int:
        """Return the socket's file descriptor, for poll."""
        return self._socket().fileno()

    def _socket(self) -> socket.socket:
        sock: socket.socket = self._connection._sock  # the driver has no public way to it
        return sock

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()


class RedisNode:
    """One server, with its idle connections. ``on_away`` runs on a background thread before each reconnect
    attempt.

    A caller with a patience (seconds) gets an IndexSlow instead of waiting longer than that, counted from
    when the node fell silent.
    """

    def __init__(
        self,
        address: Address,
        connect: Callable[[], Any],
        read_timeout: float,
        on_away: Callable[[], object] = lambda: None,
    ) -> None:
        self.address = address
        self._connect = connect
        self._read_timeout = read_timeout
        self._on_away = on_away
        self._idle: deque[Wire] = deque()
        self._broke = 0.0
        """When a connection last broke, on the monotonic clock."""
        self._lock = threading.Lock()
        self.failure = ""
        """Why the node cannot be used, while a thread tries to reach it again; else empty."""
        self._wanted = 0.0
        """When a caller last asked for the failed node, on the monotonic clock."""
        self._closed = threading.Event()
        """Ends the reconnect thread."""
        self._unanswered = 0
        """Number of waits given up whose reply is still to come."""
        self._silent_since = 0.0

    def __repr__(self) -> str:
        return f"Node({self.address})"

    def __str__(self) -> str:
        return str(self.address)

    @property
    def well(self) -> bool:
        """Whether the node is not known to be unreachable or slow."""
        return not self.failure and not self._unanswered

    def take(self, patience: float | None = None) -> Wire:
        """Take an open connection, for one thread until it gives it back. Raises IndexUnavailable."""
        self._refuse()
        if patience is not None and self._unanswered and time.monotonic() - self._silent_since > patience:
            raise self.slow()
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:
                break
            fresh = wire.used > max(self._broke, time.monotonic() - FRESH_SECONDS)
            if fresh or wire.is_quiet():
                return wire
            wire.close()
        return self.open() if patience is None else self._open_within(patience)

    def open(self) -> Wire:
        """Open a new connection. Raises IndexUnavailable."""
        self._refuse()
        try:
            return self._opened()
        except IndexUnavailable as exc:
            if not none_left():  # else existing connections are still usable
                self.failed(str(exc))
            raise

    def _refuse(self) -> None:
        if failure := self.failure:
            self._wanted = time.monotonic()
            raise IndexUnavailable(failure)

    def _opened(self) -> Wire:
        try:
            connection = self._connect()
        except OSError as exc:  # the driver reads files of its own
            raise IndexUnavailable(f"Redis at {self.address} {_no_connection(exc)}") from exc
        try:
            return Wire(connection, self._read_timeout)
        except REPLIES as exc:
            connection.disconnect()
            code, _, advice = meaning_of(exc)
            advice = advice or "check the user's permissions and the database number"
            # The server's text may hold the password, so it is not passed on.
            raise IndexUnavailable(
                f"Redis at {self.address} refused the connection ({code}): {advice}"
            ) from None
        except (RedisError, OSError, *NONSENSE) as exc:
            connection.disconnect()
            raise IndexUnavailable(f"Redis at {self.address} {_no_connection(exc)}") from exc

    def _open_within(self, patience: float) -> Wire:
        """Open a connection on a background thread; if it comes too late, it is kept for other callers."""
        future: Future[Wire] = Future()
        began = time.monotonic()
        threading.Thread(target=self._open_for, args=(future,), name="toc-connect", daemon=True).start()
        try:
            return future.result(patience)
        except TimeoutError:
            self.gave_up(began)
            if future.cancel():
                raise self.slow() from None
            self.answered()
            return future.result()

    def _open_for(self, future: Future[Wire]) -> None:
        try:
            wire = self.open()
        except BaseException as exc:
            if future.set_running_or_notify_cancel():
                future.set_exception(exc)
            else:
                self.answered()
            return
        if future.set_running_or_notify_cancel():
            future.set_result(wire)
        else:
            self.answered()
            self.give(wire)

    # --- trouble

    def slow(self) -> IndexSlow:
        """Build the error for a caller that stops waiting."""
        return IndexSlow(f"Redis at {self.address} has not answered yet; this call stopped waiting for it")

    def gave_up(self, since: float) -> None:
        """Record that a caller gave up on a request sent at ``since``. Its end is reported to
        ``answered``."""
        with self._lock:
            self._silent_since = min(self._silent_since, since) if self._unanswered else since
            self._unanswered += 1

    def answered(self) -> None:
        """Record that a reply that was given up has come, or never will."""
        with self._lock:
            self._unanswered -= 1
            self._silent_since = time.monotonic()

    def lost(self, exc: Exception) -> None:
        """Record that a connection broke with this error. After a timeout the node is out of reach."""
        if isinstance(exc, RedisTimeout) or isinstance(exc.__context__, BlockingIOError):
            self.failed(
                f"Redis at {self.address} cannot be reached (no answer within {self._read_timeout:g} s); "
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
        except RuntimeError:  # the interpreter ends
            self.failure = ""

    def _come_back(self, closed: threading.Event) -> None:
        rest = _REST_S
        try:
            while not closed.wait(rest * random.uniform(0.75, 1.0)):  # noqa: S311 - spreads load, guards nothing
                if time.monotonic() - self._wanted > _WANTED_S:
                    return  # the next caller tries to connect
                self._on_away()
                if closed.is_set():
                    return  # another thread has replaced this one
                try:
                    self.give(self._opened())
                except IndexUnavailable as exc:
                    self.failure = str(exc)
                else:
                    return
                rest = min(2 * rest, _MAX_REST_S)
        finally:
            self.failure = ""

    def clock(self) -> float:
        """Return its clock minus this machine's, in seconds, as exactly as one round trip can measure.

        Raises IndexUnavailable.
        """
        wire = self.take()
        before = time.time()
        try:
            seconds, microseconds = map(int, wire.ask("TIME"))
        except (RedisError, OSError, *NONSENSE) as exc:
            self.drop(wire)
            self.lost(exc)
            raise IndexUnavailable(f"Redis at {self.address} did not answer ({type(exc).__name__})") from exc
        after = time.time()
        self.give(wire)
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
        while self._idle:
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

    def __init__(self, location: Location, *, connect_timeout: float, read_timeout: float) -> None:
        self.location = location
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self.refusal: str | None = None
        """Why no call may be sent to any server, or None."""
        self._start_anew()

    def __repr__(self) -> str:
        return f"Nodes({', '.join(map(str, self.location.addresses))})"

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._nodes: dict[Address, RedisNode] = {}
        self._map: list[RedisNode] | None = None
        self._mapped_at = 0.0
        self._looking: threading.Thread | None = None

    def master(self, hash_slot: int) -> RedisNode:
        """Return the node that serves ``hash_slot``.

        Raises IndexUnavailable if the map cannot be read or calls are refused (``refusal``).
        """
        if self.refusal is not None:
            raise IndexUnavailable(self.refusal)
        if self._pid != os.getpid():
            self._start_anew()
        served = self._map
        if served is None:
            served = self.rediscover()
        return served[hash_slot]

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
            location, timeout = self.location, self._connect_timeout

            def connect() -> Any:
                return location.connection(address, timeout, sentinel=sentinel)

            node = self._nodes.setdefault(
                address, RedisNode(address, connect, self._read_timeout, self._look_again)
            )
        return node

    def redirected(self, error: AskError, asked: RedisNode) -> RedisNode:
        """Return the node that a MOVED or ASK of ``asked`` points to."""
        return self.at(Address(error.host or asked.address.host, int(error.port)))

    def moved(self, hash_slot: int, node: RedisNode) -> None:
        """Correct one entry of the map."""
        if self._map is not None:
            self._map[hash_slot] = node

    def _look_again(self) -> None:
        """Read the map after a node became unreachable: another node may have taken its place."""
        with suppress(IndexUnavailable):
            self.rediscover()

    def look_again_within(self, patience: float) -> None:
        """Read the map on a background thread. Returns when it is done, or after ``patience`` seconds."""
        looking = self._looking
        if looking is None or not looking.is_alive():
            looking = self._looking = threading.Thread(
                target=self._look_again, name="toc-rediscover", daemon=True
            )
            looking.start()
        looking.join(patience)

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
        trouble = None
        nodes = [self.at(address, sentinel=kind is Topology.SENTINEL) for address in dict.fromkeys(addresses)]
        for node in sorted(nodes, key=lambda node: not node.well):  # slow or unreachable nodes come last
            address = node.address
            if node.failure:  # not marked as wanted: else two failed nodes would be tried forever
                trouble = IndexUnavailable(node.failure)
                continue
            try:
                wire = node.take()
                try:
                    served = (
                        self._ask_cluster(wire, node)
                        if kind is Topology.CLUSTER
                        else self._ask_sentinel(wire)
                    )
                except BaseException:
                    wire.close()
                    raise
                node.give(wire)
            except IndexUnavailable as exc:
                trouble = exc
            except (RedisError, *NONSENSE) as exc:
                node.lost(exc)
                trouble = IndexUnavailable(
                    f"Redis at {address} does not report which node serves what ({type(exc).__name__}); "
                    f"check that it is part of a {kind.value} and the user's permissions"
                )
                trouble.__cause__ = exc
            else:
                return served
        raise trouble or IndexUnavailable("TOC_REDIS_URL names no server")

    def _ask_cluster(self, wire: Wire, asked: RedisNode) -> list[RedisNode]:
        served: list[RedisNode | None] = [None] * HASH_SLOTS
        for first, last, (host, port, *_), *_replicas in wire.ask("CLUSTER", "SLOTS"):
            name = host.decode() if host else ""
            node = self.at(Address(asked.address.host if name in ("", "?") else name, port))
            served[first : last + 1] = [node] * (last + 1 - first)
        # A hash slot without a node is left to the node that was asked: it answers CLUSTERDOWN.
        return [node or asked for node in served]

    def _ask_sentinel(self, wire: Wire) -> list[RedisNode]:
        service = self.location.service or ""
        reply = wire.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        if reply is None:
            raise IndexUnavailable(f"the sentinels do not know the service {service!r}; check TOC_REDIS_URL")
        host, port = reply
        return [self.at(Address(host.decode(), int(port)))] * HASH_SLOTS

    def close(self) -> None:
        """Close idle connections. The object stays usable."""
        with self._lock:
            for node in list(self._nodes.values()):
                node.close()
