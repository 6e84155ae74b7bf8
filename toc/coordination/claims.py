"""The claims of one daemon's workers: for each slot that one of them holds, an ephemeral node.

Claims last as long as the daemon's session, so no other daemon has their slots. A claim that passes from one
of its workers to another is replaced in one step, so that it is never free in between.

Slots whose claim may have to be written or deleted are recorded first (``unwritten``) and forgotten once
ZooKeeper says what is held, so interrupted work is simply repeated. Only the daemon's thread uses a Claims;
kazoo's threads only report that a claim of another daemon's worker has changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any

from toc.coordination.session import Session
from toc.coordination.znodes import Paths, encode, holder_of, slot_of
from toc.model.clock import Clock
from toc.model.topic import Slot
from toc.observe.log import get_logger

log = get_logger(__name__)


class Claims:
    """The slots that this daemon's workers hold, and their claims in ZooKeeper.

    ``ours`` are the workers that ever joined this daemon, and those that it has proved gone. ``signal`` makes
    the daemon try again. Methods with a ``session_id`` raise CoordinationUnavailable.
    """

    def __init__(
        self, session: Session, paths: Paths, clock: Clock, ours: Set[str], signal: Callable[[], None]
    ) -> None:
        self._session = session
        self._paths = paths
        self._clock = clock
        self._ours = ours
        self._signal = signal
        self.held: dict[Slot, str] = {}
        """slot -> worker_id."""
        self.unwritten: set[Slot] = set()
        """Slots whose claim in ZooKeeper may be ours and not what ``held`` says."""
        self._lock = threading.Lock()
        self._blocked: set[Slot] = set()
        """Slots that workers of other daemons hold; a watch tells when a claim changes. Under the lock."""

    def of(self, worker_id: str, slots: Collection[Slot]) -> set[Slot]:
        """Return those of the slots that the worker holds."""
        return {slot for slot in slots if self.held.get(slot) == worker_id}

    def let_go(self, slots: Collection[Slot]) -> None:
        """Record that a worker of ours has released slots. ``write`` deletes their claims, unless another
        worker of ours has taken them up by then."""
        for slot in slots:
            del self.held[slot]
        self.unwritten.update(slots)

    def take_up(self, worker_id: str, slots: Collection[Slot]) -> None:
        """Let a worker hold those of the slots that workers of ours have released and whose claims still
        stand. ``write`` puts its name into them."""
        self.held.update(dict.fromkeys(self.unwritten.intersection(slots) - self.held.keys(), worker_id))

    def to_claim(self, slots: Iterable[Slot]) -> list[Slot]:
        """Return those of the slots that no worker holds, as far as known."""
        with self._lock:
            return [slot for slot in slots if slot not in self.held and slot not in self._blocked]

    def unblock(self) -> None:
        """Try all slots again: watches may have been lost."""
        with self._lock:
            self._blocked.clear()

    def claim(self, wanted: Mapping[Slot, str], session_id: int) -> None:
        """Claim those of the slots that are free, for workers of ours."""
        self.held.update(self._make(wanted, session_id))

    def write(self, session_id: int) -> None:
        """Make or rewrite the unwritten claims of slots that are held, and delete the others. Gives up the
        slots that workers of other daemons have claimed."""
        wanted = {slot: self.held[slot] for slot in self.unwritten if slot in self.held}
        lost = wanted.keys() - self._make(wanted, session_id).keys()
        if lost:
            log.warning("claims_lost", slots=len(lost))
        for slot in lost:
            del self.held[slot]
        left = sorted(self.unwritten - self.held.keys())
        paths = [self._paths.node("slots", slot) for slot in left]
        nodes = self._session.read(paths)
        self._session.delete(
            path
            for path, slot, node in zip(paths, left, nodes, strict=True)
            if node and (node.session == session_id or holder_of(str(slot), node.data) in self._ours)
        )
        self.unwritten.clear()

    def _make(self, wanted: Mapping[Slot, str], session_id: int) -> dict[Slot, str]:
        """Create claims for workers of ours. Returns those that were granted; watches the others."""
        self.unwritten.update(wanted)  # until the outcome of each is known
        granted = self._create(wanted)
        refused = [slot for slot in wanted if slot not in granted]
        with self._lock:
            self._blocked.update(refused)
        nodes = self._session.read((self._paths.node("slots", slot) for slot in refused), self._changed)
        ours = {
            slot: node.version  # of a worker of ours that has released it, or of an earlier session of ours
            for slot, node in zip(refused, nodes, strict=True)
            if node and (node.session == session_id or holder_of(str(slot), node.data) in self._ours)
        }
        granted |= self._take_over(ours, wanted)
        asked = {slot for slot, node in zip(refused, nodes, strict=True) if node is None or slot in ours}
        with self._lock:
            self._blocked -= granted.keys() | asked
        if not asked <= granted.keys():
            self._signal()  # it is free by now, or another worker was quicker: claim again
        self.unwritten -= wanted.keys()
        return granted

    def _create(self, wanted: Mapping[Slot, str]) -> dict[Slot, str]:
        made = self._session.create((self._node(*each) for each in wanted.items()), ephemeral=True)
        return {slot: wanted[slot] for slot, new in zip(wanted, made, strict=True) if new}

    def _take_over(self, versions: Mapping[Slot, int], wanted: Mapping[Slot, str]) -> dict[Slot, str]:
        """Put claims in place of those of these versions."""
        nodes = ((*self._node(slot, wanted[slot]), version) for slot, version in versions.items())
        done = self._session.take_over(nodes)
        return {slot: wanted[slot] for slot, made in zip(versions, done, strict=True) if made}

    def _node(self, slot: Slot, worker_id: str) -> tuple[str, bytes]:
        return self._paths.node("slots", slot), encode(worker_id=worker_id, since=self._clock.now_ms())

    def _changed(self, event: Any) -> None:
        """A claim of another worker has changed. Runs on kazoo's thread."""
        slot = slot_of(event.path.rpartition("/")[2]) if event.path else None
        if slot is not None:
            with self._lock:
                self._blocked.discard(slot)
            self._signal()
