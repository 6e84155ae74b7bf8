"""The interface of coordination for a daemon, and the views of it for an operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from toc.coordination.assignment import TABLES, Member
from toc.model.topic import Slot

DEAD_FOR_MS = 600_000
"""How long a known death is remembered (ms): longer than others need to put back the dead worker's
entries."""


class Coordinator(Protocol):
    """Gives slots to the worker processes of one daemon: through rows in the first database, or ZooKeeper.

    One thread calls all methods. A handover in order: the slot vanishes from the old owner's ``desired``; the
    old owner stops taking from it, finishes or rolls back what it holds, and releases it; only then is the
    new owner's claim granted. While that server is out of reach, ``desired`` and ``claimed`` stay; new claims
    are granted only to a worker that replaces another one of this daemon, for that one's slots.
    """

    def start(self) -> None:
        """Connect. Raises CoordinationUnavailable."""

    def stop(self) -> None:
        """Release everything and disconnect. May be called twice, or without start."""

    def set_topics(self, topics: Mapping[str, int], deliveries: Mapping[str, str] | None = None) -> None:
        """Set what to assign: topic -> number of slots (former slot amounts included, tables as TABLES).

        ``deliveries``: topic -> delivery, for those that are not delivered to handlers.
        """

    def join(self, member: Member) -> None:
        """Add a worker process of this daemon to the cluster, or update what is known of it."""

    def leave(self, worker_id: str, *, known_dead: bool) -> None:
        """Remove a worker and drop its claims. ``known_dead``: its process is known to have ended."""

    def desired(self) -> dict[str, set[Slot]]:
        """Return worker_id -> the slots that it should own, for each worker that joined here."""

    def claimed(self) -> dict[str, set[Slot]]:
        """Return worker_id -> the slots that it holds.

        A slot that vanishes from here without a release is lost: the session ended, and another worker has
        claimed the slot. The worker must stop taking from it.
        """

    def claim(self, worker_id: str, slots: Collection[Slot]) -> set[Slot]:
        """Claim slots for a worker. Returns those that it holds now. Claim the others again when woken."""

    def release(self, worker_id: str, slots: Collection[Slot]) -> None:
        """Drop claims, once the worker holds no entry of these slots any more."""

    def dead_workers(self) -> frozenset[str]:
        """Return the workers whose process is known to have ended, for ten minutes after that."""

    def connected(self) -> bool:
        """Whether every claim can be granted now. If not, this daemon keeps what it holds."""

    def sure_until(self) -> float:
        """Return until when (monotonic) no other daemon has what ours hold, as far as this one can know: one
        that is cut off cannot always tell that from an outage. Later ours start nothing without a lease."""
        return float("inf")

    def senders(self) -> int:
        """Return how many workers of all daemons send webhooks; 0 if that is not known."""
        return 0

    def drained(self) -> bool:
        """Whether an operator has drained this daemon's host, as far as known."""
        return False

    def unowned(self) -> frozenset[Slot]:
        """Return the slots, tables included, that no worker may have.

        Only one of the daemons returns any: with ZooKeeper the leading one, as of when it last read them.
        """

    def step(self) -> float | None:
        """Do what is due. Returns the seconds until the next step, or None if the next step waits
        for an event."""
        return None


def by_worker(workers: Iterable[str], owners: Mapping[Slot, str | None]) -> dict[str, set[Slot]]:
    """Return the slots that each of these workers has."""
    found: dict[str, set[Slot]] = {worker_id: set() for worker_id in workers}
    for slot, owner in owners.items():
        if owner in found:
            found[owner].add(slot)
    return found


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
    ``weight`` is the weight in force; ``weighed_by`` is the operator who set it, None if it is the weight
    with which its daemon was started. ``drained_by`` and ``drained_at`` (ms): who
    drained its host, and when.
    """

    member: Member
    weight: float
    assigned: int
    owned: int
    tables_assigned: int
    tables: int
    leader: bool = False
    weighed_by: str | None = None
    drained: bool = False
    drained_by: str | None = None
    drained_at: int | None = None


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
    drains: Mapping[str, Intent] | None = None,
    leading: Collection[str] = (),
) -> list[WorkerRow]:
    """Return one row per worker. ``weights`` and ``drains`` are by host; ``leading``: whose daemon leads."""
    assigned = Counter((owner, topic == TABLES) for topic, owners in assignment.items() for owner in owners)
    held = Counter((claim.worker_id, slot.topic == TABLES) for slot, claim in claims.items())
    rows = []
    for member in members:
        weight, drain = (weights or {}).get(member.host), (drains or {}).get(member.host)
        name = member.worker_id
        slots = assigned[name, False], held[name, False], assigned[name, True], held[name, True]
        row = WorkerRow(member, weight.to if weight else member.weight, *slots, leader=name in leading)
        if weight:
            row = replace(row, weighed_by=weight.by)
        if drain:
            row = replace(row, drained=True, drained_by=drain.by, drained_at=drain.at)
        rows.append(row)
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
