"""Quarantine: a task that was running when several workers in a row ended runs alone, to be judged.

When a process dies, every task that runs there is charged a crash (``crashes`` on the row), because nobody
can tell the culprit from the others. So is a task whose try another handler has broken off (``Disturbed``).
After ``limit`` crashes in a row, a task runs alone in a child process (``isolated``).

    it returns                  it is processed, as usual
    it raises, or max_runtime   a normal failed try; its crashes are forgotten
    the child ends, or freezes  the task did it: it is dead
    the worker ends too         nobody saw the end: it runs again, each time later; after MAX_UNSEEN: dead

A run alone is charged on the row *before* it begins, with the time of the next run in case no outcome is
reported. So the count is right whatever happens to the worker, and a task that only waits is charged nothing.

There is one child at a time, and only a short line of tasks waits in memory. The others are put
back to a time at which their turn may come. While tasks wait, the same child runs one after the
other, because most suspects are innocent. A task counts as guilty only if it ends a child that has
run nothing before.
"""

from __future__ import annotations

import random
import threading
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from toc.loop import Loop
from toc.model.body import Body
from toc.model.clock import Clock, RateLimit
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.raised import Raised, overran
from toc.model.task import TryRow
from toc.model.topic import Slot
from toc.model.verdict import Failure, has_expired, is_suspect
from toc.observe.log import get_logger
from toc.observe.metrics import LOG_LINES_DROPPED, QUARANTINED
from toc.store.batch import Guard
from toc.store.store import Store
from toc.worker.quarantine.child import IsolatedProcess, Told
from toc.worker.silence import SILENT_SECONDS
from toc.worker.stages.bodies import BodyReader
from toc.worker.stages.early import EarlyEntries
from toc.worker.stages.entry import Entry, Inflight
from toc.worker.stages.finish import Finisher
from toc.worker.stages.handler_loop import CLEAN_UP_SECONDS
from toc.worker.stages.moves import tell_unwritten

log = get_logger(__name__)

LINE = 50
"""Most entries that wait here for their run."""
READY_SECONDS = 60.0
"""How long the child may take to load the app."""
NOT_STARTED_MS = 10_000
"""When to try again if there is no child: no memory, or the app does not load."""
UNSEEN_MS = 5000
"""When to run a task again whose worker ended while it ran alone; doubled each time."""
MAX_UNSEEN = 5
"""After this many runs alone whose end nobody observed, a task is dead: it brings down even the worker. The
pauses between these runs give crashes that another task causes minutes to end."""
ALONE = "it runs alone, since every worker that ran it died or fell silent"
"""The last error of a task while it runs alone, and if that run's end was not observed."""
BROKEN_OFF = "its worker stopped while it ran alone"
FIRST_GUESS_SECONDS = 0.1
"""Assumed time of a run before any was measured. A task that comes back too early is put back again."""
LEAST_SECONDS = 0.01
OUTLIER = 4
"""A run enters the average as at most this many times the average. Long runs are rare, and most are
those of culprits. If they counted in full, all other tasks would be put off for too long."""
SOONEST_MS = 500
"""Soonest turn (ms ahead) of a task that finds the line full."""
FARTHEST_MS = 300_000
"""Farthest turn (ms ahead) of a task that finds the line full. Beyond it, order is not kept."""
LINGER_SECONDS = 2.0
"""How long a child waits for the next task."""
CANCEL_SECONDS = 1.0
"""How long a coroutine may take to receive its cancel."""
LEAVE_SECONDS = 2.0
"""How long a child may take to end by itself."""
BUSY_LOG_SECONDS = 60.0
IDLE_SECONDS = 3600.0


