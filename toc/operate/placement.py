"""How operators change where slots go: hosts drained or weighed, slots pinned, everything spread evenly.

Each change is recorded in the audit. A change that names a host or worker that does not exist is
refused, unless the caller says that it will come later (``absent``).
"""

from __future__ import annotations

from collections.abc import Iterable

from toc.coordination.operator import Move, Operator
from toc.coordination.znodes import slot_of
from toc.model.errors import InvalidInput, UnknownHost, shown
from toc.model.topic import Delivery, Slot
from toc.operate import admin
from toc.operate.audit import audited
from toc.store.store import Store

NAMED = 20
"""How many hosts a message names at most."""


class Placement:
    """Changes where slots go, in the name of ``by``. Every method raises InvalidInput and UnknownHost.

    ``hint`` says how to name a host that is ``absent``.
    """

    def __init__(self, operator: Operator, store: Store, *, by: str, cluster: str, hint: str) -> None:
        self._operator = operator
        self._store = store
        self._by = by
        self._cluster = cluster
        self._hint = hint

    def drain(self, host: str, *, absent: bool = False) -> bool:
        """Take all slots from a host until ``undrain``. Returns whether it has a worker now."""
        present = self._is_there(host, absent=absent or host in self._operator.intents().drains)
        with audited(self._store, self._by, "host.drain", host):
            self._operator.drain(host, by=self._by)
        return present

    def undrain(self, host: str) -> bool:
        """Let a host have slots again. Returns False if it was not drained."""
        with audited(self._store, self._by, "host.undrain", host):
            found = self._operator.undrain(host)
        if not found:
            self._is_there(host, hint=f"drained hosts: {some(self._operator.intents().drains)}")
        return found

    def weigh(self, host: str, weight: float, *, absent: bool = False) -> None:
        """Give the workers of a host another share than its TOC_WEIGHT, until ``unweigh``."""
        self._is_there(host, absent=absent or host in self._operator.intents().weights)
        with audited(self._store, self._by, "host.weight", host, weight=weight):
            self._operator.weigh(host, weight, by=self._by)

    def unweigh(self, host: str) -> bool:
        """Let TOC_WEIGHT of a host count again. Returns False if it did."""
        with audited(self._store, self._by, "host.unweight", host):
            found = self._operator.unweigh(host)
        if not found:
            self._is_there(host, hint=f"hosts with a weight: {some(self._operator.intents().weights)}")
        return found

    def pin(self, slot: str, target: str, *, absent: bool = False) -> None:
        """Put a slot, such as order.close_3, on a worker or host. Raises UnknownTopic."""
        wanted = _slot(slot)
        topic = admin.get_topic(self._store, wanted.topic)
        if wanted.number >= topic.slot_amount:
            raise InvalidInput(
                f"{topic.name} has slots 0 to {topic.slot_amount - 1}, not {wanted.number}", "slot"
            )
        self._is_there(target, absent=absent, workers=True)
        with audited(self._store, self._by, "slot.pin", slot, to=target):
            self._operator.pin(wanted, target, by=self._by)

    def unpin(self, slot: str) -> bool:
        """Let a slot go where balance puts it, also one that is gone. Returns False if it was not pinned."""
        wanted = _slot(slot)
        with audited(self._store, self._by, "slot.unpin", slot):
            return self._operator.unpin(wanted)

    def rebalance(self, *, dry_run: bool) -> list[Move]:
        """Spread every topic's slots evenly over the workers. Returns what will move."""
        deliveries = {
            topic.name: topic.delivery.value
            for topic in self._store.topics.list()
            if topic.delivery is not Delivery.HANDLER
        }
        if dry_run:
            return self._operator.rebalance(by=self._by, dry_run=True, deliveries=deliveries)
        with audited(self._store, self._by, "cluster.rebalance", self._cluster) as record:
            moves = self._operator.rebalance(by=self._by, deliveries=deliveries)
            record["moves"] = len(moves)
        return moves

    def _is_there(self, target: str, *, absent: bool = False, workers: bool = False, hint: str = "") -> bool:
        """Whether a host has a worker now. With ``workers`` the target may be a worker too."""
        host_of = {row.member.worker_id: row.member.host for row in self._operator.workers()}
        hosts = set(host_of.values())
        if target in hosts or (workers and target in host_of):
            return True
        if target in host_of:
            raise UnknownHost(f"{shown(target)} is a worker, not a host: give its host, {host_of[target]}")
        if not absent:
            raise UnknownHost(
                f"{shown(target)} has no worker now; hosts with workers: {some(hosts)}; {hint or self._hint}"
            )
        return False


def _slot(name: str) -> Slot:
    slot = slot_of(name)
    if slot is None:
        raise InvalidInput(
            f"{shown(name)} is not a slot; write it as `toc slots` does: order.close_3", "slot"
        )
    return slot


def some(names: Iterable[str]) -> str:
    """Return names for a message, at most NAMED of them."""
    first, rest = sorted(names)[:NAMED], sorted(names)[NAMED:]
    return (", ".join(first) or "none") + (f" and {len(rest)} more" if rest else "")
