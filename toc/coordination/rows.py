"""Coordination without ZooKeeper: the daemons are rows in the first database, and each assigns for itself.

A thread writes the own row and reads those of all, a few times in each timeout and whenever something is to
be told. While the table is out of reach nothing moves between daemons: the workers keep what they hold, and
one that replaces another takes up its slots. They are sure of it only for a time, after which they start
nothing without a lease (``sure_until``).

A row's ``data`` is a JSON object; readers ignore unknown keys::

    {workers: {worker_id: {...as in ZooKeeper's workers/{worker_id}, slots: {topic: mask}}},
     leaving: {topic: mask},       what it still holds and gives up
     dead: [worker_id, ...]}       its workers whose process is known to have ended, the latest ones

A mask is a hexadecimal number whose bit n stands for slot n.

A Ledger decides what one daemon may take. It needs no clock but its own monotonic one:

    list      a slot is written into the own row only if no living row had it
    grant     and may be taken if the rows, read after that write, have it in no other
    give up   a slot leaves the row after the last worker has let go of it
    silence   a row is called dead, in the table, once it has not changed for its timeout since it was first
              read, by the clock of the reader, who has read it again and again meanwhile
    sure      the writer of a row is sure of its slots until its timeout, less a margin, has passed since it
              began the last write that was answered

Of two rows with one slot, the one written later was read after both were written, so its daemon saw the
other: only one may take. A row is called dead later than its writer was last sure: the reader's time begins
after the write, the writer's before it. A member that was called dead learns it with its next write, which
the table refuses; it then owns nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

from toc.coordination import coordinator
from toc.coordination.assignment import Member, assign
from toc.coordination.coordinator import DEAD_FOR_MS, Coordinator, SlotOwner, SlotRow, WorkerRow, by_worker
from toc.coordination.presence import LocalNames, Presence
from toc.coordination.znodes import encode, member_from, member_values, not_understood
from toc.loop import Loop
from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument, TocError
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
LEAVE_SECONDS = 1.0
"""How long ``stop`` waits until the row is gone."""
MARGIN = 0.25
"""The part of its timeout by which a member stops being sure before others may call it dead."""
BLIND = 0.5
"""If a member has not read the rows for this part of its timeout, the silence of others begins anew: the
table was perhaps out of their reach as well."""
MAX_DATA_CHARS = 16 << 20
"""Characters of a row's data: the most that its column holds."""
DEAD_TOLD = 200
"""How many deaths a row tells of."""


@dataclass(frozen=True)
class Daemon:
    """What a row says. ``slots`` are by worker_id; ``dead`` are known deaths."""

    members: Mapping[str, Member] = field(default_factory=dict)
    slots: Mapping[str, frozenset[Slot]] = field(default_factory=dict)
    leaving: frozenset[Slot] = frozenset()
    dead: tuple[str, ...] = ()

    @property
    def listed(self) -> set[Slot]:
        """The slots that no other daemon may take."""
        return set(self.leaving).union(*self.slots.values())

    def data(self) -> str:
        """Return the row's data."""
        workers = {
            name: member_values(member) | {"slots": _masks(self.slots.get(name, ()))}
            for name, member in self.members.items()
        }
        dead = list(self.dead[-DEAD_TOLD:])
        return encode(workers=workers, leaving=_masks(self.leaving), dead=dead).decode()


@lru_cache(64)
def daemon_of(name: str, data: str) -> Daemon:
    """Return what a row says. What cannot be understood is logged once and says nothing."""
    try:
        values = parse_object(data, most=MAX_DATA_CHARS)
    except InvalidDocument as exc:
        not_understood(name, str(exc))
        return Daemon()
    members, slots = {}, {}
    workers, dead = values.get("workers"), values.get("dead")
    for worker_id, each in workers.items() if isinstance(workers, dict) else ():
        if isinstance(each, dict) and (member := member_from(worker_id, each)):
            members[worker_id] = member
            slots[worker_id] = _slots(each.get("slots"))
    ended = tuple(each for each in dead if isinstance(each, str)) if isinstance(dead, list) else ()
    return Daemon(members, slots, _slots(values.get("leaving")), ended)


