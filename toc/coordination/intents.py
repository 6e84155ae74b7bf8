"""Operators' intents in ZooKeeper, each with the operator and the time.

Intents outlive every daemon. The leader watches them and applies them to the assignment. This module reads
them for the leader and for operators' commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from toc.coordination.assignment import Member
from toc.coordination.session import Session, Watch
from toc.coordination.znodes import Paths, decode, instant, member_of, not_understood, slot_of, weight_of
from toc.model.topic import Slot

DIRECTORIES = ("drain", "pin", "weight", "rebalance")


@dataclass(frozen=True, slots=True)
class Intent:
    """Who wants it, since when (ms). ``to``: the target of a pin, the weight of a host."""

    by: str
    at: int
    to: Any = None


@dataclass(frozen=True, slots=True)
class Intents:
    """All intents, by their subject: hosts that are to have no slots, slots that are to be on a worker or
    host, hosts whose workers are to have another weight. ``requests`` are those to rebalance, by name."""

    drains: dict[str, Intent]
    pins: dict[Slot, Intent]
    weights: dict[str, Intent]
    requests: list[str]

    @property
    def targets(self) -> dict[tuple[str, int], str]:
        """Return the pins as ``assign`` takes them."""
        return {(slot.topic, slot.number): pin.to for slot, pin in self.pins.items()}

    def weighed(self, members: Iterable[Member]) -> list[Member]:
        """Return the members with the weights that operators gave them."""
        return [
            replace(member, weight=self.weights[member.host].to) if member.host in self.weights else member
            for member in members
        ]


def read_intents(session: Session, paths: Paths, watch: Watch | None = None) -> Intents:
    """Read all intents except malformed ones. ``watch`` is called at the next change of their directories.

    Raises CoordinationUnavailable.
    """

    def found(directory: str) -> list[tuple[str, dict[str, Any]]]:
        nodes = session.nodes(paths.directory(directory), watch)
        return [(name, decode(name, node.data)) for name, node in nodes.items()]

    drains = {name: _intent(values) for name, values in found("drain")}
    pins: dict[Slot, Intent] = {}
    for name, values in found("pin"):
        slot, target = slot_of(name), values.get("target")
        if slot is not None and isinstance(target, str):
            pins[slot] = _intent(values, target)
        elif values:
            not_understood(name, "a pin is named after a slot and has a target")
    weights: dict[str, Intent] = {}
    for name, values in found("weight"):
        weight = weight_of(name, values)
        if weight is not None:
            weights[name] = _intent(values, weight)
    requests = session.children(paths.directory("rebalance"), watch)
    return Intents(drains, pins, weights, requests)


def read_members(session: Session, paths: Paths) -> list[Member]:
    """Read the workers that are alive, with the weights that their daemons gave them."""
    nodes = session.nodes(paths.directory("workers"))
    found = [member_of(name, node.data) for name, node in nodes.items()]
    return [member for member in found if member is not None]


def _intent(values: dict[str, Any], to: object = None) -> Intent:
    return Intent(str(values.get("by", "")), instant(values, "at"), to)
