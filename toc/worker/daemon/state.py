"""What a daemon reports of itself once a second, and what its probes conclude."""

from __future__ import annotations

from collections import Counter
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
    stuck: Mapping[str, list[str]] = field(default_factory=dict)
    """worker_id -> its internal loops that hang."""
    owned: frozenset[Slot] = frozenset()
    """Slots that its workers consume."""
    moving: frozenset[Slot] = frozenset()
    """Slots that its workers are gaining or losing."""
    unowned: frozenset[Slot] = frozenset()
    """Slots that no worker may own; only the leading daemon knows any."""
    tables: int = 0
    """How many tables its workers sweep."""
    missing: int = 0
    """How many slots and tables its workers should have and have not claimed yet."""
    zookeeper: bool | None = None
    """Whether there is a session. None: ZooKeeper is not used."""
    drained: bool = False
    """Whether an operator wants no slots on this host."""
    stopping: bool = False


def faults(state: State, now: float) -> list[str]:
    """Return reasons to restart a daemon. A server out of reach is none: a restart does not bring it back."""
    found = []
    if now - state.at > STILL_SECONDS:
        found.append(f"the daemon has been stuck for {now - state.at:.0f} s")
    return found + [f"worker {worker}: {', '.join(loops)} hangs" for worker, loops in state.stuck.items()]


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


def notes(state: State) -> list[str]:
    """Return intended but unusual states, and faults of the cluster rather than of this daemon.

    They do not make a daemon unready. A rolling update that waits for a drained host would never
    end, and the update may be what brings a worker for slots without an owner.
    """
    found = []
    if state.drained:
        left = len(state.owned) + state.tables
        still = f"{left} slots or tables are still to be handed over" if left else "it owns nothing"
        found.append(f"drained: {still}; this host gets no slots until `toc undrain`")
    for topic, count in sorted(Counter(slot.topic for slot in state.unowned).items()):
        found.append(f"{count} slots of {topic} have no owner: no undrained worker handles it")
    return found
