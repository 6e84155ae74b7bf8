"""Connections, and which server serves which hash slot.

A single server, a master behind sentinels and a cluster look alike from outside: a map of the 16384 hash
slots to RedisNodes. Only how the map is found differs. It is read when it is first needed, and again when a
server says that it is wrong or cannot be reached.

One server that is away must not hold up those who need others as well. So a node that cannot be reached, or
has not answered for the read timeout, is refused to everybody at once; a thread of its own tries whether it
is back, while somebody asks for it. And who serves several nodes names a patience: a node that has been
silent for longer is not waited for (``IndexSlow``), whatever is still to come of it.

Thread-safe: connections are taken by one thread at a time. Fork-safe: a child opens its own.
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
"""What is raised, here or in the driver, where a reply is not what it should be."""

_REST_S = 0.1
_MAX_REST_S = 0.5
"""How long the tries to reach a node again are apart: the first, and at most."""
_WANTED_S = 5.0
"""How long after somebody asked for it a node is tried to be reached again."""
_MIN_MAP_AGE_S = 0.05
FRESH_SECONDS = 0.05
"""A connection that was in use so short a time ago is not asked whether it still stands, unless another one
to its server has just broken: each question is a moment in which other threads take the interpreter."""


class IndexSlow(IndexUnavailable):
    """The node has not answered yet, and who asked serves others as well. It may well do so in a moment."""


class Wire:
    """An open connection to one server process.

    ``run_id`` is that process's; it cannot change while the connection stands. The connection comes with
    the timeout of the handshake; ``read_timeout`` is that of every reply after it, in seconds.
    """

    def __init__(self, connection: Any, read_timeout: float) -> None:
        self._connection = connection
        self.used = 0.0
        """When it was given back last, on the monotonic clock."""
        connection.connect()
        info = str(self.ask("INFO", "server"), errors="replace")
        self.run_id = next((line[7:].strip() for line in info.splitlines() if line.startswith("run_id:")), "")
        if not keep_timeouts(self._socket(), read_timeout, read_timeout):
            self._socket().settimeout(read_timeout)

    def send(self, commands: Iterable[Command]) -> None:
        """Write commands at once. Raises RedisError; some may then have been executed."""
        if threading.current_thread() is threading.main_thread():
            # Its signal handlers run while an int is turned into text, too; if one raises then, hiredis 3.5
            # goes on without the text, and the process dies of SIGSEGV. Python itself is prepared for it.
            commands = [[w if isinstance(w, (str, bytes)) else repr(w) for w in words] for words in commands]
        self._connection.send_packed_command(
            [b"".join(hiredis.pack_command(tuple(command)) for command in commands)]  # type: ignore[arg-type]  # its stub says 1-tuple
        )

    def read(self) -> Any:
        """The next reply, or the server's error as a value. Raises RedisError when the connection broke."""
        try:
            return self._connection.read_response(disconnect_on_error=False)
        except REPLIES as exc:
            return exc
        except NONSENSE as exc:  # a damaged reply may be of any type, a map with lists for keys among them
            raise InvalidResponse(f"a reply that makes no sense ({type(exc).__name__})") from exc

    def ask(self, *command: str | bytes | int | float) -> Any:
        """One command and its reply. Raises RedisError, also for an error that the server replied."""
        self.send([command])
        reply = self.read()
        if isinstance(reply, RedisError):
            raise reply
        return reply

    def left(self) -> bool:
        """Whether more has been received than was read."""
        return bool(self._connection._parser._reader.has_data())  # the driver's own way asks the kernel, too

    def is_quiet(self) -> bool:
        """Whether the connection still stands with nothing left to read: only then can it be used again."""
        try:
            return not self._connection.can_read(0)
        except (RedisError, OSError):
            return False

    def has_reply(self, seconds: float = 0) -> bool:
        """Whether something can be read within so long. Raises RedisError when the server has hung up."""
        return bool(self._connection.can_read(max(seconds, 0)))

    def fileno(self) -> int:
        """The socket's file descriptor, for poll."""
        return self._socket().fileno()

    def _socket(self) -> socket.socket:
        sock: socket.socket = self._connection._sock  # the driver has no public way to it
        return sock

    def close(self) -> None:
        """Hang up."""
        self._connection.disconnect()


