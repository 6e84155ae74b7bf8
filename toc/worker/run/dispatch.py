"""Dispatch: from checked entries to running handlers.

Synchronous handlers run on threads (``handler_threads``), asynchronous ones on one event loop
(``handler_loop``). Entries wait in one line per topic. ``room`` tells the poller how many more entries of a
topic it may take: only what can start soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from toc.model.handler import Handler
from toc.model.topic import Slot
from toc.worker.entry import ROOM, Crowd, Entry
from toc.worker.run.bodies import BodyReader
from toc.worker.run.handler_calls import HandlerCalls
from toc.worker.run.handler_loop import HandlerLoop
from toc.worker.run.handler_threads import HandlerThreads
from toc.worker.settle.finish import Finisher
from toc.worker.take.early import EarlyEntries
from toc.worker.take.feedback import WantedRoom
from toc.worker.tools import Tools

CROWD_SECONDS = 0.05
"""For how long an answer about a crowd holds."""


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

    tools: Tools
    finisher: Finisher
    threads: int
    async_limit: int
    early: EarlyEntries
    bodies: BodyReader
    on_room: Sequence[Callable[[], None]]
    recycle: Callable[[str], None]

    def __post_init__(self) -> None:
        self._wanted = WantedRoom(self.room, self.on_room)
        calls = HandlerCalls(
            tools=self.tools,
            finisher=self.finisher,
            early=self.early,
            bodies=self.bodies,
            wanted=self._wanted,
            recycle=self.recycle,
            crowd=self.crowd,
        )
        self._crowds: dict[str, tuple[float, Crowd]] = {}
        """By topic, what kept its tasks, and until when that is not asked again (monotonic)."""
        plain = [topic for topic, handler in self.tools.handlers.items() if not handler.is_async]
        self._threads = HandlerThreads(plain, self.threads, calls)
        coroutines = [handler for handler in self.tools.handlers.values() if handler.is_async]
        self._loop = HandlerLoop(coroutines, self.async_limit, calls)

    def start(self) -> None:
        """Start the threads."""
        self._threads.start()
        self._loop.start()

    def close(self) -> None:
        """Start nothing more. Threads end once their handler returns; this does not wait for them."""
        self._threads.close()
        self._loop.close()

    def serve(self, handler: Handler) -> None:
        """Prepare for another handler than at the start: a topic is new or has another delivery.

        Only a coroutine handler can be added: the lines of the threads are fixed at the start. No entry of
        the topic may be held for another one.
        """
        self._loop.serve(handler)

    def topics_changed(self) -> None:
        """Apply concurrency limits that may have changed."""
        self._threads.limits_changed()
        self._loop.limits_changed()
        self._wanted.look()

    def room(self, topic: str) -> int:
        """How many more entries of ``topic`` may be taken now: no more than can start soon."""
        return (self._loop if topic in self._loop.lines else self._threads).room(topic)

    def want_room(self, topic: str) -> None:
        """Wake the callers in ``on_room`` when there is room for ``topic``: at once if there is room now."""
        self._wanted.add(topic)
        self._loop.look_for_room(topic)

    def crowd(self, topic: str) -> Crowd:
        """What keeps tasks of a topic that are due, checked and late from having started, a moment ago."""
        now = self.tools.clock.monotonic()
        until, crowd = self._crowds.get(topic, (0.0, ROOM))
        if now >= until:
            known = self.tools.catalog.known().get(topic)
            part = self._loop if topic in self._loop.lines else self._threads
            crowd = part.crowd(topic, 0 if known is None else known.concurrency)
            self._crowds[topic] = now + CROWD_SECONDS, crowd
        return crowd

    def put(self, entries: Sequence[Entry]) -> None:
        """Put entries that are due and checked into their lines."""
        plain = self._loop.put(entries) if self._loop.lines else entries
        if plain:
            self._threads.put(plain)

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait and have not started."""
        return self._threads.withdraw(slots) + self._loop.withdraw(slots)

    def load(self) -> dict[str, tuple[int, int]]:
        """For each topic, how many handlers run (a batch counts as one) and how many entries wait."""
        return self._threads.load() | self._loop.load()

    def look_at_loop(self) -> None:
        """Find out whether a coroutine blocks the event loop. One thread calls this once a second."""
        self._loop.look()

    def cancel_async(self, entry: Entry) -> None:
        """Cancel the coroutine that runs this entry, once. Its whole batch fails with it."""
        self._loop.cancel(entry)