def assign_rows(
    daemons: Iterable[Daemon], slots: Iterable[Slot], deliveries: Mapping[str, str] | None = None
) -> dict[Slot, str | None]:
    """Return who should own each of these slots: all who read the same rows compute the same. What a daemon
    is giving up has no previous owner."""
    members: list[Member] = []
    before: dict[Slot, str] = {}
    for daemon in daemons:
        members += daemon.members.values()
        for worker_id, some in daemon.slots.items():
            before |= {slot: min(worker_id, before.get(slot, worker_id)) for slot in some}
    by_topic: dict[str, list[Slot]] = {}
    for slot in sorted(slots):
        by_topic.setdefault(slot.topic, []).append(slot)
    owners = assign(
        members,
        {topic: len(some) for topic, some in by_topic.items()},
        previous={topic: [before.get(slot) for slot in some] for topic, some in by_topic.items()},
        deliveries=deliveries,
    )
    return {
        slot: owner
        for topic, some in by_topic.items()
        for slot, owner in zip(some, owners[topic], strict=True)
    }


class Ledger:
    """What one daemon lists in its row, and what it may take. ``timeout`` is in seconds. Not thread-safe."""

    def __init__(self, name: str, timeout: float, monotonic: Callable[[], float]) -> None:
        self._name = name
        self._timeout = timeout
        self._monotonic = monotonic
        self.listed: set[Slot] = set()
        """What the own row says, or will with the next write."""
        self.granted: set[Slot] = set()
        """Those of them that our workers may have."""
        self.others: dict[str, Daemon] = {}
        """What the other living rows said when they were last read."""
        self._elsewhere: set[Slot] = set()
        """What these list."""
        self.sure_until = float("-inf")
        """Until when (monotonic) no other daemon has what was granted."""
        self._seen: dict[str, tuple[MemberRow, float]] = {}
        """The other rows as first read with their present beat, and when (monotonic)."""
        self._read_at = float("-inf")

    def want(self, wanted: Collection[Slot], held: Collection[Slot]) -> bool:
        """List what is wanted and free, and keep what our workers hold. Returns whether that is to be
        written."""
        before = self.listed
        fresh = set(wanted) - before - self._elsewhere
        self.listed = before.intersection(wanted).union(held, fresh)
        self.granted &= self.listed
        return self.listed != before

    def read(self, rows: Iterable[MemberRow], sent: Collection[Slot], began: float) -> bool:
        """Learn of the living rows, as read after a write that began at ``began`` and listed ``sent``.

        Returns whether something has changed, but for the beats.
        """
        now = self._monotonic()
        theirs = [row for row in rows if row.name != self._name and not row.dead]
        others = {row.name: daemon_of(row.name, row.data) for row in theirs}
        before = self.others, set(self.listed), set(self.granted)
        if others != self.others:
            self.others = others
            self._elsewhere = set().union(*(daemon.listed for daemon in others.values()))
        self.listed -= self._elsewhere - self.granted
        self.granted |= self.listed.intersection(sent) - self._elsewhere
        self.sure_until = began + self._timeout * (1 - MARGIN)
        blind = now - self._read_at > self._timeout * BLIND
        self._read_at = now
        known = {} if blind else self._seen
        self._seen = {}
        for row in theirs:
            first = known.get(row.name)
            self._seen[row.name] = first if first and first[0].beat == row.beat else (row, now)
        return before != (self.others, self.listed, self.granted)

    def over(self, gone: Callable[[str], bool]) -> list[MemberRow]:
        """Return the rows that may be called dead: they were silent, or their process is known to be
        ``gone``."""
        return [
            row
            for name, (row, since) in self._seen.items()
            if self._read_at - since >= row.timeout / 1000 or gone(name)
        ]

    def lost(self) -> None:
        """Forget everything: others have called our row dead."""
        self.listed, self.granted = set(), set()


def _masks(slots: Iterable[Slot]) -> dict[str, str]:
    masks: dict[str, int] = {}
    for topic, number in slots:
        masks[topic] = masks.get(topic, 0) | 1 << number
    return {topic: f"{mask:x}" for topic, mask in masks.items()}


def _slots(masks: Any) -> frozenset[Slot]:
    found: set[Slot] = set()
    for topic, text in masks.items() if isinstance(masks, dict) else ():
        with suppress(TypeError, ValueError):  # no mask
            bits = f"{int(text, 16):b}"[::-1]
            found.update(Slot(topic, number) for number, bit in enumerate(bits) if bit == "1")
    return frozenset(found)


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


