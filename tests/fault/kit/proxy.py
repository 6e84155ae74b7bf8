"""A TCP relay in front of a server that misbehaves as it is told, and counts what it did."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from sqlalchemy.engine import make_url

_CHUNK = 1 << 16
_T = TypeVar("_T")


def through(proxy: Proxy, url: str) -> str:
    """The URL of a MySQL server behind a proxy that reads along (hence without TLS)."""
    changed = make_url(url).set(port=proxy.port).update_query_dict({"ssl_disabled": "true"})
    return changed.render_as_string(hide_password=False)


@dataclass
class Stats:
    """What passed and what was done to it: the proof that a fault bit."""

    matched: int = 0
    """Requests that held the text that the rule for eating replies looks for."""
    eaten: int = 0
    """Replies that the server sent and no client ever saw."""
    delayed: int = 0
    """Pieces that were held back for a while."""
    cut_short: int = 0
    """Replies of which a client saw the first bytes alone."""
    flipped: int = 0
    """Replies in which one byte was changed."""
    vanished: int = 0
    """Pieces that came from clients over connections that were forgotten."""


@dataclass
class _Rule:
    """Which replies are eaten."""

    match: bytes
    left: int | None
    probability: float
    quiet: float
    refuse: bool
    dice: random.Random


@dataclass
class _Damage:
    """How replies are damaged."""

    cut: float
    flip: float
    dice: random.Random


@dataclass(eq=False)
class _Pair:
    """One client's connection and the server's, with what their two pumps tell each other."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    losing: bool = False
    forgotten: bool = False
    used: float = field(default_factory=time.monotonic)
    quiet: float = 0.0
    tail: bytes = b""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Proxy:
    """Relays to 127.0.0.1:``port``; everything passes until it is told otherwise. Thread-safe.

    The ``seed`` decides every random choice. The proxy has a thread of its own until ``close``.
    """

    def __init__(self, port: int, *, seed: int = 0) -> None:
        self.target = port
        """Where new connections lead; may be changed, as a failover behind a fixed address does."""
        self.stats = Stats()
        self.port = 0
        self._seed = seed
        self._pairs: set[_Pair] = set()
        self._rule: _Rule | None = None
        self._damage: _Damage | None = None
        self._refusing = False
        self._delay = self._drip = 0.0
        self._loop = asyncio.new_event_loop()
        self._flow = asyncio.Event()
        self._flow.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._listener = self._ask(self._listen())

    # --- faults

    def cut(self) -> int:
        """Cut every open connection; returns how many."""
        return self._ask(self._cut())

    def forget(self, idle: float = 0.0) -> int:
        """Let vanish what clients send over connections that were idle for so long; returns how many these
        are. Neither side is told."""
        return self._ask(self._forget(idle))

    def refuse(self) -> int:
        """Cut every open connection and hang up on new ones, until ``accept``."""
        self._refusing = True
        return self.cut()

    def accept(self) -> None:
        """Let new connections through again."""
        self._refusing = False

    def stall(self) -> None:
        """Let nothing pass in either direction, connections staying open, until ``flow``."""
        self._ask(self._stall())

    def flow(self) -> None:
        """Let everything pass again, what was held back first."""
        self._ask(self._let_flow())

    def delay(self, seconds: float) -> None:
        """Hold every reply back for so long; 0 ends it."""
        self._delay = seconds

    def drip(self, seconds: float) -> None:
        """Let replies through byte by byte, so many seconds apart; 0 ends it."""
        self._drip = seconds

    def eat(
        self,
        match: bytes = b"",
        *,
        count: int | None = 1,
        probability: float = 1.0,
        quiet: float = 0.3,
        refuse: bool = False,
    ) -> None:
        """Swallow replies: the request reaches the server, which executes it; its client is cut off.

        Of the requests that hold ``match``, each is chosen with ``probability``, until ``count`` of them were
        chosen (None: without end). The server's reply counts as over when it has said nothing for ``quiet``
        seconds. With ``refuse`` nobody gets through after the first until ``accept``.
        """
        self._rule = _Rule(match, count, probability, quiet, refuse, random.Random(self._seed))

    def eat_nothing(self) -> None:
        """End ``eat``."""
        self._rule = None

    def damage(self, *, cut: float = 0.0, flip: float = 0.0) -> None:
        """Damage shares of the pieces of replies: cut them off at a random byte, with their connection;
        or change one byte. Without a share: damage none.
        """
        self._damage = _Damage(cut, flip, random.Random(self._seed)) if cut or flip else None

    # --- life

    def close(self) -> None:
        """Cut everything and end the thread. May be called twice."""
        if self._loop.is_closed():
            return
        self._ask(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # --- inside, on the loop

    def _ask(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        opened = None
        if not self._refusing:
            with suppress(OSError):
                opened = await asyncio.open_connection("127.0.0.1", self.target)
        if opened is None or self._refusing:  # perhaps only since then: nobody would end this pair
            for side in (client, opened[1]) if opened else (client,):
                side.transport.abort()
            return
        answers, server = opened
        pair = _Pair(client, server)
        self._pairs.add(pair)
        pair.tasks = [
            asyncio.create_task(self._upstream(pair, reader)),
            asyncio.create_task(self._downstream(pair, answers)),
        ]
        await asyncio.wait(pair.tasks, return_when=asyncio.FIRST_COMPLETED)
        self._end(pair, flush=not pair.losing)

    async def _upstream(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                pair.used = time.monotonic()
                if pair.forgotten:
                    self.stats.vanished += 1
                    continue
                self._choose(pair, data)
                await self._flow.wait()
                pair.server.write(data)
                await pair.server.drain()

    def _choose(self, pair: _Pair, data: bytes) -> None:
        """Apply the rule for eating replies to a request."""
        rule = self._rule
        if rule is None:
            return
        seen = pair.tail + data
        pair.tail = seen[len(seen) - len(rule.match) + 1 :] if len(rule.match) > 1 else b""
        if rule.match not in seen:
            return
        self.stats.matched += 1
        if rule.dice.random() >= rule.probability:
            return
        pair.losing, pair.quiet = True, rule.quiet
        if rule.left is not None:
            rule.left -= 1
            if not rule.left:
                self._rule = None
        self._refusing |= rule.refuse

    async def _downstream(self, pair: _Pair, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                if pair.losing:
                    self.stats.eaten += 1
                    with suppress(TimeoutError):  # until the server has nothing more to say: it has committed
                        while await asyncio.wait_for(reader.read(_CHUNK), pair.quiet):
                            pass
                    return
                if self._delay:
                    self.stats.delayed += 1
                    await asyncio.sleep(self._delay)
                    with suppress(TimeoutError):  # what followed it closely is not held back a second time
                        data += await asyncio.wait_for(reader.read(_CHUNK), 0.001)
                whole = len(data)
                data = self._damaged(data)
                pieces = [data[n : n + 1] for n in range(len(data))] if self._drip else [data]
                for piece in pieces:
                    await self._flow.wait()
                    pair.client.write(piece)
                    await pair.client.drain()
                    await asyncio.sleep(self._drip)
                if len(data) < whole:
                    return

    def _damaged(self, data: bytes) -> bytes:
        damage = self._damage
        if damage is None:
            return data
        luck = damage.dice.random()
        at = damage.dice.randrange(len(data))
        if luck < damage.cut:
            self.stats.cut_short += 1
            return data[:at]
        if luck < damage.cut + damage.flip:
            self.stats.flipped += 1
            changed = bytearray(data)
            changed[at] ^= damage.dice.randrange(1, 256)
            return bytes(changed)
        return data

    def _end(self, pair: _Pair, *, flush: bool) -> None:
        """Hang up on both sides, at once or when what was relayed has gone out."""
        self._pairs.discard(pair)
        for task in pair.tasks:
            task.cancel()
        for side in (pair.client, pair.server):
            if flush:
                side.close()
            else:
                side.transport.abort()

    async def _cut(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair, flush=False)
        return len(pairs)

    async def _forget(self, idle: float) -> int:
        forgotten = [pair for pair in self._pairs if time.monotonic() - pair.used >= idle]
        for pair in forgotten:
            pair.forgotten = True
        return len(forgotten)

    async def _stall(self) -> None:
        self._flow.clear()

    async def _let_flow(self) -> None:
        self._flow.set()

    async def _shut(self) -> None:
        self._refusing = True
        self._listener.close()
        await self._cut()
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        await asyncio.gather(*others, return_exceptions=True)  # each ends with its connection
