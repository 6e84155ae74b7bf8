"""Fallback: operation without Redis. Due rows are read from the tables and run under leases.

When the Redis node of a slot has not answered for a second, the slot's owner takes due tasks from
the tables. The owner does this, not the sweeper of the table: its app handles the topic, and it
holds what was prepared before the outage, so it knows what not to take. It commits a lease before a
handler starts. No other worker runs a task with a lease, whether it can still read the index or has
lost it too.

    same row check, dispatcher and finisher; without a fencing token there is no move in Redis
    a failed try: its row says when it is due again, and a later look takes it
    the index is back: looks continue for a moment beside the poller, until the sweep has caught up

If the poller prepares such a task later, ``Inflight`` finds its id. Other workers find the lease or the ended
row. Each database server has a loop of its own: one that hangs delays no task of the others.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from toc.loop import Loop, Wake
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.handler import Handler
from toc.model.topic import Slot, Topic
from toc.observe.log import get_logger
from toc.observe.metrics import WITHOUT_INDEX
from toc.store.servers.shards import Trouble
from toc.store.store import Store
from toc.store.tasks.scan import DueRow, Position
from toc.worker.check import Checker
from toc.worker.entry import NO_FENCE, Entry, Inflight
from toc.worker.lease_keeper import LeaseKeeper
from toc.worker.run.dispatch import Dispatcher
from toc.worker.settle.finish import MAX_UNWRITTEN, Finisher
from toc.worker.slots import SlotBook
from toc.worker.without_redis.index_watch import IndexWatch

log = get_logger(__name__)

LOOK_SECONDS = 0.2
"""How often the tables that hold a slot's tasks by default (slot_basis is the biz_id) are read."""
LOOK_EVERYWHERE_SECONDS = 1.0
"""How often all tables are read."""
IDLE_SECONDS = 0.5
OWNED_SECONDS = 1.5
"""How long a slot must be ours. By then its former owner has leases on what it took and still runs."""
LINGER_SECONDS = 2.5
"""How long looks continue after the index is back. By then the sweep has indexed all recent submissions."""
MIN_PAGE = 20
MAX_PAGE = 500
RETRY_SECONDS = 5.0
"""Pause before a database server that failed is queried again."""
START = Position(0)


