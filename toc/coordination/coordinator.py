"""What a daemon asks of coordination, and what an operator sees of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from toc.coordination.assignment import TABLES, Member
from toc.model.topic import Slot


class Coordinator(Protocol):
    """Hands slots to the worker processes of one daemon: local (one host) or through ZooKeeper (a cluster).

    One thread calls all of it. The order of a hand-over: the old owner sees its slot vanish from ``desired``,
    stops taking from it, finishes or gives back what it holds, and releases; only then is the new owner's
    claim granted. Losing ZooKeeper takes nothing away: ``desired`` and ``claimed`` stay, and new claims are
    granted only of what a worker of this daemon has left behind meanwhile.
    """

    on_change: Callable[[], None] | None
    """Called, from any thread, when ``step`` should be called soon. Must not block."""

    def start(self) -> None:
        """Connect. Raises CoordinationUnavailable."""

    def stop(self) -> None:
        """Give everything back and disconnect; may be called twice, or without start."""

    def set_topics(self, topics: Mapping[str, int]) -> None:
        """What is to be assigned: topic -> number of slots (old slot amounts included, tables as TABLES)."""

    def join(self, member: Member) -> None:
        """Add a worker process of this daemon to the cluster."""

    def leave(self, worker_id: str, *, known_dead: bool) -> None:
        """Take a worker out and drop its claims. ``known_dead``: its process was seen to have ended."""

    def desired(self) -> dict[str, set[Slot]]:
        """worker_id -> the slots that it should own, for each worker that joined here."""

    def claimed(self) -> dict[str, set[Slot]]:
        """worker_id -> the slots that it holds. A slot that vanished from here without a release is lost (its
        session ended and it is another's now): stop taking from it."""

    def claim(self, worker_id: str, slots: Collection[Slot]) -> set[Slot]:
        """Those of ``slots`` that the worker holds now. Another holds the rest: ask again when woken."""

    def release(self, worker_id: str, slots: Collection[Slot]) -> None:
        """Drop claims: nothing of these slots is in the worker's hands any more."""

    def dead_workers(self) -> frozenset[str]:
        """Workers whose process is known to have ended, for ten minutes after that."""

    def connected(self) -> bool:
        """Whether every claim can be granted now. Without that what is held stays with this daemon."""

    def drained(self) -> bool:
        """Whether an operator wants no slots on this daemon's host, as far as is known."""

    def unowned(self) -> frozenset[Slot]:
        """Slots, tables included, that no worker may have, as far as this daemon is the one to tell of them:
        in a cluster the daemon that leads is, as of the last time that ZooKeeper answered it."""

    def wait(self, timeout: float) -> None:
        """Sleep until something may have changed, at most ``timeout`` seconds, then ``step``."""

    def step(self) -> float | None:
        """Do what is due. Returns the seconds until there is more to do, None if only events bring it."""

    def slots(self) -> list[SlotRow]:
        """Every slot, for ``toc slots``. Raises CoordinationUnavailable."""

    def workers(self) -> list[WorkerRow]:
        """Every worker, for ``toc workers``. Raises CoordinationUnavailable."""


class SlotState(StrEnum):
    """Where a slot stands."""

    OWNED = "owned"
    """Its assigned worker holds it."""
    MOVING = "moving"
    """Another worker still holds it, or its assigned worker has not taken it yet."""
    UNASSIGNED = "unassigned"
    """No worker may have it: none handles the topic, or all that do are drained."""


@dataclass(frozen=True, slots=True)
class SlotRow:
    """One slot as an operator sees it. ``since`` is the instant of the owner's claim in milliseconds."""

    topic: str
    number: int
    state: SlotState
    owner: str | None
    assigned: str | None
    since: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as an operator sees it. ``leader``: its daemon leads.

    ``assigned`` and ``owned`` count slots, ``tables_assigned`` and ``tables`` the tables that it sweeps.

    ``weight`` is what counts; ``weighed_by`` whoever asked for it, None if its daemon was started with it.
    ``drained_by`` and ``drained_at`` (milliseconds): whoever drained its host, and when. ``metrics`` is where
    its daemon shows its numbers, by the network of ``machine``; None of both if it does not, or does not say.
    """

    worker_id: str
    host: str
    pid: int
    weight: float
    topics: list[str] | None
    joined: int
    assigned: int
    owned: int
    tables_assigned: int
    tables: int
    drained: bool
    leader: bool
    weighed_by: str | None = None
    drained_by: str | None = None
    drained_at: int | None = None
    metrics: str | None = None
    machine: str | None = None


@dataclass(frozen=True, slots=True)
class SlotOwner:
    """Who holds a slot, since which instant (milliseconds)."""

    worker_id: str
    since: int


class Share(NamedTuple):
    """How many slots of topics a worker has, and how many tables it sweeps."""

    slots: int
    tables: int


def shares(pairs: Iterable[tuple[str, str | None]]) -> Callable[[str], Share]:
    """What each worker has, given the topic and the worker_id of each slot."""
    counts = Counter((worker_id, topic == TABLES) for topic, worker_id in pairs)
    return lambda worker_id: Share(counts[worker_id, False], counts[worker_id, True])


def without_owner(assignment: Mapping[str, Collection[str | None]]) -> frozenset[Slot]:
    """The slots that nobody may have."""
    return frozenset(
        Slot(topic, number)
        for topic, owners in assignment.items()
        if None in owners
        for number, owner in enumerate(owners)
        if owner is None
    )


def slot_rows(
    assignment: Mapping[str, Collection[str | None]],
    claims: Mapping[Slot, SlotOwner],
    hosts: Mapping[str, str],
    *,
    pins: Mapping[Slot, str] | None = None,
    drains: Mapping[str, str] | None = None,
) -> list[SlotRow]:
    """One row per slot that is assigned or held, by topic and number.

    ``hosts`` is worker_id -> host of those alive; ``pins`` and ``drains`` are what is to be said of a slot
    that is pinned, and of a host that is drained.
    """
    pins, drains = pins or {}, drains or {}
    assigned = {
        Slot(topic, number): owner
        for topic, owners in assignment.items()
        for number, owner in enumerate(owners)
    }
    rows = []
    for slot in sorted(assigned.keys() | claims.keys()):
        claim, target = claims.get(slot), assigned.get(slot)
        holder = claim.worker_id if claim else None
        if slot in pins:
            cause = pins[slot]
        elif holder not in (None, target) and holder not in hosts:
            cause = f"{holder} has left"
        elif holder not in (None, target) and hosts[holder] in drains:
            cause = drains[hosts[holder]]
        else:
            cause = ""
        if holder is not None and holder == target:
            state, step = SlotState.OWNED, ""
        elif holder is None and target is None:
            state, step = SlotState.UNASSIGNED, "no worker that is not drained handles this topic"
        elif holder is None:
            state, step = SlotState.MOVING, f"{target} has not claimed it yet"
        else:
            state, step = SlotState.MOVING, f"{holder} has not released it yet"
        reason = "; ".join(part for part in (cause, step) if part) or "balance"
        rows.append(SlotRow(*slot, state, holder, target, claim.since if claim else None, reason))
    return rows
