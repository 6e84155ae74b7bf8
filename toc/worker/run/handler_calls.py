"""What threads and event loop have in common: the lines in which entries wait for a handler, and what
surrounds its call.

Before it: the last look at the entries, and the tasks that the handler gets. After it: what its answer means
for each task, and the report to the finisher.
"""

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from toc.model.clock import span
from toc.model.errors import UnreadableTask
from toc.model.lateness import LATE_MS, Cause
from toc.model.raised import Raised, raised
from toc.model.task import Body, Task
from toc.model.topic import Delivery, Slot
from toc.model.verdict import has_expired
from toc.observe.log import Stack, get_logger
from toc.worker import guards
from toc.worker.entry import Crowd, Entry
from toc.worker.run.bodies import BodyReader
from toc.worker.settle.finish import Finisher
from toc.worker.take.feedback import WantedRoom
from toc.worker.tools import Tools

log = get_logger(__name__)

TaskBodies = Mapping[int, Body]
NO_BODIES: TaskBodies = {}

START_WITHIN_SECONDS = 0.1
"""How far ahead the poller takes: as many entries as can start within this time."""
FIRST_GUESS_SECONDS = 0.005
"""Assumed run time of a handler that has not run yet."""
PEAK_SECONDS = 1.0
"""For how long it counts how many ran at once. Handlers often end together: now is not enough."""
LONG_SECONDS = 0.1
"""Handlers that take longer keep their threads; with shorter ones it is the number of tasks that counts."""


@dataclass(eq=False, slots=True)
class Line:
    """The entries of one topic that wait. Its owner locks it."""

    topic: str
    waiting: deque[Entry] = field(default_factory=deque)
    running: int = 0
    """How many calls of its handler run."""
    seconds: float = FIRST_GUESS_SECONDS
    """Moving average of the time that a task takes, from a guess on. Decides; is no evidence."""
    last: float = 0.0
    """How long the last call of its handler took (seconds). 0: none has ended."""
    peak: int = 0
    """How many ran at once at the most since ``peak_since`` (monotonic), and in the time before."""
    peak_before: int = 0
    peak_since: float = 0.0

    def note_run(self, seconds: float, tasks: int = 1) -> None:
        """Add a call of the handler, with so many tasks, to the average."""
        self.last = seconds
        self.seconds += (max(seconds / tasks, 1e-5) - self.seconds) * 0.1

    def took(self) -> str:
        """Return how long the last call took, for evidence; nothing while none has ended."""
        return f", the last took {span(self.last)}" if self.last else ""

    def most_running(self) -> int:
        """Return how many ran at once a moment ago at most."""
        now = monotonic()
        if now - self.peak_since > max(PEAK_SECONDS, 2 * self.seconds):
            self.peak_before, self.peak, self.peak_since = self.peak, self.running, now
        return max(self.peak_before, self.peak)

    def crowd(self, most: int, concurrency: int) -> Crowd:
        """What keeps its entries, of which so many ran at once: the topic's concurrency (0: none), or their
        number."""
        if concurrency and most >= concurrency:
            return Cause.CONCURRENCY, f"{concurrency} at once{self.took()}"
        return Cause.BACKLOG, f"{len(self.waiting)} were taken and waited"

    def withdraw(self, slots: set[Slot] | None) -> list[Entry]:
        """Remove and return the entries of these slots (None: all)."""
        taken: list[Entry] = []
        kept: deque[Entry] = deque()
        for entry in self.waiting:
            (taken if slots is None or entry.slot in slots else kept).append(entry)
        self.waiting = kept
        return taken


