"""Which handler each topic has: the application's, or that of webhooks, as the topic's delivery says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from toc.model.catalog import REFRESH_SECONDS
from toc.model.errors import TocError
from toc.model.handler import Handler
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.worker.run.dispatch import Dispatcher
from toc.worker.tools import Tools

log = get_logger(__name__)


class WebhookHandlers(Protocol):
    """What sends the tasks of webhook topics (``toc.webhooks``).

    ``members``: how many processes do so.
    """

    members: int

    def run_once(self) -> float:
        """Read the targets. Returns the seconds until the next call."""

    def handler(self, topic: str) -> Handler:
        """Return the handler of a topic."""

    def leave(self) -> None:
        """Send nothing more: leave this process's share of the targets' limits to other processes."""


@dataclass(eq=False)
class Deliveries:
    """Follows the topic table. ``run_once`` reads it again.

    ``tools.handlers`` has the application's at the start. The stages read it, and this keeps it up to date.
    ``look_at`` has the poller look at a slot.
    """

    tools: Tools
    dispatcher: Dispatcher
    webhooks: WebhookHandlers | None
    look_at: Callable[[Slot, int], None]

    def __post_init__(self) -> None:
        self._own = dict(self.tools.handlers)
        """Those of the application."""
        self._topics = self.tools.catalog.known()
        self._serve_webhooks()

    def run_once(self) -> float:
        """Follow changes of topics. Returns the seconds until the next call."""
        try:
            topics = self.tools.catalog.refresh()
        except TocError as exc:
            log.warning("topics_not_read", error=str(exc))
            return REFRESH_SECONDS
        if topics != self._topics:
            changed = [topic for name, topic in topics.items() if topic != self._topics.get(name)]
            self._topics = topics
            self._serve_webhooks()
            self.dispatcher.topics_changed()
            for topic in changed:  # new, or resumed: its slots may have been looked at too early
                for slot in topic.slots():
                    self.look_at(slot, 0)
        return REFRESH_SECONDS

    def _serve_webhooks(self) -> None:
        if self.webhooks is None:
            return
        for topic in self._topics.values():
            handler, own = self.tools.handlers.get(topic.name), self._own.get(topic.name)
            wanted = own
            if topic.delivery is Delivery.WEBHOOK:
                known = handler is not None and handler.delivery is Delivery.WEBHOOK
                wanted = handler if known else self.webhooks.handler(topic.name)
            if wanted is None or wanted is handler:
                continue
            self.dispatcher.serve(wanted)
            self.tools.handlers[topic.name] = wanted
