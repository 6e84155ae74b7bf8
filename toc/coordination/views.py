"""What an operator sees of a cluster: its workers, its slots, and who wants what."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any

from toc.coordination.assignment import TABLES, Member
from toc.coordination.ledger import assign_rows, daemon_of
from toc.model.member import MemberRow
from toc.model.topic import Slot


class SlotState(StrEnum):
    """The state of a slot's ownership."""

    OWNED = "owned"
    """The worker that it is assigned to holds it."""
    MOVING = "moving"
    """Another worker still holds it, or the one that it is assigned to has not claimed it yet."""
    UNASSIGNED = "unassigned"
    """No worker may have it: none handles the topic, or all that do are drained."""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """An operator's view of one slot. ``since`` is the instant (ms) of the owner's claim."""

    topic: str
    number: int
    state: SlotState
    owner: str | None
    assigned: str | None
    since: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """An operator's view of one worker. ``leader``: its daemon leads.

    ``assigned`` and ``owned`` count slots, ``tables_assigned`` and ``tables`` the tables that it sweeps.
    ``weight`` is the weight in force.
    """

    member: Member
    weight: float
    assigned: int
    owned: int
    tables_assigned: int
    tables: int
    leader: bool = False
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Intent:
    """What an operator wants, since when (ms). ``to``: the target of a pin, the weight of a host."""

    by: str
    at: int
    to: Any = None


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """The worker that holds a slot, and since when (ms)."""

    worker_id: str
    since: int


def worker_rows(
    members: Iterable[Member],
    assignment: Mapping[str, Collection[str | None]],
    claims: Mapping[Slot, SlotOwner],
    weights: Mapping[str, Intent] | None = None,
    drains: Collection[str] = (),
    leading: Collection[str] = (),
) -> list[WorkerRow]:
    """Return one row per worker. ``weights`` are by host, ``drains`` the drained hosts; ``leading``: whose
    daemon leads."""
    assigned = Counter((owner, topic == TABLES) for topic, owners in assignment.items() for owner in owners)
    held = Counter((claim.worker_id, slot.topic == TABLES) for slot, claim in claims.items())
    rows = []
    for member in members:
        weight = (weights or {}).get(member.host)
        name = member.worker_id
        slots = assigned[name, False], held[name, False], assigned[name, True], held[name, True]
        in_force = weight.to if weight else member.weight
        rows.append(WorkerRow(member, in_force, *slots, name in leading, member.host in drains))
    return rows


def slot_rows(
    assignment: Mapping[str, Collection[str | None]],
    claims: Mapping[Slot, SlotOwner],
    hosts: Mapping[str, str],
    *,
    pins: Mapping[Slot, str],
    leaving: Mapping[str, str],
) -> list[SlotRow]:
    """Return one row per slot that is assigned or held, by topic and number.

    ``hosts`` maps the worker_id of each live worker to its host. ``pins`` are remarks on pinned slots,
    ``leaving`` remarks on workers that lose their slots, by worker_id.
    """
    each = ((Slot(topic, n), owner) for topic, owners in assignment.items() for n, owner in enumerate(owners))
    assigned = dict(each)
    rows = []
    for slot in sorted(assigned.keys() | claims.keys()):
        claim, target = claims.get(slot), assigned.get(slot)
        holder = claim.worker_id if claim else None
        cause = pins.get(slot, "")
        if not cause and holder is not None and holder != target:
            cause = leaving.get(holder, "") if holder in hosts else f"{holder} has left"
        if holder is not None and holder == target:
            state, step = SlotState.OWNED, ""
        elif holder is None and target is None:
            state, step = SlotState.UNASSIGNED, "no undrained worker handles this topic"
        elif holder is None:
            state, step = SlotState.MOVING, f"{target} has not claimed it yet"
        else:
            state, step = SlotState.MOVING, f"{holder} has not released it yet"
        reason = "; ".join(part for part in (cause, step) if part) or "balance"
        rows.append(SlotRow(*slot, state, holder, target, claim.since if claim else None, reason))
    return rows


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
        return worker_rows(members, self._assignment, self._claims)

    def slots(self) -> list[SlotRow]:
        """Return every slot, with its owner, its assigned worker, and the reason."""
        return slot_rows(self._assignment, self._claims, self._hosts, pins={}, leaving={})

    def silent(self) -> dict[str, int]:
        """Return the hosts without a living daemon, one of whose daemons did not leave: seconds since it was
        heard of."""
        living = {row.host for row in self._rows if row.alive}
        heard: dict[str, int] = {}
        for row in self._rows:
            if row.host not in living:
                heard[row.host] = min(row.age // 1000, heard.get(row.host, row.age // 1000))
        return heard
