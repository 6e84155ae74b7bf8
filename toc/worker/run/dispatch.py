"""Dispatch: from checked entries to running handlers.

Synchronous handlers run on threads (``handler_threads``), asynchronous ones on one event loop
(``handler_loop``). Entries wait in one line per topic. ``room`` tells the poller how many more entries of a
topic it may take: only what can start soon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.topic import Slot
from toc.worker.entry import Entry, Inflight
from toc.worker.run.bodies import BodyReader
from toc.worker.run.handler_calls import HandlerCalls
from toc.worker.run.handler_loop import HandlerLoop
from toc.worker.run.handler_threads import HandlerThreads
from toc.worker.settle.finish import Finisher
from toc.worker.take.early import EarlyEntries
from toc.worker.take.feedback import LetGo, WantedRoom


class Starts(Protocol):
    """What starts entries."""

    def put(self, entries: Sequence[Entry]) -> None:
        """Start these soon: they are due and checked."""

    def room(self, topic: str) -> int:
        """How many more entries of a topic may be taken now."""

    def want_room(self, topic: str) -> None:
        """Wake who takes when there is room for a topic."""


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """Runs handlers and reports the outcome of each try to the finisher.

    A topic may limit how many of its handlers run at once (``concurrency``).
    """

    handlers: Mapping[str, Handler]
    inflight: Inflight
    finisher: Finisher
    catalog: TopicCatalog
    clock: Clock
    threads: int
    async_limit: int
    early: EarlyEntries
    let_go: LetGo
    bodies: BodyReader
    on_room: Sequence[Callable[[], None]]
    recycle: Callable[[str], None]
    coroutines: bool = False
    """Whether ``serve`` may bring coroutines although there is none at the start."""

    def __post_init__(self) -> None:
        self._wanted = WantedRoom(self.room, self.on_room)
        calls = HandlerCalls(
            inflight=self.inflight,
            finisher=self.finisher,
            catalog=self.catalog,
            clock=self.clock,
            early=self.early,
            let_go=self.let_go,
            bodies=self.bodies,
            wanted=self._wanted,
            recycle=self.recycle,
        )
        plain = [topic for topic, handler in self.handlers.items() if not handler.is_async]
        self._threads = HandlerThreads(plain, self.threads, calls)
        coroutines = [handler for handler in self.handlers.values() if handler.is_async]
        self._loop: HandlerLoop | None = None
        if coroutines or self.coroutines:
            self._loop = HandlerLoop(coroutines, self.async_limit, calls)

    def start(self) -> None:
        """Start the threads."""
        self._threads.start()
        if self._loop is not None:
            self._loop.start()

    def close(self) -> None:
        """Start nothing more. Threads end once their handler returns; this does not wait for them."""
        self._threads.close()
        if self._loop is not None:
            self._loop.close()

    def serve(self, handler: Handler) -> bool:
        """Prepare for a handler that was not there at the start: a topic is new or has another delivery.

        Returns whether that was possible: not while entries of the topic are held for another
        coroutine. Only a coroutine handler can be added: the lines of the threads are fixed at the
        start.
        """
        return self._loop is None or self._loop.serve(handler)

    def topics_changed(self) -> None:
        """Apply concurrency limits that may have changed."""
        self._threads.limits_changed()
        if self._loop is not None:
            self._loop.limits_changed()
        self._wanted.look()

    def room(self, topic: str) -> int:
        """How many more entries of ``topic`` may be taken now: no more than can start soon."""
        room = None if self._loop is None else self._loop.room(topic)
        return self._threads.room(topic) if room is None else room

    def want_room(self, topic: str) -> None:
        """Wake the callers in ``on_room`` when there is room for ``topic``: at once if there is room now."""
        self._wanted.add(topic)
        if self._loop is not None:
            self._loop.look_for_room(topic)

    def put(self, entries: Sequence[Entry]) -> None:
        """Put entries that are due and checked into their lines."""
        plain = entries if self._loop is None else self._loop.put(entries)
        if plain:
            self._threads.put(plain)

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait and have not started."""
        taken = self._threads.withdraw(slots)
        return taken if self._loop is None else taken + self._loop.withdraw(slots)

    def load(self) -> dict[str, tuple[int, int]]:
        """For each topic, how many handlers run (a batch counts as one) and how many entries wait."""
        load = self._threads.load()
        return load if self._loop is None else load | self._loop.load()

    def look_at_loop(self) -> None:
        """Find out whether a coroutine blocks the event loop. One thread calls this once a second."""
        if self._loop is not None:
            self._loop.look()

    def cancel_async(self, entry: Entry) -> None:
        """Cancel the coroutine that runs this entry, once. Its whole batch fails with it."""
        if self._loop is not None:
            self._loop.cancel(entry)
