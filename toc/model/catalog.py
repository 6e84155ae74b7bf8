"""A process's view of the topic table, refreshed every few seconds while it is in use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from toc.model import features
from toc.model.clock import Clock
from toc.model.errors import SchemaBehind, StoreUnavailable, UnknownTopic
from toc.model.features import Feature
from toc.model.topic import Topic, check_topic_name

REFRESH_SECONDS = 2.0
"""Seconds before the view is read again: a policy change takes effect within this time."""

NOTICED_SECONDS = REFRESH_SECONDS + 0.5
"""After this many seconds every worker that reaches MySQL has read the topic table again."""

PATIENCE_SECONDS = 0.02
"""Seconds a caller with a stale view of a known topic waits for the refresh."""


class TopicsRead(NamedTuple):
    """What one read of the topic table yields: the topics, and which members lack which features."""

    topics: list[Topic]
    lacking: features.Lacking = features.NOBODY_LACKS


class TopicCatalog:
    """Topics by name and by biz_type. Thread-safe.

    A stale view is harmless: each row is stamped with the slot_amount under which it was submitted.
    """

    def __init__(self, read: Callable[[], TopicsRead], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._read_at = float("-inf")
        self._refreshing: threading.Thread | None = None
        self._view: tuple[dict[str, Topic], dict[int, Topic]] = {}, {}
        """By name and by biz_type. Replaced in one assignment, so no lock is needed."""
        self._lacking: features.Lacking = {}
        """Which members lack which features, as of the last read."""

    def refresh(self) -> dict[str, Topic]:
        """Read the topic table now. Raises StoreUnavailable, and keeps the old view then."""
        topics, self._lacking = self._read()
        self._show(topics)
        self._read_at = self._clock.monotonic()
        return self.known()

    def learn(self, topics: Iterable[Topic]) -> None:
        """Use topics that another process has read, until this process has read its own."""
        if not self._view[0]:
            self._show(topics)

    def get(self, name: str) -> Topic:
        """Return topic ``name``. Raises InvalidTopic, UnknownTopic, StoreUnavailable."""
        topic = self.known().get(name) if isinstance(name, str) else None
        if topic is None:
            check_topic_name(name)
        if topic is None:
            topic = self.refresh().get(name)
        elif self._stale():
            self._refresh_soon()
            topic = self.known().get(name)
        if topic is None:
            raise UnknownTopic(
                f"there is no topic {name!r}; create it with `toc topic create {name} --biz-type N --slots N`"
            )
        return topic

    @property
    def lacking(self) -> features.Lacking:
        """Which members lack which features, as last read."""
        return self._lacking

    def require(self, feature: Feature) -> None:
        """Raise FeatureNotReady unless every member of the cluster knows a feature.

        Costs nothing while they do: it is read together with the topics. Before it refuses, it reads again,
        and may raise StoreUnavailable.
        """
        if self._lacking.get(feature.value) == () and not self._stale():
            return
        if self._lacking.get(feature.value) == ():
            self._refresh_soon()
        else:
            self.refresh()
        features.check(feature, self._lacking)

    def _refresh_soon(self) -> None:
        """Refresh in the background and wait at most PATIENCE_SECONDS: a slightly stale view is good enough.

        The topic table's server may be out of reach while the server of the caller's task is fine.
        """
        refreshing = self._refreshing
        if refreshing is None or not refreshing.is_alive():
            self._read_at = self._clock.monotonic()  # also limits how often an unreachable server is tried
            refreshing = threading.Thread(target=self._try_refresh, name="toc-topics", daemon=True)
            refreshing.start()
            self._refreshing = refreshing
            refreshing.join(PATIENCE_SECONDS)

    def _try_refresh(self) -> None:
        with contextlib.suppress(StoreUnavailable, SchemaBehind):
            self.refresh()

    def known_type(self, biz_type: int) -> Topic | None:
        """Return the topic of ``biz_type`` as last read, or None. Never reads the table."""
        return self._view[1].get(biz_type)

    def of_type(self, biz_type: int) -> Topic | None:
        """Return the topic of ``biz_type``, or None. Raises StoreUnavailable."""
        topic = self.known_type(biz_type)
        if topic is None:
            self.refresh()
            topic = self.known_type(biz_type)
        return topic

    def known(self) -> dict[str, Topic]:
        """Return the topics by name as last read."""
        return self._view[0]

    def _show(self, topics: Iterable[Topic]) -> None:
        by_name = {topic.name: topic for topic in topics}
        self._view = by_name, {topic.biz_type: topic for topic in by_name.values()}

    def _stale(self) -> bool:
        return self._clock.monotonic() - self._read_at > REFRESH_SECONDS
