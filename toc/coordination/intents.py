"""Operators' intents in ZooKeeper, each with the operator and the time.

Intents outlive every daemon. The leader watches them and applies them to the assignment. This module reads
them for the leader and for operators' commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from toc.coordination.assignment import Member
from toc.coordination.session import Session, Watch
from toc.coordination.znodes import Paths, decode, instant, member_of, not_understood, slot_of, weight_of
from toc.model.topic import Slot

DIRECTORIES = ("drain", "pin", "weight", "rebalance")


@dataclass(frozen=True, slots=True)
class Drain:
    """A host that is to have no slots. ``at`` is in milliseconds."""

    host: str
    by: str
    at: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A slot that is to be on ``target``, a worker_id or a host. ``at`` is in milliseconds."""

    topic: str
    number: int
    target: str
    by: str
    at: int


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of each worker of a host, in place of its daemon's setting. ``at`` is in milliseconds."""

    host: str
    weight: float
    by: str
    at: int


@dataclass(frozen=True, slots=True)
class Intents:
    """All intents, by their subject. ``requests`` are the names of requests to rebalance."""

    drains: dict[str, Drain]
    pins: dict[Slot, Pin]
    weights: dict[str, Weight]
    requests: list[str]

    @property
    def targets(self) -> dict[tuple[str, int], str]:
        """Return the pins as ``assign`` takes them."""
        return {(slot.topic, slot.number): pin.target for slot, pin in self.pins.items()}

    def weighed(self, members: Iterable[Member]) -> list[Member]:
        """Return the members with the weights that operators gave them."""
        return [
            replace(member, weight=self.weights[member.host].weight)
            if member.host in self.weights
            else member
            for member in members
        ]


def read_intents(
    session: Session, paths: Paths, watch: Callable[[str], Watch | None] = lambda _name: None
) -> Intents:
    """Read all intents except malformed ones. ``watch`` returns the watch for a directory.

    Raises CoordinationUnavailable.
    """

    def found(directory: str) -> list[tuple[str, dict[str, Any]]]:
        nodes = session.nodes(paths.directory(directory), watch(directory))
        return [(name, decode(name, node.data)) for name, node in nodes.items()]

    drains = {name: Drain(name, *_origin(values)) for name, values in found("drain")}
    pins: dict[Slot, Pin] = {}
    for name, values in found("pin"):
        slot, target = slot_of(name), values.get("target")
        if slot is not None and isinstance(target, str):
            pins[slot] = Pin(*slot, target, *_origin(values))
        elif values:
            not_understood(name, "a pin is named after a slot and has a target")
    weights: dict[str, Weight] = {}
    for name, values in found("weight"):
        weight = weight_of(name, values)
        if weight is not None:
            weights[name] = Weight(name, weight, *_origin(values))
    requests = session.children(paths.directory("rebalance"), watch("rebalance"))
    return Intents(drains, pins, weights, requests)


def read_members(session: Session, paths: Paths, watch: Watch | None = None) -> list[Member]:
    """Read the workers that are alive, with the weights that their daemons gave them."""
    nodes = session.nodes(paths.directory("workers"), watch)
    found = [member_of(name, node.data) for name, node in nodes.items()]
    return [member for member in found if member is not None]


def _origin(values: dict[str, Any]) -> tuple[str, int]:
    return str(values.get("by", "")), instant(values, "at")