@dataclass(kw_only=True, eq=False)
class Quarantine:
    """The loop that runs suspects one by one. The row check admits them; the finisher writes the outcomes."""

    app: str
    limit: int
    store: Store
    finisher: Finisher
    inflight: Inflight
    clock: Clock
    early: EarlyEntries
    bodies: BodyReader

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[Entry] = deque()
        self._running: tuple[Entry, TryRow] | None = None
        """The task that runs or is about to run, and its row before this run was counted."""
        self._counting = threading.Lock()
        self._child: IsolatedProcess | None = None
        self._idle_since = 0.0
        self._seconds = FIRST_GUESS_SECONDS  # moving average of the run time
        self._turn = 0
        """The latest turn given to a task that was put back (ms)."""
        self._tells = RateLimit(self.clock, BUSY_LOG_SECONDS)
        self._leaving = False
        self.loop = Loop("quarantine", self.run_once)

    # --- told by other threads

    def takes(self, row: TryRow) -> bool:
        """Whether a task may run only here."""
        return is_suspect(row, self.limit)

    def admit(self, entries: Sequence[Entry]) -> None:
        """Run these alone, one by one. Those that find the line full are put back until their turn."""
        now = self.clock.now_ms()
        with self._lock:
            room = 0 if self._leaving else max(0, LINE - len(self._line))
            self._line.extend(entries[:room])
            put_off = [(entry, self._next_turn(now)) for entry in entries[room:]]
        self.loop.wake()
        if not put_off:
            return
        if self._tells():
            log.warning("quarantine_full", waiting=LINE, put_off=len(put_off))
        self._put_off(put_off)

    def withdraw(self, slots: set[Slot] | None = None) -> list[Entry]:
        """Take back the entries of these slots (None: all) that wait and have not started."""
        with self._lock:
            taken = [entry for entry in self._line if slots is None or entry.slot in slots]
            self._line = deque(entry for entry in self._line if entry not in taken)
        return taken

    def leave(self) -> None:
        """Start nothing more. The running task may end, but from now on the child's death proves nothing."""
        self._leaving = True

    def abandon(self) -> list[Entry]:
        """Kill the running task and undo its count. Returns it, to be given back."""
        with self._counting:
            running = self._running
            if running is None or not self.inflight.settle(running[0]):
                return []
        with self._lock:
            child = self._child
        if child is not None:
            child.kill()
        self._take_back(*running)
        return [running[0]]

    # --- the loop

    def run_once(self) -> float:
        """Run the next suspect to its end. Returns the seconds until the next call."""
        with self._lock:
            entry = self._line.popleft() if self._line and not self._leaving else None
        began = self.clock.monotonic()
        if entry is not None:
            self._running = (entry, entry.row)
            self._run(entry, entry.row)
            self._running = None
            self._idle_since = self.clock.monotonic()
            self._seconds = smoothed(self._seconds, self._idle_since - began)
            return 0.0
        if self._child is None:
            return IDLE_SECONDS
        left = self._idle_since + LINGER_SECONDS - began
        if left > 0 and not self._leaving:
            return left
        self._end_child(LEAVE_SECONDS)
        return IDLE_SECONDS

    def _run(self, entry: Entry, row: TryRow) -> None:
        if row.crashes >= self.limit + MAX_UNSEEN and self._ran_alone(entry):
            reason = f"the workers that ran it ended {row.crashes} times in a row, also while it ran alone"
            self._report(entry, _ended_its_process(reason), "unseen")
            return
        child = self._ready_child(entry.topic.name)
        now = self.clock.now_ms()
        if child is None:
            self._put_off([(entry, now + NOT_STARTED_MS)])
        elif self._leaving:
            self.finisher.give_back([entry])
        elif row.next_time > now:
            self.early.put([entry])  # the last check of the clock: never early
        elif has_expired(row.expires_at, now):
            self.finisher.expire([entry])
        else:
            self._run_alone(entry, row, child)

    def _run_alone(self, entry: Entry, row: TryRow, child: IsolatedProcess) -> None:
        ready, bodies = self.bodies.fetch([entry])
        if ready and self._count(entry, self.clock.now_ms()):
            log.warning("task_quarantined", job_id=entry.job_id, topic=entry.topic.name, crashes=row.crashes)
            QUARANTINED.of(entry.topic.name).add()
            self._judge(entry, row, child, bodies.get(entry.job_id))

    def _judge(self, entry: Entry, before: TryRow, child: IsolatedProcess, body: Body | None) -> None:
        fresh, told, how = self._try(entry, before, child, body)
        if not fresh and how:
            # The cause may be something that earlier tasks left in that child: only a fresh one convicts.
            again = self._ready_child(entry.topic.name)
            if again is not None and not entry.settled:
                fresh, told, how = self._try(entry, before, again, body)
        if told is not None:
            self._report(entry, told.error, told.kind)
        elif not how:
            self._end_child()
            self._report(entry, overran(entry.topic.max_runtime), "overdue")
        elif fresh and not self._leaving:
            times = entry.row.crashes
            reason = f"its handler ended its process {times} times, the last time alone ({how})"
            self._report(entry, _ended_its_process(reason), how)
        elif self.inflight.settle(entry):
            self._take_back(entry, before)
            self.finisher.give_back([entry])

    def _try(
        self, entry: Entry, row: TryRow, child: IsolatedProcess, body: Body | None
    ) -> tuple[bool, Told | None, str]:
        """Run the task. Returns whether the child was fresh, its message, and how it ended without one."""
        fresh, child.fresh = child.fresh, False
        limit = entry.topic.max_runtime
        content = None if body is None else [body.content.content_type, b64encode(body.content.data).decode()]
        child.send("run", topic=entry.topic.name, row=list(row), body=content, seconds=limit)
        clean_up = CLEAN_UP_SECONDS + CANCEL_SECONDS if entry.handler.is_async else 0.0
        told = child.hear(limit + clean_up, SILENT_SECONDS)
        how = ""
        if told is not None:
            LOG_LINES_DROPPED.of().add(told.dropped)
        elif child.silent:
            how = f"it held the interpreter for {SILENT_SECONDS:.0f} s"
            self._end_child()
        elif child.dead:
            how = self._end_child()
        return fresh, told, how

    def _report(self, entry: Entry, error: Raised | None, outcome: str) -> None:
        if self.inflight.settle(entry):  # false if it was abandoned meanwhile
            log.info("quarantine_ended", job_id=entry.job_id, topic=entry.topic.name, outcome=outcome)
            self.finisher.ended(entry, error)

    # --- the child

    def _ready_child(self, topic: str) -> IsolatedProcess | None:
        """Return a child that has loaded the app, the current or a new one. None if there can be none now."""
        if self._child is not None and not self._child.dead:
            return self._child
        self._end_child()
        try:
            child = IsolatedProcess(self.app)
        except OSError as exc:  # no memory, no more processes
            log.warning("quarantine_not_started", error=str(exc))
            return None
        with self._lock:
            self._child = child
        told = child.hear(READY_SECONDS)
        if told is not None and topic in told.topics:
            return child
        log.warning("quarantine_not_started", error=f"the app was not loaded ({self._end_child()})")
        return None

    def _end_child(self, seconds: float = 0.0) -> str:
        with self._lock:
            child, self._child = self._child, None
        return child.end(seconds) if child is not None else ""

    # --- rows

    def _ran_alone(self, entry: Entry) -> bool:
        """Whether its last crashes were runs alone. If not, the limit was lowered after they happened."""
        try:
            whole = self.store.get(entry.job_id)
        except (StoreUnavailable, SchemaBehind):
            return False
        return whole is not None and whole.last_error == ALONE

    def _count(self, entry: Entry, now: int) -> bool:
        """Charge a run alone on the row, with the time of the next in case no outcome comes.

        False if that was not written; the entry has then been dealt with.
        """
        row = entry.row
        again = UNSEEN_MS * 2 ** min(row.crashes - self.limit, MAX_UNSEEN)
        counted = row._replace(crashes=row.crashes + 1, next_time=now + again)
        with self._counting:
            if entry.settled:
                return False  # abandoned meanwhile
            guards = self.store.charge_runs([_change(row, counted, ALONE)])
            if guards.get(entry.job_id) is Guard.APPLIED:
                entry.row = counted
                return True
        if guards.unanswered:
            tell_unwritten(guards.unanswered)
            self._put_off([(entry, now + NOT_STARTED_MS)])
        else:
            self._by_row([entry])
        return False

    def _take_back(self, entry: Entry, before: TryRow) -> None:
        """Undo the count of a run that we broke off."""
        if entry.row is before:
            return
        guards = self.store.fail([_change(entry.row, before, BROKEN_OFF)])
        tell_unwritten(guards.unanswered)
        entry.row = before

    def _put_off(self, times: Sequence[tuple[Entry, int]]) -> None:
        """Put entries back to these times (ms), charging nothing.

        The rows are changed too; otherwise the sweep would move the entries back at once.
        """
        changed = {entry.job_id: entry.row._replace(next_time=at) for entry, at in times}
        guards = self.store.fail([_change(entry.row, changed[entry.job_id]) for entry, _ in times])
        tell_unwritten(guards.unanswered)
        lost = [entry for entry, _ in times if guards.get(entry.job_id) is Guard.LOST]
        back = [entry for entry, _ in times if guards.get(entry.job_id) is not Guard.LOST]
        for entry in back:
            entry.row = changed[entry.job_id]
        self.finisher.give_back(back)
        if lost:
            self._by_row(lost)

    def _by_row(self, entries: list[Entry]) -> None:
        """Settle entries that did not run because somebody else has changed their rows; the new
        rows decide."""
        rows = self.store.read_tries([entry.job_id for entry in entries])
        self.finisher.give_back_unread(entry for entry in entries if entry.job_id in rows.unanswered)
        self.finisher.settle_by_row(
            (entry, rows.get(entry.job_id)) for entry in entries if entry.job_id not in rows.unanswered
        )

    def _next_turn(self, now: int) -> int:
        """Return when the next task that finds the line full may have its turn (ms)."""
        each = max(1, int(self._seconds * 1000))
        turn = max(self._turn + each, now + each * (len(self._line) + 1), now + SOONEST_MS)
        if turn - now > FARTHEST_MS:
            return now + random.randint(FARTHEST_MS // 2, FARTHEST_MS)  # noqa: S311 - spreads, guards nothing
        self._turn = turn
        return turn


def smoothed(average: float, seconds: float) -> float:
    """Return the moving average of run times after a run of ``seconds``."""
    return average + (min(seconds, OUTLIER * max(average, LEAST_SECONDS)) - average) * 0.1


def _change(row: TryRow, new: TryRow, error: str | None = None) -> Failure:
    """Return the change that turns ``row``, a pending row, into ``new`` if it is still unchanged."""
    return Failure.of(row, attempts=new.attempts, crashes=new.crashes, next_time=new.next_time, error=error)


def _ended_its_process(reason: str) -> Raised:
    return Raised("ProcessEnded", reason, dead=True, crashed=True)
