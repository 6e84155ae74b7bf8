"""The event loop that runs coroutines, each in an asyncio task that other handlers cannot cancel, and the
lines in which entries wait for it.

Entries wait only where their topic limits how many coroutines run at once (``concurrency``), and until the
event loop has seen them: a handler may block it, and what waits can be withdrawn.
"""

import asyncio
import os
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any, TypeVar

from toc.loop import PREFIX, WatchedEventLoop, dies, watched_thread
from toc.model.handler import Handler
from toc.model.lateness import Cause
from toc.model.raised import LIBRARIES, OVERRAN, Delivered, Disturbed, lines
from toc.model.topic import Slot
from toc.observe.holdups import SLOW_SECONDS
from toc.observe.log import get_logger
from toc.worker import guards
from toc.worker.entry import Crowd, Entry
from toc.worker.run import handler_calls
from toc.worker.run.bodies import Fetched
from toc.worker.run.handler_calls import NO_BODIES, HandlerCalls, Line, TaskBodies

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
CALL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""How many calls in ``asyncio.to_thread`` of one topic run at once."""


_running: ContextVar[Entry | None] = ContextVar("toc_running", default=None)
"""The entry for which a coroutine runs. Callbacks and tasks that the coroutine creates inherit it."""


class _Executor(ThreadPoolExecutor):
    """Threads for ``asyncio.to_thread``. Those of a topic are its own: its calls may never end."""

    def __init__(self, monotonic: Callable[[], float], name: str) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._monotonic = monotonic
        self.calls: dict[Future[Any], tuple[Entry, float]] = {}
        """For which entry each call that has not ended was made, and when (monotonic)."""
        self._of_topic = defaultdict[str, ThreadPoolExecutor](partial(ThreadPoolExecutor, CALL_THREADS, name))

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run ``fn`` on a thread, in a context of its own: what others have set there is not seen."""
        if (entry := _running.get()) is None:
            return super().submit(Context().run, fn, *args, **kwargs)
        call = self._of_topic[entry.topic.name].submit(Context().run, fn, *args, **kwargs)
        self.calls[call] = entry, self._monotonic()
        call.add_done_callback(self.calls.pop)
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start no more calls."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        for pool in self._of_topic.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)


@dataclass(eq=False, slots=True, kw_only=True)
class _LoopLine(Line):
    size: int
    """Most tasks of one call."""
    waiting_remotely: Callable[[], int] | None
    """``waiting_remotely`` of its handler."""
    taken: int = 0
    """Entries that were put here and have not ended."""


_refusal_logged: ContextVar[bool] = ContextVar("toc_refusal_logged", default=False)


