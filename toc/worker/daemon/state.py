"""What a daemon reports of itself once a second, and what its probes conclude."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from toc.model.topic import Slot

STILL_SECONDS = 30.0
"""After this time without progress, the daemon counts as hanging."""


@dataclass(frozen=True)
class State:
    """The daemon's state at ``at`` (monotonic)."""

    at: float
    processes: int
    """How many processes there should be."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """How many there are, by state: ready, starting, leaving."""
    owned: frozenset[Slot] = frozenset()
    """Slots that its workers consume."""
    moving: frozenset[Slot] = frozenset()
    """Slots that its workers are gaining or losing."""
    unowned: frozenset[Slot] = frozenset()
    """Slots that no worker may own; only the leading daemon knows any."""
    missing: int = 0
    """How many slots and tables its workers should have and have not claimed yet."""
    zookeeper: bool | None = None
    """Whether there is a session. None: ZooKeeper is not used."""
    drained: bool = False
    """Whether an operator wants no slots on this host."""
    stopping: bool = False


def hangs(state: State, now: float) -> list[str]:
    """Return why the daemon must be restarted. A server out of reach is no reason: that brings none back."""
    still = now - state.at
    return [f"the daemon has been stuck for {still:.0f} s"] if still > STILL_SECONDS else []


def lacks(state: State) -> list[str]:
    """Return why a daemon cannot do all its work, apart from servers that are out of reach."""
    found = []
    if state.stopping:
        found.append("it is stopping")
    if (ready := state.workers.get("ready", 0)) < state.processes:
        found.append(f"{ready} of {state.processes} worker processes are ready")
    if state.missing:
        found.append(f"{state.missing} slots or tables are not claimed yet")
    if state.zookeeper is False:
        found.append("ZooKeeper is out of reach")
    return found
