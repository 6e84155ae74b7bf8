"""An operator's views of a cluster and changes to it, without being a member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Self

from toc.coordination.address import Address
from toc.coordination.assignment import ONE_SERVER, Spread, assign
from toc.coordination.coordinator import SlotOwner, SlotRow, WorkerRow, slot_rows, worker_rows
from toc.coordination.intents import Intent, Intents, read_intents, read_members
from toc.coordination.session import Session
from toc.coordination.znodes import (
    DIRECTORIES,
    Paths,
    check_node_name,
    decode,
    encode,
    first_candidate,
    instant,
    member_of,
    owners_of,
    slot_of,
)
from toc.model.clock import Clock
from toc.model.topic import Slot


class Move(NamedTuple):
    """A slot that changes its owner; None: no owner."""

    topic: str
    number: int
    old: str | None
    new: str | None


class Operator:
    """A short connection to a cluster: ``with Operator(address, cluster=...) as operator: operator.slots()``.

    ``address`` is TOC_ZOOKEEPER; ``spread``: on which servers the tasks of a slot are. Every method raises
    CoordinationUnavailable when ZooKeeper is out of reach.
    """

    def __init__(
        self, address: str, *, cluster: str, connect_timeout: float = 10.0, spread: Spread = ONE_SERVER
    ) -> None:
        place = Address.parse(address)
        self._paths = Paths.of(place.chroot, cluster)
        self._session = Session(place, _ignore, connect_timeout=connect_timeout)
        self._spread = spread
        self._clock = Clock()

    def __enter__(self) -> Self:
        self._session.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._session.stop()

    def slots(self) -> list[SlotRow]:
        """Return every slot, with its owner, its assigned worker, and the reason."""
        wanted = self.intents()
        members = {member.worker_id: member for member in read_members(self._session, self._paths)}
        hosts = {worker_id: member.host for worker_id, member in members.items()}
        leaving = {
            name: f"{host} is drained by {wanted.drains[host].by}"
            for name, host in hosts.items()
            if host in wanted.drains
        }

        def pinned(pin: Intent) -> str:
            if hosts.get(pin.to, pin.to) in wanted.drains:
                why_not = ", but that is drained"
            elif pin.to not in hosts and pin.to not in hosts.values():
                why_not = ", but that is not running"
            else:
                why_not = ""
            return f"pinned to {pin.to} by {pin.by}{why_not}"

        return slot_rows(
            self._assignment(),
            read_claims(self._session, self._paths),
            hosts,
            pins={slot: pinned(pin) for slot, pin in wanted.pins.items()},
            leaving=leaving,
        )

    def workers(self) -> list[WorkerRow]:
        """Return every worker that is alive."""
        wanted = self.intents()
        candidates = self._session.children(self._paths.directory("leader"))
        leader = first_candidate(candidates).rpartition("-")[0]
        nodes = self._session.nodes(self._paths.directory("workers"))
        members = (member_of(name, node.data) for name, node in nodes.items())
        claims = read_claims(self._session, self._paths)
        rows = worker_rows((one for one in members if one is not None), self._assignment(), claims)
        found = []
        for row in rows:
            drain, weight = wanted.drains.get(row.member.host), wanted.weights.get(row.member.host)
            found.append(
                replace(
                    row,
                    weight=weight.to if weight else row.weight,
                    leader=f"{nodes[row.member.worker_id].session:x}" == leader,
                    weighed_by=weight.by if weight else None,
                    drained=drain is not None,
                    drained_by=drain.by if drain else None,
                    drained_at=drain.at if drain else None,
                )
            )
        return found

    def intents(self) -> Intents:
        """Return all intents, each with the operator and the time."""
        return read_intents(self._session, self._paths)

    def open_nodes(self) -> list[str]:
        """Return the directories that any client may change although the address names a user."""
        if self._session.address.credential is None:
            return []
        return self._session.open_to_all([self._paths.root, *map(self._paths.directory, DIRECTORIES)])

    def want(self, kind: str, subject: object, *, by: str, **values: object) -> None:
        """Write an intent: ``drain`` a host, ``pin`` a slot to a ``target``, give a host a ``weight``. ``by``
        names the operator. While the target of a pin is absent, its slot is balanced as usual."""
        data = encode(**values, by=by, at=self._clock.now_ms())
        self._write(kind, _subject(kind, subject), data)

    def unwant(self, kind: str, subject: object) -> bool:
        """Remove an intent. False if there was none."""
        path = self._paths.node(kind, _subject(kind, subject))
        [node] = self._session.read([path])
        self._session.delete([path])
        return node is not None

    def rebalance(
        self, *, by: str, dry_run: bool = False, deliveries: Mapping[str, str] | None = None
    ) -> list[Move]:
        """Spread every topic evenly over the workers. Returns what will move; the leader does it at once.

        ``deliveries``: topic -> delivery, for topics that are not delivered to handlers.
        """
        assignment = self._assignment()
        wanted = self.intents()
        members = read_members(self._session, self._paths)
        owners = assign(
            wanted.weighed(members),
            {topic: len(slots) for topic, slots in assignment.items()},
            previous=assignment,
            pins=wanted.targets,
            drained_hosts=wanted.drains,
            deliveries=deliveries,
            rebalance=True,
            spread=self._spread,
        )
        moves = [
            Move(topic, number, old, new)
            for topic, slots in assignment.items()
            for number, (old, new) in enumerate(zip(slots, owners[topic], strict=True))
            if old != new
        ]
        if not dry_run:
            self._write("rebalance", "request", encode(by=by, at=self._clock.now_ms()))
        return moves

    def _assignment(self) -> dict[str, list[str | None]]:
        nodes = self._session.nodes(self._paths.directory("assignment"))
        return {name: owners_of(name, node.data) for name, node in nodes.items()}

    def _write(self, directory: str, name: str, data: bytes) -> None:
        # All directories are made here, because an intent may be written before the first daemon starts.
        self._session.make_directories(self._paths.directory(each) for each in DIRECTORIES)
        self._session.replace(self._paths.node(directory, name), data)


def _subject(kind: str, subject: object) -> str:
    return check_node_name("slot" if kind == "pin" else "host", str(subject))


def read_claims(session: Session, paths: Paths) -> dict[Slot, SlotOwner]:
    """Return the owner of each held slot. Raises CoordinationUnavailable."""
    claims = {}
    for name, node in session.nodes(paths.directory("slots")).items():
        slot, values = slot_of(name), decode(name, node.data)
        if slot is not None and values:
            claims[slot] = SlotOwner(str(values.get("worker_id")), instant(values, "since"))
    return claims


def _ignore() -> None:
    """Ignore connection events: each request of this short session reports a lost connection itself."""
