"""The threads that run synchronous handlers, and the lines in which entries wait for them.

The threads serve the topics in turn, so a burst on one does not hold up another; ``most_threads`` limits the
threads of one topic, so slow handlers do not either. At most ``concurrency`` threads of a topic serve it.
"""

import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from queue import SimpleQueue
from traceback import walk_stack

from toc.loop import watched_thread
from toc.model.lateness import Cause
from toc.model.raised import lines
from toc.model.topic import Slot
from toc.worker.entry import Crowd, Entry
from toc.worker.run import handler_calls
from toc.worker.run.handler_calls import NO_BODIES, HandlerCalls, Line, TaskBodies

MAX_WAITING = 2000
"""Most entries of one topic that wait for a thread, however fast its handler is. Bounds memory."""


@dataclass(eq=False, slots=True)
class _ThreadLine(Line):
    threads: int = 0
    """Most threads that it may occupy, whatever other topics do. Cached: each task reads it."""


class HandlerThreads:
    """Runs the handlers of these topics on ``threads`` threads."""

    def __init__(self, topics: Sequence[str], threads: int, calls: HandlerCalls) -> None:
        self._size = threads
        self._calls = calls
        self._clock = calls.tools.clock
        self._wanted = calls.wanted
        self._lines = {topic: _ThreadLine(topic) for topic in topics}
        self._shared = len(self._lines) > 1
        """Whether the threads serve several topics."""
        self._turns: deque[_ThreadLine] = deque()
        """Lines that have waiting entries, in the order in which they are served."""
        self._free = threads
        """How many more handlers may run. Negative while spare threads run handlers, see ``most_threads``."""
        self._lock = threading.Lock()
        self._idle = 0
        """Sleeping threads, without those that are about to be woken."""
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        """Each item wakes one idle thread. A Condition would need twice as many switches between threads."""
        self._runs: dict[int, Sequence[Entry]] = {}
        """By thread, what it runs, or has run last."""
        self._closed = False
        self.limits_changed()
        # One spare thread for each topic that may find all of them busy. None beside a single thread: its
        # handlers must not run at the same time.
        spare = len(self._lines) - 1 if threads > 1 else 0
        self.threads = [
            watched_thread(f"handler-{n}", self._work, lambda: self._closed)
            for n in range(threads + spare if self._lines else 0)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Start nothing more. Threads end once their handler returns; this does not wait for them."""
        with self._lock:
            self._closed = True
            self._wake(self._idle)

    def limits_changed(self) -> None:
        """Apply concurrency limits that may have changed."""
        with self._lock:
            for line in self._lines.values():
                line.threads = self._calls.concurrency(line.topic) or self._size
            self._wake(self._idle)

    def room(self, topic: str) -> int:
        """How many more entries of ``topic`` can start soon, judged by past run times.

        0 while the line is more than half full: a few large batches cost less than many small ones.
        """
        line = self._lines[topic]
        threads = self._threads_for(line)
        ahead = int(handler_calls.START_WITHIN_SECONDS * threads / line.seconds)
        waiting = len(line.waiting)
        if waiting > min(ahead, MAX_WAITING) // 2:
            return 0
        return max(min(max(threads - line.running, 0) + ahead, MAX_WAITING) - waiting, 0)

    def load(self) -> dict[str, tuple[int, int]]:
        """For each topic, how many threads run its handler, and how many entries wait."""
        return {topic: (line.running, len(line.waiting)) for topic, line in self._lines.items()}

    def crowd(self, topic: str) -> Crowd:
        """What keeps entries of a topic from running sooner."""
        line = self._lines[topic]
        most = line.most_running()
        crowd = line.crowd(most, self._calls.concurrency(topic))
        longest = max(self._lines.values(), key=lambda one: one.running * one.seconds)
        has_room = most < self._threads_for(line)
        if crowd[0] is Cause.CONCURRENCY or has_room or longest.seconds < handler_calls.LONG_SECONDS:
            return crowd
        ran = max(longest.peak_before, longest.peak)
        return Cause.THREADS, f"{ran} of {self._size} ran {longest.topic}{longest.took()}"

    def stack_of(self, entry: Entry) -> str:
        """Return the lines of code in which the handler of this entry is. Empty if no thread runs it."""
        for ident, frame in sys._current_frames().items():
            if entry in self._runs.get(ident, ()):
                return lines([*walk_stack(frame)][::-1])
        return ""

    def put(self, entries: Sequence[Entry]) -> None:
        """Put entries into their lines."""
        with self._lock:
            for entry in entries:
                line = self._lines[entry.topic.name]
                if not line.waiting:
                    self._turns.append(line)
                line.waiting.append(entry)
            # Wake no more than may run: a thread that wakes for nothing takes the interpreter from others.
            for line in self._turns:
                self._wake(min(len(line.waiting), self._threads_for(line) - line.running))

    def withdraw(self, slots: set[Slot] | None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait."""
        with self._lock:
            taken = [entry for line in self._lines.values() for entry in line.withdraw(slots)]
            self._turns = deque(line for line in self._lines.values() if line.waiting)
        return taken

    # --- which thread serves which line

    def _threads_for(self, line: _ThreadLine) -> int:
        """How many threads the topic may occupy now."""
        held = line.running
        most = most_threads(self._size, held, self._free) if self._shared else held + self._free
        return most if most < line.threads else line.threads

    def _wake(self, count: int) -> None:
        """Wake up to ``count`` idle threads. Call under the lock."""
        for _ in range(min(count, self._idle)):
            self._idle -= 1
            self._wake_ups.put(None)

    def _take(self, batch: list[Entry], took: float) -> list[Entry]:
        """The next entry, or the next batch of a batch handler. Empty when closed.

        ``batch`` is what the thread took before, if anything. ``took`` is how many seconds its call
        took, 0 if none could start.
        """
        with self._lock:
            line = None
            if batch:
                line = self._lines[batch[0].topic.name]
                line.running -= 1
                if took:
                    line.note_run(took, len(batch))
                self._free += 1
            following = self._next()
            if self._idle and line is not None and line.waiting and line.running < self._threads_for(line):
                self._wake(1)  # it may have another thread, and this one serves another topic now
        if self._wanted:
            self._wanted.look()
        while following is None:
            self._wake_ups.get()
            with self._lock:
                following = self._next()
        return following

    def _next(self) -> list[Entry] | None:
        """What the thread runs next: empty when closed, None if it is to sleep. Call under the lock."""
        if self._closed:
            return []
        for _ in range(len(self._turns)):
            line = self._turns.popleft()
            if line.running < self._threads_for(line):
                break
            self._turns.append(line)
        else:
            self._idle += 1
            return None
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
        if line.running > line.peak:
            line.peak = line.running
        return batch

    # --- a thread's work

    def _work(self) -> None:
        batch: list[Entry] = []
        took, ident = 0.0, threading.get_ident()
        while batch := self._take(batch, took):
            started = now = self._clock.monotonic()
            whole, bodies = batch, NO_BODIES
            for entry in batch:
                if entry.row.body_length >= 0:
                    # Before the last look: reading takes time, in which others may have taken the entry.
                    whole, bodies = self._calls.bodies.fetch(batch)
                    now = self._clock.monotonic()
                    break
            due = self._runs[ident] = self._calls.last_look(whole, now)
            if due and due[0].handler.batch is not None:
                self._run_batch(due, bodies)
            elif due:
                self._run_one(due[0], bodies)
            took = self._clock.monotonic() - started if due else 0.0
            bodies = NO_BODIES  # they may be large, and the next task far away

    def _run_one(self, entry: Entry, bodies: TaskBodies) -> None:
        try:
            handler_calls.errors_of(
                Context().run(entry.handler.call, handler_calls.task_for(entry, bodies)), None
            )
        except BaseException as exc:
            self._calls.returned([entry], {entry.job_id: exc})
        else:
            self._calls.succeeded(entry)

    def _run_batch(self, batch: list[Entry], bodies: TaskBodies) -> None:
        unreadable: dict[int, BaseException | None] = {}
        try:
            outcome = Context().run(batch[0].handler.call, handler_calls.tasks_for(batch, bodies, unreadable))
            errors = {**handler_calls.errors_of(outcome, batch), **unreadable}
        except BaseException as exc:
            errors = dict.fromkeys((entry.job_id for entry in batch), exc)
        self._calls.returned(batch, errors)


def most_threads(threads: int, held: int, free: int) -> int:
    """How many of ``threads`` a topic may occupy that holds ``held``, while ``free`` are free.

    Three quarters of what no other topic holds: it takes one more while it holds less than three times what
    is free. So a topic alone gets three quarters, and beside k slow topics 1 in 1 + 3k stays free for new
    arrivals. The rule is that of shared-memory switches (Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998). It need not know which topics are slow.

    A topic that holds no thread may always take one: if none is free, a spare thread serves it, and
    ``free`` becomes negative. Of two or three threads, one stays free. All topics share a single
    thread.
    """
    pool = held + free if free > 0 else held  # without max and min: each task calls this
    most = pool - pool // 4
    limit = threads - (threads // 4 or 1)
    return (most if most < limit else limit) or 1
