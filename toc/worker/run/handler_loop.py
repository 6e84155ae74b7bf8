"""The event loop that runs coroutines, and the lines in which entries wait for it.

Entries wait only where their topic limits how many coroutines run at once (``concurrency``), and until the
event loop has seen them: a handler may block it, and what waits can be withdrawn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from toc.loop import WatchedEventLoop, dies, watched_thread
from toc.model.handler import Handler
from toc.model.lateness import Cause
from toc.model.raised import Delivered, Disturbed
from toc.model.topic import Slot
from toc.observe.log import get_logger
from toc.worker.entry import Crowd, Entry
from toc.worker.guards import copies
from toc.worker.guards.loopwatch import LoopWatch
from toc.worker.run.bodies import Fetched
from toc.worker.run.coroutine import HandlerTask
from toc.worker.run.handler_calls import (
    NO_BODIES,
    HandlerCalls,
    TaskBodies,
    check_done,
    per_task,
    task_for,
    tasks_for,
)
from toc.worker.run.line import LONG_SECONDS, START_WITHIN_SECONDS, Line

log = get_logger(__name__)

R = TypeVar("R")

NAME = "async-handlers"
AHEAD = 256
"""Most entries taken ahead for handlers with ``waiting_remotely``, beyond the tasks that wait for other
servers."""
LOOK_SECONDS = 0.003
"""How often to check whether more tasks wait for other servers, which makes room although no task
has ended."""
CLEAN_UP_SECONDS = 5.0
"""How long a coroutine that was cancelled because of max_runtime may clean up. After that its process is
replaced, as for a thread that does not end."""


class _Executor(ThreadPoolExecutor):
    """Threads for ``asyncio.to_thread``."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run ``fn`` on a thread, in a context of its own: what others have set there is not seen."""
        return super().submit(Context().run, fn, *args, **kwargs)


@dataclass(eq=False, slots=True, kw_only=True)
class _LoopLine(Line):
    size: int
    """Most tasks of one call."""
    waiting_remotely: Callable[[], int] | None
    """``waiting_remotely`` of its handler."""
    taken: int = 0
    """Entries that were put here and have not ended."""
    calls: int = 0
    """Coroutines that run. Only the event loop's thread changes it."""


