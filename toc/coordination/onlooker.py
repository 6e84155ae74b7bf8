"""What the rows of members say at one moment, as an operator sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from toc.coordination.assignment import TABLES
from toc.coordination.coordinator import SlotOwner, SlotRow, WorkerRow, slot_rows
from toc.coordination.members import assign_rows, daemon_of
from toc.model.member import MemberRow
from toc.model.topic import Slot


class Onlooker:
    """``rows`` are those of all daemons, ``slots`` all slots that there are, tables included; ``deliveries``
    as for ``assign``."""

    def __init__(
        self, rows: Iterable[MemberRow], slots: Collection[Slot], deliveries: Mapping[str, str]
    ) -> None:
        self._rows = list(rows)
        self._daemons = {row.name: daemon_of(row.name, row.data) for row in self._rows if row.alive}
        self._assignment = assign_rows(self._daemons.values(), slots, deliveries)

    def workers(self) -> list[WorkerRow]:
        """Return every worker that is alive."""
        assigned = Counter((owner, slot.topic == TABLES) for slot, owner in self._assignment.items())
        found = []
        for daemon in self._daemons.values():
            for worker_id, member in daemon.members.items():
                tables = sum(slot.topic == TABLES for slot in daemon.slots[worker_id])
                found.append(
                    WorkerRow(
                        member,
                        weight=member.weight,
                        joined=daemon.joined[worker_id],
                        assigned=assigned[worker_id, False],
                        owned=len(daemon.slots[worker_id]) - tables,
                        tables_assigned=assigned[worker_id, True],
                        tables=tables,
                        leader=False,
                    )
                )
        return found

    def slots(self) -> list[SlotRow]:
        """Return every slot, with its owner, its assigned worker, and the reason."""
        assignment: dict[str, list[str | None]] = {}
        for slot, owner in sorted(self._assignment.items()):
            assignment.setdefault(slot.topic, []).append(owner)
        claims: dict[Slot, SlotOwner] = {}
        hosts: dict[str, str] = {}
        for name, daemon in self._daemons.items():
            for owner, slots in {name: daemon.leaving, **daemon.slots}.items():
                claims |= {slot: SlotOwner(owner, 0) for slot in slots if slot in self._assignment}
                hosts[owner] = name
        return slot_rows(assignment, claims, hosts, pins={}, leaving={})

    def silent(self) -> dict[str, int]:
        """Return the hosts without a living daemon, one of whose daemons did not leave: seconds since it was
        heard of."""
        living = {row.host for row in self._rows if row.alive}
        heard: dict[str, int] = {}
        for row in self._rows:
            if row.host not in living:
                heard[row.host] = min(row.age // 1000, heard.get(row.host, row.age // 1000))
        return heard
