"""Check: the row of each entry that was taken decides what becomes of it, whatever the index said.

An entry that may start goes to the dispatcher, a suspect to the quarantine, one that is not yet due by this
machine's clock to the early entries, one that has expired to the finisher, every other back to where it
belongs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, inf

from toc.model.clock import Clock
from toc.model.task import TaskStatus, TryRow
from toc.model.topic import Delivery
from toc.model.verdict import Check, check
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS, STALE, StepTimer
from toc.store.shards import Answers, Trouble
from toc.store.store import Store
from toc.store.tries import Owing
from toc.worker.quarantine import Quarantine
from toc.worker.slots import NEVER
from toc.worker.stages.dispatch import Dispatcher
from toc.worker.stages.early import EarlyEntries
from toc.worker.stages.entry import Entry, Inflight
from toc.worker.stages.finish import MAX_UNWRITTEN, Finisher
from toc.worker.stages.lease_keeper import LeaseKeeper

log = get_logger(__name__)

RETRY_MS = 500
"""Pause before rows are read again, or leases asked for again that cannot be got (ms)."""
MOST_RETRY_MS = 10_000
"""Longest such pause (ms), when a database server has been away for long."""
LUMP = 200
LUMP_MS = 500
"""Entries postponed for longer return in lumps, ``LUMP`` entries each ``LUMP_MS``. So taking and
postponing them repeatedly costs little, even if a server that is away has many due tasks."""
OWING_MS = 30
"""Pause (ms) while it is unknown whether a server is away or one of its tables is locked."""
MOST_OWED = 1000
"""Most entries that wait here for a distant server. Those that arrive while it has yet to answer are queried
together once it has."""
SOON_MS = 10
"""When to query it again (ms) if its answer is overdue."""
FORGET_UNREAD_SECONDS = 30.0
"""A failed read that comes this long after the last one counts as new trouble."""


@dataclass(kw_only=True, eq=False)
class Checker:
    """The row check. Any thread may call it; ``wake`` wakes the thread that calls ``check_again``."""

    store: Store
    clock: Clock
    inflight: Inflight
    finisher: Finisher
    dispatcher: Dispatcher
    quarantine: Quarantine
    leases: LeaseKeeper
    early: EarlyEntries
    wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._unread: deque[tuple[float, list[Entry]]] = deque()
        """Entries with a lease whose rows could not be read, or that need a lease and could not get it, with
        the time of the next try (monotonic)."""
        self._owed: list[Entry] = []
        """Entries of a distant server that wait until it has answered earlier queries."""
        self._owed_at = 0.0
        """When they may be queried (monotonic)."""
        self._unread_since = self._unread_at = float("-inf")
        """Start of the current trouble with reading rows, and time of its last failure (monotonic)."""
        self._lump_at = self._lump_left = 0
        """When the last lump of postponed entries returns (monotonic, in ms), and how many more
        entries it can hold."""
        self._leaving = threading.Event()
        self._read_step = StepTimer("read")

    def leave(self) -> None:
        """This worker leaves: entries that cannot be decided at once are left to their slot's next owner."""
        self._leaving.set()

    def check_again(self) -> None:
        """Check the entries whose retry time has come."""
        if not self._unread and not self._owed:  # the usual case
            return
        now = self.clock.monotonic()
        while self._unread and self._unread[0][0] <= now:
            self.check(self._unread.popleft()[1])
        if self._owed and self._owed_at <= now:
            self.check(self._take_owed())

    def next_again(self) -> int:
        """When ``check_again`` has something to do (ms, by the wall clock as it is now), or NEVER."""
        at = self._unread[0][0] if self._unread else inf
        if self._owed:
            at = min(at, self._owed_at)
        if at == inf:
            return NEVER
        return self.clock.now_ms() + ceil(1000 * max(at - self.clock.monotonic(), 0.0))

    def check_taken(self, entries: list[Entry]) -> None:
        """Check entries that were just taken, together with those that wait for their server."""
        # Without this, new entries would always be checked before those that wait.
        self.check(self._take_owed() + entries)

    def _take_owed(self) -> list[Entry]:
        with self._lock:
            owed, self._owed = self._owed, []
        return owed

    def check(self, entries: list[Entry]) -> None:
        """Decide about entries by their rows. Skips those whose id was taken again: the newer one decides.

        Each database server's rows are judged as they arrive. Entries of a server that has not answered are
        held until it does; a thread of the store waits for it, so nothing here waits for a server that hangs.
        """
        began = self.clock.monotonic()
        # If entries have waited for their server, the list may hold two of one id, in either order.
        by_id = {entry.job_id: entry for entry in entries if self.inflight.get(entry.job_id) is entry}
        taker = threading.get_ident()

        def take(job_ids: Sequence[int], rows: Answers[TryRow]) -> None:
            read = self.clock.monotonic() - began
            some = [by_id[job_id] for job_id in job_ids]
            if answered := len(some) - len(rows.unanswered):
                self._read_step.took(read, answered)
            if self._leaving.is_set() and threading.get_ident() != taker:
                self.finisher.give_back_unread(some)  # this worker leaves: the slot's next owner decides
            else:
                self._judge(some, rows)

        self.store.check_tries(by_id, take)

    def _judge(self, entries: Sequence[Entry], rows: Answers[TryRow]) -> None:
        now = self.clock.now_ms()
        ready: list[Entry] = []
        leased: list[Entry] = []
        soon: list[Entry] = []
        expired: list[Entry] = []
        behind: list[Entry] = []
        refused: list[tuple[Entry, TryRow | None]] = []
        for entry in entries:
            row = rows.get(entry.job_id)
            if row is None:
                if entry.job_id in rows.unanswered:
                    continue
                log.error("orphan_dropped", job_id=entry.job_id, slot=str(entry.slot))
                ORPHANS.of(entry.topic.name).add()
                refused.append((entry, None))
                continue
            if row.action_time > row.next_time:  # the row was changed directly in the table
                row = row._replace(next_time=row.action_time)
            entry.row = row
            what = check(row, now=now, taken=entry.taken)
            if what is Check.START:
                ready.append(entry)
            elif what is Check.LEASED:
                leased.append(entry)
            elif what is Check.SOON:
                soon.append(entry)
            elif what is Check.EXPIRED:
                expired.append(entry)
            elif what is Check.CLOCK_BEHIND:
                behind.append(entry)
            else:
                if row.status != TaskStatus.PENDING:
                    STALE.of(entry.topic.name).add()
                refused.append((entry, row))
        if rows.unanswered:
            self._put_away([entry for entry in entries if entry.job_id in rows.unanswered], rows.unanswered)
        if leased:
            ready += self.leases.judge(leased)
        if soon:
            self.early.put(soon)
        if expired:
            self.finisher.expire(self._written_soon(expired))
        if behind:
            log.error("clock_behind_redis", tasks=len(behind), milliseconds=behind[0].taken - now)
            # They are due by Redis's clock. They go back until the time, by that clock, at which
            # they are due by ours.
            self.finisher.give_back_until((e, e.taken + e.row.next_time - now) for e in behind)
        if refused:
            self.finisher.settle_by_row(refused)
        if ready:
            uncovered = self.leases.cover(ready)  # [rule: covered]
            if uncovered and not self._leaving.is_set():
                with self._lock:
                    waiting = [entry for entry in ready if entry.job_id in uncovered]
                    self._unread.append((self.clock.monotonic() + RETRY_MS / 1000, waiting))
                self.wake()
                ready = [entry for entry in ready if entry.job_id not in uncovered]
            self.start(ready)

    def _put_away(self, entries: Sequence[Entry], errors: Mapping[int, Trouble]) -> None:
        """Postpone entries that cannot be decided now, so that other due tasks do not wait behind them.

        The pause grows with the outage, as all due tasks of that server keep returning. When it is back, the
        sweep brings them in at once.
        """
        if self._leaving.is_set():
            self.finisher.give_back_unread(entries)
            return
        now, at = self.clock.monotonic(), self.clock.now_ms()
        if leased := [entry for entry in entries if entry.lease.possible]:
            # These are few. If the lease ran out, it would be taken for a crash.
            with self._lock:
                self._unread.append((now + RETRY_MS / 1000, leased))
            self.wake()
        free = [entry for entry in entries if not entry.lease.possible]
        rest: list[Entry] = []
        for error, group in groupby(free, lambda entry: errors[entry.job_id]):
            some = list(group)
            if not isinstance(error, Owing):
                rest += some
            elif error.seconds is None or len(self._owed) > MOST_OWED:
                self.finisher.put_away((entry, at + OWING_MS) for entry in some)
            else:
                with self._lock:
                    self._owed += some
                    self._owed_at = now + max(SOON_MS / 1000, error.seconds)
                self.wake()
        if not rest:
            return
        if now - self._unread_at > FORGET_UNREAD_SECONDS:
            self._unread_since = now
            log.warning("rows_not_read", tasks=len(rest), error=str(errors[rest[0].job_id]))
        self._unread_at = now
        wait = min(max(RETRY_MS, int(500 * (now - self._unread_since))), MOST_RETRY_MS)
        began = int(1000 * now)
        self.finisher.put_away([(entry, at + self._lumped(began + wait) - began) for entry in rest])

    def _lumped(self, at: int) -> int:
        """Return when an entry that is to return at ``at`` (monotonic, in ms) returns with its
        lump: then or a little later."""
        with self._lock:
            if at > self._lump_at:
                self._lump_at, self._lump_left = at + LUMP_MS, LUMP
            elif not self._lump_left:
                self._lump_at, self._lump_left = self._lump_at + LUMP_MS, LUMP
            self._lump_left -= 1
            return self._lump_at

    def start(self, ready: list[Entry]) -> None:
        """Dispatch entries that are due and checked. Suspects go to the quarantine."""
        if not ready:
            return
        ready = self._written_soon(ready)
        alone = [entry for entry in ready if entry.row.crashes and self._runs_alone(entry)]
        if alone:
            self.quarantine.admit(alone)
            ready = [entry for entry in ready if not self._runs_alone(entry)]
        self.dispatcher.put(ready)

    def _written_soon(self, entries: list[Entry]) -> list[Entry]:
        """Those of the entries whose server keeps up with writing. Postpones the others."""
        if self.finisher.unwritten <= MAX_UNWRITTEN or not any(map(self.finisher.behind, entries)):
            return entries
        at = self.clock.now_ms() + RETRY_MS
        self.finisher.put_away((entry, at) for entry in entries if self.finisher.behind(entry))
        return [entry for entry in entries if not self.finisher.behind(entry)]

    def _runs_alone(self, entry: Entry) -> bool:
        """Whether it is a suspect. A webhook never is: it runs nothing of the application."""
        return entry.handler.delivery is Delivery.HANDLER and self.quarantine.takes(entry.row)