class HandlerTask(asyncio.Task[None]):
    """Runs the handler of one entry, or of a batch that begins with it. Other handlers cannot cancel it.

    The context tells where a cancel comes from. If another handler breaks off a try nevertheless, that counts
    as a crash but uses up no try (``Disturbed``). After several of them the task runs alone, where only the
    task itself can break off its try.

    Usually the handler itself cancels it, for example by a timeout. A cancel by another handler,
    most likely in a loop over ``asyncio.all_tasks()``, is refused as if the task had ended. A
    cancel from an unknown source, such as a thread that a handler started, takes effect, but only
    after the first step: before that, nothing would report the end of the task. ``disturbed``:
    there was a cancel of either kind, so a CancelledError is not the handler's own; tasks that it
    awaits may have been cancelled.
    """

    def __init__(
        self, call: Coroutine[Any, Any, None], entry: Entry, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.entry = entry
        self.disturbed = self.begun = self.ending = False
        super().__init__(call, loop=loop, context=Context())  # what other tries have set is not seen here

    def begin(self) -> None:
        """The first step, called inside the task."""
        self.begun = True
        _running.set(self.entry)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task unless another handler calls. Returns whether it was cancelled."""
        asks = _running.get()
        if asks is self.entry:
            self.disturbed = False
            return super().cancel(msg)
        self.disturbed = self.disturbed or not self.cancelling()
        if asks is None and self.begun:
            return super().cancel(msg)
        if asks is not None and not _refusal_logged.get():  # log once: there may be thousands
            _refusal_logged.set(True)
            log.warning("cancel_refused", job_id=asks.job_id, topic=asks.topic.name)
        return False

    def end(self) -> None:
        """Cancel the task because max_runtime is over: its own failure, even if it was disturbed."""
        self.disturbed, self.ending = False, True
        super().cancel(OVERRAN.format(self.entry.topic.max_runtime))


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
        self.call_threads = f"{PREFIX}handler-call-{calls.tools.worker_id}"
        """How the threads for topics' calls are named, before "_" and a number."""
        self._executor = _Executor(self._clock.monotonic, self.call_threads)
        self._loop.set_default_executor(self._executor)
        self._thread = watched_thread(NAME, self._run, lambda: self._closed)
        self._answered = True
        """Whether the event loop has answered what ``look`` asked."""
        self._asked_at = self._answered_at = 0.0
        self._silent = 0
        """Looks in a row at which it had not."""

    def start(self) -> None:
        """Start the event loop's thread."""
        self._thread.start()

    def close(self) -> None:
        """Start nothing more. The thread ends once its step has ended; this does not wait for it."""
        if self._closed:
            return  # another stop could meet the thread's last step
        self._closed = True
        if self._thread.ident:
            self._loop.call_soon_threadsafe(self._loop.stop)
        else:  # never started
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
            soon = concurrency * line.size * (1 + handler_calls.START_WITHIN_SECONDS / line.seconds)
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
        return {topic: (line.running, len(line.waiting)) for topic, line in self.lines.items()}

    def crowd(self, topic: str) -> Crowd:
        """What keeps entries of a topic from running sooner."""
        line = self.lines[topic]
        now = self._clock.monotonic()
        until = self._answered_at if self._answered else now
        if until - self._asked_at > SLOW_SECONDS and now - until < SLOW_SECONDS:
            return Cause.EVENT_LOOP, f"it did not answer for {until - self._asked_at:.1f} s"
        crowd = line.crowd(line.most_running(), self._calls.concurrency(topic))
        if line.waiting_remotely is not None and line.running >= AHEAD // 2:
            return Cause.TARGET, f"{line.running} requests run or wait for targets"
        full = line.taken >= self._limit and line.seconds >= handler_calls.LONG_SECONDS
        if crowd[0] is Cause.CONCURRENCY or not full:
            return crowd
        return Cause.THREADS, f"{line.taken} of {self._limit} coroutines{line.took()}"

    def look(self) -> None:
        """Report a step of a coroutine that blocks the event loop: no other one runs meanwhile. One thread
        calls this once a second.

        It asks the event loop to answer. A single missed answer proves nothing: the whole process may have
        been stopped.
        """
        if not self._answered:
            self._silent += 1
            if self._silent == 2 and (culprit := self._culprit()):
                log.warning("event_loop_blocked", **culprit, do="use asyncio.to_thread")
            return
        self._silent = 0
        if any(line.taken for line in self.lines.values()):
            self._answered, self._asked_at = False, self._clock.monotonic()
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._answered_at = self._clock.monotonic()
        self._answered = True

    def _culprit(self) -> dict[str, object]:
        """Return what blocks the event loop: the stack, and the task if its own coroutine runs (not a child
        task or callback). Nothing if that may take as long as it does."""
        about: dict[str, object] = {}
        task = asyncio.current_task(self._loop)
        if isinstance(task, HandlerTask):
            if not task.entry.handler.limited:
                return {}  # a developer looks at it
            about = {"job_id": task.entry.job_id, "topic": task.entry.topic.name}
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is not None:
            passed = traceback.extract_stack(frame)
            own = list(dropwhile(lambda one: one.filename.startswith(LIBRARIES), passed))
            about["stack"] = "".join(traceback.format_list(own or passed))
        return about

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

    def unbegun(self, entry: Entry) -> bool:
        """Whether a started entry waits for the event loop, which others block."""
        task = self._tasks.get(entry.job_id)
        return task is not None and not task.begun

    def stack_of(self, entry: Entry) -> str:
        """Return the lines of code in which the coroutine of this entry is or waits. Empty if it has none."""
        task = self._tasks.get(entry.job_id)
        waits: Any = task and task.get_coro()
        if task and task is asyncio.current_task(self._loop):
            return lines([*traceback.walk_stack(sys._current_frames()[self._thread.ident or 0])][::-1])
        found = []
        while frame := getattr(waits, "cr_frame", None):
            found.append((frame, frame.f_lineno))
            waits = waits.cr_await
        return lines(found)

    def outrun(self, now: float) -> set[str]:
        """Return the topics all of whose threads run calls in ``asyncio.to_thread`` that last longer than
        max_runtime by CLEAN_UP_SECONDS, whether or not their coroutines have ended."""
        since = now - CLEAN_UP_SECONDS
        calls = [one for one in list(self._executor.calls.values()) if one[0].handler.limited]
        outrun = Counter(entry.topic.name for entry, at in calls if since - at > entry.topic.max_runtime)
        return {topic for topic, count in outrun.items() if count >= CALL_THREADS}

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
        guards.runs_here(self._loop)
        self._loop.run_forever()
        while not self._closed:
            # A handler has stopped the loop. The coroutines of other tasks run on it and must not wait.
            log.error("event_loop_stopped")
            self._calls.tools.recycle("a handler stopped the event loop")
            self._loop.run_forever()
        self._executor.shutdown(wait=False)
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
                most = (concurrency - line.running) * line.size if concurrency else len(line.waiting)
                taken = [line.waiting.popleft() for _ in range(min(most, len(line.waiting)))]
            if not taken:
                return
            plain = [entry for entry in taken if entry.row.body_length < 0]
            due = self._calls.last_look(plain, self._clock.monotonic())
            if len(due) < len(plain):
                self._done(line, len(plain) - len(due))
            for first in range(0, len(due), line.size):
                self._begin_batch(line, due[first : first + line.size], NO_BODIES)
            if len(plain) == len(taken):
                continue
            rest = [entry for entry in taken if entry.row.body_length >= 0]
            for first in range(0, len(rest), line.size):
                batch = rest[first : first + line.size]
                line.running += 1  # while its bodies are read, too
                give_up = self._calls.bodies.fetch_async(batch, partial(self._have_fetched, line, len(batch)))
                self._loop.call_later(self._calls.bodies.patience, give_up)

    def _have_fetched(self, line: _LoopLine, count: int, fetched: Fetched) -> None:
        """Have the event loop begin a batch whose bodies are here. Runs on any thread."""
        self._loop.call_soon_threadsafe(self._begin_fetched, line, count, *fetched)

    def _begin_fetched(self, line: _LoopLine, count: int, whole: list[Entry], bodies: TaskBodies) -> None:
        """Begin what is left of a batch of ``count`` entries, now that their bodies are here."""
        line.running -= 1
        due = self._calls.last_look(whole, self._clock.monotonic())  # after the reading: the last look
        if len(due) < count:
            self._done(line, count - len(due))
        if due:
            self._begin_batch(line, due, bodies)
        elif line.waiting:
            self._start_waiting(line.topic)

    def _begin_batch(self, line: _LoopLine, batch: list[Entry], bodies: TaskBodies) -> None:
        line.running += 1
        line.peak = max(line.peak, line.running)
        task = HandlerTask(self._await_batch(batch, bodies, line), batch[0], self._loop)
        for entry in batch:
            self._tasks[entry.job_id] = task

    async def _await_batch(self, batch: list[Entry], bodies: TaskBodies, line: _LoopLine) -> None:
        task = self._tasks[batch[0].job_id]
        task.begin()
        handler = batch[0].handler
        errors: dict[int, BaseException | None] = {}
        begun = self._calls.begin(batch)
        try:
            if begun and handler.batch is None:
                outcome = await handler.call(handler_calls.task_for(batch[0], bodies))
                if isinstance(outcome, Delivered):
                    batch[0].delivered = outcome
                else:
                    handler_calls.errors_of(outcome, None)
            elif begun:
                outcome = await handler.call(handler_calls.tasks_for(begun, bodies, errors))
                errors = {**handler_calls.errors_of(outcome, begun), **errors}
        except BaseException as exc:
            errors = dict.fromkeys((entry.job_id for entry in begun), exc)
        try:
            for entry in batch:
                if self._tasks.get(entry.job_id) is task:  # not if it was given back, and taken again
                    del self._tasks[entry.job_id]
            for job_id, error in errors.items() if task.disturbed else ():
                if issubclass(type(error), asyncio.CancelledError):
                    errors[job_id] = Disturbed("another handler of its process cancelled it")
            if begun:
                self._calls.returned(begun, errors)
                line.note_run(self._clock.monotonic() - begun[0].started)
            line.running -= 1
            self._done(line, len(batch))
            if line.waiting:
                self._start_waiting(batch[0].topic.name)
        except BaseException as exc:
            dies(NAME, exc)  # asyncio would only log it

    def _done(self, line: _LoopLine, count: int) -> None:
        """Count entries that have ended."""
        with self._lock:
            self._count(line, -count)
        if self._wanted:
            self._wanted.look()

    def _cancel(self, job_id: int) -> None:
        task = self._tasks.get(job_id)
        # Only once, as it may await its clean-up.
        if task and task.begun and not task.ending and task.entry.overtime(self._clock.monotonic()) > 0:
            task.end()


def _line(handler: Handler) -> _LoopLine:
    return _LoopLine(topic=handler.topic, size=handler.batch or 1, waiting_remotely=handler.waiting_remotely)
