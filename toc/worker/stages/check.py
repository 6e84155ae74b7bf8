"""Check: the row of each entry that was taken says what becomes of it, whatever the index said.

What may start goes on to the dispatcher, suspects to the quarantine, what is not due yet here to the early
entries, everything else back to where it belongs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from toc.model.clock import Clock
from toc.model.task import TaskStatus, TryRow
from toc.model.verdict import Check, check
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS, STALE, StepTimer
from toc.store.batch import Owing
from toc.store.shards import Answers, Trouble
from toc.store.store import Store
from toc.worker.loop import end_process
from toc.worker.quarantine.quarantine import Quarantine
from toc.worker.stages.dispatch import Dispatcher
from toc.worker.stages.early import EarlyEntries
from toc.worker.stages.entry import Entry
from toc.worker.stages.finish import Finisher
from toc.worker.stages.lease_keeper import LeaseKeeper

log = get_logger(__name__)

RETRY_MS = 500
"""Pause before rows are read again, and before more is taken where nothing gets a lease."""
MOST_RETRY_MS = 10_000
"""The longest such pause, when a database server has been away for long."""
LUMP = 200
LUMP_MS = 500
"""What is put away for longer comes back in lumps, so many entries in so much time: however many are due that
belong to a server that is away, taking them and putting them away again costs little."""
OWING_MS = 30
"""The pause while it is not yet known whether a server is away or some table of it locked."""
MOST_OWED = 1000
"""How many entries may wait here for a server that is far away: those that come while it has yet to answer
are asked about together, once it has."""
SOON_MS = 10
"""When to ask it again if it has not answered when it should have."""
FORGET_UNREAD_SECONDS = 30.0
"""How long after rows could not be read last the next such trouble is another one."""


class Checker:
    """The row check. Any thread may ask for it; ``wake`` wakes who calls ``check_again``."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        finisher: Finisher,
        dispatcher: Dispatcher,
        quarantine: Quarantine,
        leases: LeaseKeeper,
        early: EarlyEntries,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._finisher = finisher
        self._dispatcher = dispatcher
        self._quarantine = quarantine
        self._leases = leases
        self._early = early
        self._wake = wake
        self._lock = threading.Lock()
        self._unread: deque[tuple[int, list[Entry]]] = deque()
        """Entries that have a lease and whose rows could not be read, with the time to try again."""
        self._owed: list[Entry] = []
        """Entries for whose rows a server that is far away is to be asked once it has answered to others."""
        self._owed_at = 0
        """When that may be, in milliseconds."""
        self._unread_since = self._unread_at = float("-inf")
        """Since when rows cannot be read, and when that was so last."""
        self._lump_at = self._lump_left = 0
        """When the last lump comes of what was put away, and how many entries may still come with it."""
        self._leaving = threading.Event()
        self._read_step = StepTimer("read")

    def leave(self) -> None:
        """This worker leaves: what cannot be decided at once is for whoever has its slot next."""
        self._leaving.set()

    def check_again(self, now: int) -> None:
        """Check what could not be read before and is to be tried again by now (ms)."""
        while self._unread and self._unread[0][0] <= now:
            self.check(self._unread.popleft()[1])
        if self._owed and self._owed_at <= now:
            self.check(self._no_more_owed())

    def next_again(self) -> int | None:
        """When ``check_again`` has something to do (ms); None: never."""
        times = [self._unread[0][0]] if self._unread else []
        if self._owed:
            times.append(self._owed_at)
        return min(times, default=None)

    def check_taken(self, entries: list[Entry]) -> None:
        """Decide about entries that were just taken, and with them about those that wait for their server."""
        self.check(self._no_more_owed() + entries)  # else these would overtake them, again and again

    def _no_more_owed(self) -> list[Entry]:
        with self._lock:
            owed, self._owed = self._owed, []
        return owed

    def check(self, entries: list[Entry]) -> None:
        """Decide about entries by their rows.

        Each database server's rows are judged as they come. What a server has yet to tell is held until it
        does, which another thread sees to: nothing here waits for a server that hangs.
        """
        began = self._clock.monotonic()
        by_id = {entry.job_id: entry for entry in entries}
        taker = threading.get_ident()

        def take(job_ids: Sequence[int], rows: Answers[TryRow]) -> None:
            read = self._clock.monotonic() - began
            some = [by_id[job_id] for job_id in job_ids]
            if threading.get_ident() == taker:
                self._judge(some, rows)
                self._read_step.took(read, len(some))
                return
            try:
                if not self._leaving.is_set():
                    self._judge(some, rows)
                else:  # this worker leaves: whoever has the slot next decides
                    self._finisher.give_back_unread(some)
            except BaseException as exc:  # the thread is the store's, which would not tell
                end_process("poll", exc)

        self._store.check_tries(by_id, take)

    def _judge(self, entries: Sequence[Entry], rows: Answers[TryRow]) -> None:
        now = self._clock.now_ms()
        checked: dict[Check, list[Entry]] = {what: [] for what in Check}
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
            if row.action_time > row.next_time:  # somebody has moved it in the table itself
                row = row._replace(next_time=row.action_time)
            entry.row = row
            entry.checked = True
            what = check(row, now=now, taken=entry.taken)
            if what is Check.ELSEWHERE:
                if row.status != TaskStatus.PENDING:
                    STALE.of(entry.topic.name).add()
                refused.append((entry, row))
            else:
                checked[what].append(entry)
        if rows.unanswered:
            self._put_away([entry for entry in entries if entry.job_id in rows.unanswered], rows.unanswered)
        ready = checked[Check.START]
        if leased := checked[Check.LEASED]:
            ready += self._leases.judge(leased)
        if soon := checked[Check.SOON]:
            self._early.put(soon)
        if behind := checked[Check.CLOCK_BEHIND]:
            log.error("clock_behind_redis", tasks=len(behind), milliseconds=behind[0].taken - now)
            self._finisher.give_back_later(behind, now)
        if refused:
            self._finisher.settle_by_row(refused)
        if ready:
            if not self._leases.cover(ready):  # [rule: covered]
                self._leaving.wait(RETRY_MS / 1000)
            self.start(ready)

    def _put_away(self, entries: Sequence[Entry], errors: Mapping[int, Trouble]) -> None:
        """Give back, for a while, what cannot be decided now: others that are due must not wait behind it.

        The longer a server is away, the longer: all of what is due there comes by again and again. When it is
        back the sweep brings it at once.
        """
        if self._leaving.is_set():
            self._finisher.give_back_unread(entries)
            return
        now, at = self._clock.monotonic(), self._clock.now_ms()
        if leased := [entry for entry in entries if entry.leased]:
            # These are few, and a lease that is left to run out would tell of a crash.
            with self._lock:
                self._unread.append((at + RETRY_MS, leased))
            self._wake()
        free = [entry for entry in entries if not entry.leased]
        rest: list[Entry] = []
        for error, group in groupby(free, lambda entry: errors[entry.job_id]):
            some = list(group)
            if not isinstance(error, Owing):
                rest += some
            elif error.seconds is None or len(self._owed) > MOST_OWED:
                self._finisher.put_away((entry, at + OWING_MS) for entry in some)
            else:
                with self._lock:
                    self._owed += some
                    self._owed_at = at + max(SOON_MS, int(error.seconds * 1000))
                self._wake()
        if not rest:
            return
        if now - self._unread_at > FORGET_UNREAD_SECONDS:
            self._unread_since = now
            log.warning("rows_not_read", tasks=len(rest), error=str(errors[rest[0].job_id]))
        self._unread_at = now
        wait = min(max(RETRY_MS, int(500 * (now - self._unread_since))), MOST_RETRY_MS)
        self._finisher.put_away([(entry, self._lumped(at + wait)) for entry in rest])

    def _lumped(self, at: int) -> int:
        """When an entry comes back that would at ``at``, or somewhat later, with others."""
        with self._lock:
            if at > self._lump_at:
                self._lump_at, self._lump_left = at + LUMP_MS, LUMP
            elif not self._lump_left:
                self._lump_at, self._lump_left = self._lump_at + LUMP_MS, LUMP
            self._lump_left -= 1
            return self._lump_at

    def start(self, ready: list[Entry]) -> None:
        """Hand over entries that are due and checked; suspects run alone."""
        if not ready:
            return
        if any(map(self._finisher.behind, ready)):
            at = self._clock.now_ms() + RETRY_MS
            self._finisher.put_away((entry, at) for entry in ready if self._finisher.behind(entry))
            ready = [entry for entry in ready if not self._finisher.behind(entry)]
        alone = [entry for entry in ready if self._quarantine.takes(entry.row)]
        if alone:
            self._quarantine.admit(alone)
            ready = [entry for entry in ready if not self._quarantine.takes(entry.row)]
        self._dispatcher.put(ready)
