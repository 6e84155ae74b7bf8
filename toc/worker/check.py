"""Check: the row of each entry that was taken decides what becomes of it, whatever the index said.

An entry that may start goes to the dispatcher, a suspect to the quarantine, one that is not yet due by this
machine's clock to the early entries, one that has expired to the finisher, every other back to where it
belongs.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from toc.model.clock import MAX_CLOCK_SKEW_MS, RateLimit
from toc.model.lateness import LATE_MS, Cause
from toc.model.task import TryRow
from toc.model.verdict import Check, check, is_suspect
from toc.observe.log import get_logger
from toc.observe.metrics import ORPHANS, STEP
from toc.store.servers.shards import Answers, Trouble
from toc.worker.entry import Entry
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.quarantine import Quarantine
from toc.worker.run.dispatch import Starts
from toc.worker.settle.finish import MAX_UNWRITTEN, Finisher
from toc.worker.tools import Tools

log = get_logger(__name__)
BEHIND_SECONDS = 10.0
"""Seconds between two lines that this clock is behind Redis's while tasks start late by it."""

RETRY_MS = 500
"""Pause before rows are read again, or leases asked for again that cannot be got (ms)."""
MAX_RETRY_MS = 10_000
"""Longest such pause (ms), when a database server has been away for long."""
LUMP_MS = 500
"""Entries postponed return together, at the next multiple of this. So taking and postponing them repeatedly
costs little, even if a server that is away has many due tasks."""
RETURNS_A_SECOND = 1000
"""How many tasks of a server that is away return in a second, within the longest pause: a crowd that returned
at once, again and again, would hold up others of its slots."""
FORGET_UNREAD_SECONDS = 30.0
"""A failed read that comes this long after the last one counts as new trouble."""