class RedisNode:
    """One server, with its idle connections. ``on_away`` is called, by a thread, while it is tried again.

    Those who ask for it with a patience (seconds) are told that it is slow instead of waiting for longer than
    that, counted from when it fell silent.
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
        """When a connection broke last."""
        self._lock = threading.Lock()
        self.failure = ""
        """Why it cannot be used, while a thread tries whether it is back."""
        self._wanted = 0.0
        """When somebody asked for it last meanwhile."""
        self._closed = threading.Event()
        """Ends that thread."""
        self._unanswered = 0
        """How many waits have been given up whose answer is still to come."""
        self._silent_since = 0.0

    def __repr__(self) -> str:
        return f"Node({self.address})"

    @property
    def well(self) -> bool:
        """Whether it has answered whatever it was asked, as far as is known."""
        return not self.failure and not self._unanswered

    def take(self, patience: float | None = None) -> Wire:
        """An open connection, for one thread until it gives it back. Raises IndexUnavailable."""
        self._refuse()
        if patience is not None and self._unanswered and time.monotonic() - self._silent_since > patience:
            raise self.slow()
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            fresh = wire.used > max(self._broke, time.monotonic() - FRESH_SECONDS)
            if fresh or wire.is_quiet():
                return wire
            wire.close()
        return self.open() if patience is None else self._open_within(patience)

    def open(self) -> Wire:
        """A new connection. Raises IndexUnavailable."""
        self._refuse()
        try:
            return self._opened()
        except IndexUnavailable as exc:
            if not none_left():  # else those who have a connection can go on
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
            # The server's own words may hold the password, so they are not passed on.
            raise IndexUnavailable(
                f"Redis at {self.address} refused the connection ({code}): {advice}"
            ) from None
        except (RedisError, OSError, *NONSENSE) as exc:
            connection.disconnect()
            raise IndexUnavailable(f"Redis at {self.address} {_no_connection(exc)}") from exc

    def _open_within(self, patience: float) -> Wire:
        """A new connection, made by a thread of its own: it is kept for others if it comes too late."""
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
        """What is told to who does not wait any longer."""
        return IndexSlow(f"Redis at {self.address} has not answered yet; others are served meanwhile")

    def gave_up(self, since: float) -> None:
        """Somebody waits no more for what it was asked at ``since``; ``answered`` is called once it comes."""
        with self._lock:
            self._silent_since = min(self._silent_since, since) if self._unanswered else since
            self._unanswered += 1

    def answered(self) -> None:
        """What nobody waits for any more has come, or never will."""
        with self._lock:
            self._unanswered -= 1
            self._silent_since = time.monotonic()

    def lost(self, exc: Exception) -> None:
        """A connection broke with this error: if it did not answer in time, it is out of reach."""
        if isinstance(exc, RedisTimeout) or isinstance(exc.__context__, BlockingIOError):
            self.failed(
                f"Redis at {self.address} cannot be reached (no answer within {self._read_timeout:g} s); "
                f"check that it runs and the network to it"
            )

    def failed(self, failure: str) -> None:
        """It is out of reach: from now on everybody is told so at once, until it is back."""
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
                    return  # who asks next tries anew
                self._on_away()
                if closed.is_set():
                    return  # another one has taken its place
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
        """Its clock minus this machine's, in seconds, as well as one round trip can tell.

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
        """Close a connection that broke: the others may have, too."""
        self._broke = time.monotonic()
        wire.close()

    def close(self) -> None:
        """Close idle connections, and try no more whether it is back."""
        self._closed.set()
        while self._idle:
            self._idle.pop().close()


def _no_connection(exc: BaseException) -> str:
    """Why there is none, and what to look at."""
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
        """Why nothing may be sent to any of them, if so."""
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
        """The node that serves ``hash_slot``. Raises IndexUnavailable when no map can be had.

        Or when nothing may be sent to any (``refusal``).
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
        """Whether one call may have keys of one hash slot only."""
        return self.location.kind is Topology.CLUSTER

    def masters(self) -> list[RedisNode]:
        """Every node that serves something. Raises IndexUnavailable."""
        self.master(0)
        return list(dict.fromkeys(self._map or ()))

    def at(self, address: Address, *, sentinel: bool = False) -> RedisNode:
        """The node at an address."""
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
        """The node that a MOVED or ASK of ``asked`` points to."""
        return self.at(Address(error.host or asked.address.host, int(error.port)))

    def moved(self, hash_slot: int, node: RedisNode) -> None:
        """Correct one entry of the map."""
        if self._map is not None:
            self._map[hash_slot] = node

    def _look_again(self) -> None:
        """A node is away: another one may have taken its place."""
        with suppress(IndexUnavailable):
            self.rediscover()

    def look_again_within(self, patience: float) -> None:
        """The same as ``rediscover``, by a thread of its own; returns when it is done, or after so long."""
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
        for node in sorted(nodes, key=lambda node: not node.well):  # those that are slow or away come last
            address = node.address
            if node.failure:  # not asked for on its account: two that are away would be tried for ever
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
                    f"Redis at {address} does not tell who serves what ({type(exc).__name__}); "
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
        # A hash slot that nobody serves is left to the node that was asked: it answers CLUSTERDOWN.
        return [node or asked for node in served]

    def _ask_sentinel(self, wire: Wire) -> list[RedisNode]:
        service = self.location.service or ""
        reply = wire.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        if reply is None:
            raise IndexUnavailable(f"the sentinels know no service {service!r}; check TOC_REDIS_URL")
        host, port = reply
        return [self.at(Address(host.decode(), int(port)))] * HASH_SLOTS

    def close(self) -> None:
        """Close idle connections. The object stays usable."""
        with self._lock:
            for node in list(self._nodes.values()):
                node.close()
