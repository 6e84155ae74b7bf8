"""Dispatch: from checked entries to running handlers.

Synchronous handlers run on threads, asynchronous ones on one event loop. Entries wait in one queue (line) per
topic. The threads serve the topics in turn, so a burst on one does not hold up another; ``most_threads``
limits the threads of one topic, so slow handlers do not either. ``room`` tells the poller how many more
entries of a topic it may take: only what can start soon, judged by past run times.

A topic may limit how many of its handlers run at once (``concurrency``). At most that many threads then serve
its line, and further coroutines wait as entries in a line do.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from toc.loop import end_process, watch_callbacks, watched_thread
from toc.model.body import Body
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import UnreadableTask
from toc.model.handler import Handler
from toc.model.raised import Delivered, Disturbed, Raised, raised
from toc.model.task import Task
from toc.model.topic import Delivery, Slot
from toc.model.verdict import has_expired
from toc.observe.log import Stack, get_logger
from toc.worker import copies, descriptors
from toc.worker.stages.bodies import BodyReader, Fetched
from toc.worker.stages.coroutine import HandlerTask
from toc.worker.stages.early import EarlyEntries
from toc.worker.stages.entry import Entry, Inflight
from toc.worker.stages.feedback import LetGo
from toc.worker.stages.finish import Finisher
from toc.worker.stages.loopwatch import LoopWatch, executor_gone

log = get_logger(__name__)

START_WITHIN_SECONDS = 0.1
"""How far ahead the poller takes: as many entries as the threads can start within this time."""
MAX_WAITING = 2000
"""Most entries of one topic that wait for a thread, however fast its handler is. Bounds memory."""
AHEAD = 256
"""Most entries taken of topics whose handlers mostly wait for others, beyond those that do."""
LOOK_SECONDS = 0.003
CLEAN_UP_SECONDS = 5.0
"""How long a coroutine that was cancelled because of max_runtime may clean up. After that its process is
replaced, as for a thread that does not end."""
NO_DESCRIPTORS = "a handler has left it hardly any descriptors"
FIRST_GUESS_SECONDS = 0.005
"""Assumed run time of a handler that has not run yet."""


TaskBodies = Mapping[int, Body]
NONE: TaskBodies = {}


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting entries of one topic with a synchronous handler."""

    topic: str
    waiting: deque[Entry] = field(default_factory=deque)
    running: int = 0
    threads: int = 0
    """Most threads that it may occupy, whatever other topics do. Cached: each task reads it."""
    seconds: float = FIRST_GUESS_SECONDS  # moving average of the thread time per task


