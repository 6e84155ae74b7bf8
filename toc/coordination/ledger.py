"""What the daemons' rows say, and by what rules a daemon takes slots: without a thread, without the table.

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

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from toc.coordination.assignment import Member, assign
from toc.coordination.znodes import encode, member_from, member_values, not_understood
from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument
from toc.model.member import MemberRow
from toc.model.topic import Slot

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

    def want(self, wanted: Collection[Slot], held: Collection[Slot]) -> None:
        """List what is wanted and free, and keep what our workers hold."""
        fresh = set(wanted) - self.listed - self._elsewhere
        self.listed = self.listed.intersection(wanted).union(held, fresh)
        self.granted &= self.listed

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
