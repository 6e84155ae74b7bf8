"""The topics as a daemon knows them: looked at often, and read again when one has changed."""

from __future__ import annotations

import time
from collections.abc import Callable

from toc.coordination.assignment import TABLES
from toc.loop import Loop
from toc.model.catalog import REFRESH_SECONDS, TopicCatalog
from toc.model.errors import TocError
from toc.model.topic import Delivery
from toc.observe.log import get_logger

log = get_logger(__name__)

LOOK_SECONDS = 0.05
"""How soon a new topic is noticed: a look costs a twentieth of a millisecond of the database's time."""
LOOK_BY_ROWS_SECONDS = 0.25
"""The same without an index, where tasks are due in a second or start up to a second late."""


class Topics:
    """``state`` returns another value when a topic has changed; ``on_change`` is called when what is to be
    assigned has. ``tables`` is their number."""

    def __init__(
        self,
        catalog: TopicCatalog,
        state: Callable[[], object],
        *,
        tables: int,
        indexed: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.catalog = catalog
        self._state = state
        self._tables = tables
        self._pause = LOOK_SECONDS if indexed else LOOK_BY_ROWS_SECONDS
        self._on_change = on_change
        self._seen: object = None
        self._read_at = float("-inf")
        self.loop = Loop("catalog", self._look)

    def assigned(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return what must be assigned: the number of slots of each topic, and of tables; and the deliveries
        of the topics that are not delivered to handlers."""
        topics = self.catalog.known().values()
        amounts = {topic.name: topic.slot_amount for topic in topics} | {TABLES: self._tables}
        others = [topic for topic in topics if topic.delivery is not Delivery.HANDLER]
        return amounts, {topic.name: topic.delivery.value for topic in others}

    def _look(self) -> float:
        """Read the topics again if one has changed: the first task of a new one waits for its slots."""
        try:
            seen, now = self._state(), time.monotonic()
            if seen == self._seen and now - self._read_at < REFRESH_SECONDS:
                return self._pause
            before = self.assigned()
            self.catalog.refresh()
            self._seen, self._read_at = seen, now
            if self.assigned() != before:
                self._on_change()
        except TocError as exc:
            log.warning("topics_not_read", error=str(exc))
            return REFRESH_SECONDS
        return self._pause
