"""Quarantine: a task that was running when several workers in a row ended runs alone, to be judged.

When a process dies, every task that runs there is charged a crash (``crashes`` on the row), because nobody
can tell the culprit from the others. So is a task whose try another handler has broken off (``Disturbed``).
After ``limit`` crashes in a row, the worker that takes it puts it off and names it to its daemon. The daemon
(``daemon/supervisor``) starts one more worker process, without slots and with a single thread, and passes it
one such task after the other, because most suspects are innocent:

    it returns                  it is processed, as usual
    it raises, or max_runtime   a normal failed try; its crashes are forgotten
    its process dies            the task did it, if nothing else had run there: it is dead. Otherwise it runs
                                once more, first in a new process
    its daemon ends too         nobody saw the end: it runs again, each time later; after MAX_UNSEEN: dead

A run alone is charged on the row *before* it begins, with the time of the next run in case nobody sees its
end. So the count is right whatever happens, and a task that only waits is charged nothing.
"""

import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from toc.loop import Loop
from toc.model.raised import Raised
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Slot
from toc.model.verdict import Failure, has_expired, try_as_read
from toc.store.tasks.batch import Guard
from toc.worker.control import Suspect
from toc.worker.entry import NO_FENCE, Entry
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.run.dispatch import Starts
from toc.worker.settle.finish import IDLE_SECONDS, Finisher
from toc.worker.settle.moves import tell_unwritten
from toc.worker.tools import Tools

BATCH = 200
"""Most suspects that are put off together."""
PUT_OFF_MS = 5_000, 60_000
"""How long suspects are put off (ms), at random: then they are named again."""
UNSEEN_MS = 5000
"""When to run a task again if nobody saw the end of its run alone; doubled each time."""
MAX_UNSEEN = 5
"""After this many such runs a task is dead: it brings down even the daemon. The pauses between them give
crashes that another task causes minutes to end."""
ALONE = "it runs alone, since every worker that ran it died or fell silent"
"""The last error of a task while it runs alone, and if that run's end was not observed."""
BROKEN_OFF = "its run alone was broken off, or could not begin"
OVER_SECONDS = 0.05
"""How often to look whether a run alone is over."""


@dataclass(eq=False)
class Quarantine:
    """The loop that puts suspects off and names them to the daemon. The row check admits them."""

    tools: Tools
    finisher: Finisher

    def __post_init__(self) -> None:
        self._admitted: deque[Entry] = deque()
        self.loop = Loop("quarantine", self.run_once)

    def admit(self, entries: Sequence[Entry]) -> None:
        """Have these run alone."""
        self._admitted.extend(entries)
        self.loop.wake()

    def run_once(self) -> float:
        """Put off, and name, those that were admitted. Returns the seconds until the next call.

        The rows are changed too; otherwise the sweep would move the entries back at once.
        """
        entries = [self._admitted.popleft() for _ in range(min(len(self._admitted), BATCH))]
        if not entries:
            return IDLE_SECONDS
        now = self.tools.clock.now_ms()
        rows = {entry: entry.row._replace(next_time=now + random.randint(*PUT_OFF_MS)) for entry in entries}  # noqa: S311 - spreads, guards nothing
        guards = self.tools.store.fail([_change(entry.row, row) for entry, row in rows.items()])
        tell_unwritten(guards.unanswered)
        lost = [entry for entry in entries if guards.get(entry.job_id) is Guard.LOST]
        self.finisher.give_back_unread(lost)  # their rows have changed: they are checked anew
        back = [entry for entry in entries if guards.get(entry.job_id) is not Guard.LOST]
        for entry in back:
            entry.row = rows[entry]
        self.finisher.give_back(back)
        named = [_suspect(entry.row, entry.slot) for entry in back if entry.job_id in guards]
        self.tools.tell("suspects", suspects=named)
        return 0.0