@dataclass(eq=False)
class HandlerCalls:
    """Decides which entries may start, and reports how their tries ended; and what those need that run
    handlers. Thread-safe."""

    tools: Tools
    finisher: Finisher
    bodies: BodyReader
    wanted: WantedRoom
    crowd: Callable[[str], Crowd]

    def concurrency(self, topic: str) -> int:
        """How many handlers of the topic may run at once. 0: no limit."""
        known = self.tools.catalog.known().get(topic)
        return 0 if known is None else known.concurrency

    def last_look(self, batch: Sequence[Entry], started: float) -> list[Entry]:
        """The entries of one topic that are due by this machine's clock too, and may start. The others go
        back, to the poller those that are early, and those that have expired to the finisher.

        This is the last check of the clock, and of a pause, before a handler starts: none starts early by its
        worker's clock.
        """
        if batch and batch[0].topic.name in self.tools.catalog.paused:
            return self.withhold(batch)
        now = self.tools.clock.now_ms()
        due, early, expired = [], [], []
        for entry in batch:
            if entry.row.next_time > now:
                early.append(entry)
            elif has_expired(entry.row.expires_at, now) and entry.in_time(started):  # while it waited
                expired.append(entry)
            elif self.tools.inflight.start(entry, started):  # else the keeper of leases gives it back
                if now - entry.row.next_time > LATE_MS:
                    entry.crowd = self.crowd(entry.topic.name)
                due.append(entry)
        if early:
            self.tools.early.put(early)
        self.finisher.expire(expired)
        return due

    def withhold(self, batch: Sequence[Entry]) -> list[Entry]:
        """Give back entries whose topic was paused before their handler was called. Returns none."""
        self.finisher.give_back([entry for entry in batch if self.tools.inflight.settle(entry)])
        return []

    def begin(self, batch: Sequence[Entry]) -> list[Entry]:
        """The entries of a batch that waited for the event loop, whose handler is called now. Not those that
        were given back meanwhile: a coroutine may have blocked it."""
        if batch[0].topic.name in self.tools.catalog.paused:
            return self.withhold(batch)
        now = self.tools.clock.monotonic()
        return [entry for entry in batch if self.tools.inflight.call(entry, now)]

    def succeeded(self, entry: Entry) -> None:
        """Report the success of a task that was alone in its call. Does less than ``returned``, as
        this is the usual case."""
        self._check_process(entry, None)
        if self.tools.inflight.settle(entry):
            self.finisher.ended(entry, None)

    def returned(self, batch: Sequence[Entry], errors: Mapping[int, BaseException | None]) -> None:
        """Report a handler that has returned, on the thread that ran it. Exceptions become text here."""
        self._check_process(batch[0], errors.get(batch[0].job_id))
        texts: dict[int, Raised] = {}
        """By the id of the exception, which tasks of a batch may share."""
        for entry in batch:
            error = errors.get(entry.job_id)
            if error is not None and id(error) not in texts:
                texts[id(error)] = raised(error)
            if not self.tools.inflight.settle(entry):
                continue
            if error is None:
                self.finisher.ended(entry, None)
            else:
                what = texts[id(error)]
                # Not for webhooks: the stack of toc's own code tells nothing.
                if what.until is None and what.sent is None:
                    about = {"job_id": entry.job_id, "topic": entry.topic.name, "error": what.name}
                    log.debug("handler_raised", stack=Stack(error), **about)
                self.finisher.ended(entry, what)
        if any(what.until is None for what in texts.values()) and (why := guards.damage()):
            self.tools.recycle(why)

    def _check_process(self, entry: Entry, error: BaseException | None) -> None:
        """End the process if the handler has made a copy of it, or has closed its descriptors."""
        guards.end_if_copy(error)
        if entry.handler.delivery is not Delivery.WEBHOOK:  # toc's own handler closes none
            guards.check_descriptors()


def task_for(entry: Entry, bodies: TaskBodies) -> Task:
    """The task that a handler gets. Raises UnreadableTask."""
    return entry.row.to_task(entry.topic.name, bodies.get(entry.job_id))


def tasks_for(
    batch: Sequence[Entry], bodies: TaskBodies, unreadable: dict[int, BaseException | None]
) -> list[Task]:
    """The tasks that a batch handler gets. One that cannot be read fails alone: its error goes into
    ``unreadable``.

    Raises UnreadableTask if none can be read.
    """
    tasks = []
    for entry in batch:
        try:
            tasks.append(task_for(entry, bodies))
        except UnreadableTask as exc:
            unreadable[entry.job_id] = exc
            if len(unreadable) == len(batch):
                raise
    return tasks


def errors_of(outcome: Any, batch: Sequence[Entry | Task] | None) -> Mapping[int, BaseException | None]:
    """Which tasks of a batch have failed, as its handler returned it; none where ``batch`` is None: then the
    handler got one task.

    Raises TypeError if it returned an awaitable or a generator, which has yet to run, or for a batch
    anything else that it must not.
    """
    if outcome is None:
        return {}
    if inspect.isawaitable(outcome) or inspect.isgenerator(outcome):
        if inspect.iscoroutine(outcome):
            outcome.close()  # else Python warns that it was never awaited
        raise TypeError(
            "the handler returned a coroutine or generator that is never run; declare it with `async def`, "
            "and await what it calls"
        )
    if batch is None:
        return {}
    if not isinstance(outcome, Mapping) or not all(
        error is None or issubclass(type(error), BaseException) for error in outcome.values()
    ):
        raise TypeError("a batch handler must return None or a dict of job_id to an exception or None")
    if not outcome.keys() <= {entry.job_id for entry in batch}:
        raise TypeError("a batch handler returned a job_id that was not in its batch; job_ids are ints")
    return outcome