class RowsCoordinator(Coordinator):
    """Spreads slots over the daemons that have rows.

    ``host`` names this daemon. After ``timeout`` seconds without a beat others take over what it has.
    ``on_change`` is called, from any thread, when ``step`` should be called soon. It must not block.
    """

    def __init__(
        self,
        table: Members,
        *,
        host: str,
        timeout: float,
        clock: Clock | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._table = table
        self._host = host
        self._timeout = timeout
        self._timeout_ms = round(timeout * 1000)
        self._clock = clock or Clock()
        self._on_change = on_change
        self._local_names = LocalNames.of(host)
        self._name = self._local_names.name(f"{host}-daemon")
        self._presence: Presence | None = None
        self._loop = Loop("members", self._run_once)
        self._number = 0
        """That of the last write."""

        self._lock = threading.Lock()
        """For all that follows."""
        self._ledger = Ledger(self._name, timeout, self._clock.monotonic)
        self._reached = True
        """Whether the table answered the last time."""
        self._alone_until = float("-inf")
        """Until when (monotonic) a daemon without a process keeps its slots for the one that it starts."""
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
        if self._presence is None:
            return
        self._loop.stop(LEAVE_SECONDS)
        leaving = threading.Thread(target=self._leave, daemon=True)  # the server may hang
        leaving.start()
        leaving.join(LEAVE_SECONDS)
        self._presence.close()
        self._presence = None

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
                if not self._members:
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

    def unowned(self) -> frozenset[Slot]:
        """Return the slots that no worker may have; only the first of the daemons returns any."""
        with self._lock:
            first = all(self._name < name for name in self._ledger.others)
            return frozenset(slot for slot, owner in self._assignment.items() if first and owner is None)

    # --- the assignment, under the lock

    def _assign(self) -> None:
        """Compute the assignment anew, if something has changed, and list accordingly.

        Nothing goes to other daemons while the table is out of reach, nor while a daemon starts its only
        process.
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
        return now >= self._ledger.sure_until or now < self._alone_until

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
        """Write our row and read those of all. Returns the seconds until the next time."""
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

    def _leave(self) -> None:
        try:
            self._table.leave(self._name, self._host)
        except TocError as exc:
            log.warning("member_not_left", daemon=self._name, error=str(exc))


class Onlooker:
    """What the rows say at one moment, as an operator sees it.

    ``rows`` are those of all daemons, ``slots`` all slots that there are, tables included; ``deliveries``
    as for ``assign``."""

    def __init__(
        self, rows: Iterable[MemberRow], slots: Collection[Slot], deliveries: Mapping[str, str]
    ) -> None:
        self._rows = list(rows)
        self._daemons = {row.name: daemon_of(row.name, row.data) for row in self._rows if row.alive}
        owners = assign_rows(self._daemons.values(), slots, deliveries)
        self._assignment: dict[str, list[str | None]] = {}
        for slot, owner in sorted(owners.items()):
            self._assignment.setdefault(slot.topic, []).append(owner)
        self._claims: dict[Slot, SlotOwner] = {}
        self._hosts: dict[str, str] = {}
        for name, daemon in self._daemons.items():
            for worker, some in {name: daemon.leaving, **daemon.slots}.items():
                self._claims |= {slot: SlotOwner(worker, 0) for slot in some if slot in owners}
                self._hosts[worker] = name

    def workers(self) -> list[WorkerRow]:
        """Return every worker that is alive."""
        members = chain.from_iterable(daemon.members.values() for daemon in self._daemons.values())
        return coordinator.worker_rows(members, self._assignment, self._claims)

    def slots(self) -> list[SlotRow]:
        """Return every slot, with its owner, its assigned worker, and the reason."""
        return coordinator.slot_rows(self._assignment, self._claims, self._hosts, pins={}, leaving={})

    def silent(self) -> dict[str, int]:
        """Return the hosts without a living daemon, one of whose daemons did not leave: seconds since it was
        heard of."""
        living = {row.host for row in self._rows if row.alive}
        heard: dict[str, int] = {}
        for row in self._rows:
            if row.host not in living:
                heard[row.host] = min(row.age // 1000, heard.get(row.host, row.age // 1000))
        return heard
