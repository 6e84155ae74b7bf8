"""What a process tells the daemon each second: that it is alive, what hangs in it, what it cannot reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toc.index.calls import IndexFull
from toc.model.lateness import Cause
from toc.observe import metrics
from toc.observe.holdups import EVERYWHERE
from toc.worker import guards
from toc.worker.control import BEAT_SECONDS
from toc.worker.entry import State
from toc.worker.take.by_rows import OWNED_SECONDS

if TYPE_CHECKING:
    from toc.worker.worker import Worker

STUCK_SECONDS = 120.0
"""An internal loop that takes longer for one turn counts as hanging, and so do the handlers if none runs for
so long while tasks wait for one: the daemon replaces the process. Calls to servers that hang are given up
much earlier."""
STILL_SECONDS = 1.0
"""A process whose beat comes later than this was stopped, perhaps with its daemon. Its slots may have other
owners, which the daemon learns in the next moments."""


@dataclass(eq=False)
class Beat:
    """Sends the beats of one process. ``run_once`` has its own thread: the main thread may wait for a
    server."""

    worker: Worker

    def __post_init__(self) -> None:
        self.tools = self.worker.tools
        self._last = float("inf")
        """When the last beat began. A stop at any moment is between two of these times."""
        self._runs_at = self._stood_at = self._turn_at = self.tools.clock.monotonic()
        """When a handler last ran, or no task waited for one; when the process last stood still; when the
        main thread was last active."""

    def turned(self) -> None:
        """Note that the main thread is active."""
        self._turn_at = self.tools.clock.monotonic()

    def run_once(self) -> float:
        """Check the process and send a beat. Returns the seconds until the next."""
        now = self.tools.clock.monotonic()
        if now - self._last > BEAT_SECONDS + STILL_SECONDS:  # [rule: stood-still]
            self.tools.inflight.share(now + OWNED_SECONDS)
            self._stood_at = now
            self.tools.late.slow(Cause.HALTED, EVERYWHERE, now - self._last, "what takes a second")
        self._last = now
        self.tools.late.look_at_clock()
        guards.check_descriptors()
        if why := guards.damage():
            self.tools.recycle(why)
        self.tools.store.close_unused()
        self.tools.tell("beat", stuck=self._measure(), out_of_reach=sorted(self._out_of_reach()))
        return BEAT_SECONDS

    def _out_of_reach(self) -> set[str]:
        """Return names for the servers that do not answer: the same on all hosts, as the address of a single
        Redis may not be."""
        clustered = self.worker.watch.queues.nodes.clustered
        store = self.tools.store
        databases = {f"database {n}" for n in range(len(store.tables_of_server())) if store.away(n)}
        silent = self.worker.watch.silent.items()
        nodes = [node for node, error in silent if not isinstance(error, IndexFull)]
        return databases | {f"redis {node}" if clustered and node is not None else "redis" for node in nodes}

    def _first_due(self) -> dict[str, int]:
        """By topic, when the first task was due (ms) that this process has taken and not started, or put back
        because its row is out of reach. The StoreQueues do not tell of these."""
        first = self.worker.finisher.away_since(self.tools.clock.now_ms())
        for entry in self.tools.inflight.snapshot():
            if entry.state is State.WAITS:
                first[entry.topic.name] = min(first.get(entry.topic.name, entry.due), entry.due)
        return first

    def _measure(self) -> list[str]:
        """Update the gauges. Returns the names of loops that hang."""
        self.worker.dispatcher.event_loop.look()
        load, first, now_ms = self.worker.dispatcher.load(), self._first_due(), self.tools.clock.now_ms()
        for topic, (running, waiting) in load.items():
            metrics.HANDLERS.of(topic).set(running)
            metrics.WAITING.of(topic).set(waiting)
            metrics.OVERDUE.of(topic).set(max(now_ms - first.get(topic, now_ms), 0) / 1000)
        metrics.UNWRITTEN.of().set(self.worker.finisher.unwritten)
        metrics.WITHOUT_REDIS.of().set(self.worker.rows.slots)
        metrics.BROKEN_SLOTS.of().set(len(self.worker.watch.broken))
        metrics.INDEX_FOREIGN.of().set(self.worker.watch.foreign)
        now = self.tools.clock.monotonic()
        if any(running for running, _ in load.values()) or not any(waiting for _, waiting in load.values()):
            self._runs_at = now
        busy = {loop.name: loop.busy_seconds(now) for loop in self.worker.loops}
        busy["main"] = max(now - self._turn_at - BEAT_SECONDS, 0.0)  # it sleeps no longer than that
        busy["handlers"] = now - self._runs_at  # tasks wait for one, and none runs
        for name, seconds in busy.items():
            metrics.LOOP_BUSY.of(name).set(seconds)
        awake = now - self._stood_at
        return [name for name, seconds in busy.items() if min(seconds, awake) > STUCK_SECONDS]
