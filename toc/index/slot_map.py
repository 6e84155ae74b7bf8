"""The map from hash slots to servers.

A single server, a master behind sentinels and a cluster have the same interface: a map of the 16384 hash
slots to RedisNodes. They differ only in how the map is found. It is read on first use, and again when a
server says that it is wrong or cannot be reached.

After a fork, the child opens its own connections.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from toc.index.connections import RedisNode
from toc.index.keys import HASH_SLOTS
from toc.index.refusals import Disconnected, Refusal
from toc.index.url import Address, Location, Topology
from toc.index.wire import NONSENSE, Command, Wire
from toc.model.errors import IndexUnavailable
from toc.model.fork import call_in_children
from toc.sockets import KEEPALIVE_SECONDS

_MIN_MAP_AGE_S = 0.05
"""A map that was read less than this ago (seconds) is not read again."""

CLUSTER_READ_SECONDS = 0.25
"""Longest wait (seconds) for a reply of one of several nodes: calls to the others wait meanwhile."""


class RedisNodes:
    """The servers behind one URL."""

    def __init__(
        self,
        location: Location,
        *,
        connect_timeout: float,
        read_timeout: float,
        keepalive: float = KEEPALIVE_SECONDS,
    ) -> None:
        self.location = location
        self._connect_timeout = connect_timeout
        self._read_timeout = min(read_timeout, CLUSTER_READ_SECONDS) if self.clustered else read_timeout
        self._keepalive = keepalive
        self.refusal: str | None = None
        """Why no call may be sent to any server, or None."""
        self._start_anew()
        call_in_children(self._start_anew)

    def __repr__(self) -> str:
        return f"Nodes({', '.join(map(str, self.location.addresses))})"

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
            location, timeout, keepalive = self.location, self._connect_timeout, self._keepalive

            def connect(read_timeout: float) -> Wire:
                return Wire(
                    partial(location.open, address, timeout, keepalive),
                    location.login(sentinel=sentinel),
                    read_timeout,
                )

            node = self._nodes.setdefault(
                address, RedisNode(address, connect, self._read_timeout, self._try_rediscover)
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

    def _try_rediscover(self) -> None:
        """Read the map again after a node became unreachable: another one may have taken its place."""
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
        # Calls for a hash slot without a node go to the node that was asked, which answers CLUSTERDOWN.
        return [node or asked for node in served]

    def _of_sentinel(self, reply: Any, _asked: RedisNode) -> list[RedisNode]:
        if reply is None:
            service = self.location.service
            raise IndexUnavailable(f"the sentinels do not know the service {service!r}; check TOC_REDIS_URL")
        host, port = reply
        return [self.at(Address(host.decode(), int(port)))] * HASH_SLOTS

    def close(self) -> None:
        """Close idle connections. The object stays usable."""
        with self._lock:
            for node in list(self._nodes.values()):
                node.close()
