"""Keeps what the workers of a daemon hold in line with the assignment.

desired (coordinator)  -> claim -> take          to the worker
no longer desired      -> drop -> dropped -> release

Rows in the first database, or ZooKeeper, coordinate. A handover in order: the slot vanishes from the old
owner's ``desired``; the old owner stops taking from it, finishes or gives back what it holds, and releases
it; only then is the new owner's claim granted. While that server is out of reach, ``desired`` and ``claimed``
stay; new claims are granted only to a worker that replaces another one of this daemon, for that one's slots.
What vanishes from ``claimed`` without a release is lost: another worker has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from toc.config import Settings
from toc.coordination.assignment import TABLES, Spread
from toc.coordination.presence import LocalNames
from toc.coordination.rows import Members, RowsCoordinator
from toc.loop import Loop
from toc.model.catalog import REFRESH_SECONDS
from toc.model.clock import Clock, RateLimit
from toc.model.errors import TocError
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.worker.daemon.processes import Child

if TYPE_CHECKING:
    from toc.coordination.zookeeper import ZooKeeperCoordinator

log = get_logger(__name__)

NEVER = 1e9
"""A monotonic time that is decades away, which JSON can say."""


LOOK_SECONDS = 0.05
"""How soon a new topic is noticed: a look costs a twentieth of a millisecond of the database's time."""
LOOK_BY_ROWS_SECONDS = 0.25
"""The same without an index, where tasks are due in a second or start up to a second late."""


MARK_SECONDS = 5.0
"""How often a daemon that shares by ZooKeeper says so in the rows, unless another does."""
MARK_MS = 15_000
"""For how long that is believed."""


class _Topics:
    """The topics as a daemon knows them: looked at often, and read again when one has changed. ``on_change``
    is called when what is to be assigned has. With ZooKeeper, this says so in the rows."""

    def __init__(self, center: TimeoutCenter, on_change: Callable[[], None]) -> None:
        self.switched = False
        """Whether there is an index and these settings name none, or the reverse: who switched it saw none of
        ours."""
        self._center = center
        self._on_change = on_change
        self._pause = LOOK_SECONDS if center.settings.redis_url is not None else LOOK_BY_ROWS_SECONDS
        self._seen: object = None
        self._read_at = float("-inf")
        self._complains = RateLimit(center.clock)
        self._mark_ms = MARK_MS
        self._marks = RateLimit(center.clock, MARK_SECONDS)
        self.loop = Loop("catalog", self._look, last=True)

    def stop(self) -> None:
        """Look no more, and say so."""
        self._mark_ms = 0
        self.loop.stop(1.0)

    def assigned(self) -> tuple[dict[str, int], dict[str, str]]:
        """Return what must be assigned: the number of slots of each topic, and of tables; and the deliveries
        of the topics that are not delivered to handlers."""
        topics = self._center.catalog.known().values()
        amounts = {topic.name: topic.slot_amount for topic in topics} | {TABLES: self._center.settings.tables}
        others = [topic for topic in topics if topic.delivery is not Delivery.HANDLER]
        return amounts, {topic.name: topic.delivery.value for topic in others}

    def _look(self) -> float:
        """Read the topics again if one has changed: the first task of a new one waits for its slots."""
        try:
            seen, now = self._center.store.topics.state(), time.monotonic()
            if seen != self._seen or now - self._read_at >= REFRESH_SECONDS:
                before = self.assigned()
                self._center.catalog.refresh()
                self._seen, self._read_at = seen, now
                self.switched = self._center.store.identity.indexed() is not self._center.queues.present
                if self.switched or self.assigned() != before:
                    self._on_change()
            if self._center.settings.zookeeper and (self._marks() or not self._mark_ms):
                with suppress(TocError):  # such as read-only: that harms nothing else here
                    self._center.store.identity.mark(self._center.settings.host, self._mark_ms)
        except TocError as exc:
            if self._complains():
                log.warning("topics_not_read", error=str(exc))
            return REFRESH_SECONDS
        return self._pause


