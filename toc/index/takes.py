"""Takes due entries for a thread that waits for no node.

One call at a time is under way to each node; its replies are read as they come. Whatever takes longer than
that is left to a thread of its own: opening a connection, finding the node that serves a slot, loading a
script, a node that passes calls on or refuses them for a moment.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import SimpleQueue

from toc.index.calls import Attempt, Call, Window
from toc.index.messages import Prepared, PrepareRequest
from toc.index.nodes import RedisNode
from toc.index.queues import Queues
from toc.index.wire import Disconnected, TimedOut
from toc.loop import Reactor
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot

Calls = Mapping[Call, PrepareRequest]

SOON_SECONDS = 0.01
"""How long ``begin`` waits for answers. They usually come at once, and then a second sleep would cost more
than this wait does. A node whose last answer took longer is not waited for."""


@dataclass(slots=True, eq=False)
class Take:
    """Calls to one node, sent ``at``, whose replies are waited for ``until`` (monotonic)."""

    calls: Calls
    at: float
    until: float
    window: Window
    attempt: Attempt


class Takes:
    """The takes that are under way. For the thread of ``reactor``, which wakes when an answer has come."""

    def __init__(self, queues: Queues, reactor: Reactor) -> None:
        self._queues = queues
        self._reactor = reactor
        self.under_way: dict[RedisNode | None, Take | None] = {}
        """By node (None: not known yet). A take of None is made by another thread."""
        self._made: SimpleQueue[tuple[RedisNode | None, Calls, float]] = SimpleQueue()
        """What other threads have done."""
        self.answered: list[tuple[Calls, float]] = []
        """What ``answers`` returns next, and when it was sent or refused (monotonic)."""
        self._slow: set[RedisNode | None] = set()
        """Nodes whose last answer came later than soon."""

    def node(self, slot: Slot) -> RedisNode | None:
        """The node of the slot, as far as known."""
        return self._queues.nodes.known(self._queues.keys(slot).hash_slot)

    def begin(self, requests: Iterable[PrepareRequest]) -> None:
        """Send requests, refuse them to nodes to which some are under way, and hear what is answered soon."""
        by_node: dict[RedisNode | None, dict[Call, PrepareRequest]] = {}
        for request in requests:
            call = self._queues.prepare_call(request)
            by_node.setdefault(self.node(request.slot), {})[call] = request
        now = time.monotonic()
        for node, calls in by_node.items():
            self._send(node, calls, now)
        for node in by_node.keys() - self._slow:
            if (take := self.under_way.get(node)) is not None:
                self._hear(take, now + SOON_SECONDS)

    def answers(self) -> list[tuple[PrepareRequest, Prepared | IndexUnavailable, float]]:
        """The requests that were answered since the last call, with the time at which they were sent
        (monotonic)."""
        while not self._made.empty():
            self._end(*self._made.get_nowait())
        answers = []
        while self.answered:
            calls, at = self.answered.pop()
            by_slot = {request.slot: call for call, request in calls.items()}
            prepared, strays = self._queues.prepared_by(by_slot)
            answers += [(request, prepared[request.slot], at) for request in calls.values()]
            if strays:
                self._begin(partial(self._queues.drop_strays, strays))
        return answers

    def give_up(self) -> float:
        """Give up the nodes that have not answered in time. Returns when the next is given up (monotonic)."""
        takes = [take for take in self.under_way.values() if take is not None]
        now, following = time.monotonic(), min((take.until for take in takes), default=inf)
        if following > now:
            return following
        for take in takes:
            if take.until <= now:
                self._broke(take, TimedOut("no answer in time"))
        return now

    def _send(self, node: RedisNode | None, calls: Calls, at: float) -> None:
        if node in self.under_way:  # the map has changed since the caller looked
            self._fail(calls, IndexUnavailable("the slot has moved to a node that has yet to answer"), at)
            return
        try:
            wire = None if node is None else node.take_idle()
        except IndexUnavailable as exc:
            self._fail(calls, exc, at)
            return
        if node is None or wire is None:
            self._leave(node, calls, at)
            return
        take = Take(
            calls, at, at + node.read_timeout, Window(node, wire, list(calls)), Attempt(self._queues.nodes)
        )
        self.under_way[node] = take
        self._reactor.watch(wire.fileno(), partial(self._hear, take))
        try:
            take.window.send()
        except Disconnected as exc:
            self._broke(take, exc)

    def _hear(self, take: Take, until: float = 0.0) -> None:
        """Read the replies that have come, or come ``until`` then (monotonic)."""
        window, attempt = take.window, take.attempt
        try:
            while not window.accept(attempt):
                if not window.wire.receive(until - time.monotonic()):
                    return
        except Disconnected as exc:
            self._broke(take, exc)
            return
        self._reactor.forget(window.wire.fileno())
        window.node.give(window.wire)
        again = {call: take.calls[call] for call in (*attempt.again, *attempt.after_pause)}
        self._end(window.node, {c: request for c, request in take.calls.items() if c not in again}, take.at)
        if again:
            self._leave(window.node, again, take.at)

    def _broke(self, take: Take, exc: Disconnected) -> None:
        self._reactor.forget(take.window.wire.fileno())
        take.attempt.broke(take.window, exc)
        self._end(take.window.node, take.calls, take.at)

    def _end(self, node: RedisNode | None, calls: Calls, at: float) -> None:
        del self.under_way[node]
        if time.monotonic() - at > SOON_SECONDS:
            self._slow.add(node)
        else:
            self._slow.discard(node)
        self.answered.append((calls, at))

    def _fail(self, calls: Calls, error: IndexUnavailable, at: float) -> None:
        for call in calls:
            call.result = error
        self.answered.append((calls, at))

    def _leave(self, node: RedisNode | None, calls: Calls, at: float) -> None:
        """Have a thread make the calls, however long that takes."""

        def make() -> None:
            self._queues.run(list(calls))
            self._made.put((node, calls, at))
            self._reactor()

        if self._begin(make):
            self.under_way[node] = None
        else:
            self._fail(calls, IndexUnavailable("no thread for Redis can be started; check the limits"), at)

    def _begin(self, do: Callable[[], object]) -> bool:
        try:
            threading.Thread(target=do, name="toc-take", daemon=True).start()
        except RuntimeError:
            return False
        return True
