"""Heartbeat: keeps held entries from timing out, and ends tries that run too long."""

from dataclasses import dataclass

from toc.loop import Loop
from toc.model.errors import IndexUnavailable
from toc.model.raised import overran
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.worker.entry import LOST, Entry, State
from toc.worker.run.dispatch import Dispatcher
from toc.worker.run.handler_loop import CLEAN_UP_SECONDS
from toc.worker.settle.finish import Finisher
from toc.worker.tools import Tools

log = get_logger(__name__)

TICK_SECONDS = 0.5


@dataclass(eq=False)
class Heartbeat:
    """The loop that extends entries every third of prepare_timeout and enforces max_runtime.

    A coroutine that runs too long is cancelled, once, and may clean up. A thread cannot be cancelled. If the
    handler does not end, its try is marked failed and its late result is ignored. Before that the process
    asks for a successor, so that it takes nothing more. It also does once calls that coroutines have left to
    threads keep all threads of their topic.
    """

    tools: Tools
    finisher: Finisher
    dispatcher: Dispatcher

    def __post_init__(self) -> None:
        self.loop = Loop("heartbeat", self.run_once)

    def run_once(self) -> float:
        """Extend entries, end overlong tries. Returns the seconds until the next look."""
        now = self.tools.clock.monotonic()
        aging: dict[Slot, list[Entry]] = {}
        for entry in self.tools.inflight.snapshot():
            if entry.fenced and now - entry.kept > entry.topic.prepare_timeout / 3:
                aging.setdefault(entry.slot, []).append(entry)
            if entry.state is State.RUNS and entry.handler.limited and entry.overtime(now) > 0:
                self._end(entry, now)
        for topic in self.dispatcher.event_loop.outrun(now):
            self.tools.recycle(f"calls of {topic} in asyncio.to_thread keep all its threads past max_runtime")
        if aging:
            self._extend(aging, now)
        return TICK_SECONDS

    def _extend(self, aging: dict[Slot, list[Entry]], now: float) -> None:
        sent = {slot: [(e.job_id, e.fence) for e in entries] for slot, entries in aging.items()}
        results = self.tools.queues.extend(sent)
        failures: list[IndexUnavailable] = []
        for slot, entries in aging.items():
            matched = results[slot]
            if isinstance(matched, IndexUnavailable):
                failures.append(matched)
                continue
            for entry, (_, fence), match in zip(entries, sent[slot], matched, strict=True):
                if entry.fence != fence:
                    continue  # taken again meanwhile: it runs on under another fencing token
                if match:
                    entry.kept = now if entry.fenced else LOST
                elif self.tools.inflight.get(entry.job_id) is entry:
                    # Timed out by another worker, or lost. A success still counts; a failure will not.
                    entry.kept = LOST
                    log.warning("fence_lost", job_id=entry.job_id, slot=str(slot))
        if failures:
            log.warning("not_kept_alive", slots=len(failures), error=str(failures[0]))

    def _end(self, entry: Entry, now: float) -> None:
        started = entry.started
        if entry.handler.is_async and entry.overtime(now) < CLEAN_UP_SECONDS:
            self.dispatcher.event_loop.cancel(entry)
            return
        if self.dispatcher.event_loop.unbegun(entry):
            self.tools.recycle("a coroutine blocks its event loop")
            if self.tools.inflight.settle(entry, started):
                self.finisher.give_back([entry])
            return
        runs = self.dispatcher.handler_threads.stack_of(entry) or self.dispatcher.event_loop.stack_of(entry)
        error = overran(entry.topic.max_runtime, runs)
        log.error("handler_stuck", job_id=entry.job_id, topic=entry.topic.name, stack=error.stack or None)
        self.tools.recycle("a handler ran longer than max_runtime")
        if self.tools.inflight.settle(entry, started):
            if entry.handler.overran is not None:
                entry.handler.overran(entry.job_id, error.text, error.stack)
            self.finisher.ended(entry, error)
