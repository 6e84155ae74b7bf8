"""Coordination without ZooKeeper: the daemons are rows in the first database, and each assigns for itself.

A thread writes the own row and reads those of all, a few times in each timeout and whenever something is to
be told. A Ledger decides by them. While the table is out of reach nothing moves between daemons: the workers
keep what they hold, and one that replaces another takes up its slots. They are sure of it only for a time,
after which they start nothing without a lease (``sure_until``).
"""

import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from toc.coordination.assignment import DEAD_FOR_MS, Member, by_worker
from toc.coordination.ledger import Daemon, Ledger, assign_rows
from toc.coordination.presence import LocalNames, Presence
from toc.loop import Loop
from toc.model.clock import Clock
from toc.model.errors import TocError
from toc.model.member import MemberRow
from toc.model.topic import Delivery, Slot
from toc.observe.log import get_logger

log = get_logger(__name__)

BEATS = 6
"""How often a member writes within its timeout."""
BUSY_SECONDS = 0.25
"""Pause while slots that it should have are still held by others, or if the table did not answer."""
AGAIN_SECONDS = 0.02
"""Longest pause if there is something to tell."""
LEAVE_SECONDS = 2.0
"""How long ``stop`` waits until the row is gone."""


class Members(Protocol):
    """The table of rows, as ``toc.store.records.cluster`` describes it. Its methods raise TocError."""

    def beat(self, name: str, number: int, timeout: int, data: str) -> list[MemberRow] | None:
        """Write a row and read all living ones; None if there is none to write."""

    def join(self, name: str, host: str, number: int, timeout: int, data: str) -> None:
        """Make a row."""

    def bury(self, name: str, number: int) -> None:
        """Call a row dead."""

    def leave(self, name: str, host: str) -> None:
        """Delete a row, and those of the dead of its host."""


