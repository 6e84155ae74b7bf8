"""A process's view of the topic table, refreshed every few seconds while it is in use."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from toc.model.clock import Clock
from toc.model.errors import StoreUnavailable, TocError, UnknownTopic
from toc.model.fork import in_each_process
from toc.model.topic import Topic, check_topic_name, unknown_topic

REFRESH_SECONDS = 2.0
"""Seconds before the view is read again: a policy change takes effect within this time."""

NOTICED_SECONDS = REFRESH_SECONDS + 0.5
"""After this many seconds every worker that reaches MySQL has read the topic table again."""

UNKNOWN_SECONDS = 2.0
"""Seconds that a caller waits for the topic table if this process does not know the topic."""

PATIENCE_SECONDS = 0.02
"""Seconds a caller with a stale view of a known topic waits for the refresh."""

OLD_PATIENCE_SECONDS = 0.5
"""The same for a view older than NOTICED_SECONDS, of a process that was idle: its topic may have been deleted
meanwhile. Only the first caller waits so long if the table does not answer."""


class _Reading(threading.Thread):
    """One read of the topic table, begun at ``began`` (monotonic seconds)."""

    def __init__(self, read: Callable[[], object], began: float) -> None:
        super().__init__(name="toc-topics", daemon=True)
        self.began = began
        self.error: BaseException | None = None
        self._read = read

    def run(self) -> None:
        """Read; keep the error."""
        try:
            self._read()
        except BaseException as exc:
            self.error = exc
            if not isinstance(exc, TocError):
                raise


class TopicCatalog:
    """Topics by name and by biz_type. Thread-safe.

    A stale view is harmless: each row is stamped with the slot_amount under which it was submitted.
    """

    def __init__(self, read: Callable[[], list[Topic]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._read_at = self._view_at = float("-inf")
        """When it was last read, or tried to be; and when the last read that succeeded began."""
        self._reading: _Reading | None = None
        """The last read on a thread of its own."""
        self._view: tuple[dict[str, Topic], dict[int, Topic]] = {}, {}
        """By name and by biz_type. Replaced in one assignment, so readers need no lock."""
        self.paused: frozenset[str] = frozenset()
        """The names of those that are paused. Replaced in the same way."""
        in_each_process(self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    def refresh(self) -> dict[str, Topic]:
        """Read the topic table now. Raises StoreUnavailable, and keeps the old view then.

        Of reads at the same time, the one that began last counts: a topic that was seen never vanishes again.
        """
        began = self._clock.monotonic()
        topics = self._read()
        with self._lock:
            if began >= self._view_at:
                self._replace_view(topics)
                self._view_at = began
            self._read_at = self._clock.monotonic()
        return self.known()

    def learn(self, topics: Iterable[Topic]) -> None:
        """Use topics that another process has read, until this process has read its own."""
        with self._lock:
            if not self._view[0]:
                self._replace_view(topics)

    def get(self, name: str) -> Topic:
        """Return topic ``name``. Raises InvalidTopic, UnknownTopic, StoreUnavailable."""
        topic = self.fresh(name)
        if topic is None and isinstance(name, str) and name in self.known():
            self._refresh_soon()
            topic = self.known().get(name)
        elif topic is None:
            check_topic_name(name)
            topic = self.read_through().get(name)
        if topic is None:
            raise self.unknown(name)
        return topic

    def unknown(self, name: str) -> UnknownTopic:
        """Return the error for a name that is none."""
        do = f"creates those of your code, `toc topic create {name} --biz-type N --slots N` any other"
        return unknown_topic(name, self.known(), f"`toc topic sync --app module:center` {do}")

    def fresh(self, name: str) -> Topic | None:
        """Return topic ``name`` if it was there a moment ago. Never reads the table."""
        return None if self._stale() or not isinstance(name, str) else self.known().get(name)

    def _refresh_soon(self) -> None:
        """Refresh in the background and wait at most PATIENCE_SECONDS: a slightly stale view is good enough.

        The topic table's server may be out of reach while the server of the caller's task is fine.
        """
        before, now = self._reading, self._clock.monotonic()
        if before is None or not before.is_alive():
            old = now - self._view_at > NOTICED_SECONDS and (before is None or before.error is None)
            self._read_at = now  # also limits how often an unreachable server is tried
            with suppress(StoreUnavailable):
                self._read_soon().join(OLD_PATIENCE_SECONDS if old else PATIENCE_SECONDS)

    def known_type(self, biz_type: int) -> Topic | None:
        """Return the topic of ``biz_type`` as last read, or None. Never reads the table."""
        return self._view[1].get(biz_type)

    def of_type(self, biz_type: int) -> Topic | None:
        """Return the topic of ``biz_type``, or None. Raises StoreUnavailable."""
        topic = self.known_type(biz_type)
        if topic is None:
            self.read_through()
            topic = self.known_type(biz_type)
        return topic

    def read_through(self) -> dict[str, Topic]:
        """Read the topic table for a topic that is not known. Raises StoreUnavailable, at the latest after
        UNKNOWN_SECONDS.

        Callers share a read. While a read hangs, all its callers stop waiting at the same moment:
        UNKNOWN_SECONDS after the read began.
        """
        asked = self._clock.monotonic()
        while True:
            reading = self._reading
            if reading is None or not reading.is_alive():
                reading = self._read_soon()
            reading.join(max(reading.began + UNKNOWN_SECONDS - self._clock.monotonic(), 0.0))
            if reading.is_alive():
                what = f"the topic table has not answered within {UNKNOWN_SECONDS:g} s"
                raise StoreUnavailable(f"{what}; try again in a moment")
            if reading.began >= asked:  # an earlier read may have missed a new topic
                if reading.error is not None:
                    raise reading.error
                return self.known()

    def _read_soon(self) -> _Reading:
        reading = _Reading(self.refresh, self._clock.monotonic())
        try:
            reading.start()
        except RuntimeError as exc:  # can't start new thread
            what = "the topic table cannot be read: this process can start no further thread; try again"
            raise StoreUnavailable(what) from exc
        self._reading = reading
        return reading

    def known(self) -> dict[str, Topic]:
        """Return the topics by name as last read."""
        return self._view[0]

    def _replace_view(self, topics: Iterable[Topic]) -> None:
        by_name = {topic.name: topic for topic in topics}
        self._view = by_name, {topic.biz_type: topic for topic in by_name.values()}
        self.paused = frozenset(topic.name for topic in by_name.values() if topic.paused)

    def _stale(self) -> bool:
        return self._clock.monotonic() - self._read_at > REFRESH_SECONDS
