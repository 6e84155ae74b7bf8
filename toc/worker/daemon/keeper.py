"""What keeps workers running, processes or not: it listens to them, replaces them, gives them their slots.

One thread does everything: it waits for its workers' messages and for the coordinator, then aligns the slots
of each worker with the assignment (``toc.worker.daemon.slots``). It never touches a task.
"""

from __future__ import annotations

import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from toc.config import Settings
from toc.coordination.assignment import Member, Spread
from toc.coordination.coordinator import Coordinator
from toc.coordination.presence import LocalNames
from toc.coordination.rows import Members, RowsCoordinator
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.loop import Bell
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.worker.control import texts, unpack
from toc.worker.daemon.processes import Child
from toc.worker.daemon.slots import WorkerSlots
from toc.worker.daemon.successors import Successors
from toc.worker.daemon.topics import Topics

log = get_logger(__name__)

TICK_SECONDS = 1.0
CLAIM_RETRY_SECONDS = 0.25
"""Pause before slots are claimed again whose former owner has not released them."""

C = TypeVar("C", bound=Child)


class Keeper(ABC, Generic[C]):
    """Keeps ``workers`` workers of a center running, by these settings. ``serves`` are the deliveries of the
    topics that they serve; ``metrics`` is the host:port of their metrics."""

    def __init__(
        self,
        center: TimeoutCenter,
        settings: Settings,
        *,
        workers: int,
        serves: frozenset[str],
        metrics: str | None = None,
    ) -> None:
        self.center = center
        self.settings = settings
        self._serves, self._metrics = serves, metrics
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._slots = WorkerSlots(
            _coordinator(settings, center.store.members, self._bell),
            Topics(
                center.catalog,
                center.store.topics.state,
                tables=settings.tables,
                indexed=settings.redis_url is not None,
                on_change=self._bell,
            ),
            LocalNames.of(settings.host),
        )
        self._children: dict[str, C] = {}
        self._successors = Successors(workers)
        self._stop_at: float | None = None
        """Until when running handlers may end, once it stops (monotonic)."""

    @abstractmethod
    def _spawn(self, index: int) -> None:
        """Start a worker."""

    @abstractmethod
    def _kill(self, child: C, why: str) -> None:
        """End a worker that does not do its work."""

    @property
    def over(self) -> bool:
        """Whether it has stopped and no worker is left."""
        return self._stop_at is not None and not self._children

    def _stop(self) -> None:
        """Have all workers leave."""
        self._stop_at = time.monotonic() + self.settings.shutdown_deadline
        for child in self._children.values():
            child.link.send("stop")

    def _turn(self) -> None:
        """Start what is missing, align slots, and listen until something is to be done again."""
        stopping = self._stop_at is not None
        if stopping:
            self._successors.none()
        for index in self._successors.take_due():
            self._spawn(index)
        self._slots.reconcile(self._children.values(), stopping=stopping)
        self._slots.assure(self._children.values())
        self._wait()
        self._slots.find_gone(self._children)

    def _add(self, child: C) -> None:
        self._children[child.worker_id] = child
        self._selector.register(child.link, selectors.EVENT_READ, (child, self._listen))

    def _wait(self) -> None:
        timeout = CLAIM_RETRY_SECONDS if self._slots.incomplete else TICK_SECONDS
        if [child for child in self._children.values() if not child.link.flush()]:
            timeout = CLAIM_RETRY_SECONDS
        until = min(self._slots.step_at, self._successors.next_at())
        for key, _ in self._selector.select(max(0.0, min(timeout, until - time.monotonic()))):
            if key.fileobj is self._bell:
                self._bell.clear()
                self._slots.changed = True
                continue
            child, then = key.data
            if child.worker_id in self._children:
                then(child)

    def _listen(self, child: C) -> None:
        """Hear what a worker says. Once its end of the channel is closed, it will die, or count as silent."""
        try:
            for message in child.link.receive():
                self._hear(child, message)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:  # as a handler may write
            self._kill(child, f"it sent a malformed message ({type(exc).__name__})")
        if child.link.closed:
            self._selector.unregister(child.link)

    def _hear(self, child: C, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        child.silence.broken()
        if not child.heard:
            child.heard, child.born = True, time.monotonic()
        if kind == "beat":
            child.stuck = message["stuck"]
            if child.stuck:
                self._kill(child, f"hanging: {', '.join(texts(child.stuck))}")
            before = child.out_of_reach
            child.out_of_reach = frozenset(texts(message.get("out_of_reach", ())))
            if child.member and child.out_of_reach != before:
                self._join(child)
        elif kind == "ready":
            self._successors.loaded = True
            child.version, child.protocol = message["version"], message["protocol"]
            child.keys = frozenset(texts(message.get("keys", ())))
            log.info("worker_ready", worker=child.worker_id, pid=child.pid)
        elif kind == "met":
            self._slots.meet(texts(message["workers"]))
        elif kind == "dropped":
            self._slots.dropped(child, unpack(message["slots"]))
        elif kind == "leaving":
            child.leaving = True
            self._slots.give_up(child)
            if message["recycle"]:
                child.recycled = True
                log.warning("worker_recycled", worker=child.worker_id, reason=message["recycle"])
        elif kind == "left":
            child.left = True
        if not (child.member or child.leaving) and self._consumes(child) and self._stop_at is None:
            child.member = self._slots.changed = True
            child.joined = self.center.clock.now_ms()
            self._join(child)

    def _consumes(self, child: C) -> bool:  # noqa: ARG002
        """Whether the child is a worker that consumes slots."""
        return True

    def _join(self, child: C) -> None:
        """Add a worker to the cluster, or update what is known of it."""
        self._slots.coordinator.join(
            Member(
                child.worker_id,
                self.settings.host,
                weight=self.settings.weight,
                topics=frozenset(self.center.handlers),
                pid=child.pid,
                metrics=self._metrics,
                machine=socket.gethostname(),
                serves=self._serves,
                version=child.version,
                protocol=child.protocol,
                keys=child.keys,
                out_of_reach=child.out_of_reach,
                lost_threads=child.lost_threads,
                joined=child.joined,
            )
        )


def _coordinator(settings: Settings, members: Members, on_change: Callable[[], None]) -> Coordinator:
    """Return the coordinator of these settings, which is not connected yet."""
    if not settings.zookeeper:
        return RowsCoordinator(
            members, host=settings.host, timeout=settings.session_timeout, on_change=on_change
        )
    return ZooKeeperCoordinator(
        settings.zookeeper,
        cluster=settings.cluster,
        host=settings.host,
        session_timeout=settings.session_timeout,
        spread=Spread(settings.databases, len(settings.database_urls)),
        on_change=on_change,
    )
