"""Operators' intents in ZooKeeper, and their views of a cluster and changes to it, without being a member.

Intents outlive every daemon, each with the operator and the time. The leader watches them and applies them to
the assignment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from toc.coordination import znodes
from toc.coordination.assignment import ONE_SERVER, Member, Owners, Spread, assign
from toc.coordination.session import Session, Znode
from toc.coordination.views import Intent, SlotOwner, SlotRow, WorkerRow, slot_rows, worker_rows
from toc.coordination.znodes import decode, encode, slot_of
from toc.model.clock import Clock
from toc.model.topic import Slot

INTENTS = ("drain", "pin", "weight", "rebalance")
"""The directories of intents."""


@dataclass(frozen=True, slots=True)
class Intents:
    """All intents, by their subject: hosts that are to have no slots, slots that are to be on a worker or
    host, hosts whose workers are to have another weight. ``requests`` are those to rebalance, by name."""

    drains: dict[str, Intent]
    pins: dict[Slot, Intent]
    weights: dict[str, Intent]
    requests: list[str]

    def assign(
        self, members: Iterable[Member], topics: Mapping[str, int],
        previous: Mapping[str, Sequence[str | None]], deliveries: Mapping[str, str] | None, spread: Spread, *,
        rebalance: bool,
    ) -> Owners:  # fmt: skip
        """Return the owner of every slot, as ``assign`` does, and as operators want."""
        weights = self.weights
        return assign(
            [replace(one, weight=weights[one.host].to) if one.host in weights else one for one in members],
            topics,
            previous=previous,
            pins={slot: pin.to for slot, pin in self.pins.items()},
            drained_hosts=self.drains,
            deliveries=deliveries,
            rebalance=rebalance,
            spread=spread,
        )


def read_intents(session: Session, *, watch: bool = False) -> Intents:
    """Read all intents except malformed ones, and ``watch`` their directories.

    Raises CoordinationUnavailable.
    """

    def found(directory: str) -> list[tuple[str, dict[str, Any]]]:
        nodes = session.nodes(directory, watch=watch)
        return [(name, decode(name, node.data)) for name, node in nodes.items()]

    drains = {name: _intent(values) for name, values in found("drain")}
    pins: dict[Slot, Intent] = {}
    for name, values in found("pin"):
        slot, target = slot_of(name), values.get("target")
        if slot is not None and isinstance(target, str):
            pins[slot] = _intent(values, target)
        elif values:
            znodes.not_understood(name, "a pin is named after a slot and has a target")
    weights: dict[str, Intent] = {}
    for name, values in found("weight"):
        if weight := znodes.weight_of(name, values):
            weights[name] = _intent(values, weight)
    return Intents(drains, pins, weights, session.children("rebalance", watch=watch))


def _intent(values: dict[str, Any], to: object = None) -> Intent:
    return Intent(str(values.get("by", "")), znodes.instant(values, "at"), to)


def read_claims(session: Session) -> dict[Slot, SlotOwner]:
    """Return the owner of each held slot. Raises CoordinationUnavailable."""
    claims = {}
    for name, node in session.nodes("slots").items():
        slot, values = slot_of(name), decode(name, node.data)
        if slot is not None and values:
            claims[slot] = SlotOwner(str(values.get("worker_id")), znodes.instant(values, "since"))
    return claims


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
        self._session = Session(address, cluster, lambda: None, connect_timeout=connect_timeout)
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
        hosts = {member.worker_id: member.host for member in _members(self._session.nodes("workers"))}
        drained = {host: f"{host} is drained by {drain.by}" for host, drain in wanted.drains.items()}
        leaving = {name: drained[host] for name, host in hosts.items() if host in drained}
        pins = {}
        for slot, pin in wanted.pins.items():
            pins[slot] = f"pinned to {pin.to} by {pin.by}"
            if hosts.get(pin.to, pin.to) in drained:
                pins[slot] += ", but that is drained"
            elif pin.to not in hosts and pin.to not in hosts.values():
                pins[slot] += ", but that is not running"
        claims = read_claims(self._session)
        return slot_rows(self._assignment(), claims, hosts, pins=pins, leaving=leaving)

    def workers(self) -> list[WorkerRow]:
        """Return every worker that is alive."""
        wanted = self.intents()
        leader = znodes.first_candidate(self._session.children("leader")).rpartition("-")[0]
        nodes = self._session.nodes("workers")
        leading = {name for name, node in nodes.items() if f"{node.session:x}" == leader}
        members, assignment, claims = _members(nodes), self._assignment(), read_claims(self._session)
        return worker_rows(members, assignment, claims, wanted.weights, wanted.drains, leading)

    def intents(self) -> Intents:
        """Return all intents, each with the operator and the time."""
        return read_intents(self._session)

    def want(self, kind: str, subject: object, *, by: str, **values: object) -> None:
        """Write an intent: ``drain`` a host, ``pin`` a slot to a ``target``, give a host a ``weight``. ``by``
        names the operator. While the target of a pin is absent, its slot is balanced as usual."""
        self._write(kind, _subject(kind, subject), by=by, **values)

    def unwant(self, kind: str, subject: object) -> bool:
        """Remove an intent. False if there was none."""
        name = _subject(kind, subject)
        there = bool(self._session.read(kind, [name]))
        self._session.delete(kind, [name])
        return there

    def rebalance(
        self, *, by: str, dry_run: bool = False, deliveries: Mapping[str, str] | None = None
    ) -> list[Move]:
        """Spread every topic evenly over the workers. Returns what will move; the leader does it at once.

        ``deliveries``: topic -> delivery, for topics that are not delivered to handlers.
        """
        assignment = self._assignment()
        wanted = self.intents()
        members = _members(self._session.nodes("workers"))
        topics = {topic: len(slots) for topic, slots in assignment.items()}
        owners = wanted.assign(members, topics, assignment, deliveries, self._spread, rebalance=True)
        moves = [
            Move(topic, number, old, new)
            for topic, slots in assignment.items()
            for number, (old, new) in enumerate(zip(slots, owners[topic], strict=True))
            if old != new
        ]
        if not dry_run:
            self._write("rebalance", "request", by=by)
        return moves

    def _assignment(self) -> dict[str, list[str | None]]:
        nodes = self._session.nodes("assignment")
        return {name: znodes.owners_of(name, node.data) for name, node in nodes.items()}

    def _write(self, directory: str, name: str, **values: object) -> None:
        self._session.make_directories()  # an intent may be written before the first daemon starts
        self._session.replace(directory, name, encode(**values, at=self._clock.now_ms()))


def _subject(kind: str, subject: object) -> str:
    return znodes.check_node_name("slot" if kind == "pin" else "host", str(subject))


def _members(nodes: Mapping[str, Znode]) -> list[Member]:
    """Return the workers that are alive, with the weights that their daemons gave them."""
    found = (znodes.member_of(name, node.data) for name, node in nodes.items())
    return [member for member in found if member is not None]
