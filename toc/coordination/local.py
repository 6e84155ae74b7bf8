"""Coordination without ZooKeeper: the members are the worker processes of one daemon."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from toc.coordination.assignment import Member, Owners, assign
from toc.coordination.coordinator import without_owner
from toc.model.clock import Clock
from toc.model.topic import Slot

DEAD_FOR_MS = 600_000
"""How long a known death is remembered (ms): longer than others need to put back the dead worker's
entries."""


class LocalCoordinator:
    """Spreads the slots over the processes of this daemon. Implements Coordinator.

    ``on_change`` is called, from any thread, when ``step`` should be called soon. It must not block.
    """

    def __init__(self, clock: Clock | None = None, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._clock = clock or Clock()
        self._topics: dict[str, int] = {}
        self._deliveries: dict[str, str] = {}
        self._members: dict[str, Member] = {}
        self._dead: dict[str, int] = {}
        self._claims: dict[Slot, str] = {}
        self._assignment: Owners = {}
        self._stale = False

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Forget all members and claims."""
        self._members.clear()
        self._claims.clear()
        self._assignment = {}

    def set_topics(self, topics: Mapping[str, int], deliveries: Mapping[str, str] | None = None) -> None:
        """Set what to assign: topic -> number of slots."""
        if (self._topics, self._deliveries) != (dict(topics), dict(deliveries or {})):
            self._topics, self._deliveries = dict(topics), dict(deliveries or {})
            self._changed()

    def join(self, member: Member) -> None:
        """Add a worker process."""
        self._members[member.worker_id] = member
        self._changed()

    def leave(self, worker_id: str, *, known_dead: bool) -> None:
        """Remove a worker and its claims."""
        if known_dead:
            self._dead[worker_id] = self._clock.now_ms()
        if self._members.pop(worker_id, None) is not None:
            self.release(worker_id, [slot for slot, owner in self._claims.items() if owner == worker_id])
            self._changed()

    def desired(self) -> dict[str, set[Slot]]:
        """Return the slots that are assigned to each worker."""
        self._assign()
        wanted: dict[str, set[Slot]] = {worker_id: set() for worker_id in self._members}
        for topic, owners in self._assignment.items():
            for number, owner in enumerate(owners):
                if owner is not None:
                    wanted[owner].add(Slot(topic, number))
        return wanted

    def claimed(self) -> dict[str, set[Slot]]:
        """Return the slots that each worker holds."""
        held: dict[str, set[Slot]] = {worker_id: set() for worker_id in self._members}
        for slot, owner in self._claims.items():
            held[owner].add(slot)
        return held

    def claim(self, worker_id: str, slots: Collection[Slot]) -> set[Slot]:
        """Claim free slots. Returns those that the worker holds now."""
        if worker_id not in self._members:
            return set()
        for slot in slots:
            self._claims.setdefault(slot, worker_id)
        return {slot for slot in slots if self._claims[slot] == worker_id}

    def release(self, worker_id: str, slots: Collection[Slot]) -> None:
        """Drop the worker's claims on these slots."""
        for slot in slots:
            if self._claims.get(slot) == worker_id:
                del self._claims[slot]
                self._on_change()

    def dead_workers(self) -> frozenset[str]:
        """Return the workers known to have died within DEAD_FOR_MS."""
        oldest = self._clock.now_ms() - DEAD_FOR_MS
        self._dead = {worker_id: died for worker_id, died in self._dead.items() if died >= oldest}
        return frozenset(self._dead)

    def connected(self) -> bool:
        """Return True: there is no server to lose."""
        return True

    def drained(self) -> bool:
        """Return False: drains need ZooKeeper."""
        return False

    def unowned(self) -> frozenset[Slot]:
        """Return the slots that no worker may have."""
        self._assign()
        return without_owner(self._assignment)

    def step(self) -> float | None:
        """Return None: nothing is due at a time."""
        return None

    def _assign(self) -> None:
        # On demand, not at each change: processes that start together cost one assignment, so few slots move.
        if self._stale:
            self._assignment = assign(
                self._members.values(),
                self._topics,
                previous=self._assignment,
                deliveries=self._deliveries,
            )
            self._stale = False

    def _changed(self) -> None:
        self._stale = True
        self._on_change()
