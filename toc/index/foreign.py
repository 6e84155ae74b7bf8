"""Reads another system's Redis, from which ``toc import`` takes jobs. Never writes to it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from toc.index.nodes import RedisNodes, Timeouts
from toc.index.url import Topology, parse
from toc.index.wire import Command, Refusal
from toc.model.errors import ConfigError, IndexUnavailable

PAGE = 1000
TIMEOUT_SECONDS = 30.0
FOREVER = -1
"""The ttl (ms) of a key that never expires."""
GONE = -2
"""The ttl of a key that does not exist."""


class ForeignRedis:
    """A connection to another system's Redis: a single server, or the master behind sentinels.

    For one thread. Raises ConfigError for a bad URL, IndexUnavailable if the server cannot be read.
    """

    def __init__(self, url: str) -> None:
        try:
            location = parse(url)
        except ConfigError as exc:
            raise ConfigError(str(exc).replace("TOC_REDIS_URL", "--redis")) from None
        if location.kind is Topology.CLUSTER:
            raise ConfigError("--redis names a cluster, where neither youzan nor lmstfy keeps jobs")
        nodes = RedisNodes(location, Timeouts(TIMEOUT_SECONDS, TIMEOUT_SECONDS))
        self._node = nodes.masters()[0]
        self.now_ms()

    def close(self) -> None:
        """Close the connection."""
        self._node.close()

    def now_ms(self) -> int:
        """Return the server's time."""
        ((seconds, microseconds),) = self._ask([("TIME",)])
        return int(seconds) * 1000 + int(microseconds) // 1000

    def keys(self, pattern: str, kind: str) -> Iterator[bytes]:
        """Yield the keys of a type (``string``, ``list``, ``zset``).

        Keys that exist during the whole time are found, perhaps twice.
        """
        for found in self._pages(lambda cursor: ("SCAN", cursor, "MATCH", pattern, "COUNT", PAGE)):
            kinds = self._ask([("TYPE", key) for key in found])  # SCAN has a TYPE from Redis 6.0 on
            yield from (key for key, one in zip(found, kinds, strict=True) if one == kind.encode())

    def scores(self, key: str | bytes) -> Iterator[tuple[bytes, float]]:
        """Yield the members of a sorted set with their scores, some perhaps twice."""
        for flat in self._pages(lambda cursor: ("ZSCAN", key, cursor, "COUNT", PAGE)):
            yield from zip(flat[::2], map(float, flat[1::2]), strict=True)

    def _pages(self, command: Callable[[bytes | int], Command]) -> Iterator[list[bytes]]:
        cursor: bytes | int = 0
        while True:
            ((cursor, found),) = self._ask([command(cursor)])
            if found:
                yield list(found)
            if int(cursor) == 0:
                return

    def items(self, key: str | bytes) -> Iterator[bytes]:
        """Yield the elements of a list, from its right end, from which its consumers take them."""
        end = -1
        while True:
            (found,) = self._ask([("LRANGE", key, end - PAGE + 1, end)])
            yield from reversed(found)
            if len(found) < PAGE:
                return
            end -= PAGE

    def values(self, keys: Sequence[bytes]) -> list[tuple[bytes | None, int] | None]:
        """Return the strings at these keys, each with its ttl in ms (or FOREVER).

        The string is None if the key has another type; a key that does not exist has no tuple.
        """
        if not keys:
            return []
        found = self._ask([(command, key) for key in keys for command in ("GET", "PTTL")], errors=True)
        return [
            None if value is None or ttl == GONE else (value if isinstance(value, bytes) else None, int(ttl))
            for value, ttl in zip(found[::2], found[1::2], strict=True)
        ]

    def _ask(self, commands: Sequence[Command], *, errors: bool = False) -> list[Any]:
        """Return the replies; with ``errors`` an error reply is a value."""
        replies = self._node.ask(*commands)
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Refusal) and not (errors and reply.code == "WRONGTYPE"):
                raise IndexUnavailable(
                    f"Redis at {self._node.address} refuses {command[0]!s} ({reply.code}); its "
                    f"user needs +@read, +info and +time on all keys"
                ) from None
        return replies
