"""What a worker process tells its daemon each second, and what it checks and measures on that occasion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from toc.coordination.cut_off import Reach
from toc.loop import Loop
from toc.model.clock import Clock
from toc.observe.metrics import (
    BROKEN_SLOTS,
    HANDLERS,
    INDEX_FOREIGN,
    LOOP_BUSY,
    UNWRITTEN,
    WAITING,
    WITHOUT_REDIS,
)
from toc.store.store import Store
from toc.worker import descriptors, interpreter, limits, stdio
from toc.worker.control import ControlPipe
from toc.worker.silence import BEAT_SECONDS
from toc.worker.stages.fallback import Fallback
from toc.worker.stages.handler_calls import NO_DESCRIPTORS
from toc.worker.stages.index_watch import IndexWatch
from toc.worker.stages.pipeline import Pipeline

STUCK_SECONDS = 120.0
"""An internal loop that takes longer for one turn counts as hanging. Calls to servers that hang are
given up much earlier."""


class Beat:
    """Sends the beats of one process. ``run_once`` has its own thread: the main thread may wait for a server.

    ``turn_at`` returns when the main thread was last active (monotonic). ``recycle`` asks, with a reason, for
    a successor of this process: a handler has damaged it.
    """

    def __init__(
        self,
        *,
        link: ControlPipe,
        store: Store,
        clock: Clock,
        pipeline: Pipeline,
        fallback: Fallback,
        watch: IndexWatch,
        loops: Iterable[Loop],
        turn_at: Callable[[], float],
        recycle: Callable[[str], None],
    ) -> None:
        self._link = link
        self._store = store
        self._clock = clock
        self._pipeline = pipeline
        self._fallback = fallback
        self._watch = watch
        # Not the quarantine: a task may run alone for as long as max_runtime.
        self._loops: Sequence[Loop] = [loop for loop in loops if loop is not pipeline.quarantine.loop]
        self._turn_at = turn_at
        self._recycle = recycle
        self._reach = Reach()

    def run_once(self) -> float:
        """Undo or report what handlers did to the process, and send a beat. Returns the seconds until the
        next."""
        interpreter.restore()
        descriptors.check()
        if descriptors.short():
            self._recycle(NO_DESCRIPTORS)
        if limits.restore():
            self._recycle("a handler lowered a resource limit for good")
        if stdio.restore():
            self._recycle("a handler closed a standard stream, and a connection has its number")
        out = self._reach.look(self._servers(self._store.away, self._watch.silent))
        reached = self._servers(self._store.reached, self._watch.heard)
        if self._watch.heard:
            reached.add("redis")  # the name used by members that cannot list the nodes
        stuck = self._measure()
        self._link.send("beat", stuck=stuck, out_of_reach=out, reached=sorted(reached.difference(out)))
        return BEAT_SECONDS

    def _servers(self, wanted: Callable[[int], object], nodes: Iterable[object]) -> set[str]:
        """Return names for these Redis nodes, and for the database servers that are ``wanted``.

        The names are the same on all hosts. The address of a single Redis may not be.
        """
        clustered = self._watch.queues.nodes.clustered
        databases = {f"database {n}" for n in range(len(self._store.tables_of_server())) if wanted(n)}
        return databases | {f"redis {node}" if clustered and node is not None else "redis" for node in nodes}

    def _measure(self) -> list[str]:
        """Update the gauges. Returns the names of loops that hang."""
        self._pipeline.dispatcher.look_at_loop()
        for topic, (running, waiting) in self._pipeline.dispatcher.load().items():
            HANDLERS.of(topic).set(running)
            WAITING.of(topic).set(waiting)
        UNWRITTEN.of().set(self._pipeline.finisher.unwritten)
        WITHOUT_REDIS.of().set(self._fallback.slots)
        BROKEN_SLOTS.of().set(self._watch.broken)
        INDEX_FOREIGN.of().set(self._watch.foreign)
        now = self._clock.monotonic()
        busy = {loop.name: loop.busy_seconds(now) for loop in self._loops}
        busy["main"] = max(now - self._turn_at() - BEAT_SECONDS, 0.0)  # it sleeps no longer than that
        for name, seconds in busy.items():
            LOOP_BUSY.of(name).set(seconds)
        return [name for name, seconds in busy.items() if seconds > STUCK_SECONDS]