class RowsCoordinator:
    """Spreads slots over the daemons that have rows.

    ``host`` names this daemon. After ``timeout`` seconds without a beat others take over what it has.
    ``on_change`` is called, from any thread, when ``step`` should be called soon. It must not block.
    """

    def __init__(
        self, table: Members, *, host: str, timeout: float, clock: Clock, on_change: Callable[[], None]
    ) -> None:
        self._table = table
        self._host = host
        self._timeout = timeout
        self._timeout_ms = round(timeout * 1000)
        self._clock = clock
        self._on_change = on_change
        self._local_names = LocalNames.of(host)
        self._name = self._local_names.name(f"{host}-daemon")
        self._presence: Presence | None = None
        self._loop = Loop("members", self._run_once, last=True)
        self._number = 0
        """That of the last write."""

        self._lock = threading.Lock()
        """For all that follows."""
        self._ledger = Ledger(self._name, timeout, self._clock.monotonic)
        self._reached = True
        """Whether the table answered the last time."""
        self._alone_until = float("-inf")
        """Until when (monotonic) a daemon whose only process died keeps its slots for the next one."""
        self._topics: dict[str, int] = {}
        self._deliveries: dict[str, str] = {}
        self._members: dict[str, Member] = {}
        self._claims: dict[Slot, str] = {}
        """The slots that our workers hold."""
        self._assignment: dict[Slot, str | None] = {}
        self._stale = True
        """Whether the assignment is to be computed anew."""
        self._data: str | None = None
        """What the own row is to say; None if that has changed."""
        self._apart = True
        """Whether that is among our workers alone."""
        self._wanted: set[Slot] = set()
        """What is assigned to our workers."""
        self._lost = False
        """Whether others have called this daemon dead, and its thread has not heard of it yet."""
        self._deaths: dict[str, int] = {}
        """Our workers known to be dead, and since when we know it (ms): of these we tell others."""
        self._heard: dict[str, int] = {}
        """Those of which others told us."""
        self._unproved: set[str] = set()
        """Workers of a daemon of this host that is gone, which may be gone themselves."""

    # --- the port

    def start(self) -> None:
        """Begin to write the row."""
        self._presence = Presence(self._name)
        self._loop.start()

    def stop(self) -> None:
        """Remove the row. May be called twice, or without start."""
        presence, self._presence = self._presence, None
        if presence is not None:
            self._loop.stop(LEAVE_SECONDS)
            presence.close()

    def set_topics(self, topics: Mapping[str, int], deliveries: Mapping[str, str] | None = None) -> None:
        """Set what to assign: topic -> number of slots."""
        with self._lock:
            if (self._topics, self._deliveries) == (dict(topics), dict(deliveries or {})):
                return
            self._topics, self._deliveries = dict(topics), dict(deliveries or {})
        self._changed()

    def join(self, member: Member) -> None:
        """Add a worker process of this daemon, or update what is known of it."""
        with self._lock:
            self._alone_until = float("-inf")
            self._members[member.worker_id] = member
        self._changed()

    def leave(self, worker_id: str, *, known_dead: bool) -> None:
        """Remove a worker and its claims. ``known_dead``: tell all that its process has ended."""
        with self._lock:
            if known_dead:
                self._deaths[worker_id] = self._clock.now_ms()
            if self._members.pop(worker_id, None) is not None:
                self._claims = {slot: owner for slot, owner in self._claims.items() if owner != worker_id}
                if not self._members and known_dead:
                    self._alone_until = self._clock.monotonic() + self._timeout
        self._changed()

    def desired(self) -> dict[str, set[Slot]]:
        """Return the slots that are assigned to each worker."""
        with self._lock:
            self._assign()
            return by_worker(self._members, self._assignment)

    def claimed(self) -> dict[str, set[Slot]]:
        """Return the slots that each worker holds."""
        with self._lock:
            self._lost = False
            return by_worker(self._members, self._claims)

    def claim(self, worker_id: str, slots: Collection[Slot]) -> set[Slot]:
        """Claim free slots of this daemon. Returns those that the worker holds now."""
        with self._lock:
            if worker_id not in self._members:
                return set()
            for slot in self._ledger.granted.intersection(slots):
                self._claims.setdefault(slot, worker_id)
            return {slot for slot in slots if self._claims.get(slot) == worker_id}

    def release(self, worker_id: str, slots: Collection[Slot]) -> None:
        """Drop the worker's claims on these slots."""
        with self._lock:
            freed = {slot for slot in slots if self._claims.get(slot) == worker_id}
            for slot in freed:
                del self._claims[slot]
        if freed:
            self._changed()

    def dead_workers(self) -> frozenset[str]:
        """Return the workers known to have died within DEAD_FOR_MS."""
        with self._lock:
            self._forget_deaths()
            return frozenset(self._deaths.keys() | self._heard.keys())

    def sure_until(self) -> float:
        """Return until when (monotonic) no other daemon has what ours hold."""
        with self._lock:
            return float("-inf") if self._lost else self._ledger.sure_until

    def senders(self) -> int:
        """Return how many living workers send webhooks."""
        with self._lock:
            daemons = [self._members, *(each.members for each in self._ledger.others.values())]
            return sum(Delivery.WEBHOOK in member.serves for each in daemons for member in each.values())

    def connected(self) -> bool:
        """Whether the table answered the last time."""
        return self._reached

    def drained(self) -> bool:
        """Whether an operator has drained this host: only ZooKeeper knows of that."""
        return False

    def step(self) -> None:
        """Do nothing: the thread does it."""

    def unowned(self) -> frozenset[Slot]:
        """Return the slots that no worker may have; only the first of the daemons returns any."""
        with self._lock:
            first = all(self._name < name for name in self._ledger.others)
            return frozenset(slot for slot, owner in self._assignment.items() if first and owner is None)

    # --- the assignment, under the lock

    def _assign(self) -> None:
        """Compute the assignment anew, if something has changed, and list accordingly.

        Nothing goes to other daemons while the table is out of reach, nor while a daemon whose only process
        died starts another.
        """
        if not self._stale:
            return
        self._stale, self._data = False, None
        self._apart = self._is_apart()
        ledger, daemons = self._ledger, [self._own()]
        slots = set(ledger.granted)
        if not self._apart:
            daemons += ledger.others.values()
            slots = {Slot(topic, number) for topic, some in self._topics.items() for number in range(some)}
        self._assignment = assign_rows(daemons, slots, self._deliveries)
        self._wanted = {slot for slot, owner in self._assignment.items() if owner in self._members}
        ledger.want(slots if self._apart else self._wanted, self._claims)

    def _is_apart(self) -> bool:
        """Whether nothing may go to other daemons now."""
        now = self._clock.monotonic()
        return not self._reached or now >= self._ledger.sure_until or now < self._alone_until

    def _own(self) -> Daemon:
        """Return what our row is to say."""
        listed = self._ledger.listed
        shares = by_worker(self._members, self._assignment)
        slots = {worker_id: frozenset(share & listed) for worker_id, share in shares.items()}
        leaving = frozenset(listed.difference(*slots.values()))
        return Daemon(dict(self._members), slots, leaving, tuple(self._deaths))

    def _forget_deaths(self) -> None:
        oldest = self._clock.now_ms() - DEAD_FOR_MS
        for deaths in (self._deaths, self._heard):
            for worker_id in [one for one, died in deaths.items() if died < oldest]:
                del deaths[worker_id]
                self._data = None

    def _changed(self) -> None:
        """Tell this daemon and all others."""
        with self._lock:
            self._stale = True
        self._loop.wake()
        self._on_change()

    # --- the thread

    def _run_once(self) -> float:
        """Write our row and read those of all, or delete it. Returns the seconds until the next time."""
        if self._presence is None:
            return self._leave()
        with self._lock:
            self._forget_deaths()
            self._assign()
            self._data = self._data or self._own().data()
            sent, data = set(self._ledger.listed), self._data
            self._number += 1
        began = self._clock.monotonic()
        try:
            rows = self._table.beat(self._name, self._number, self._timeout_ms, data)
            if rows is None:
                self._join()
                return 0.0
            self._note_reached(None)
            with self._lock:
                pause = self._learn(rows, sent, began)
            self._bury()
        except TocError as exc:
            self._note_reached(exc)
            return BUSY_SECONDS
        return pause

    def _join(self) -> None:
        """Make our row, at the start or after others have called it dead."""
        with self._lock:
            if self._ledger.listed:
                log.warning("member_called_dead", daemon=self._name)
            self._ledger.lost()
            self._claims.clear()
            self._stale = self._lost = True
        self._on_change()
        self._table.join(self._name, self._host, self._number, self._timeout_ms, "{}")

    def _learn(self, rows: Iterable[MemberRow], sent: Collection[Slot], began: float) -> float:
        """Note what the rows say. Returns the seconds until the next write. Call under the lock."""
        ledger, now = self._ledger, self._clock.now_ms()
        changed = ledger.read(rows, sent, began) or self._apart != self._is_apart()
        heard = {one: now for each in ledger.others.values() for one in each.dead if one not in self._heard}
        self._heard |= heard
        self._stale |= changed
        self._assign()
        if changed or heard:
            self._on_change()
        if self._data is None:
            return random.uniform(0, AGAIN_SECONDS)  # noqa: S311 - two that are in each other's way part
        return self._timeout / BEATS if self._wanted <= ledger.listed else BUSY_SECONDS

    def _bury(self) -> None:
        """Call members dead that are silent, or proved gone. Tell of their workers that are proved gone."""
        proved = self._local_names.proves_gone
        for row in self._ledger.over(proved):
            log.warning("member_buried", daemon=row.name)
            if proved(row.name):
                self._unproved.update(self._ledger.others[row.name].members)
            self._table.bury(row.name, row.beat)
            self._loop.wake()
        for worker_id in filter(proved, list(self._unproved)):
            self._unproved.discard(worker_id)
            self.leave(worker_id, known_dead=True)

    def _note_reached(self, error: TocError | None) -> None:
        if error is not None and self._reached:
            log.warning("members_out_of_reach", error=str(error))
        self._reached = error is None

    def _leave(self) -> float:
        try:
            self._table.leave(self._name, self._host)
        except TocError as exc:
            log.warning("member_not_left", daemon=self._name, error=str(exc))
        return LEAVE_SECONDS
