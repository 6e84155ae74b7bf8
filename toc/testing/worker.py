"""The worker of a test: it takes tasks, and says which calls of handlers are next.

Nothing here decides what becomes of a task. Rows are read, leased, checked, written and given back by the
stages of a worker without Redis, each stepped in the test's own thread; only their threads are missing.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from toc.model.errors import UnreadableTask
from toc.model.handler import Handler
from toc.model.task import Task
from toc.sdk.client import TimeoutCenter
from toc.worker.check import Checker
from toc.worker.control import Suspect
from toc.worker.entry import NO_FENCE, ROOM, Entry
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.quarantine import Quarantine, RunsAlone
from toc.worker.run.bodies import BodyReader
from toc.worker.run.handler_calls import NO_BODIES, HandlerCalls, errors_of, task_for, tasks_for
from toc.worker.settle.finish import Finisher
from toc.worker.take.by_rows import RowTaker
from toc.worker.take.feedback import WantedRoom
from toc.worker.tools import Tools

PAGE = 500
"""Most tasks that are taken at once."""
FLUSH_SECONDS = 0.05
"""What a flush takes on the monotonic clock of the test, so that no stage waits for it."""
LOOK_SECONDS = 0.0005
"""Pause between looks whether a thread has ended its work."""


@dataclass(slots=True)
class Call:
    """A call of a handler that is due: with one task, or with the list of a batch handler."""

    handler: Handler
    argument: Task | list[Task]
    entries: list[Entry]


class Worker:
    """One life of the test's worker. What it holds when it is killed is found by its leases, as anywhere."""

    def __init__(
        self, center: TimeoutCenter, handlers: Mapping[str, Handler], died: Callable[[int, str], None]
    ) -> None:
        self._center, self._clock, self.handlers = center, center.clock, dict(handlers)
        self._waiting: deque[Entry] = deque()
        self.suspects: list[Suspect] = []
        """Tasks that may run only alone: several workers in a row ended while they ran."""
        tools = self._tools = Tools(
            store=center.store,
            queues=center.queues,
            catalog=center.catalog,
            clock=center.clock,
            worker_id="the test",
            handlers=self.handlers,
            max_crashes=center.settings.max_crashes,
            died=died,
            recycle=lambda _why: None,
            tell=lambda _kind, **named: self.suspects.extend(named.get("suspects", ())),
        )
        self._finisher = finisher = Finisher(tools)
        self._bodies = BodyReader(tools, finisher)
        self._reading = False
        """Whether the threads that read bodies have started."""
        wanted = WantedRoom(lambda _topic: 1, ())
        self._calls = HandlerCalls(tools, finisher, self._bodies, wanted, crowd=lambda _topic: ROOM)
        self._leases = LeaseKeeper(tools, finisher)
        self._alone = RunsAlone(tools, finisher, self, self._leases)
        self._quarantine = Quarantine(tools, finisher)
        self._checker = Checker(tools, finisher, self, self._quarantine, self._leases)
        self._rows = RowTaker(tools, finisher, self, self._leases, self._checker, watch=None)

    def put(self, entries: Sequence[Entry]) -> None:
        """Have these run next. The row check calls it."""
        self._waiting.extend(entries)

    @property
    def waits(self) -> bool:
        """Whether a task that was taken has yet to run."""
        return bool(self._waiting)

    def take(self) -> None:
        """Take what is due, and check it."""
        topics = self._center.catalog.known().values()
        self._tools.book.want(chain.from_iterable(topic.slots() for topic in topics))
        self._rows.look_now()
        self._rows.run_once(0)
        self._check()

    def take_alone(self, job_id: int) -> None:
        """Take this task, which is due, and check it."""
        row = self._center.store.read([job_id])[job_id]
        topic = self._center.catalog.of_type(row.biz_type)
        assert topic is not None  # noqa: S101 - it was just submitted
        now, slot = self._clock.now_ms(), topic.slot(row.slot_crc, row.slot_amount)
        handler, at = self.handlers[topic.name], self._clock.monotonic()
        entry = Entry(job_id, slot, NO_FENCE, topic, handler, now, at)
        if self._tools.inflight.hold_if_free(entry):
            self._leases.take([entry])
            self._checker.put([entry])
        self._check()

    def _check(self) -> None:
        self._checker.run_once()
        while not self._checker.settled:  # a thread looks who has the leases of others
            time.sleep(LOOK_SECONDS)
            self._checker.run_once()
        self.write()

    def room(self, topic: str) -> int:  # noqa: ARG002 - the same for each
        """How many tasks may be taken now."""
        return PAGE - len(self._waiting)

    def want_room(self, topic: str) -> None:
        """Do nothing: more are taken once these have run."""

    def calls(self) -> Iterator[Call]:
        """The calls of handlers whose tasks were taken, one after the other."""
        while self._waiting:
            first = self._waiting.popleft()
            batch = [first]
            size = first.handler.batch or 1
            while self._waiting and len(batch) < size and self._waiting[0].handler is first.handler:
                batch.append(self._waiting.popleft())
            call = self._call(batch)
            if call is not None:
                yield call
            self.write()

    def _call(self, batch: list[Entry]) -> Call | None:
        bodies = NO_BODIES
        if any(entry.row.body_length >= 0 for entry in batch):
            if not self._reading:
                self._reading = True
                for loop in self._bodies.loops:
                    loop.start()
            batch, bodies = self._bodies.fetch(batch)
        due = self._calls.last_look(batch, self._clock.monotonic())
        if not due:
            return None
        handler = due[0].handler
        unreadable: dict[int, BaseException | None] = {}
        try:
            if handler.batch is None:
                return Call(handler, task_for(due[0], bodies), due)
            tasks = tasks_for(due, bodies, unreadable)
        except UnreadableTask as exc:
            self._calls.returned(due, dict.fromkeys((entry.job_id for entry in due), exc))
            return None
        bad = [entry for entry in due if entry.job_id in unreadable]
        if bad:
            self._calls.returned(bad, unreadable)
        return Call(handler, tasks, [entry for entry in due if entry.job_id not in unreadable])

    def returned(self, call: Call, outcome: object) -> list[BaseException]:
        """Report what a handler returned. Returns the errors that it reports so."""
        try:
            errors = errors_of(outcome, None if call.handler.batch is None else call.entries)
        except TypeError as exc:
            return self.raised(call, exc)
        self._calls.returned(call.entries, errors)
        return [error for error in errors.values() if error is not None]

    def raised(self, call: Call, error: BaseException) -> list[BaseException]:
        """Report what a handler raised, and return it."""
        self._calls.returned(call.entries, dict.fromkeys((entry.job_id for entry in call.entries), error))
        return [error]

    def write(self) -> None:
        """Write what has ended, and run alone what may only run so."""
        self._flush()
        self._quarantine.run_once()
        if self.suspects:
            self._flush()  # they are let go
        while self.suspects:
            self._alone.take(self.suspects.pop(), "")
        self._alone.run_once()

    def _flush(self) -> None:
        self._clock.wait(FLUSH_SECONDS)
        for flusher in self._finisher.flushers:
            flusher.run_once()

    def close(self) -> None:
        """End its threads."""
        for loop in self._bodies.loops if self._reading else ():
            loop.stop()

    def serves(self) -> str:
        """The SQL condition that a handler serves a task and nobody has leased it."""
        served = [
            str(topic.biz_type)
            for name, topic in self._center.catalog.known().items()
            if (handler := self.handlers.get(name)) is not None and handler.serves(topic)
        ]
        return f"biz_type IN ({','.join(served)}) AND {self._center.store.leases.untaken()}"