@dataclass(eq=False)
class RunsAlone:
    """Runs the suspects that the daemon passes to this process, one at a time, by leases on their rows."""

    tools: Tools
    finisher: Finisher
    dispatcher: Starts
    leases: LeaseKeeper

    def __post_init__(self) -> None:
        self._passed: deque[tuple[Suspect, str]] = deque()
        self._entry: Entry | None = None
        """The task that runs, or whose end is being written."""
        self.loop = Loop("alone", self.run_once)

    def take(self, suspect: Suspect, how: str) -> None:
        """Run this task. ``how`` it ended the process in which it ran alone, if it has done so: it is
        convicted instead."""
        self._passed.append((suspect, how))
        self.loop.wake()

    def run_once(self) -> float:
        """Begin what was passed, or see whether it is over. Returns the seconds until the next call."""
        if self._entry is not None:
            if self.tools.inflight.get(self._entry.job_id) is not None or not self.finisher.idle:
                return OVER_SECONDS
            if not self._entry.started:  # paused meanwhile, or without its lease or body
                self.take_back([self._entry])
            self._entry = None  # what stands in the index is put right by the row check, when it comes due
        elif self._passed:
            suspect, how = self._passed.popleft()
            if (row := self._row(suspect)) is not None:
                self._entry = self._begin(suspect, row, how)
                return OVER_SECONDS
        else:
            return IDLE_SECONDS
        self.tools.tell("ran")
        return 0.0

    def take_back(self, running: Collection[Entry]) -> None:
        """Undo the count of the run, if it is among these, which are broken off."""
        entry = self._entry
        if entry is not None and entry in running:
            row = entry.row._replace(crashes=entry.row.crashes - 1, next_time=self.tools.clock.now_ms())
            tell_unwritten(self.tools.store.fail([_change(entry.row, row, BROKEN_OFF)]).unanswered)

    def _row(self, suspect: Suspect) -> TryRow | None:
        """Return the task's row if it is as its worker or the last run left it. Otherwise another worker
        takes the task up when the row says."""
        row = self.tools.store.read_tries([suspect.job_id]).get(suspect.job_id)
        now = self.tools.clock.now_ms()
        if row is None or row.status != TaskStatus.PENDING or _suspect(row, suspect.slot) != suspect:
            return None
        waits = row.lease > 0 or row.action_time > now or has_expired(row.expires_at, now)
        topic = self.tools.catalog.known().get(suspect.slot.topic)
        handler = self.tools.handlers.get(suspect.slot.topic)  # files may have changed under a daemon
        return None if waits or topic is None or handler is None or not handler.serves(topic) else row

    def _begin(self, suspect: Suspect, row: TryRow, how: str) -> Entry:
        """Hold the task, and begin a run, or write that it is guilty."""
        name = suspect.slot.topic
        topic, handler = self.tools.catalog.known()[name], self.tools.handlers[name]
        now, began = self.tools.clock.now_ms(), self.tools.clock.monotonic()
        entry = Entry(row.job_id, suspect.slot, NO_FENCE, topic, handler, now, began)
        self.tools.inflight.hold_if_free(entry)
        times, reason = row.crashes, ""
        if how:
            reason = f"its handler ended its process {times} times, the last time alone ({how})"
        elif times >= self.tools.max_crashes + MAX_UNSEEN and self._ran_alone(entry):
            reason = f"the workers that ran it ended {times} times in a row, also while it ran alone"
        if reason:
            entry.row = row
            if self.tools.inflight.settle(entry):
                self.finisher.ended(entry, Raised("ProcessEnded", reason, dead=True, crashed=True))
        elif self._count(entry, row):
            self.tools.tell("begun", crashes=entry.row.crashes)
            self.dispatcher.put([entry])
        else:
            self.finisher.give_back([entry])
        return entry

    def _ran_alone(self, entry: Entry) -> bool:
        """Whether its last crashes were runs alone. If not, the limit was lowered after they happened."""
        whole = self.tools.store.read_each([entry.job_id]).get(entry.job_id)
        return whole is not None and whole.last_error == ALONE

    def _count(self, entry: Entry, row: TryRow) -> bool:
        """Charge a run on the row, with the time of the next, and lease the row. Returns whether it may
        begin.

        In this order: the lease of a process that died with it ends when the run is charged.
        """
        now = self.tools.clock.now_ms()
        again = UNSEEN_MS * 2 ** min(row.crashes - self.tools.max_crashes, MAX_UNSEEN)
        counted = row._replace(crashes=row.crashes + 1, next_time=now + again)
        guards = self.tools.store.fail([_change(row, counted, ALONE)])
        tell_unwritten(guards.unanswered)
        applied = guards.get(entry.job_id) is Guard.APPLIED
        if applied:
            self.leases.take([entry])
        entry.row = counted._replace(next_time=min(row.next_time, now), lease=0)
        return applied and entry.lease.until > 0


def _suspect(row: TryRow, slot: Slot) -> Suspect:
    return Suspect(row.job_id, slot, row.version, row.attempts, row.crashes)


def _change(row: TryRow, new: TryRow, error: str | None = None) -> Failure:
    """Return the change that turns ``row``, a pending row, into ``new`` if it is still unchanged."""
    return Failure(*try_as_read(row), new.attempts, new.crashes, new.next_time, error)