@dataclass(eq=False, slots=True)
class _AsyncLine:
    """The entries of one topic whose handler is a coroutine."""

    topic: str
    size: int
    elsewhere: Callable[[], int] | None = None
    """That of its handler."""
    waiting: deque[Entry] = field(default_factory=deque)
    """Entries beyond the topic's concurrency, and each new entry until the event loop has seen it."""
    taken: int = 0
    """Entries that were put here and have not ended."""
    calls: int = 0
    """Coroutines that run. Only the event loop's thread changes it."""
    seconds: float = FIRST_GUESS_SECONDS  # moving average of the run time of one coroutine


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """Runs handlers and reports the outcome of each try to the finisher."""

    handlers: Mapping[str, Handler]
    inflight: Inflight
    finisher: Finisher
    catalog: TopicCatalog
    clock: Clock
    threads: int
    async_limit: int
    early: EarlyEntries
    let_go: LetGo
    bodies: BodyReader
    on_room: Sequence[Callable[[], None]]
    recycle: Callable[[str], None]
    coroutines: bool = False
    """Whether ``serve`` may bring coroutines although there is none at the start."""

    def __post_init__(self) -> None:
        handlers = self.handlers.values()
        self._lines = {handler.topic: _Line(handler.topic) for handler in handlers if not handler.is_async}
        self._shared = len(self._lines) > 1
        """Whether the threads serve several topics."""
        for line in self._lines.values():
            line.threads = self._concurrency(line.topic) or self.threads
        self._turns: deque[_Line] = deque()
        """Lines that have waiting entries, in the order in which they are served."""
        self._free = self.threads
        """How many more handlers may run. Negative while spare threads run handlers, see ``most_threads``."""
        self._wants_room: set[str] = set()
        self._lock = threading.Lock()
        self._idle = 0
        """Sleeping threads, without those that are about to be woken."""
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        """Each item wakes one idle thread. A Condition would need twice as many switches between threads."""
        self._closed = False
        # One spare thread for each topic that may find all of them busy. None beside a single thread: its
        # handlers must not run at the same time.
        spare = len(self._lines) - 1 if self.threads > 1 else 0
        self._threads = [
            watched_thread(f"handler-{n}", self._work, lambda: self._closed)
            for n in range(self.threads + spare if self._lines else 0)
        ]
        self._async = {
            topic: _AsyncLine(topic, handler.batch or 1, handler.elsewhere)
            for topic, handler in self.handlers.items()
            if handler.is_async
        }
        self._shared_taken = 0
        """Entries of lines whose handlers have ``elsewhere`` that have not ended."""
        self._looking = False
        """Whether room is looked for each LOOK_SECONDS."""
        self._tasks: dict[int, HandlerTask] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        if self._async or self.coroutines:
            self._loop = asyncio.new_event_loop()
            watch_callbacks(self._loop)
            self._loop.set_default_executor(copies.Executor(thread_name_prefix="asyncio"))
            thread = watched_thread("async-handlers", self._run_event_loop, lambda: self._closed)
            self._threads.append(thread)
            self._loop_watch = LoopWatch(self._loop, thread, self.clock)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Start nothing more. Threads end once their handler returns; this does not wait for them."""
        with self._lock:
            self._closed = True
            self._wake(self._idle)
        if self._loop is None:
            return
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        elif not any(thread.ident for thread in self._threads):  # never started
            self._loop.close()

    def serve(self, handler: Handler) -> bool:
        """Prepare for a handler that was not there at the start: a topic is new or has another delivery.

        Returns whether that was possible: not while entries of the topic are held for another coroutine.
        Only a coroutine may be new: threads have the lines that were made at the start.
        """
        topic = handler.topic
        with self._lock:
            if topic in self._async and self._async[topic].taken:
                return False
            others = {name: line for name, line in self._async.items() if name != topic}
            if handler.is_async:
                others[topic] = _AsyncLine(topic, handler.batch or 1, handler.elsewhere)
            self._async = others  # replaced, as other threads iterate over it
        return True

    # --- the poller's side

    def room(self, topic: str) -> int:
        """How many more entries of ``topic`` may be taken now: no more than can start soon.

        0 while the queue is more than half full: a few large batches cost less than many small ones.
        """
        coroutines = self._async.get(topic)
        if coroutines is not None:
            limit = self.async_limit
            if concurrency := self._concurrency(topic):
                soon = concurrency * coroutines.size * (1 + START_WITHIN_SECONDS / coroutines.seconds)
                limit = int(min(limit, soon))
            room = limit - coroutines.taken
            if coroutines.elsewhere is not None:
                room = min(room, coroutines.elsewhere() + AHEAD - self._shared_taken)
                limit = min(limit, 2 * AHEAD)
            return room if room >= limit // 8 else 0
        line = self._lines[topic]
        threads = self._threads_for(line)
        ahead = int(START_WITHIN_SECONDS * threads / line.seconds)
        waiting = len(line.waiting)
        if waiting > min(ahead, MAX_WAITING) // 2:
            return 0
        return max(min(max(threads - line.running, 0) + ahead, MAX_WAITING) - waiting, 0)

    def want_room(self, topic: str) -> None:
        """Wake the callers in ``on_room`` when there is room for ``topic``: at once if there is room now."""
        with self._lock:
            self._wants_room.add(topic)
        self._tell_room()
        line = self._async.get(topic)
        if self._loop is not None and line is not None and line.elsewhere is not None and self._wants_room:
            self._loop.call_soon_threadsafe(self._on_loop, self._look_for_room, False)

    def _tell_room(self) -> None:
        with self._lock:
            found = self._finds_room()
        if found:
            self._say_room()

    def _look_for_room(self, again: bool) -> None:
        """Tell of room that came although no task has ended: more wait elsewhere. Runs on the event loop."""
        assert self._loop is not None  # noqa: S101
        if self._looking and not again:
            return
        self._tell_room()
        self._looking = bool(self._wants_room)
        if self._looking:
            self._loop.call_later(LOOK_SECONDS, self._on_loop, self._look_for_room, True)

    def _say_room(self) -> None:
        for wake in self.on_room:
            wake()

    def _finds_room(self) -> bool:
        """Whether to tell the poller that there is room. It is told once. Call under the lock."""
        found = any(self.room(topic) > 0 for topic in self._wants_room)
        if found:
            self._wants_room.clear()
        return found

    def topics_changed(self) -> None:
        """Apply concurrency limits that may have changed."""
        with self._lock:
            for line in self._lines.values():
                line.threads = self._concurrency(line.topic) or self.threads
            self._wake(self._idle)
        for topic in self._async:
            self._tell_loop(topic)
        self._tell_room()

    def _concurrency(self, topic: str) -> int:
        """How many handlers of the topic may run at once. 0: no limit."""
        known = self.catalog.known().get(topic)
        return 0 if known is None else known.concurrency

    def _threads_for(self, line: _Line) -> int:
        """How many threads the topic may occupy now."""
        held = line.running
        most = most_threads(self.threads, held, self._free) if self._shared else held + self._free
        return most if most < line.threads else line.threads

    def put(self, entries: Sequence[Entry]) -> None:
        """Put entries that are due and checked into their lines."""
        coroutines = set()
        with self._lock:
            for entry in entries:
                topic = entry.topic.name
                line = self._lines.get(topic)
                if line is None or topic in self._async:
                    self._count(self._async[topic], 1)
                    # Not on the event loop, which a handler may block: what waits can be withdrawn.
                    self._async[topic].waiting.append(entry)
                    coroutines.add(topic)
                    continue
                if not line.waiting:
                    self._turns.append(line)
                line.waiting.append(entry)
            # Wake no more than may run: a thread that wakes for nothing takes the interpreter from others.
            self._wake(
                sum(
                    max(0, min(len(line.waiting), self._threads_for(line) - line.running))
                    for line in self._turns
                )
            )
        for topic in coroutines:
            self._tell_loop(topic)

    def _count(self, line: _AsyncLine, more: int) -> None:
        """Count entries that were put into a line, or have ended. Call under the lock."""
        line.taken += more
        if line.elsewhere is not None:
            self._shared_taken += more

    def load(self) -> dict[str, tuple[int, int]]:
        """For each topic, how many handlers run (a batch counts as one) and how many entries wait."""
        load = {topic: (line.running, len(line.waiting)) for topic, line in self._lines.items()}
        return load | {topic: (line.calls, len(line.waiting)) for topic, line in self._async.items()}

    def look_at_loop(self) -> None:
        """Find out whether a coroutine blocks the event loop. One thread calls this once a second."""
        if self._loop is not None:
            self._loop_watch.look(busy=any(line.taken for line in self._async.values()))

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait and have not started."""
        taken: list[Entry] = []
        with self._lock:
            lines: list[_Line | _AsyncLine] = [*self._lines.values(), *self._async.values()]
            for line in lines:
                kept: deque[Entry] = deque()
                for entry in line.waiting:
                    (taken if slots is None or entry.slot in slots else kept).append(entry)
                if isinstance(line, _AsyncLine):
                    self._count(line, len(kept) - len(line.waiting))
                line.waiting = kept
            self._turns = deque(line for line in self._lines.values() if line.waiting)
        return taken

    # --- threads

    def _wake(self, count: int) -> None:
        """Wake up to ``count`` idle threads. Call under the lock."""
        for _ in range(min(count, self._idle)):
            self._idle -= 1
            self._wake_ups.put(None)

    def _take(self, batch: list[Entry], took: float) -> list[Entry]:
        """The next entry, or the next batch of a batch handler. Empty when closed.

        ``batch`` is what the thread took before, if anything, and ``took`` the seconds per entry of it: 0 if
        nothing of it could start.
        """
        with self._lock:
            line = None
            if batch:
                line = self._lines[batch[0].topic.name]
                line.running -= 1
                if took:
                    line.seconds += (max(took, 1e-5) - line.seconds) * 0.1
                self._free += 1
            following = self._next()
            if self._idle and line is not None and line.waiting and line.running < self._threads_for(line):
                self._wake(1)  # it may have another thread, and this one serves another topic now
            has_room = bool(self._wants_room) and self._finds_room()
        if has_room:
            self._say_room()
        while following is None:
            self._wake_ups.get()
            with self._lock:
                following = self._next()
        return following

    def _next(self) -> list[Entry] | None:
        """What the thread runs next: empty when closed, None if it is to sleep. Call under the lock."""
        if self._closed:
            return []
        line = self._next_line()
        if line is None:
            self._idle += 1
            return None
        return self._first_of(line)

    def _first_of(self, line: _Line) -> list[Entry]:
        """Take the next entry or batch from a line. Call under the lock."""
        first = line.waiting.popleft()
        batch = [first]
        size = first.handler.batch
        if size is not None:
            while line.waiting and len(batch) < size:
                batch.append(line.waiting.popleft())
        if line.waiting:
            self._turns.append(line)
        self._free -= 1
        line.running += 1
        return batch

    def _next_line(self) -> _Line | None:
        """Remove from the turns, and return, the first line that may use another thread."""
        for _ in range(len(self._turns)):
            line = self._turns.popleft()
            if line.running < self._threads_for(line):
                return line
            self._turns.append(line)
        return None

    def _work(self) -> None:
        batch: list[Entry] = []
        took = 0.0
        while batch := self._take(batch, took):
            started = now = self.clock.monotonic()
            whole, bodies = batch, NONE
            for entry in batch:
                if entry.row.body_length >= 0:
                    # Before the last look: reading takes time, in which others may have taken the entry.
                    whole, bodies = self.bodies.fetch(batch)
                    now = self.clock.monotonic()
                    break
            due = self._due_now(whole, now)
            if due and due[0].handler.batch is not None:
                self._run_batch(due, bodies)
            elif due:
                self._run_one(due[0], bodies)
            took = (self.clock.monotonic() - started) / len(batch) if due else 0.0

    def _due_now(self, batch: list[Entry], started: float) -> list[Entry]:
        """The entries that are due by this machine's clock too, and may start. The others go back to the
        poller, those that have expired to the finisher.

        The last check of the clock before a handler starts: never early by its worker's clock.
        """
        now = self.clock.now_ms()
        due, early, refused, expired = [], [], [], []
        for entry in batch:
            if entry.row.next_time > now:
                early.append(entry)
            elif not self.inflight.start(entry, started):
                refused.append(entry)
            elif entry.row.expires_at and has_expired(entry.row, now):  # while it waited
                entry.started = 0.0
                expired.append(entry)
            else:
                due.append(entry)
        if early:
            self.early.put(early)
        if refused:
            self.let_go.add(refused)
        if expired:
            self.finisher.expire(expired)
        return due

    def _run_one(self, entry: Entry, bodies: TaskBodies) -> None:
        try:
            check_done(entry.handler.call(_task(entry, bodies)))
        except BaseException as exc:
            self._report([entry], {entry.job_id: exc})
        else:  # the usual case, without what only failures and batches need
            self._returned(entry, None)
            if self.inflight.settle(entry):
                self.finisher.ended(entry, None)

    def _run_batch(self, batch: list[Entry], bodies: TaskBodies) -> None:
        unreadable: dict[int, BaseException | None] = {}
        try:
            outcome = batch[0].handler.call(_tasks(batch, bodies, unreadable))
            check_done(outcome)
            errors = {**per_task(outcome, batch), **unreadable}
        except BaseException as exc:
            errors = dict.fromkeys((entry.job_id for entry in batch), exc)
        self._report(batch, errors)

    def _report(self, batch: Sequence[Entry], errors: Mapping[int, BaseException | None]) -> None:
        """Report a handler that has returned, on the thread that ran it. Exceptions become text here."""
        self._returned(batch[0], errors.get(batch[0].job_id))
        told: dict[int, Raised] = {}
        for entry in batch:
            error = errors.get(entry.job_id)
            if error is not None and id(error) not in told:
                told[id(error)] = raised(error)
            if not self.inflight.settle(entry):
                continue
            if error is None:
                self.finisher.ended(entry, None)
            else:
                what = told[id(error)]
                if what.until is None and what.sent is None:  # else the lines of code, ours, tell nothing
                    about = {"job_id": entry.job_id, "topic": entry.topic.name, "error": what.name}
                    log.debug("handler_raised", stack=Stack(error), **about)
                self.finisher.ended(entry, what)
        if any(what.until is None for what in told.values()) and descriptors.short():
            self.recycle(NO_DESCRIPTORS)

    def _returned(self, entry: Entry, error: BaseException | None) -> None:
        """End the process if the handler has made a copy of it, or has closed its descriptors."""
        copies.end_if_copy(error)
        if entry.handler.delivery is not Delivery.WEBHOOK:  # that is ours, and closes nothing
            descriptors.check()

    # --- event loop

    def _run_event_loop(self) -> None:
        assert self._loop is not None  # noqa: S101 - the thread exists only with a loop
        asyncio.set_event_loop(self._loop)
        copies.runs_here(self._loop)
        self._loop.run_forever()
        while not self._closed:
            # A handler has stopped the loop. The coroutines of other tasks run on it and must not wait.
            log.error("event_loop_stopped")
            self.recycle("a handler stopped the event loop")
            self._loop.run_forever()

    def _on_loop(self, do: Callable[[Any], None], about: Any) -> None:
        """Run ``do`` on the event loop. An error of ours ends the process: asyncio would only log it."""
        try:
            do(about)
        except BaseException as exc:
            end_process("async-handlers", exc)

    def _tell_loop(self, topic: str) -> None:
        """Have the event loop start the waiting entries of a topic that may run."""
        assert self._loop is not None  # noqa: S101 - there is one where a handler is a coroutine
        self._loop.call_soon_threadsafe(self._on_loop, self._start_waiting, topic)

    def _start_waiting(self, topic: str) -> None:
        """Start the waiting entries that may run. Runs on the event loop."""
        assert self._loop is not None  # noqa: S101
        line, concurrency = self._async[topic], self._concurrency(topic)
        while True:
            with self._lock:
                most = (concurrency - line.calls) * line.size if concurrency else len(line.waiting)
                taken = [line.waiting.popleft() for _ in range(min(most, len(line.waiting)))]
            if not taken:
                return
            plain = [entry for entry in taken if entry.row.body_length < 0]
            due = self._due_now(plain, self.clock.monotonic())
            if len(due) < len(plain):
                self._async_done(line, len(plain) - len(due))
            for first in range(0, len(due), line.size):
                line.calls += 1
                self._begin_batch(line, due[first : first + line.size], NONE)
            if len(plain) == len(taken):
                continue
            rest = [entry for entry in taken if entry.row.body_length >= 0]
            for first in range(0, len(rest), line.size):
                batch = rest[first : first + line.size]
                line.calls += 1
                give_up = self.bodies.fetch_soon(batch, partial(self._have_fetched, line, len(batch)))
                self._loop.call_later(self.bodies.patience, self._on_loop, _call, give_up)

    def _have_fetched(self, line: _AsyncLine, count: int, fetched: Fetched) -> None:
        """Have the event loop begin a batch whose bodies are here."""
        assert self._loop is not None  # noqa: S101
        self._loop.call_soon_threadsafe(self._on_loop, self._begin_fetched, (line, count, fetched))

    def _begin_fetched(self, fetched: tuple[_AsyncLine, int, Fetched]) -> None:
        """Begin what is left of a batch of ``count`` entries, now that their bodies are here."""
        line, count, (whole, bodies) = fetched
        due = self._due_now(whole, self.clock.monotonic())  # after the reading: the last look
        if len(due) < count:
            self._async_done(line, count - len(due))
        if due:
            self._begin_batch(line, due, bodies)
            return
        line.calls -= 1
        if line.waiting:
            self._start_waiting(line.topic)

    def _begin_batch(self, line: _AsyncLine, batch: list[Entry], bodies: TaskBodies) -> None:
        assert self._loop is not None  # noqa: S101
        task = HandlerTask(self._await_batch(batch, bodies, line), batch[0], self._loop)
        for entry in batch:
            self._tasks[entry.job_id] = task

    async def _await_batch(self, batch: list[Entry], bodies: TaskBodies, line: _AsyncLine) -> None:
        task = self._tasks[batch[0].job_id]
        task.begin()
        handler = batch[0].handler
        errors: dict[int, BaseException | None] = {}
        try:
            if handler.batch is None:
                outcome = await handler.call(_task(batch[0], bodies))
                if isinstance(outcome, Delivered):
                    batch[0].delivered = outcome
            else:
                outcome = await handler.call(_tasks(batch, bodies, errors))
                errors = {**per_task(outcome, batch), **errors}
        except BaseException as exc:
            errors = dict.fromkeys((entry.job_id for entry in batch), exc)
        try:
            for entry in batch:
                self._tasks.pop(entry.job_id, None)
            self._report(batch, {job_id: self._judged(error, task) for job_id, error in errors.items()})
            line.calls -= 1
            took = self.clock.monotonic() - batch[0].started
            line.seconds += (max(took, 1e-5) - line.seconds) * 0.1
            self._async_done(line, len(batch))
            if line.waiting:
                self._start_waiting(batch[0].topic.name)
        except BaseException as exc:
            end_process("async-handlers", exc)  # asyncio would only log it

    def _judged(self, error: BaseException | None, task: HandlerTask) -> BaseException | None:
        """The error to report: Disturbed if another handler caused it."""
        if task.disturbed and isinstance(error, asyncio.CancelledError):
            return Disturbed("another handler of its process cancelled it")
        if self._lacks_executor(error):
            return Disturbed("a handler of its process shut the default executor down")
        return error

    def _lacks_executor(self, error: BaseException | None) -> bool:
        """Whether the error came from a shutdown of the default executor, which cannot be undone."""
        assert self._loop is not None  # noqa: S101
        if not isinstance(error, RuntimeError) or "shutdown" not in raised(error).text:
            return False
        gone = executor_gone(self._loop)
        if gone:
            self.recycle("a handler shut the default executor down")
        return gone

    def _async_done(self, line: _AsyncLine, count: int) -> None:
        with self._lock:
            self._count(line, -count)
        if self._wants_room:
            self._tell_room()

    def cancel_async(self, entry: Entry) -> None:
        """Cancel the coroutine that runs this entry, once. Its whole batch fails with it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_loop, self._cancel_on_loop, entry.job_id)

    def _cancel_on_loop(self, job_id: int) -> None:
        task = self._tasks.get(job_id)
        if task is not None and task.begun:
            # Once, as it may await its clean-up: so it is removed under every id of its batch.
            self._tasks = {one: other for one, other in self._tasks.items() if other is not task}
            task.end()


def most_threads(threads: int, held: int, free: int) -> int:
    """How many of ``threads`` a topic may occupy that holds ``held``, while ``free`` are free.

    Three quarters of what no other topic holds: it takes one more while it holds less than three times what
    is free. So a topic alone gets three quarters, and beside k slow topics 1 in 1 + 3k stays free for new
    arrivals. The rule is that of shared-memory switches (Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998). It need not know which topics are slow.

    A topic that holds none may always take one: if none is free (``free`` is 0, or negative while others do
    so), a spare thread serves it. Of two or three threads one stays free; all share a single one.
    """
    pool = held + free if free > 0 else held  # without max and min: each task calls this
    most = pool - pool // 4
    limit = threads - (threads // 4 or 1)
    return (most if most < limit else limit) or 1


def _task(entry: Entry, bodies: TaskBodies) -> Task:
    return entry.row.to_task(entry.topic.name, bodies.get(entry.job_id))


def _tasks(
    batch: Sequence[Entry], bodies: TaskBodies, unreadable: dict[int, BaseException | None]
) -> list[Task]:
    """The tasks of a batch. A task that cannot be read fails alone: its error goes into ``unreadable``.

    Raises UnreadableTask if none can be read.
    """
    tasks = []
    for entry in batch:
        try:
            tasks.append(_task(entry, bodies))
        except UnreadableTask as exc:
            unreadable[entry.job_id] = exc
            if len(unreadable) == len(batch):
                raise
    return tasks


def _call(do: Callable[[], object]) -> None:
    do()


def check_done(outcome: Any) -> None:
    """Raise TypeError if a handler returned an awaitable or a generator, which has yet to run."""
    if outcome is not None and (inspect.isawaitable(outcome) or inspect.isgenerator(outcome)):
        if inspect.iscoroutine(outcome):
            outcome.close()  # else Python warns that it was never awaited
        raise TypeError(
            "the handler returned a coroutine or generator that is never run; declare it with `async def`"
        )


def per_task(outcome: Any, batch: Sequence[Entry | Task]) -> Mapping[int, BaseException | None]:
    """The outcome of each task as a batch handler returned it. Raises TypeError if that is malformed."""
    if outcome is None:
        return {}
    if not isinstance(outcome, Mapping) or not all(
        error is None or isinstance(error, BaseException) for error in outcome.values()
    ):
        raise TypeError("a batch handler must return None or a dict of job_id to an exception or None")
    if not outcome.keys() <= {entry.job_id for entry in batch}:
        raise TypeError("a batch handler returned a job_id that was not in its batch; job_ids are ints")
    return outcome
