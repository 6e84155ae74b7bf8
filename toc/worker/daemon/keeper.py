"""What keeps workers running, processes or not: it listens to them, replaces them, gives them their slots.

One thread does everything: it waits for its workers' messages and for the coordinator, then aligns the slots
of each worker with the assignment (``toc.worker.daemon.slots``). It never touches a task.
"""

import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from toc.config import Settings
from toc.coordination.assignment import Member
from toc.loop import Bell
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.worker.control import unpack
from toc.worker.daemon.processes import Child
from toc.worker.daemon.slots import WorkerSlots

log = get_logger(__name__)

TICK_SECONDS = 1.0
CLAIM_RETRY_SECONDS = 0.25
"""Pause before slots are claimed again whose former owner has not released them."""

RESTART_CAP_SECONDS = 10.0
"""Longest backoff before the successor of a process that dies soon after its start."""
SERVED_CAP_SECONDS = 1.0
"""Longest backoff if it has served: tasks wait, and one that ends its worker can do so only a few times."""
LIVED_SECONDS = 10.0
"""A process that served for this long is replaced at once when it dies."""

C = TypeVar("C", bound=Child)


class Keeper(ABC, Generic[C]):
    """Keeps ``workers`` workers of a center running, by these settings. ``serves`` are the deliveries of the
    topics that they serve; ``metrics`` is the host:port of their metrics."""

    _metrics: str | None = None
    """The host:port of its metrics."""

    def __init__(
        self, center: TimeoutCenter, settings: Settings, *, workers: int, serves: frozenset[str]
    ) -> None:
        self.center = center
        self.settings = settings
        self._serves = serves
        self.bell = Bell()
        """Has it look again now. Any thread may ring."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.bell, selectors.EVENT_READ)
        self._slots = WorkerSlots(center, settings, self.bell)
        self._children: dict[str, C] = {}
        self._start_at: dict[int, float] = dict.fromkeys(range(workers), 0.0)
        """When to start the workers that are missing, by index (monotonic): at first all of them, now."""
        self._deaths: Counter[int] = Counter()
        """For each index, how many workers in a row died soon after their start."""
        self._loaded = False
        """Whether the application has ever loaded here. If so, a later failure may pass."""
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
        if self._slots.topics.switched and self._stop_at is None:
            log.critical("index_switched", do="start it again with the settings of the others")
            self._stop()
        stopping = self._stop_at is not None
        if stopping:
            self._start_at.clear()
        for index, at in list(self._start_at.items()):
            if at <= time.monotonic():
                del self._start_at[index]
                self._spawn(index)
        self._slots.reconcile(self._children.values(), stopping=stopping)
        self._slots.assure(self._children.values())
        self._wait()
        self._slots.find_gone(self._children)

    def _start_in(self, index: int, seconds: float) -> None:
        """Start a worker with this index after some seconds."""
        self._start_at[index] = time.monotonic() + seconds

    def _succeeded(self, ended: C) -> bool:
        """Whether a worker that has ended has a successor, or will have one."""
        others = (one for one in self._children.values() if one.index == ended.index)
        return ended.index in self._start_at or not all(one.leaving for one in others)

    def _backoff(self, ended: C) -> float | None:
        """Return the seconds before the successor of a worker starts. None: only an operator can help.

        That is so if the application has never loaded here. If it has, an update may be replacing its files.
        """
        if ended.unfit is not None and ended.unfit["wrong"] and not self._loaded:
            return None
        lived = time.monotonic() - ended.born if ended.heard else 0.0
        self._deaths[ended.index] = 0 if lived > LIVED_SECONDS else self._deaths[ended.index] + 1
        cap = SERVED_CAP_SECONDS if ended.heard else RESTART_CAP_SECONDS
        return min(0.1 * (2.0 ** min(self._deaths[ended.index], 10) - 1), cap)

    def _add(self, child: C) -> None:
        self._children[child.worker_id] = child
        self._selector.register(child.link, selectors.EVENT_READ, (child, self._listen))

    def _wait(self) -> None:
        unsent = [child for child in self._children.values() if not child.link.flush()]
        timeout = CLAIM_RETRY_SECONDS if unsent or self._slots.missing else TICK_SECONDS
        until = min([self._slots.step_at, *self._start_at.values()])
        for key, _ in self._selector.select(max(0.0, min(timeout, until - time.monotonic()))):
            if key.fileobj is self.bell:
                self.bell.clear()
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
        child.silent = float("-inf")
        if not child.heard:
            child.heard, child.born = True, time.monotonic()
        if kind == "beat":
            child.stuck = message["stuck"]
            if child.stuck:
                self._kill(child, f"hanging: {', '.join(map(str, child.stuck))}")
            before = child.card
            out_of_reach = frozenset(map(str, message.get("out_of_reach", ())))
            child.card = replace(before, out_of_reach=out_of_reach, lost_threads=self._lost_threads())
            if child.member and child.card != before:
                self._slots.coordinator.join(child.card)
        elif kind == "ready":
            self._loaded = True
            child.card = replace(child.card, version=message["version"], protocol=message["protocol"])
            log.info("worker_ready", worker=child.worker_id, pid=child.pid)
        elif kind == "met":
            self._slots.meet(map(str, message["workers"]))
        elif kind == "dropped":
            self._slots.dropped(child, unpack(message["slots"]))
        elif kind == "leaving":
            child.leaving = True
            child.held.clear()  # they go to others; its running tries are kept alive under its claim numbers
            self._slots.take_out(child, known_dead=False)
            if message["recycle"]:
                child.recycled = True
                log.warning("worker_recycled", worker=child.worker_id, reason=message["recycle"])
                if self._consumes(child):
                    leaving = sum(one.leaving for one in self._children.values() if one.index == child.index)
                    # They run handlers as long as these want: what has each worker replaced must not add up.
                    # Each beyond two that still leaves doubles the wait; of a few, most are gone in a moment.
                    more = max(leaving - 2, 0)
                    self._start_in(child.index, min(2.0**more - 1, RESTART_CAP_SECONDS * more))
        elif kind == "left":
            child.left = True
        if not (child.member or child.leaving) and self._consumes(child) and self._stop_at is None:
            child.member = self._slots.changed = True
            child.card = replace(child.card, joined=self.center.clock.now_ms())
            self._slots.coordinator.join(child.card)

    def _consumes(self, child: C) -> bool:  # noqa: ARG002
        """Whether the child is a worker that consumes slots."""
        return True

    def _lost_threads(self) -> int:
        """Return how many threads of this process still run handlers of workers that are over."""
        return 0

    def _member(self, worker_id: str) -> Member:
        """Return how a new worker is introduced to the cluster."""
        return Member(
            worker_id,
            self.settings.host,
            weight=self.settings.weight,
            topics=frozenset(self.center.handlers),
            metrics=self._metrics,
            machine=socket.gethostname(),
            serves=self._serves,
        )