class WorkerSlots:
    """The slots of a daemon's workers, and its place in the cluster. For the daemon's thread alone, which
    ``wake`` wakes."""

    def __init__(self, center: TimeoutCenter, settings: Settings, wake: Callable[[], None]) -> None:
        self.coordinator = _coordinator(settings, center.store.members, wake)
        self.topics = _Topics(center, wake)
        self._names = LocalNames.of(settings.host)
        self.name = self._names.name
        """Returns a name for a new process of a place."""
        self._met: set[str] = set()
        """Workers of an earlier daemon of this host that have claims in our slots. Once their nodes or rows
        are gone, nothing else tells of them: what they held would wait for prepare_timeout."""
        self.changed = True
        """Whether what the workers hold may differ from what they should."""
        self.missing: set[Slot] = set()
        """Slots and tables that our workers should have, and whose claims were refused: a former owner has
        not released them yet."""
        self._waited: set[Slot] = set()
        """The same at the last look."""
        self.dead: frozenset[str] = frozenset()
        """The workers known to be dead, as our workers were told."""
        self._sure_until = float("-inf")
        """Until when (monotonic) our workers are sure of their slots, as they were told."""
        self._senders = 0
        """How many workers send webhooks, as ours were told."""
        self.step_at = 0.0
        """When the coordinator wants its next call (monotonic)."""

    def start(self) -> None:
        """Enter the cluster. Raises CoordinationUnavailable."""
        self.coordinator.start()
        self.coordinator.set_topics(*self.topics.assigned())
        self.topics.loop.start()

    def stop(self) -> None:
        """Leave the cluster."""
        self.topics.stop()
        self.coordinator.stop()

    def take_out(self, child: Child, *, known_dead: bool) -> None:
        """Take a process out of the cluster. ``known_dead``: it has ended, and not in good order."""
        if child.member:
            child.member = False
            self.changed = True
            self.coordinator.leave(child.worker_id, known_dead=known_dead)

    def dropped(self, child: Child, slots: set[Slot]) -> None:
        """Record that a process has let go of slots."""
        self.changed = True
        child.held -= slots
        child.dropping -= slots
        self.coordinator.release(child.worker_id, slots)

    def meet(self, workers: Iterable[str]) -> None:
        """Record workers that have claims in our slots and are none of ours."""
        self._met.update(filter(self._names.knows, workers))

    def find_gone(self, ours: Collection[str]) -> None:
        """Report as dead the workers of an earlier daemon that are proved gone, so nothing of them runs.

        The others may have outlived their daemon; they are checked again later.
        """
        self._met -= {*ours, *self.dead}
        gone = set(filter(self._names.proves_gone, self._met))
        if gone:
            self._met -= gone
            self.changed = True
            log.info("workers_proved_gone", workers=sorted(gone))
            for worker_id in gone:
                self.coordinator.leave(worker_id, known_dead=True)

    def reconcile(self, children: Collection[Child], *, stopping: bool) -> None:
        """Bring what workers hold in line with the assignment."""
        if not (self.changed or self.missing or time.monotonic() >= self.step_at):
            return
        self.changed, self._waited, self.missing = False, self.missing, set()
        due = self.coordinator.step()  # it reads changes, so it comes before desired()
        self.step_at = float("inf") if due is None else time.monotonic() + due
        if stopping:
            return
        self.coordinator.set_topics(*self.topics.assigned())
        dead = frozenset(self.coordinator.dead_workers())
        if dead != self.dead:
            self.dead = dead
            for child in children:
                child.link.send("dead", workers=sorted(dead))
        desired, claimed = self.coordinator.desired(), self.coordinator.claimed()
        for child in children:
            if not child.leaving:
                want = desired.get(child.worker_id, set()) if child.member else set()
                self._align(child, want, claimed.get(child.worker_id, set()))

    def assure(self, children: Collection[Child]) -> None:
        """Tell the workers until when they are sure of their slots. Call it after ``reconcile``, by which
        they know of those that others have taken over."""
        until, senders = self.coordinator.sure_until(), self.coordinator.senders()
        if until > self._sure_until or senders != self._senders:
            self._sure_until, self._senders = max(until, self._sure_until), senders
            for child in children:
                self._tell_sure(child)

    def _tell_sure(self, child: Child) -> None:
        child.link.send("sure", until=min(max(self._sure_until, 0.0), NEVER), senders=self._senders)

    def _align(self, child: Child, want: set[Slot], claimed: set[Slot]) -> None:
        """Tell a worker which slots to drop and to take, until it holds those that it should, ``want``."""
        lost = child.held - claimed - child.dropping if child.member else set()
        if lost:
            # The claims of these slots ended with a session. A slot that cannot be claimed again
            # has another owner by now.
            want -= lost - self.coordinator.claim(child.worker_id, lost & want)
        drop = child.held - want - child.dropping
        if drop:
            child.dropping |= drop
            child.link.send("drop", slots=list(drop))
        missing = want - child.held
        if missing:
            granted = self.coordinator.claim(child.worker_id, missing)
            if granted:
                child.held |= granted
                child.link.send("dead", workers=sorted(self.dead))
                self._tell_sure(child)
                child.link.send("take", slots=list(granted), handed=list(granted & self._waited))
            self.missing |= missing - granted


def _coordinator(
    settings: Settings, members: Members, on_change: Callable[[], None]
) -> RowsCoordinator | ZooKeeperCoordinator:
    """Return the coordinator of these settings, which is not connected yet."""
    if not settings.zookeeper:
        return RowsCoordinator(
            members, host=settings.host, timeout=settings.session_timeout, clock=Clock(), on_change=on_change
        )
    from toc.coordination.zookeeper import ZooKeeperCoordinator  # its client is an extra

    return ZooKeeperCoordinator(
        settings.zookeeper,
        cluster=settings.cluster,
        host=settings.host,
        session_timeout=settings.session_timeout,
        spread=Spread(settings.databases, len(settings.database_urls)),
        on_change=on_change,
    )
