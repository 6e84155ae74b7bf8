"""The pulls that wait for tasks of their topics; first come, first served.

A pull that is given entries leaves every queue until these are handed out or refused, so each answer is made
in one round. If the pull was answered meanwhile, or its client has left, what is handed out for it goes back.
"""

import asyncio
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from toc.pull.handed_out import Candidate, HandedOut, TtrOf

TAKE_LIMIT = 200
"""Most entries of one topic that one round takes."""
PART_SECONDS = 0.05
"""How long a pull that has some of its tasks waits for tasks from a slower server."""
GAP_SECONDS = 1.0
"""When nobody has asked for a topic for so long, it had no consumer meanwhile."""
LAST_SECONDS = 2.0
"""How long a pull whose time is up waits for what is being handed out to it."""


class WaitingPull:
    """A pull that waits. WaitingPulls' lock guards it, except ``done``, which belongs to its event loop."""

    def __init__(self, topics: Sequence[str], most: int, ttr: int | TtrOf, *, hasty: bool) -> None:
        self.topics = topics
        self.most = most
        self.ttr = ttr
        """The ttr of the tasks that it gets, in ms."""
        self.hasty = hasty
        """Whether it wants only what is due now."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.got: list[HandedOut] = []
        self.in_transit = 0
        """How many entries are being handed out to it."""
        self.closed = False
        """Whether it takes nothing more."""
        self.over = False
        """Whether it was answered, or its client has left."""
        self._patient = False

    def progress(self) -> None:
        """Check whether it can be answered. Runs on its loop."""
        if self.done.done():
            return
        if (self.got or self.closed) and not self.in_transit:
            self.done.set_result(None)
        elif self.got and not self._patient:
            self._patient = True
            self.done.get_loop().call_later(PART_SECONDS, self.end)

    def end(self) -> None:
        """Answer it with what there is. Runs on its loop."""
        if not self.done.done():
            self.done.set_result(None)


class WaitingPulls:
    """All waiting pulls of an event loop. Thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._queues: dict[str, dict[WaitingPull, None]] = {}
        self._hasty: set[WaitingPull] = set()
        self._asked: dict[str, tuple[float, float]] = {}
        """By topic: since when pulls wait for it or come within GAP_SECONDS, and when the last came or left
        (monotonic)."""
        self.shut = False

    def enter(self, pull: WaitingPull) -> bool:
        """Let it wait. False: no pull may wait any more."""
        with self._lock:
            if self.shut:
                return False
            self._queue(pull)
            return True

    def _queue(self, pull: WaitingPull) -> None:
        now = time.monotonic()
        for name in pull.topics:
            since, last = self._asked.get(name, (now, now))
            waits = bool(self._queues.get(name)) or now - last <= GAP_SECONDS
            self._asked[name] = since if waits else now, now
            self._queues.setdefault(name, {})[pull] = None
        if pull.hasty:
            self._hasty.add(pull)

    def _unqueue(self, pull: WaitingPull) -> None:
        for name in pull.topics:
            queue = self._queues.get(name)
            if queue is not None:
                queue.pop(pull, None)
                self._asked[name] = self._asked[name][0], time.monotonic()
                if not queue:
                    del self._queues[name]
        self._hasty.discard(pull)

    def asked_since(self, topic: str) -> float:
        """Since when pulls have asked for the topic without a longer pause (monotonic); now, if none does."""
        with self._lock:
            return self._asked.get(topic, (time.monotonic(), 0.0))[0]

    def topics(self) -> list[str]:
        """The topics from which some pull wants tasks now."""
        with self._lock:
            return list(self._queues)

    def demand(self, topic: str) -> int:
        """How many tasks of the topic are wanted, up to a round's limit."""
        with self._lock:
            first = islice(self._queues.get(topic, ()), TAKE_LIMIT)
            return min(sum(pull.most for pull in first), TAKE_LIMIT)

    def assign(
        self, topic: str, entries: Sequence[Candidate], due: Collection[str]
    ) -> tuple[list[tuple[Candidate, WaitingPull]], list[Candidate]]:
        """Give entries of a topic to waiting pulls. Returns the pairs, and the entries that no pull wants.

        ``due`` are the topics that have due tasks: a pull that prefers another of them gets tasks of that.
        """
        pairs: list[tuple[Candidate, WaitingPull]] = []
        given = 0
        with self._lock:
            chosen: list[WaitingPull] = []
            for pull in self._queues.get(topic, ()):
                if given == len(entries):
                    break
                if next(name for name in pull.topics if name == topic or name in due) != topic:
                    continue
                part = entries[given : given + pull.most]
                given += len(part)
                pull.in_transit += len(part)
                chosen.append(pull)
                pairs += [(entry, pull) for entry in part]
            for pull in chosen:
                self._unqueue(pull)
        return pairs, list(entries[given:])

    def hand_over(
        self, settled: Mapping[WaitingPull, int], handed: Mapping[WaitingPull, list[HandedOut]]
    ) -> list[HandedOut]:
        """Give pulls what was ``handed`` out to them, now that so many of their entries are settled.

        Returns the tasks whose pull is over.
        """
        lost: list[HandedOut] = []
        with self._lock:
            for pull, count in settled.items():
                pull.in_transit -= count
                if pull.over:
                    lost += handed[pull]
                    continue
                pull.got += handed[pull]
                if not pull.got and not pull.in_transit and not pull.closed:
                    self._queue(pull)
        self._notify(settled.keys())
        return lost

    def close(self, pull: WaitingPull) -> None:
        """End its wait: it takes nothing more, but gets what is being handed out to it."""
        with self._lock:
            pull.closed = True
            self._unqueue(pull)

    def leave(self, pull: WaitingPull) -> list[HandedOut]:
        """Remove a pull that is answered or whose client has left. Returns what it got."""
        with self._lock:
            pull.closed = pull.over = True
            self._unqueue(pull)
            return pull.got

    def hasty(self) -> set[WaitingPull]:
        """The pulls that want only what is due now."""
        with self._lock:
            return set(self._hasty)

    def close_hasty(self, empty: Collection[str], known: Collection[WaitingPull] | None = None) -> None:
        """Answer the pulls that want only what is due now and whose topics are all ``empty``; of those
        ``known`` alone, if given."""
        with self._lock:
            hasty = self._hasty if known is None else self._hasty.intersection(known)
            idle = [w for w in hasty if not w.in_transit and all(name in empty for name in w.topics)]
            for pull in idle:
                pull.closed = True
                self._unqueue(pull)
        self._notify(idle)

    def close_all(self) -> None:
        """Answer all pulls, because the process ends."""
        with self._lock:
            self.shut = True
            waiting = {pull for queue in self._queues.values() for pull in queue}
            for pull in waiting:
                pull.closed = True
                self._unqueue(pull)
        self._notify(waiting)

    def _notify(self, pulls: Collection[WaitingPull]) -> None:
        """Let them see whether they can be answered, on their loop."""
        if pulls:
            with suppress(RuntimeError):  # it is closed
                self.loop.call_soon_threadsafe(_progress, pulls)


def _progress(pulls: Iterable[WaitingPull]) -> None:
    for pull in pulls:
        pull.progress()
