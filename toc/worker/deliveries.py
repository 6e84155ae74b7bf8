"""Which handler each topic has: the application's, or that of webhooks, as the topic's delivery says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from toc.model.catalog import REFRESH_SECONDS, TopicCatalog
from toc.model.errors import TocError
from toc.model.handler import Handler
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.worker.run.dispatch import Dispatcher

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


class Deliveries:
    """Follows the topic table. ``run_once`` reads it again.

    ``handlers`` has the application's at the start. The stages read it, and this keeps it up to date.
    ``look_at`` has the poller look at a slot.
    """

    def __init__(
        self,
        *,
        catalog: TopicCatalog,
        handlers: dict[str, Handler],
        dispatcher: Dispatcher,
        webhooks: WebhookHandlers | None,
        look_at: Callable[[Slot, int], None],
    ) -> None:
        self._catalog = catalog
        self._handlers = handlers
        self._own = dict(handlers)
        """Those of the application."""
        self._dispatcher = dispatcher
        self._webhooks = webhooks
        self._look_at = look_at
        self._topics = catalog.known()
        self._serve_webhooks()

    def run_once(self) -> float:
        """Follow changes of topics. Returns the seconds until the next call."""
        try:
            topics = self._catalog.refresh()
        except TocError as exc:
            log.warning("topics_not_read", error=str(exc))
            return REFRESH_SECONDS
        if topics != self._topics:
            changed = [topic for name, topic in topics.items() if topic != self._topics.get(name)]
            self._topics = topics
            self._serve_webhooks()
            self._dispatcher.topics_changed()
            for topic in changed:  # new, or resumed: its slots may have been looked at too early
                for slot in topic.slots():
                    self._look_at(slot, 0)
        return REFRESH_SECONDS

    def _serve_webhooks(self) -> None:
        if self._webhooks is None:
            return
        for topic in self._topics.values():
            handler, own = self._handlers.get(topic.name), self._own.get(topic.name)
            wanted = own
            if topic.delivery is Delivery.WEBHOOK:
                known = handler is not None and handler.delivery is Delivery.WEBHOOK
                wanted = handler if known else self._webhooks.handler(topic.name)
            if wanted is None or wanted is handler:
                continue
            self._dispatcher.serve(wanted)
            self._handlers[topic.name] = wanted
