"""A cluster without ZooKeeper, as an operator sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from toc.coordination.coordinator import SlotOwner, SlotRow, WorkerRow, slot_rows, worker_rows
from toc.coordination.ledger import assign_rows, daemon_of
from toc.model.member import MemberRow
from toc.model.topic import Slot


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