@dataclass(eq=False)
class Checker:
    """The row check. Any thread may call ``check``; the poller's does all else, in ``run_once``."""

    tools: Tools
    finisher: Finisher
    dispatcher: Starts
    quarantine: Quarantine
    leases: LeaseKeeper

    def __post_init__(self) -> None:
        self.reader = self.tools.store.tries_reader(self.tools.wake)
        self._unchecked: deque[list[Entry]] = deque()
        """Entries whose rows are to be read."""
        self._again: deque[tuple[float, list[Entry]]] = deque()
        """Entries with a lease whose rows could not be read, or that need a lease and could not get it, with
        the time of the next try (monotonic)."""
        self._judging: deque[None] = deque()
        """An item for each thread that asks for leases."""
        self._unread: dict[int, tuple[float, float, int]] = {}
        """By server, start of the last trouble with reading rows, time of its last failure (monotonic), and
        until when its tasks have been postponed (ms)."""
        self._tells_behind = RateLimit(self.tools.clock, BEHIND_SECONDS)
        self._read_seconds = STEP.of("read")

    @property
    def settled(self) -> bool:
        """Whether nothing is being checked."""
        return not self._unchecked and not self.reader.under_way and not self._judging

    def put(self, entries: list[Entry]) -> None:
        """Have the next ``run_once`` decide about entries by their rows. Skips those whose id was taken again
        by then."""
        self._unchecked.append(entries)

    def check(self, entries: list[Entry]) -> None:
        """Decide about entries by their rows soon. Any thread may call it."""
        self.put(entries)
        self.tools.wake()

    def run_once(self) -> float:
        """Ask for rows, and decide about entries whose rows have been read. Returns when there is more to do
        (monotonic)."""
        while self._again and self._again[0][0] <= self.tools.clock.monotonic():
            self._unchecked.append(self._again.popleft()[1])
        while self._unchecked:
            self._read(self._unchecked.popleft())
        at = self.reader.run_once()
        if self._again:
            at = min(at, time.monotonic() + self._again[0][0] - self.tools.clock.monotonic())
        return at

    def _read(self, entries: list[Entry]) -> None:
        """Have the rows read. Those of each database server are judged as they arrive."""
        if self.tools.book.leaving:
            self.finisher.give_back_unread(entries)
            return
        began = time.monotonic()
        by_id = {entry.job_id: entry for entry in entries if self.tools.inflight.get(entry.job_id) is entry}

        def take(job_ids: Sequence[int], rows: Answers[TryRow]) -> None:
            some = [by_id[job_id] for job_id in job_ids]
            read = self.tools.clock.monotonic()
            for entry in some:
                entry.read = read
            server = self.tools.store.server_of(job_ids[0])
            self.tools.late.slow(Cause.DATABASE, server, time.monotonic() - began, "reading rows")
            if not rows.unanswered:
                self._read_seconds.observe([time.monotonic() - began])
            if self.tools.book.leaving:
                self.finisher.give_back_unread(some)
            else:
                self._judge(some, rows)

        self.reader.ask(by_id, take)

    def _judge(self, entries: Sequence[Entry], rows: Answers[TryRow]) -> None:
        now = self.tools.clock.now_ms()
        found: defaultdict[Check, list[Entry]] = defaultdict(list)
        unread: list[Entry] = []
        refused: list[tuple[Entry, TryRow | None]] = []
        for entry in entries:
            row = rows.get(entry.job_id)
            if row is None:
                if entry.job_id in rows.unanswered:
                    unread.append(entry)
                else:
                    log.error("orphan_dropped", job_id=entry.job_id, slot=str(entry.slot))
                    ORPHANS.of(entry.topic.name).add()
                    refused.append((entry, None))
                continue
            if row.action_time > row.next_time:  # the row was changed directly in the table
                row = row._replace(next_time=row.action_time)
            entry.row = row
            found[check(row, now=now, taken=entry.taken)].append(entry)
        ready, leased, soon = found[Check.START], found[Check.LEASED], found[Check.SOON]
        expired, behind = found[Check.EXPIRED], found[Check.CLOCK_BEHIND]
        refused += [(entry, entry.row) for entry in found[Check.ELSEWHERE]]
        if unread:
            self._put_away(unread, rows.unanswered)
        skew = max((entry.taken for entry in entries), default=now) - now
        if skew > LATE_MS:
            for entry in ready + soon:
                entry.behind = skew
        if soon:
            self.tools.early.put(soon)
        if expired:
            self.finisher.expire(self._written_soon(expired))
        if skew > MAX_CLOCK_SKEW_MS and self._tells_behind():
            # Also if all waited for this clock before they were taken: nothing else would say why.
            log.error("clock_behind_redis", tasks=len(entries), milliseconds=skew)
        if behind:
            # They are due by Redis's clock. They go back until the time, by that clock, at which
            # they are due by ours.
            self.finisher.give_back_until((e, e.taken + e.row.next_time - now) for e in behind)
        if refused:
            self.finisher.settle_by_row(refused)
        if leased or self.leases.uncovered(ready):
            self._judging.append(None)
            self.tools.store.run_detached(partial(self._ask_for_leases, leased, ready))
        else:
            self.start(ready)

    def _ask_for_leases(self, leased: Sequence[Entry], ready: list[Entry]) -> None:
        """Start those that may start, on a thread that may wait for the database."""
        ready = ready + self.leases.judge(leased)
        uncovered = self.leases.cover(ready)  # [rule: covered]
        waiting = [entry for entry in ready if entry.job_id in uncovered]
        ready = [entry for entry in ready if entry.job_id not in uncovered]
        if self.tools.book.leaving:
            self.finisher.give_back_unread(waiting)
        elif waiting:
            self._again.append((self.tools.clock.monotonic() + RETRY_MS / 1000, waiting))
        self.start(ready)
        self._judging.pop()
        self.tools.wake()

    def _put_away(self, entries: Sequence[Entry], errors: Mapping[int, Trouble]) -> None:
        """Postpone entries of one server that cannot be decided now, so that other due tasks do not wait.

        The pause grows with the outage, as all due tasks of that server keep returning. When it is back, the
        sweep brings them in within seconds.
        """
        now, at = self.tools.clock.monotonic(), self.tools.clock.now_ms()
        if leased := [entry for entry in entries if entry.lease.possible]:
            # These are few. If the lease ran out, it would be taken for a crash.
            self._again.append((now + RETRY_MS / 1000, leased))
        rest = [entry for entry in entries if not entry.lease.possible]
        if not rest:
            return
        server, error = self.tools.store.server_of(rest[0].job_id), str(errors[rest[0].job_id])
        since, last, postponed = self._unread.get(server, (now, float("-inf"), 0))
        if now - last > FORGET_UNREAD_SECONDS:
            since = now
            log.warning("rows_not_read", tasks=len(rest), error=error)
        pause = max(RETRY_MS, int(500 * (now - since)), postponed - at)
        until = at + min(pause, MAX_RETRY_MS)
        self._unread[server] = since, now, until + 1000 * len(rest) // RETURNS_A_SECOND
        self.tools.late.note(Cause.DATABASE, server, at, until, error)
        self.finisher.put_away([(entry, until + -until % LUMP_MS) for entry in rest])

    def start(self, ready: list[Entry]) -> None:
        """Dispatch entries that are due and checked. Suspects go to the quarantine."""
        if not ready:
            return
        ready = self._written_soon(ready)
        most = self.tools.max_crashes
        if alone := [e for e in ready if e.row.crashes and is_suspect(e.row, most, e.handler.delivery)]:
            self.quarantine.admit(alone)
            ready = [entry for entry in ready if entry not in alone]
        self.dispatcher.put(ready)

    def _written_soon(self, entries: list[Entry]) -> list[Entry]:
        """Those of the entries whose server keeps up with writing. Postpones the others."""
        if self.finisher.unwritten <= MAX_UNWRITTEN or not any(map(self.finisher.behind, entries)):
            return entries
        now = self.tools.clock.now_ms()
        at = now + RETRY_MS
        late = set(filter(self.finisher.behind, entries))
        for server in {self.tools.store.server_of(entry.job_id) for entry in late}:
            self.tools.late.note(Cause.DATABASE, server, now, at, "ended tries wait to be written")
        self.finisher.put_away((entry, at) for entry in late)
        return [entry for entry in entries if entry not in late]