@dataclass(kw_only=True, eq=False)
class Fallback:
    """The loops that take tasks without Redis, one for each database server. ``wakes`` end their sleeps."""

    store: Store
    catalog: TopicCatalog
    clock: Clock
    handlers: Mapping[str, Handler]
    book: SlotBook
    inflight: Inflight
    finisher: Finisher
    dispatcher: Dispatcher
    leases: LeaseKeeper
    watch: IndexWatch
    checker: Checker
    wakes: Sequence[Wake]

    def __post_init__(self) -> None:
        self._tables_of_server = self.store.tables_of_server()
        self._table_count = len(self.store.tables)
        self._lost: dict[Slot, float] = {}
        """Slots that are served from the tables, with the time until which (monotonic)."""
        self._lock = threading.Lock()
        """Held to change ``_lost``."""
        # The rest is by database server, each part of which its loop alone uses.
        servers = range(len(self._tables_of_server))
        self._everywhere_at = [float("-inf") for _ in servers]
        self._after: list[dict[int, Position]] = [{} for _ in servers]
        """Tables that hold more than was read, with the position to continue from."""
        self._unsure: list[list[Entry]] = [[] for _ in servers]
        """Entries whose leases were requested when the server failed. Held until it answers."""
        self._failed = [float("-inf") for _ in servers]
        """When a server that failed is queried again (monotonic)."""
        self._looking = [False for _ in servers]
        self._taking = True
        self.loops = [
            Loop(f"fallback-{number}", partial(self.run_once, number), self.wakes[number])
            for number in servers
        ]

    @property
    def slots(self) -> int:
        """How many slots are served from the tables now, because their Redis node is out of reach."""
        return len(self._lost)

    def pause_taking(self) -> None:
        """Take nothing more."""
        self._taking = False
        self.wake()

    def wake(self) -> None:
        """Look again now."""
        for wake in self.wakes:
            wake()

    @property
    def settled(self) -> bool:
        """Whether no look is under way. If so, and ``pause_taking`` was called before, every entry
        that was taken is held."""
        return not any(self._looking)

    def run_once(self, server: int) -> float:
        """One look at a database server, if some slot's node is out of reach. Returns the seconds until
        the next."""
        self._looking[server] = True  # before it asks whether it may take
        try:
            return self._run_once(server)
        finally:
            self._looking[server] = False

    def _run_once(self, server: int) -> float:
        now = self.clock.monotonic()
        slots, after = self._slots(now), self._after[server]
        if not slots or not self._taking or now < self.inflight.shared_until:  # [rule: takes-alone]
            after.clear()
            self.finisher.give_back_unread(self._unsure[server])
            self._unsure[server] = []
            return IDLE_SECONDS
        if now < self._failed[server]:
            return self._failed[server] - now
        room = self._room(slots)
        if not room:
            return LOOK_SECONDS  # or earlier, when the dispatcher has room
        tables = self._tables(server, slots, now)
        taken, failed = self._look(server, tables, slots, room) if tables else (0, {})
        if failed:
            self._failed[server] = self.clock.monotonic() + RETRY_SECONDS
            log.warning("fallback_failed", error=str(next(iter(failed.values()))))
        if min(room.values()) <= 0:
            after.clear()  # rows skipped for lack of room come first in the next look
        took = self.clock.monotonic() - now
        # At most half of the time; much less if a look only skips what is not for us.
        return took if after or taken else max(LOOK_SECONDS, 4 * took)

    # --- what to look for

    def _slots(self, now: float) -> set[Slot]:
        """Our slots whose node is out of reach, or was until a moment ago."""
        wanted = self.book.wanted
        with self._lock:
            for slot in self.watch.out_of_reach(wanted):
                if now - wanted[slot] >= OWNED_SECONDS:  # [rule: owned-long]
                    self._lost[slot] = now + LINGER_SECONDS
            self._lost = {slot: until for slot, until in self._lost.items() if until > now and slot in wanted}
            return set(self._lost)

    def _room(self, slots: Iterable[Slot]) -> dict[Topic, int]:
        """How many tasks of each topic may be taken. Topics without room are left out."""
        if self.finisher.backlog > MAX_UNWRITTEN:
            return {}
        known = self.catalog.known()
        room: dict[Topic, int] = {}
        for name in {slot.topic for slot in slots}:
            topic = known.get(name)
            handler = self.handlers.get(name)
            if topic is None or handler is None or not handler.serves(topic):
                continue
            free = self.dispatcher.room(name)
            if free > 0:
                room[topic] = free
            else:
                self.dispatcher.want_room(name)
        return room

    def _tables(self, server: int, slots: Iterable[Slot], now: float) -> list[int]:
        """The server's tables that hold the slots' tasks by default or have more to read. Once a second: all
        of its tables."""
        own = self._tables_of_server[server]
        if now >= self._everywhere_at[server]:
            self._everywhere_at[server] = now + LOOK_EVERYWHERE_SECONDS
            return own
        tables = set(self._after[server])
        known = self.catalog.known()
        for slot in slots:
            if slot.topic in known:
                step = min(known[slot.topic].slot_amount, self._table_count)
                tables.update(range(slot.number % step, self._table_count, step))
        return [table for table in own if table in tables]

    # --- a look

    def _look(
        self, server: int, tables: Sequence[int], slots: set[Slot], room: dict[Topic, int]
    ) -> tuple[int, Mapping[int, Trouble]]:
        """Take due tasks from tables of one server, and reduce ``room`` accordingly.

        Returns how many were taken, and why the server did not answer if it answered nothing.
        """
        after = self._after[server]
        starts = {table: after.pop(table, START) for table in tables}
        limit = min(max(MIN_PAGE, sum(room.values()) // len(tables)), MAX_PAGE)
        types = ",".join(str(topic.biz_type) for topic in room)
        where = f" AND biz_type IN ({types}) AND {self.store.leases.untaken()}"
        pages = self.store.scans.page(starts, self.clock.now_ms() + 1, limit, where=where)
        if not pages:
            return 0, pages.unanswered
        after.update((table, page[-1].position) for table, page in pages.items() if len(page) == limit)
        entries, self._unsure[server] = self._unsure[server], []
        entries += self._choose(chain.from_iterable(pages.values()), slots & self.book.wanted.keys(), room)
        if not entries:
            return 0, {}
        if self.clock.monotonic() < self.inflight.shared_until:  # learned during this look
            self.finisher.give_back_unread(entries)
            return 0, {}
        failed = self.leases.take(entries)  # [rule: taken-by-lease]
        if failed:
            self._unsure[server] = [entry for entry in entries if entry.job_id in failed]
            entries = [entry for entry in entries if entry.job_id not in failed]
        # A slot may have been handed over during this look, and its new owner may run what has no lease yet.
        wanted = self.book.wanted
        self.finisher.give_back_unread(entry for entry in entries if entry.slot not in wanted)
        entries = [entry for entry in entries if entry.slot in wanted]
        leased = [entry for entry in entries if entry.lease.until]
        for topic_name, count in Counter(entry.topic.name for entry in leased).items():
            WITHOUT_INDEX.of(topic_name).add(count)
        if entries:  # without a lease too: the crash of its former holder may have to be charged
            self.checker.check(entries)
        return len(leased), failed

    def _choose(self, rows: Iterable[DueRow], slots: set[Slot], room: dict[Topic, int]) -> list[Entry]:
        """Hold those of these rows that may be taken, those that have waited longest first."""
        topics = {topic.biz_type: topic for topic in room}
        now, at = self.clock.monotonic(), self.clock.now_ms()
        chosen: list[Entry] = []
        for row in sorted(rows, key=lambda row: row.next_time):
            topic = topics[row.biz_type]
            slot = topic.slot(row.slot_crc, row.slot_amount)
            if slot not in slots or room[topic] <= 0:
                continue
            entry = Entry(row.job_id, slot, NO_FENCE, topic, self.handlers[topic.name], at, now)
            if self.inflight.hold_if_free(entry):
                chosen.append(entry)
                room[topic] -= 1
        return chosen
