"""Dispatch: from checked entries to running handlers.

Synchronous handlers run on threads (``handler_threads``), asynchronous ones on one event loop
(``handler_loop``). Entries wait in one line per topic. ``room`` tells the poller how many more entries of a
topic it may take: only what can start soon.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from toc.model.catalog import REFRESH_SECONDS
from toc.model.clock import RateLimit
from toc.model.errors import TocError
from toc.model.handler import Handler
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.worker.entry import ROOM, Crowd, Entry
from toc.worker.run.bodies import BodyReader
from toc.worker.run.handler_calls import HandlerCalls
from toc.worker.run.handler_loop import HandlerLoop
from toc.worker.run.handler_threads import HandlerThreads
from toc.worker.settle.finish import Finisher
from toc.worker.take.feedback import WantedRoom
from toc.worker.tools import Tools

log = get_logger(__name__)

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


@dataclass(eq=False)
class Dispatcher:
    """Runs handlers and reports the outcome of each try to the finisher.

    A topic may limit how many of its handlers run at once (``concurrency``). Which handler it has, the
    application's or that of webhooks, its delivery says: ``tools.handlers`` has the application's at the
    start, and ``follow_topics`` keeps it up to date.
    """

    tools: Tools
    finisher: Finisher
    bodies: BodyReader
    threads: int
    async_limit: int
    webhook: Callable[[str], Handler] | None
    """Returns the handler of a webhook topic; None: this process sends none."""

    def __post_init__(self) -> None:
        self._wanted = WantedRoom(self.room, (self.tools.wake, *self.tools.row_wakes))
        self._own = dict(self.tools.handlers)
        """Those of the application."""
        self._topics = self.tools.catalog.known()
        self._complains = RateLimit(self.tools.clock)
        calls = HandlerCalls(self.tools, self.finisher, self.bodies, self._wanted, self.crowd)
        self._crowds: dict[str, tuple[float, Crowd]] = {}
        """By topic, what kept its tasks, and until when that is not asked again (monotonic)."""
        plain = [topic for topic, handler in self.tools.handlers.items() if not handler.is_async]
        self.handler_threads = HandlerThreads(plain, self.threads, calls)
        coroutines = [handler for handler in self.tools.handlers.values() if handler.is_async]
        self.event_loop = HandlerLoop(coroutines, self.async_limit, calls)
        self._serve_webhooks()

    def start(self) -> None:
        """Start the threads."""
        self.handler_threads.start()
        self.event_loop.start()

    def close(self) -> None:
        """Start nothing more. Threads end once their handler returns; this does not wait for them."""
        self.handler_threads.close()
        self.event_loop.close()

    def follow_topics(self) -> float:
        """Read the topic table again, and follow its changes. Returns the seconds until the next call."""
        try:
            topics = self.tools.catalog.refresh()
        except TocError as exc:
            if self._complains():
                log.warning("topics_not_read", error=str(exc))
            return REFRESH_SECONDS
        if halted := {slot for topic in topics.values() if topic.paused for slot in topic.slots()}:
            self.finisher.give_back(self.withdraw(halted))  # what has not started, uncharged
        if topics != self._topics:
            changed = [topic for name, topic in topics.items() if topic != self._topics.get(name)]
            self._topics = topics
            self._serve_webhooks()
            self.handler_threads.limits_changed()
            self.event_loop.limits_changed()
            self._wanted.look()
            for topic in changed:  # new, or resumed: its slots may have been looked at too early
                for slot in topic.slots():
                    self.tools.inbox.look_at(slot, 0)
        return REFRESH_SECONDS

    def _serve_webhooks(self) -> None:
        """Give topics another handler whose delivery is new. No entry of theirs may be held for the old one.

        Only coroutines come and go: the lines of the threads are fixed at the start.
        """
        if self.webhook is None:
            return
        for topic in self._topics.values():
            handler, wanted = self.tools.handlers.get(topic.name), self._own.get(topic.name)
            if topic.delivery is Delivery.WEBHOOK:
                known = handler is not None and handler.delivery is Delivery.WEBHOOK
                wanted = handler if known else self.webhook(topic.name)
            if wanted is not None and wanted is not handler:
                self.event_loop.serve(wanted)
                self.tools.handlers[topic.name] = wanted

    def room(self, topic: str) -> int:
        """How many more entries of ``topic`` may be taken now: no more than can start soon."""
        return self._part(topic).room(topic)

    def want_room(self, topic: str) -> None:
        """Wake those who take when there is room for ``topic``: at once if there is room now."""
        self._wanted.add(topic)
        self.event_loop.look_for_room(topic)

    def crowd(self, topic: str) -> Crowd:
        """What keeps tasks of a topic that are due, checked and late from having started, a moment ago."""
        now = self.tools.clock.monotonic()
        until, crowd = self._crowds.get(topic, (0.0, ROOM))
        if now >= until:
            crowd = self._part(topic).crowd(topic)
            self._crowds[topic] = now + CROWD_SECONDS, crowd
        return crowd

    def _part(self, topic: str) -> HandlerLoop | HandlerThreads:
        return self.event_loop if topic in self.event_loop.lines else self.handler_threads

    def put(self, entries: Sequence[Entry]) -> None:
        """Put entries that are due and checked into their lines."""
        plain = self.event_loop.put(entries) if self.event_loop.lines else entries
        if plain:
            self.handler_threads.put(plain)

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait and have not started."""
        return self.handler_threads.withdraw(slots) + self.event_loop.withdraw(slots)

    def load(self) -> dict[str, tuple[int, int]]:
        """For each topic, how many handlers run (a batch counts as one) and how many entries wait."""
        return self.handler_threads.load() | self.event_loop.load()
