"""Listens for tasks that are due earlier than a slot's owner expects.

There is one connection per master, subscribed to the channels of its slots. If one hangs, the others are
still heard. (A cluster sends a message to all its nodes, so a slot that has moved is heard on its former node
too.) Messages can be lost. So whenever a connection has subscribed to all its channels, the listener reports
that every slot must be looked at: earlier changes are visible by then, later ones will be heard. It sleeps in
poll(), and pings a server after 10 s of silence.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from toc.index.keys import SlotKeys
from toc.index.messages import first_due
from toc.index.nodes import RedisNode, RedisNodes
from toc.index.wire import NONSENSE, Disconnected, Refusal, Wire
from toc.loop import Reactor
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger

_SILENCE_S = 10.0
_MAX_CHANNELS = 500
_RECONNECT_S = 0.05
_MAX_RECONNECT_S = 1.0

Callback = Callable[[Slot | None, int | None], None]
_Event = tuple[Slot | None, int | None]

log = get_logger(__name__)


class WakeListener:
    """Runs once, in one thread. Any thread may call ``set_slots`` and ``stop``."""

    def __init__(self, nodes: RedisNodes, keys: Callable[[Slot], SlotKeys]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._wanted: dict[bytes, Slot] = {}
        self._stopping = False
        self._reactor = Reactor()

    def set_slots(self, slots: Iterable[Slot]) -> None:
        """Listen for exactly these slots from now on."""
        wanted = {self._keys(slot).channel.encode(): slot for slot in slots}
        self._wanted = wanted
        self._reactor()

    def stop(self) -> None:
        """Make ``run`` return at once. May be called before it, and twice."""
        self._stopping = True
        self._reactor.surely()

    def run(self, callback: Callback) -> None:
        """Listen until stopped; reconnects by itself. An error of the callback ends it.

        ``callback(slot, due_ms)``: the slot's earliest task is now due at that instant.
        ``callback(None, None)``: messages may have been lost; look at every slot.
        """
        subscriptions: dict[RedisNode | None, _Subscription] = {}
        grouped: object = None
        try:
            while not self._stopping:
                self._reactor.clear()
                wanted = self._wanted
                if wanted is not grouped:
                    self._group(wanted, subscriptions)
                    grouped = wanted
                for node, subscription in subscriptions.items():
                    if not self._listen(node, subscription, callback):
                        grouped = None  # other nodes may serve its slots now
                silent_at = time.monotonic() + _SILENCE_S
                until = min((one.next_at() for one in subscriptions.values()), default=silent_at)
                wires = [one.wire.fileno() for one in subscriptions.values() if one.wire is not None]
                self._reactor.sleep(until - time.monotonic(), wires)
        finally:
            for subscription in subscriptions.values():
                subscription.close()

    def _group(
        self, wanted: Mapping[bytes, Slot], subscriptions: dict[RedisNode | None, _Subscription]
    ) -> None:
        """Set the channels of each master's subscription. While the map is unknown, that of None gets all."""
        groups: dict[RedisNode | None, dict[bytes, Slot]] = {}
        try:
            for channel, slot in wanted.items():
                groups.setdefault(self._nodes.master(self._keys(slot).hash_slot), {})[channel] = slot
        except IndexUnavailable:
            groups = {None: dict(wanted)}
        for node in [node for node in subscriptions if node not in groups]:
            subscriptions.pop(node).close()
        for node, channels in groups.items():
            subscriptions.setdefault(node, _Subscription()).wanted = channels

    def _listen(self, node: RedisNode | None, subscription: _Subscription, callback: Callback) -> bool:
        """Connect if that is due, and pass on messages. False if the connection was lost."""
        if subscription.wire is None and time.monotonic() < subscription.retry_at:
            return True
        try:
            events = subscription.hear(node)
        except (IndexUnavailable, Disconnected, *NONSENSE) as exc:
            if subscription.pause == _RECONNECT_S:  # once per outage
                log.warning("wake_listener_disconnected", reason=f"{exc}" or type(exc).__name__)
            subscription.disconnected()
            return False
        if events:
            subscription.pause = _RECONNECT_S
        for event in events:
            callback(*event)
        return True


class _Subscription:
    """A subscription to one master, for the channels of ``wanted``."""

    def __init__(self) -> None:
        self.wanted: Mapping[bytes, Slot] = {}
        self.wire: Wire | None = None
        self.pause = _RECONNECT_S
        """How long it rests after the next loss: longer while no try to connect succeeds."""
        self.retry_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._subscribed: Mapping[bytes, Slot] | None = None
        self._unconfirmed = 0
        self._heard_at = time.monotonic()
        self._asked = False

    def hear(self, node: RedisNode | None) -> list[_Event]:
        """Return the events received so far. Raises IndexUnavailable, Disconnected or one of NONSENSE."""
        if node is None:
            raise IndexUnavailable("no server reports which Redis node serves what")
        if self.wire is None:
            self.wire = node.take()
        wanted, wire = self.wanted, self.wire
        events: list[_Event] = []
        if wanted is not self._subscribed:
            before = self._subscribed or {}
            new = [channel for channel in wanted if channel not in before]
            _send(wire, "SUBSCRIBE", new)
            _send(wire, "UNSUBSCRIBE", [channel for channel in before if channel not in wanted])
            self._unconfirmed += len(new)
            self._subscribed = wanted
        while wire.has_reply():
            self._heard_at, self._asked = time.monotonic(), False
            message = wire.read()
            if isinstance(message, Refusal):
                raise IndexUnavailable(f"Redis refused to subscribe ({message.code})")
            kind, channel, data = (*message, None)[:3] if isinstance(message, list) else (None, None, None)
            if kind == b"subscribe":
                self._unconfirmed -= 1
                if self._unconfirmed == 0:
                    events.append((None, None))
            elif kind == b"message" and channel in wanted:
                events.append((wanted[channel], _due_ms(data)))
        if time.monotonic() - self._heard_at >= _SILENCE_S:
            if self._asked:
                raise IndexUnavailable("Redis does not answer")
            wire.send([("PING",)])
            self._heard_at, self._asked = time.monotonic(), True
        return events

    def next_at(self) -> float:
        """Return when to act next if no message comes, on the monotonic clock."""
        return self.retry_at if self.wire is None else self._heard_at + _SILENCE_S

    def disconnected(self) -> None:
        """Record the loss of the connection and pause before the next try."""
        self.close()
        self.retry_at = time.monotonic() + self.pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load
        self.pause = min(2 * self.pause, _MAX_RECONNECT_S)
        self._reset()

    def close(self) -> None:
        """Close the connection."""
        if self.wire is not None:
            self.wire.close()
            self.wire = None


def _due_ms(data: bytes) -> int:
    """Return the instant (ms) in a message. A message without one means 0: look at the slot now."""
    with suppress(ValueError):
        return first_due(data) or 0
    return 0


def _send(wire: Wire, command: str, channels: list[bytes]) -> None:
    parts = [channels[start : start + _MAX_CHANNELS] for start in range(0, len(channels), _MAX_CHANNELS)]
    wire.send([(command, *part) for part in parts])
