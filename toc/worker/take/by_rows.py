"""Take by rows: due tasks are read from the tables and run under leases, where no index says what is due.

That is so in a cluster without an index, and in one with an index while the Redis node of a slot has not
answered for a second. Once a second the slot's owner reads what comes due within the next moment, keeps it in
mind and takes each task at its time: a lease is committed on the row, then its handler may start. No other
worker runs a task with a lease, whether it reads the index, the rows, or neither. The lease is refused if the
row has ended or is not due any more, so until then a cancel or reschedule is in time; or if this host's clock
is ahead of the database's, and the row not due by that.

The owner does this, not the sweeper of the table: its app handles the topic, and where there is an index it
holds what was prepared before the outage, so it knows what not to take.

    same row check, dispatcher and finisher; without a fencing token there is no move in Redis
    a failed try: its row says when it is due again; the next look finds it
    the index is back: looks continue for a moment beside the poller, until the sweep has caught up

If the poller prepares such a task later, ``Inflight`` finds its id. Other workers find the lease or the ended
row. Each database server has a loop of its own: one that hangs delays no task of the others.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from toc.loop import Loop
from toc.model.clock import RateLimit
from toc.model.lateness import LATE_MS, Cause
from toc.model.topic import Slot, Topic
from toc.observe.log import get_logger
from toc.store.servers.shards import OF_TABLES, Trouble
from toc.store.tasks.scan import Position, of_types
from toc.worker.check import Checker
from toc.worker.entry import NO_FENCE, Entry
from toc.worker.index_watch import IndexWatch
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.run.dispatch import Starts
from toc.worker.settle.finish import MAX_UNWRITTEN, Finisher
from toc.worker.take.resume_rate import PACE_MS, ResumeRate
from toc.worker.tools import Tools

log = get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often the tables are read."""
SOON_SECONDS = 0.2
"""When to look again for tasks whose former holder has died: its crash is charged first."""
GATHER_SECONDS = 0.004
"""Least time between two takes: a commit costs several times what its leases cost."""
IDLE_SECONDS = 0.5
OWNED_SECONDS = 1.5
"""How long a slot must be ours where there is an index. By then its former owner has leases on what it took
and still runs."""
LINGER_SECONDS = 2.5
"""How long looks continue after the index is back. By then the sweep has indexed all recent submissions."""
AHEAD = 1.2
"""How far ahead a round reads, in periods: until the next has read all, and a little longer."""
TABLES = 16
"""Tables that are read at once: what is due waits meanwhile."""
PAGE = 200
"""Most rows of a table that are read at once."""
ENOUGH = 2000
"""While as many rows of a topic are known, no more of it are read: what they would hide comes first."""
MAX_TAKEN = 500
"""Most leases of one commit."""
RETRY_SECONDS = 2.0
"""Pause before a database server that failed is queried again."""
START = Position(0)

DueTask = tuple[int, int, Slot]
"""When a task is due (ms), its job_id, its slot."""


@dataclass(slots=True)
class _Plan:
    """What is known of one database server's rows. Used by its loop alone."""

    server: int
    due: dict[str, list[DueTask]] = field(default_factory=dict)
    """By topic, the first due last. A row that has changed since is refused a lease."""
    anew: bool = True
    """Whether to read all tables, whatever is left of the round."""
    left: dict[int, Position] = field(default_factory=dict)
    """The tables that are yet to be read in this round, with the position to begin or continue from."""
    began: float = 0.0
    """When the round began (monotonic)."""
    at_once: int = TABLES
    """How many tables are read at once: all, while they hold little."""
    rows: int = 1
    """How many rows were read in this round. At first nobody knows."""
    full: set[str] = field(default_factory=set)
    """Topics of which this round reads no more."""
    until_ms: int = 0
    """Up to when rows are read that come due."""
    of: tuple[set[str], set[Slot]] = field(default_factory=lambda: (set(), set()))
    """The topics and slots of which the round reads rows."""
    began_ms: int = 0
    """When the round began; 0: not all rows could be read."""
    seen_ms: int = 0
    """When the round before began, if it has read all that was due; else 0."""
    period: float = LOOK_SECONDS
    """How long the round, and the rest after it, takes (seconds)."""
    look_at: float = float("-inf")
    """When to read again (monotonic)."""
    taken_at: float = float("-inf")
    failed_until: float = float("-inf")
    """When a server that failed is queried again (monotonic)."""
    unsure: list[Entry] = field(default_factory=list)
    """Entries whose leases were requested when the server failed. Held until it answers."""


