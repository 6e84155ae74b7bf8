"""Coordination through ZooKeeper: one session per daemon, whose worker processes are the members.

Pending changes are recorded first (``_unjoined``, ``_departed``, ``Claims.unwritten``) and forgotten once
ZooKeeper has made them, so interrupted work is simply repeated.

No worker loses a slot because ZooKeeper is out of reach: claims last as long as the daemon's session, so no
other daemon has them. A process that the daemon restarts meanwhile takes up the slots of the one before it in
the same place; nothing else moves. When ZooKeeper is back, the daemon writes the deaths first, then its
claims, and only then deletes the nodes of the workers that left, which makes the leader assign anew.

When a session has ended, its nodes are gone. The daemon claims again what its workers still hold, and the
workers join again; slots that others have claimed meanwhile vanish from ``claimed``. The same happens when
nodes were deleted, which a check every few seconds detects; meanwhile a leader that misses its own workers
assigns nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from toc.coordination.address import Address
from toc.coordination.assignment import ONE_SERVER, Member, Spread
from toc.coordination.changes import Changes
from toc.coordination.claims import Claims
from toc.coordination.coordinator import Coordinator, without_owner
from toc.coordination.leader import GATHER, INPUTS, Leader
from toc.coordination.operator import read_claims
from toc.coordination.presence import LocalNames
from toc.coordination.session import Directory, Session
from toc.coordination.znodes import (
    DIRECTORIES,
    Assigned,
    Paths,
    check_node_name,
    encode,
    member_data,
    owners_of,
    place_of,
)
from toc.model.clock import Clock
from toc.model.errors import CoordinationUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger

log = get_logger(__name__)

_RETRY = 0.5  # seconds until the next attempt when ZooKeeper interrupted something
_VERIFY = 1.0  # seconds between two checks that our nodes still exist
_NAMES_A_SECOND = (
    2500  # of a directory: 1,000 daemons that list 100,000 claims each second would stop ZooKeeper
)


@dataclass(eq=False)
class _Listing:
    """The names in a directory, read again after a change; the longer they are, the more seldom."""

    path: str
    names: frozenset[str] = frozenset()
    _state: Directory | None = None
    _at: float = 0.0

    def read(self, session: Session, state: Directory | None) -> bool:
        """Whether the directory has changed and was read."""
        if state == self._state or time.monotonic() < self._at:
            return False
        self.names = frozenset(session.children(self.path))
        self._state, self._at = state, time.monotonic() + len(self.names) / _NAMES_A_SECOND
        return True


class _Departed(NamedTuple):
    worker_id: str
    known_dead: bool


class ZooKeeperCoordinator(Coordinator):
    """Spreads slots over the cluster through ZooKeeper.

    ``address`` is TOC_ZOOKEEPER. ``host`` names this daemon in what it writes. Timeouts are seconds; the
    slots of a silent daemon go to others after ``session_timeout``. ``gather``: how many seconds a new leader
    waits for missing workers (toc.coordination.leader). ``spread``: on which servers the tasks of a slot are.
    ``on_change`` is called, from any thread, when ``step`` should be called soon. It must not block.
    """

    def __init__(
        self,
        address: str,
        *,
        cluster: str,
        host: str,
        connect_timeout: float = 10.0,
        session_timeout: float = 6.0,
        gather: float = GATHER,
        spread: Spread = ONE_SERVER,
        clock: Clock | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock or Clock()
        place = Address.parse(address)
        self._paths = Paths.of(place.chroot, cluster)
        self._on_change = on_change
        self._changes = Changes(on_change)
        self._session = Session(
            place, self._changes.connection, connect_timeout=connect_timeout, session_timeout=session_timeout
        )
        self._host = host
        self._local_names = LocalNames.of(host)
        watch = self._changes.watch
        self._leader = Leader(self._session, self._paths, watch, host, self._clock, gather, spread)
        self._started = False
        self._topics: Mapping[str, int] = {}

        # the state in ZooKeeper, as far as known
        self._session_id = 0  # the session of our nodes; 0: none yet
        self._directories: dict[str, Directory | None] = {}  # DIRECTORIES as of the last check
        self._listed = {name: _Listing(self._paths.directory(name)) for name in ("slots", "workers")}
        self._verify_at = 0.0  # when the next one is due (monotonic)
        self._assignment: dict[str, Assigned] = {}
        self._dead: frozenset[str] = frozenset()
        self._drained = False
        self._members: dict[str, Member] = {}
        self._ours: set[str] = set()  # every worker that ever joined here, or was proved gone here
        self._claims = Claims(self._session, self._paths, self._clock, self._ours, on_change)

        # changes still to be made in ZooKeeper
        self._unjoined: set[str] = set()
        self._departed: list[_Departed] = []

    # --- the port ---

    def start(self) -> None:
        """Connect. Raises CoordinationUnavailable."""
        try:
            self._session.start()
            self._started = True
            self._enter_session(self._session.id)
        except CoordinationUnavailable:
            self.stop()
            raise

    def stop(self) -> None:
        """Disconnect. Ending the session removes all our nodes at once."""
        self._attempt(lambda: self._write_changes(self._session_id))  # deaths
        self._started = False
        self._session.stop()

    def set_topics(self, topics: Mapping[str, int], deliveries: Mapping[str, str] | None = None) -> None:
        """Set what to assign: topic -> number of slots."""
        self._topics = dict(topics)
        if self._leader.set_topics(topics, deliveries or {}):
            self._assignment = {
                name: each for name, each in self._assignment.items() if each.version >= 0 or name in topics
            }
            self._on_change()

    def join(self, member: Member) -> None:
        """Add a worker process to the cluster, or write its node again."""
        check_node_name("worker_id", member.worker_id)
        self._members[member.worker_id] = member
        self._ours.add(member.worker_id)
        self._unjoined.add(member.worker_id)
        self._on_change()

    def leave(self, worker_id: str, *, known_dead: bool) -> None:
        """Remove a worker and its claims. If ``known_dead``, publish its death."""
        member = self._members.pop(worker_id, None)
        if member is not None:
            self._claims.let_go([slot for slot, owner in self._claims.held.items() if owner == worker_id])
            self._unjoined.discard(worker_id)
        if member is not None or known_dead:  # it may have left already, and not finished what it held
            self._departed.append(_Departed(worker_id, known_dead))
        self._on_change()

    def desired(self) -> dict[str, set[Slot]]:
        """Return the slots that each worker should own: those assigned to it, and those of a worker that it
        replaces, until the leader has assigned them anew."""
        wanted: dict[str, set[Slot]] = {worker_id: set() for worker_id in self._members}
        successors = {place_of(worker_id): worker_id for worker_id in self._members}
        for topic, assigned in self._assignment.items():
            for number, owner in enumerate(assigned.owners):
                if owner in self._ours and owner not in wanted:
                    owner = successors.get(place_of(owner))
                if owner in wanted:
                    wanted[owner].add(Slot(topic, number))
        return wanted

    def claimed(self) -> dict[str, set[Slot]]:
        """Return the slots that each worker holds."""
        held: dict[str, set[Slot]] = {worker_id: set() for worker_id in self._members}
        for slot, worker_id in self._claims.held.items():
            held[worker_id].add(slot)
        return held

    def claim(self, worker_id: str, slots: Collection[Slot]) -> set[Slot]:
        """Claim slots; without ZooKeeper, only those that workers of ours have left. Returns those that the
        worker holds now."""
        if worker_id in self._members:
            if self._session.id is None:
                self._claims.take_up(worker_id, slots)
            elif wanted := dict.fromkeys(self._claims.to_claim(slots), worker_id):
                self._attempt(lambda: self._claims.claim(wanted, self._session_id))
        return self._claims.of(worker_id, slots)

    def release(self, worker_id: str, slots: Collection[Slot]) -> None:
        """Drop the worker's claims on these slots."""
        freed = self._claims.of(worker_id, slots)
        if freed:
            self._claims.let_go(freed)
            self._on_change()  # also since another of our workers may wait for it

    def dead_workers(self) -> frozenset[str]:
        """Return the workers whose process is known to have ended."""
        return self._dead.union(gone.worker_id for gone in self._departed if gone.known_dead)

    def connected(self) -> bool:
        """Whether every claim can be granted now."""
        return self._current()

    def drained(self) -> bool:
        """Whether this host is drained, as far as known."""
        return self._drained

    @property
    def leading(self) -> bool:
        """Whether this daemon leads, as far as it knows."""
        return self._leader.leading

    def unowned(self) -> frozenset[Slot]:
        """Return the slots that no worker may have; none if another daemon leads."""
        if not self.leading:
            return frozenset()
        return without_owner({topic: each.owners for topic, each in self._assignment.items()})

    def step(self) -> float | None:
        """Do what is due. Waits for ZooKeeper's answers, at most about the session timeout."""
        due: float | None = None
        if self._started:
            session_id = self._session.id
            try:
                if session_id is None:
                    self._session.revive()
                    due = _RETRY
                else:
                    due = self._catch_up(session_id)
            except CoordinationUnavailable as exc:
                log.warning("coordination_interrupted", reason=str(exc))
                self._changes.read_everything()
                due = _RETRY
        return due

    # --- catching up with ZooKeeper ---

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do what needs ZooKeeper now; if that fails, ``step`` does it later."""
        if not self._started or not self._current():
            return
        try:
            action()
        except CoordinationUnavailable as exc:
            log.warning("coordination_interrupted", reason=str(exc))
            self._changes.read_everything()
            self._on_change()

    def _current(self) -> bool:
        """Whether our nodes are in the current session; if not, ``step`` enters the new one first."""
        return self._session.id is not None and self._session.id == self._session_id

    def _catch_up(self, session_id: int) -> float:
        """Do what is due with a connection. Returns the seconds until the next step."""
        if session_id != self._session_id:
            self._enter_session(session_id)
        elif time.monotonic() >= self._verify_at:
            self._verify(session_id)
        self._write_changes(session_id)
        self._refresh()
        wait, refused = self._leader.step(self._assignment, self._dead, self._members.keys())
        if refused:
            self._changes.read_everything()
            wait = 0.0
        return min(wait, max(self._verify_at - time.monotonic(), 0.0))

    def _enter_session(self, session_id: int | None, *, lost: bool = False) -> None:
        """Create all our nodes, in a new session or because some were ``lost``."""
        if session_id is None:
            raise CoordinationUnavailable("the connection to ZooKeeper was lost again")
        found = self._look_at_directories()
        gone = [name for name, before in self._directories.items() if not _same(before, found[name])]
        if lost or gone:
            log.warning("zookeeper_nodes_lost", directories=gone, was_drained=self._drained)
            self._leader.nodes_lost()
        self._session.make_directories(map(self._paths.directory, DIRECTORIES))
        self._directories = self._look_at_directories()
        self._verify_at = time.monotonic() + _VERIFY
        self._leader.enroll(session_id)
        self._changes.read_everything()
        self._claims.unwritten.update(self._claims.held)
        self._unjoined = set(self._members)
        self._write_changes(session_id)
        self._session_id = session_id
        self._find_gone()

    def _verify(self, session_id: int) -> None:
        """Check that our nodes still exist and say what we wrote; else make all of them again."""
        self._verify_at = time.monotonic() + _VERIFY
        found, before = self._look_at_directories(), self._directories
        if self._session.behind:  # the server shows nodes of our session that no longer exist
            self._session.renew()
            raise CoordinationUnavailable("ZooKeeper shows an older state: a new session begins")
        members = self._members.keys() - self._unjoined
        nodes = self._session.read(self._paths.node("workers", worker_id) for worker_id in members)
        whole = all(_same(before[name], found[name]) for name in DIRECTORIES) and all(
            node is not None
            and node.session == session_id
            and node.data == member_data(self._members[worker_id])
            for worker_id, node in zip(members, nodes, strict=True)
        )
        slots = self._listed["slots"]
        if whole and slots.read(self._session, found["slots"]):
            whole = all(str(slot) in slots.names for slot in self._claims.held)
        if not whole:
            self._enter_session(session_id, lost=True)
            return
        self._directories = found
        self._find_gone()

    def _look_at_directories(self) -> dict[str, Directory | None]:
        states = self._session.directories(map(self._paths.directory, DIRECTORIES))
        return dict(zip(DIRECTORIES, states, strict=True))

    def _find_gone(self) -> None:
        """Remove what workers of an earlier daemon of this host have left in a session that has not expired
        yet. Those that are proved gone run nothing, so their slots are free."""
        workers = self._listed["workers"]
        workers.read(self._session, self._directories["workers"])
        gone = [
            name for name in workers.names if name not in self._ours and self._local_names.proves_gone(name)
        ]
        if gone:
            log.warning("workers_proved_gone", workers=gone)
            claims = read_claims(self._session, self._paths)
            self._claims.unwritten.update(slot for slot, claim in claims.items() if claim.worker_id in gone)
            self._ours.update(gone)
            self._departed += [_Departed(name, known_dead=True) for name in gone]

    def _write_changes(self, session_id: int) -> None:
        """Make the pending changes in ZooKeeper, in the order that other daemons rely on."""
        now_ms = self._clock.now_ms()
        dead = [gone for gone in self._departed if gone.known_dead]
        # Deaths before claims and workers vanish: a new owner must see that these workers run nothing.
        self._session.create(
            ((self._paths.node("dead", gone.worker_id), encode(host=self._host, at=now_ms)) for gone in dead),
            ephemeral=False,
        )
        # Claims before workers: a claim that another worker of ours has taken up must not become free in
        # between, and a leader that sees a worker sees what it holds.
        self._claims.write(session_id)
        self._session.delete(self._paths.node("workers", gone.worker_id) for gone in self._departed)
        self._departed.clear()
        self._dead = self._dead.union(gone.worker_id for gone in dead)
        for worker_id in sorted(self._unjoined):
            data = member_data(self._members[worker_id])
            # Also in place of a node of an earlier session of ours, which is about to vanish.
            self._session.replace(self._paths.node("workers", worker_id), data, ephemeral=True)
        self._unjoined.clear()

    def _refresh(self) -> None:
        """Read what has changed, and watch it."""
        everything, changed = self._changes.take()
        dirty = {name for name in DIRECTORIES if everything or self._paths.directory(name) in changed}
        topics, workers = (self._paths.names(name, changed) for name in ("assignment", "workers"))
        self._leader.forget(None if everything else workers)
        if everything:
            topics.update(self._assignment)
            self._claims.unblock()
        if "leader" in dirty:
            self._leader.find_leader()
        if "assignment" in dirty:
            names = self._names("assignment")
            topics |= names ^ {name for name, each in self._assignment.items() if each.version >= 0}
        self._read_assignment(sorted(topics))
        if "dead" in dirty:
            self._dead = self._names("dead")
        if "drain" in dirty:
            self._drained = self._host in self._names("drain")
        if dirty.intersection(INPUTS):
            self._leader.inputs_changed()

    def _names(self, directory: str) -> frozenset[str]:
        """Return the names of nodes in a directory, and watch it."""
        return frozenset(self._session.children(self._paths.directory(directory), self._changes.watch))

    def _read_assignment(self, topics: Iterable[str]) -> None:
        names = list(topics)
        nodes = self._session.read(
            (self._paths.node("assignment", name) for name in names), self._changes.watch
        )
        for name, node in zip(names, nodes, strict=True):
            if node is not None and (owners := owners_of(name, node.data)):
                self._assignment[name] = Assigned(owners, node.version)
            elif node is not None:  # another program's: without it, the leader writes what is in force
                self._session.delete([self._paths.node("assignment", name)])
            elif (known := self._assignment.pop(name, None)) and name in self._topics:
                # Its node was deleted. It stays in force, and the leader writes it again.
                self._assignment[name] = Assigned(known.owners, -1)
                self._leader.inputs_changed()


def _same(before: Directory | None, now: Directory | None) -> bool:
    """Whether it is still the same directory, perhaps with other nodes in it."""
    return before is not None and now is not None and before.made == now.made
