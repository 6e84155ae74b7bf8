"""Hears of tasks that are due earlier than what a slot's owner sleeps for.

One subscription connection carries the channels of all slots that a process owns. It is to any master: a
cluster brings a message to all its nodes. Messages can be lost, so every time that all channels are
subscribed, the listener says "look at everything": what came before is then to be seen, what comes after
will be heard. It sleeps in poll(), and asks the server for a sign of life after a silence of 10 s.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from math import floor

from redis.exceptions import RedisError

from toc.errors import IndexUnavailable
from toc.log import get_logger
from toc.queue.keys import SlotKeys
from toc.queue.members import first_due
from toc.queue.nodes import NONSENSE, Nodes, Wire
from toc.topic import Slot

_SILENCE_S = 10.0
_MAX_CHANNELS = 500
_RECONNECT_S = 0.05
_MAX_RECONNECT_S = 1.0

Callback = Callable[[Slot | None, int | None], None]
_Event = tuple[Slot | None, int | None]

log = get_logger(__name__)


class WakeListener:
    """Runs in one thread, once; ``set_slots`` and ``stop`` may be called from any."""

    def __init__(self, nodes: Nodes, keys: Callable[[Slot], SlotKeys]) -> None:
        self._nodes = nodes
        self._keys = keys
        self._lock = threading.Lock()
        self._wanted: dict[bytes, Slot] = {}
        self._stopping = False
        self._nudge: socket.socket | None = None

    def set_slots(self, slots: Iterable[Slot]) -> None:
        """From now on hear of exactly these slots."""
        wanted = {self._keys(slot).channel.encode(): slot for slot in slots}
        with self._lock:
            self._wanted = wanted
        self._wake()

    def stop(self) -> None:
        """Make ``run`` return at once. May come before it, and twice."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._nudge is not None:
                with contextlib.suppress(BlockingIOError):  # it is full of nudges already
                    self._nudge.send(b"x")

    def run(self, callback: Callback) -> None:
        """Listen until stopped; reconnects by itself.

        ``callback(slot, due_ms)``: the earliest task of the slot is now due at that millisecond.
        ``callback(None, None)``: anything may have been missed, look at every slot.
        An error of the callback ends it.
        """
        nudged, nudge = socket.socketpair()
        nudge.setblocking(False)
        with nudged, nudge:
            with self._lock:
                self._nudge = nudge
            try:
                self._run(callback, nudged)
            finally:
                with self._lock:
                    self._nudge = None

    def _run(self, callback: Callback, nudged: socket.socket) -> None:
        pause = _RECONNECT_S
        lost = False
        while not self._stopping:
            wire = None
            try:
                wire = self._connect()
                events = self._events(wire, nudged)
                while (event := _next(events)) is not None:
                    if lost:
                        log.info("wake_listener_connected")
                    pause, lost = _RECONNECT_S, False
                    callback(*event)
            except _Disconnected as exc:
                if not lost:  # once per outage
                    log.warning("wake_listener_disconnected", reason=str(exc))
                lost = True
                self._rest(nudged, pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load
                pause = min(2 * pause, _MAX_RECONNECT_S)
            finally:
                if wire is not None:
                    wire.close()

    def _rest(self, nudged: socket.socket, seconds: float) -> None:
        """Wait; nothing but ``stop`` cuts it short: new slots are subscribed on the next connection."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(nudged, select.POLLIN)
        while not self._stopping and (left := until - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                nudged.recv(4096)

    def _connect(self) -> Wire:
        try:
            masters = self._nodes.masters()
            random.shuffle(masters)
            for node in masters:
                try:
                    return node.open()
                except IndexUnavailable as exc:
                    trouble = exc
            self._nodes.rediscover()
        except IndexUnavailable as exc:
            trouble = exc
        raise _Disconnected(str(trouble)) from trouble

    def _events(self, wire: Wire, nudged: socket.socket) -> Iterator[_Event]:
        poll = select.poll()
        poll.register(nudged, select.POLLIN)
        poll.register(wire.fileno(), select.POLLIN)
        subscribed: dict[bytes, Slot] = {}
        unconfirmed = 0
        asked = False
        if not self._wanted:
            yield None, None  # no channel will be confirmed, so the connection alone is the good news
        while not self._stopping:
            with self._lock:
                wanted = self._wanted
            if wanted is not subscribed:
                new = [channel for channel in wanted if channel not in subscribed]
                _send(wire, "SUBSCRIBE", new)
                _send(wire, "UNSUBSCRIBE", [channel for channel in subscribed if channel not in wanted])
                unconfirmed += len(new)
                subscribed = wanted
            ready = {fd for fd, _ in poll.poll(_SILENCE_S * 1000)}
            if not ready:
                if asked:
                    raise _Disconnected("Redis has fallen silent")
                wire.send([("PING",)])
                asked = True
            if nudged.fileno() in ready:
                nudged.recv(4096)
            while wire.has_reply():
                asked = False
                message = wire.read()
                if isinstance(message, RedisError):
                    raise _Disconnected(f"Redis refused to subscribe ({type(message).__name__})")
                kind, channel, data = (
                    (*message, None)[:3] if isinstance(message, list) else (None, None, None)
                )
                if kind == b"subscribe":
                    unconfirmed -= 1
                    if unconfirmed == 0:
                        yield None, None
                elif kind == b"message" and channel in subscribed:
                    yield subscribed[channel], _due_ms(data)


class _Disconnected(Exception):
    """The subscription is gone, or was not to be had."""


def _due_ms(data: bytes) -> int:
    """The instant in a message; 0, to look now, for what is none: its sender may have had a reason."""
    try:
        due = first_due(data)
    except ValueError:
        due = None
    return 0 if due is None else floor(due)


def _next(events: Iterator[_Event]) -> _Event | None:
    try:
        return next(events, None)
    except (RedisError, OSError, IndexUnavailable, *NONSENSE) as exc:
        raise _Disconnected(f"the connection broke ({type(exc).__name__})") from exc


def _send(wire: Wire, command: str, channels: list[bytes]) -> None:
    wire.send(
        [
            (command, *channels[start : start + _MAX_CHANNELS])
            for start in range(0, len(channels), _MAX_CHANNELS)
        ]
    )