@dataclass(eq=False)
class RowTaker:
    """The loops that take tasks by their rows, one for each database server.

    ``watch`` tells the slots for which no index answers; None: there is no index.
    """

    tools: Tools
    finisher: Finisher
    dispatcher: Starts
    leases: LeaseKeeper
    checker: Checker
    watch: IndexWatch | None

    def __post_init__(self) -> None:
        self._tables_of_server = self.tools.store.tables_of_server()
        self._lost: dict[Slot, float] = {}
        """Slots whose index is out of reach, with the time until which they are served here (monotonic)."""
        self._lock = threading.Lock()
        """Held to change them."""
        self._resume = ResumeRate(self.tools.clock)
        self._complains = RateLimit(self.tools.clock)
        self._plans = [_Plan(server) for server in range(len(self._tables_of_server))]
        self.loops = [
            Loop(f"rows-{number}", partial(self.run_once, number), wake)
            for number, wake in enumerate(self.tools.row_wakes)
        ]

    @property
    def slots(self) -> int:
        """How many slots are served from the tables now, because their Redis node is out of reach."""
        return len(self._lost)

    def look_now(self) -> None:
        """Look again now."""
        for plan, wake in zip(self._plans, self.tools.row_wakes, strict=True):
            plan.anew, plan.look_at, plan.taken_at = True, float("-inf"), float("-inf")
            wake()

    @property
    def settled(self) -> bool:
        """Whether no look is under way. If so, and this worker was leaving before, every entry that was taken
        is held."""
        return not any(loop.at_work for loop in self.loops)

    def run_once(self, server: int) -> float:
        """Look at a database server if it is time, and take what is due. Returns the seconds until the
        next."""
        plan, now = self._plans[server], self.tools.clock.monotonic()
        slots = self._slots(now)
        if not slots or self.tools.book.leaving or self._is_shared():  # [rule: takes-alone]
            self.finisher.give_back_unread(plan.unsure)
            plan.due, plan.unsure = {}, []
            plan.anew, plan.look_at = True, float("-inf")
            return IDLE_SECONDS
        if now < plan.failed_until:
            return plan.failed_until - now
        if now >= plan.look_at and not self._look(plan, slots):
            return RETRY_SECONDS
        if now < plan.taken_at + GATHER_SECONDS:
            return plan.taken_at + GATHER_SECONDS - now
        wait = self._take(plan, slots)
        if any(len(plan.due.get(name, ())) < ENOUGH // 2 for name in plan.full):
            # First the tables that are left: else their turn would not come while there is a backlog.
            plan.anew = plan.anew or not plan.left
            plan.look_at, plan.full, plan.began_ms = float("-inf"), set(), 0
        return max(min(wait, plan.look_at - self.tools.clock.monotonic()), 0.0)

    def _is_shared(self) -> bool:
        """Whether others may take what is ours by the index, without a lease."""
        return self.watch is not None and self.tools.inflight.shared(self.tools.clock.monotonic())

    # --- what is due

    def _slots(self, now: float) -> Collection[Slot]:
        """Our slots, if there is no index; or those whose node is out of reach, or was until a moment ago."""
        wanted = self.tools.book.wanted
        if self.watch is None:
            return wanted
        with self._lock:
            for slot in self.watch.out_of_reach(wanted):
                if now - wanted[slot] >= OWNED_SECONDS:  # [rule: owned-long]
                    self._lost[slot] = now + LINGER_SECONDS
            self._lost = {slot: until for slot, until in self._lost.items() if until > now and slot in wanted}
            return self._lost

    def _served(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those of the topics whose tasks may start here."""
        known = self.tools.catalog.known()
        pairs = ((known.get(name), self.tools.handlers.get(name)) for name in names)
        return {topic.name: topic for topic, handler in pairs if topic and handler and handler.serves(topic)}

    def _look(self, plan: _Plan, slots: Collection[Slot]) -> bool:
        """Read what comes due in some of a server's tables: a page of each. A round reads all. False if the
        server did not answer."""
        began, served = self.tools.clock.monotonic(), self._served({slot.topic for slot in slots})
        if plan.anew or not plan.left:
            of = set(served), set(slots)
            plan.seen_ms = 0 if plan.anew or plan.full or plan.of != of else plan.began_ms
            plan.of = of
            plan.anew, plan.began, plan.began_ms = False, began, self.tools.clock.now_ms()
            plan.until_ms = plan.began_ms + int(AHEAD * 1000 * plan.period)
            plan.left = dict.fromkeys(self._tables_of_server[plan.server], START)
            if not plan.rows:  # at rest: a probe costs the server a third of a page
                probed = self.tools.store.scans.scan(plan.left, {}, 0, plan.until_ms, 1)
                plan.left = dict.fromkeys([*probed.with_due_rows, *probed.failed], START)
            plan.at_once = TABLES if plan.rows > PAGE else len(plan.left)
            plan.rows, plan.full = 0, set()
        plan.full |= {name for name in served if len(plan.due.get(name, ())) >= ENOUGH}
        topics = {topic.biz_type: topic for name, topic in served.items() if name not in plan.full}
        starts = dict(islice(plan.left.items(), plan.at_once))
        plan.left = dict(islice(plan.left.items(), plan.at_once, None))
        if topics:
            leases = self.tools.store.leases
            due = f"{leases.due_within(int(AHEAD * 1000 * plan.period))} AND {leases.untaken()}"
            where = f"{of_types(topics)} AND {due}"
            pages = self.tools.store.scans.page(starts, plan.until_ms, PAGE, where=where)
            if pages.unanswered:
                plan.began_ms = 0
            if not pages and pages.unanswered:
                self._failed(plan, pages.unanswered, began, RETRY_SECONDS)
                return False
            plan.left |= {table: page[-1].position for table, page in pages.items() if len(page) == PAGE}
            found = list(chain.from_iterable(pages.values()))
            locked = self.tools.store.locked(row.job_id for row in found)
            if locked:
                plan.began_ms = 0
            plan.rows += len(found)
            fresh: defaultdict[str, set[DueTask]] = defaultdict(set)
            for row in found:
                slot = topics[row.biz_type].slot(row.slot_crc, row.slot_amount)
                if slot in slots and row.job_id not in locked:
                    fresh[slot.topic].add((row.next_time, row.job_id, slot))
            for name, some in fresh.items():
                rows = plan.due.setdefault(name, [])
                unknown = some.difference(rows)  # the round before has read the others
                late = {slot for at, _, slot in unknown if at < plan.seen_ms - LATE_MS}
                for slot in late.difference(slot for _, _, slot in rows):
                    self.tools.late.came(slot)
                rows += unknown
                rows.sort(reverse=True)
        now = self.tools.clock.monotonic()
        if plan.left:  # rests for as long as it has read: what is due meanwhile is taken
            plan.look_at = now + now - began
        else:
            read_ahead, plan.period = AHEAD * plan.period, max(LOOK_SECONDS, 2 * (now - plan.began))
            # One that took longer than the last rests no longer than it has read ahead: the next reads more.
            plan.look_at = plan.began + min(plan.period, read_ahead)
        return True

    def _failed(self, plan: _Plan, errors: Mapping[int, Trouble], began: float, pause: float) -> None:
        now, at = self.tools.clock.monotonic(), self.tools.clock.now_ms()
        plan.failed_until, error = now + pause, str(next(iter(errors.values())))
        until = at + round(pause * 1000)
        self.tools.late.note(Cause.DATABASE, plan.server, at - round((now - began) * 1000), until, error)
        if self._complains(plan.server):
            log.warning("rows_not_taken", error=error)

    # --- take

    def _take(self, plan: _Plan, slots: Collection[Slot]) -> float:
        """Take what is due and can start soon. Returns the seconds until more is due."""
        if self.finisher.backlog > MAX_UNWRITTEN:
            return SOON_SECONDS
        entries, plan.unsure = plan.unsure, []
        wait = LOOK_SECONDS
        for name, topic in self._served(list(plan.due)).items():
            rows = plan.due[name]
            if rows and rows[-1][0] <= self.tools.clock.now_ms():
                room = min(self.dispatcher.room(name), MAX_TAKEN - len(entries))
                if room <= 0:
                    self.dispatcher.want_room(name)
                    continue
                chosen = self._choose(topic, rows, slots, room)
                wait = wait if chosen else PACE_MS / 1000
                entries += chosen
                plan.due[name] = plan.due.pop(name)  # those that had no room come first in the next take
            if rows:
                wait = min(wait, max(rows[-1][0] / 1000 - self.tools.clock.time(), GATHER_SECONDS))
        if entries:
            plan.taken_at = self.tools.clock.monotonic()
            self._start(plan, entries)
        return wait

    def _choose(self, topic: Topic, rows: list[DueTask], slots: Collection[Slot], room: int) -> list[Entry]:
        """Hold those of a topic's rows that are due, those that have waited longest first."""
        now, at = self.tools.clock.monotonic(), self.tools.clock.now_ms()
        limited = topic.resume_rate > 0 and rows[-1][0] < topic.resumed_at
        tokens = self._resume.tokens(topic, slots) if limited else room
        chosen: list[Entry] = []
        while rows and rows[-1][0] <= at and len(chosen) < min(room, tokens):
            _, job_id, slot = rows.pop()
            entry = Entry(job_id, slot, NO_FENCE, topic, self.tools.handlers[topic.name], at, now)
            if slot in slots and self.tools.inflight.hold_if_free(entry):
                chosen.append(entry)
        if limited:
            self._resume.took(topic, len(chosen))
        return chosen

    def _start(self, plan: _Plan, entries: list[Entry]) -> None:
        """Lease the rows of entries that are held and due, and have those checked."""
        if self._is_shared():  # learned during this look
            self.finisher.give_back_unread(entries)
            return
        began = self.tools.clock.monotonic()
        failed = self.leases.take(entries, due_by=self.tools.clock.now_ms())  # [rule: taken-by-lease]
        if failed:
            refused = [entry for entry in entries if isinstance(failed.get(entry.job_id), OF_TABLES)]
            self.finisher.give_back_unread(refused)  # the server answers: others need not wait for these
            plan.unsure = [entry for entry in entries if entry.job_id in failed and entry not in refused]
            entries = [entry for entry in entries if entry.job_id not in failed]
            self._failed(plan, failed, began, RETRY_SECONDS if plan.unsure else 0.0)
        # A slot may have been handed over meanwhile, and where there is an index its new owner may run what
        # has no lease yet.
        wanted = self.tools.book.wanted
        self.finisher.give_back_unread(entry for entry in entries if entry.slot not in wanted)
        entries = [entry for entry in entries if entry.slot in wanted]
        leased = [entry for entry in entries if entry.lease.until]
        if len(leased) < len(entries):
            plan.look_at = min(plan.look_at, self.tools.clock.monotonic() + SOON_SECONDS)
        if entries:  # without a lease too: the crash of its former holder may have to be charged
            self.checker.check(entries)