class HandlerLoop:
    """Runs the coroutines of these handlers, for at most ``limit`` tasks of a topic."""

    def __init__(self, handlers: Iterable[Handler], limit: int, calls: HandlerCalls) -> None:
        self._limit = limit
        self._calls = calls
        self._clock = calls.tools.clock
        self._wanted = calls.wanted
        self.lines = {handler.topic: _line(handler) for handler in handlers}
        """By topic. Replaced, never changed in place: other threads iterate over it."""
        self._shared_taken = 0
        """Entries of lines whose handlers have ``waiting_remotely`` that have not ended."""
        self._looking = False
        """Whether room is looked for each LOOK_SECONDS."""
        self._tasks: dict[int, HandlerTask] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._loop = WatchedEventLoop()
        self._loop.set_default_executor(_Executor(thread_name_prefix="asyncio"))
        self._thread = watched_thread(NAME, self._run, lambda: self._closed)
        self._watch = LoopWatch(self._loop, self._thread)

    def start(self) -> None:
        """Start the event loop's thread."""
        self._thread.start()

    def close(self) -> None:
        """Start nothing more. The thread ends once its step has ended; this does not wait for it."""
        if self._closed:
            return  # another stop could meet the thread's last step
        self._closed = True
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        elif not self._thread.ident:  # never started
            self._loop.close()

    def serve(self, handler: Handler) -> None:
        """Take, replace or give up the handler of a topic, of which no entry may be held here."""
        with self._lock:
            others = {topic: line for topic, line in self.lines.items() if topic != handler.topic}
            self.lines = others | ({handler.topic: _line(handler)} if handler.is_async else {})

    def limits_changed(self) -> None:
        """Apply concurrency limits that may have changed."""
        for topic in self.lines:
            self._tell(topic)

    def room(self, topic: str) -> int:
        """How many more entries of ``topic`` can start soon: 0 until they are an eighth of the limit."""
        line = self.lines[topic]
        limit = self._limit
        if concurrency := self._calls.concurrency(topic):
            soon = concurrency * line.size * (1 + START_WITHIN_SECONDS / line.seconds)
            limit = int(min(limit, soon))
        room = limit - line.taken
        if line.waiting_remotely is not None:
            room = min(room, line.waiting_remotely() + AHEAD - self._shared_taken)
            limit = min(limit, 2 * AHEAD)
        return room if room >= limit // 8 else 0

    def look_for_room(self, topic: str) -> None:
        """If the topic's handler has ``waiting_remotely``, check every LOOK_SECONDS whether there is room
        by now, because more tasks wait for other servers."""
        line = self.lines.get(topic)
        if line is not None and line.waiting_remotely is not None and self._wanted:
            self._loop.call_soon_threadsafe(self._look_for_room, False)

    def load(self) -> dict[str, tuple[int, int]]:
        """For each topic, how many coroutines run (a batch counts as one) and how many entries wait."""
        return {topic: (line.calls, len(line.waiting)) for topic, line in self.lines.items()}

    def crowd(self, topic: str, concurrency: int) -> Crowd:
        """What keeps entries of a topic from running sooner."""
        line = self.lines[topic]
        crowd = line.crowd(line.most_running(line.calls), concurrency)
        if line.waiting_remotely is not None and line.calls >= AHEAD // 2:
            return Cause.TARGET, f"{line.calls} requests run or wait for targets"
        if crowd[0] is Cause.CONCURRENCY or line.taken < self._limit or line.seconds < LONG_SECONDS:
            return crowd
        return Cause.THREADS, f"{line.taken} of {self._limit} coroutines, {line.seconds:.2g} s each"

    def look(self) -> None:
        """Find out whether a coroutine blocks the event loop. One thread calls this once a second."""
        self._watch.look(busy=any(line.taken for line in self.lines.values()))

    def put(self, entries: Sequence[Entry]) -> list[Entry]:
        """Put entries into the lines of their topics. Returns those whose topic has none."""
        others: list[Entry] = []
        topics = set()
        with self._lock:
            for entry in entries:
                line = self.lines.get(entry.topic.name)
                if line is None:
                    others.append(entry)
                    continue
                self._count(line, 1)
                line.waiting.append(entry)
                topics.add(line.topic)
        for topic in topics:
            self._tell(topic)
        return others

    def withdraw(self, slots: set[Slot] | None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait."""
        taken: list[Entry] = []
        with self._lock:
            for line in self.lines.values():
                some = line.withdraw(slots)
                self._count(line, -len(some))
                taken += some
        return taken

    def cancel(self, entry: Entry) -> None:
        """Cancel the coroutine that runs this entry, once. Its whole batch fails with it."""
        self._loop.call_soon_threadsafe(self._cancel, entry.job_id)

    def _count(self, line: _LoopLine, more: int) -> None:
        """Count entries that were put into a line, or have ended. Call under the lock."""
        line.taken += more
        if line.waiting_remotely is not None:
            self._shared_taken += more

    def _tell(self, topic: str) -> None:
        """Have the event loop start the waiting entries of a topic that may run."""
        self._loop.call_soon_threadsafe(self._start_waiting, topic)

    # --- on the event loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        copies.runs_here(self._loop)
        self._loop.run_forever()
        while not self._closed:
            # A handler has stopped the loop. The coroutines of other tasks run on it and must not wait.
            log.error("event_loop_stopped")
            self._calls.recycle("a handler stopped the event loop")
            self._loop.run_forever()
        if not asyncio.all_tasks(self._loop):  # else they were given up, perhaps while they clean up
            self._loop.close()

    def _look_for_room(self, again: bool) -> None:
        if self._looking and not again:
            return
        self._wanted.look()
        self._looking = bool(self._wanted)
        if self._looking:
            self._loop.call_later(LOOK_SECONDS, self._look_for_room, True)

    def _start_waiting(self, topic: str) -> None:
        """Start the waiting entries that may run."""
        line, concurrency = self.lines.get(topic), self._calls.concurrency(topic)
        if line is None:
            return  # the topic was given up meanwhile, so nothing of it waits
        while True:
            with self._lock:
                most = (concurrency - line.calls) * line.size if concurrency else len(line.waiting)
                taken = [line.waiting.popleft() for _ in range(min(most, len(line.waiting)))]
            if not taken:
                return
            plain = [entry for entry in taken if entry.row.body_length < 0]
            due = self._calls.last_look(plain, self._clock.monotonic())
            if len(due) < len(plain):
                self._done(line, len(plain) - len(due))
            for first in range(0, len(due), line.size):
                line.calls += 1
                line.peak = max(line.peak, line.calls)
                self._begin_batch(line, due[first : first + line.size], NO_BODIES)
            if len(plain) == len(taken):
                continue
            rest = [entry for entry in taken if entry.row.body_length >= 0]
            for first in range(0, len(rest), line.size):
                batch = rest[first : first + line.size]
                line.calls += 1
                line.peak = max(line.peak, line.calls)
                give_up = self._calls.bodies.fetch_async(batch, partial(self._have_fetched, line, len(batch)))
                self._loop.call_later(self._calls.bodies.patience, give_up)

    def _have_fetched(self, line: _LoopLine, count: int, fetched: Fetched) -> None:
        """Have the event loop begin a batch whose bodies are here. Runs on any thread."""
        self._loop.call_soon_threadsafe(self._begin_fetched, line, count, *fetched)

    def _begin_fetched(self, line: _LoopLine, count: int, whole: list[Entry], bodies: TaskBodies) -> None:
        """Begin what is left of a batch of ``count`` entries, now that their bodies are here."""
        due = self._calls.last_look(whole, self._clock.monotonic())  # after the reading: the last look
        if len(due) < count:
            self._done(line, count - len(due))
        if due:
            self._begin_batch(line, due, bodies)
            return
        line.calls -= 1
        if line.waiting:
            self._start_waiting(line.topic)

    def _begin_batch(self, line: _LoopLine, batch: list[Entry], bodies: TaskBodies) -> None:
        task = HandlerTask(self._await_batch(batch, bodies, line), batch[0], self._loop)
        for entry in batch:
            self._tasks[entry.job_id] = task

    async def _await_batch(self, batch: list[Entry], bodies: TaskBodies, line: _LoopLine) -> None:
        task = self._tasks[batch[0].job_id]
        task.begin()
        handler = batch[0].handler
        errors: dict[int, BaseException | None] = {}
        try:
            if handler.batch is None:
                outcome = await handler.call(task_for(batch[0], bodies))
                if isinstance(outcome, Delivered):
                    batch[0].delivered = outcome
                else:
                    check_done(outcome)
            else:
                outcome = await handler.call(tasks_for(batch, bodies, errors))
                errors = {**per_task(outcome, batch), **errors}
        except BaseException as exc:
            errors = dict.fromkeys((entry.job_id for entry in batch), exc)
        try:
            for entry in batch:
                self._tasks.pop(entry.job_id, None)
            self._calls.returned(
                batch, {job_id: self._judged(error, task) for job_id, error in errors.items()}
            )
            line.calls -= 1
            line.note_run(self._clock.monotonic() - batch[0].started)
            self._done(line, len(batch))
            if line.waiting:
                self._start_waiting(batch[0].topic.name)
        except BaseException as exc:
            dies(NAME, exc)  # asyncio would only log it

    def _judged(self, error: BaseException | None, task: HandlerTask) -> BaseException | None:
        """The error to report: Disturbed if another handler caused it."""
        if task.disturbed and issubclass(type(error), asyncio.CancelledError):
            return Disturbed("another handler of its process cancelled it")
        return error

    def _done(self, line: _LoopLine, count: int) -> None:
        """Count entries that have ended."""
        with self._lock:
            self._count(line, -count)
        if self._wanted:
            self._wanted.look()

    def _cancel(self, job_id: int) -> None:
        task = self._tasks.get(job_id)
        if task is not None and task.begun:
            # Cancel it only once, as it may await its clean-up: so forget it under every id of its
            # batch.
            self._tasks = {one: other for one, other in self._tasks.items() if other is not task}
            task.end()


def _line(handler: Handler) -> _LoopLine:
    return _LoopLine(topic=handler.topic, size=handler.batch or 1, waiting_remotely=handler.waiting_remotely)
