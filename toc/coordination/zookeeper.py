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

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from toc.coordination import znodes
from toc.coordination.assignment import ONE_SERVER, Member, Spread, by_worker
from toc.coordination.leader import GATHER, INPUTS, Leader
from toc.coordination.operator import read_claims
from toc.coordination.presence import LocalNames
from toc.coordination.session import DIRECTORIES, Directory, Session, Znode
from toc.model.clock import Clock
from toc.model.errors import CoordinationUnavailable
from toc.model.topic import Slot
from toc.observe.log import get_logger

log = get_logger(__name__)

_RETRY = 0.5  # seconds until the next attempt when ZooKeeper interrupted something
_VERIFY = 1.0  # seconds between two checks that our nodes still exist
_NAMES_A_SECOND = 2500
"""Of a directory: 1,000 daemons that list 100,000 claims each second would stop ZooKeeper."""


@dataclass(eq=False)
class _Listing:
    """The names in a directory, read again after a change; the longer they are, the more seldom."""

    directory: str
    names: frozenset[str] = frozenset()
    _state: Directory | None = None
    _at: float = 0.0

    def read(self, session: Session, state: Directory | None) -> bool:
        """Whether the directory has changed and was read."""
        if state == self._state or time.monotonic() < self._at:
            return False
        self.names = frozenset(session.children(self.directory))
        self._state, self._at = state, time.monotonic() + len(self.names) / _NAMES_A_SECOND
        return True


class ZooKeeperCoordinator:
    """Spreads slots over the cluster through ZooKeeper.

    ``address`` is TOC_ZOOKEEPER. ``host`` names this daemon in what it writes. Timeouts are seconds; the
    slots of a silent daemon go to others after ``session_timeout``. ``gather``: how many seconds a new leader
    waits for missing workers (toc.coordination.leader). ``spread``: on which servers the tasks of a slot are.
    ``on_change`` is called, from any thread, when ``step`` should be called soon. It must not block.
    """

    def __init__(
        self, address: str, *, cluster: str, host: str, connect_timeout: float = 10.0,
        session_timeout: float = 6.0, gather: float = GATHER, spread: Spread = ONE_SERVER,
        clock: Clock | None = None, on_change: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._clock = clock or Clock()
        self._on_change = on_change
        self._session = Session(
            address, cluster, on_change, connect_timeout=connect_timeout, session_timeout=session_timeout
        )
        self._host = host
        self._local_names = LocalNames.of(host)
        self.leader = Leader(self._session, host, self._clock, gather, spread)
        self._started = False

        # the state in ZooKeeper, as far as known
        self._session_id = 0  # the session of our nodes; 0: none yet
        self._directories: dict[str, Directory | None] = {}  # DIRECTORIES as of the last check
        self._listed = {name: _Listing(name) for name in ("slots", "workers")}
        self._verify_at = 0.0  # when the next one is due (monotonic)
        self._assignment: dict[str, znodes.Assigned] = {}
        self._dead: frozenset[str] = frozenset()
        self._drained = False
        self._members: dict[str, Member] = {}
        self._ours: set[str] = set()  # every worker that ever joined here, or was proved gone here
        self._claims = Claims(self._session, self._clock, self._ours)

        # changes still to be made in ZooKeeper
        self._unjoined: set[str] = set()
        self._departed: dict[str, bool] = {}
        """Workers that left, and whether their processes are known to have ended."""

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
        if self.leader.set_topics(topics, deliveries or {}):
            self._assignment = {
                name: each for name, each in self._assignment.items() if each.version >= 0 or name in topics
            }
            self._on_change()

    def join(self, member: Member) -> None:
        """Add a worker process to the cluster, or write its node again."""
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
            self._departed[worker_id] = known_dead or self._departed.get(worker_id, False)
        self._on_change()

    def desired(self) -> dict[str, set[Slot]]:
        """Return the slots that each worker should own: those assigned to it, and those of a worker that it
        replaces, until the leader has assigned them anew."""
        wanted: dict[str, set[Slot]] = {worker_id: set() for worker_id in self._members}
        successors = {znodes.place_of(worker_id): worker_id for worker_id in self._members}
        for topic, assigned in self._assignment.items():
            for number, owner in enumerate(assigned.owners):
                if owner in self._ours and owner not in wanted:
                    owner = successors.get(znodes.place_of(owner))
                if owner in wanted:
                    wanted[owner].add(Slot(topic, number))
        return wanted

    def claimed(self) -> dict[str, set[Slot]]:
        """Return the slots that each worker holds."""
        return by_worker(self._members, self._claims.held)

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
        if freed := self._claims.of(worker_id, slots):
            self._claims.let_go(freed)
            self._on_change()  # also since another of our workers may wait for it

    def dead_workers(self) -> frozenset[str]:
        """Return the workers whose process is known to have ended."""
        return self._dead.union(self._known_dead())

    def connected(self) -> bool:
        """Whether every claim can be granted now: our nodes are in this session, which ``step`` enters."""
        return self._session.id is not None and self._session.id == self._session_id

    def sure_until(self) -> float:
        """Return until when (monotonic) no other daemon has what ours hold: as long as the session lasts."""
        return float("inf")

    def senders(self) -> int:
        """Return how many workers send webhooks: that is not known."""
        return 0

    def drained(self) -> bool:
        """Whether this host is drained, as far as known."""
        return self._drained

    def unowned(self) -> frozenset[Slot]:
        """Return the slots that no worker may have; none if another daemon leads."""
        if not self.leader.leading:
            return frozenset()
        return frozenset(
            Slot(topic, number)
            for topic, each in self._assignment.items()
            for number, owner in enumerate(each.owners)
            if owner is None
        )

    def step(self) -> float | None:
        """Do what is due. Waits for ZooKeeper's answers, at most about the session timeout."""
        if not self._started:
            return None
        session_id = self._session.id
        try:
            if session_id is not None:
                return self._catch_up(session_id)
            self._session.revive()
        except CoordinationUnavailable as exc:
            self._interrupted(exc)
        return _RETRY

    # --- catching up with ZooKeeper ---

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do what needs ZooKeeper now; if that fails, ``step`` does it later."""
        if not self._started or not self.connected():
            return
        try:
            action()
        except CoordinationUnavailable as exc:
            self._interrupted(exc)

    def _interrupted(self, error: CoordinationUnavailable) -> None:
        log.warning("coordination_interrupted", reason=str(error))
        self._session.read_everything()

    def _catch_up(self, session_id: int) -> float:
        """Do what is due with a connection. Returns the seconds until the next step."""
        if session_id != self._session_id:
            self._enter_session(session_id)
        elif time.monotonic() >= self._verify_at:
            self._verify(session_id)
        self._write_changes(session_id)
        self._refresh()
        wait, refused = self.leader.step(self._assignment, self._dead, self._members.keys())
        if refused:
            self._session.read_everything()
            wait = 0.0
        return min(wait, max(self._verify_at - time.monotonic(), 0.0))

    def _enter_session(self, session_id: int | None, *, lost: bool = False) -> None:
        """Create all our nodes, in a new session or because some were ``lost``: that is noticed once."""
        self._claims.unwritten.update(self._claims.held)
        self._unjoined = set(self._members)
        if session_id is None:
            raise CoordinationUnavailable("the connection to ZooKeeper was lost again")
        found = self._session.directories()
        gone = [name for name, before in self._directories.items() if not _same(before, found[name])]
        if lost or gone:
            log.warning("zookeeper_nodes_lost", directories=gone, was_drained=self._drained)
            self.leader.nodes_lost()
        self._session.make_directories()
        self._directories = self._session.directories()
        self._verify_at = time.monotonic() + _VERIFY
        self.leader.enroll(session_id)
        self._session.read_everything()
        self._write_changes(session_id)
        self._session_id = session_id
        self._find_gone()

    def _verify(self, session_id: int) -> None:
        """Check that our nodes still exist and say what we wrote; else make all of them again."""
        self._verify_at = time.monotonic() + _VERIFY
        found, before = self._session.directories(), self._directories
        if self._session.behind:  # the server shows nodes of our session that no longer exist
            self._session.renew()
            raise CoordinationUnavailable("ZooKeeper shows an older state: a new session begins")
        members = self._members.keys() - self._unjoined
        nodes = self._session.read("workers", members)
        whole = all(_same(before[name], found[name]) for name in DIRECTORIES) and all(
            worker_id in nodes
            and nodes[worker_id].session == session_id
            and nodes[worker_id].data == znodes.member_data(self._members[worker_id])
            for worker_id in members
        )
        slots = self._listed["slots"]
        if whole and slots.read(self._session, found["slots"]):
            whole = all(str(slot) in slots.names for slot in self._claims.held)
        if not whole:
            self._enter_session(session_id, lost=True)
            return
        self._directories = found
        self._find_gone()

    def _find_gone(self) -> None:
        """Remove what workers of an earlier daemon of this host have left in a session that has not expired
        yet. Those that are proved gone run nothing, so their slots are free."""
        workers = self._listed["workers"]
        workers.read(self._session, self._directories["workers"])
        if gone := list(filter(self._local_names.proves_gone, workers.names - self._ours)):
            log.info("workers_proved_gone", workers=gone)
            claims = read_claims(self._session)
            self._claims.unwritten.update(slot for slot, claim in claims.items() if claim.worker_id in gone)
            self._ours.update(gone)
            self._departed |= dict.fromkeys(gone, True)

    def _write_changes(self, session_id: int) -> None:
        """Make the pending changes in ZooKeeper, in the order that other daemons rely on."""
        dead = self._known_dead()
        data = znodes.encode(host=self._host, at=self._clock.now_ms())
        # Deaths before claims and workers vanish: a new owner must see that these workers run nothing.
        self._session.create("dead", dict.fromkeys(dead, data), ephemeral=False)
        # Claims before workers: a claim that another worker of ours has taken up must not become free in
        # between, and a leader that sees a worker sees what it holds.
        self._claims.write(session_id)
        self._session.delete("workers", self._departed)
        self._departed.clear()
        self._dead = self._dead.union(dead)
        for worker_id in sorted(self._unjoined):
            data = znodes.member_data(self._members[worker_id])
            # Also in place of a node of an earlier session of ours, which is about to vanish.
            self._session.replace("workers", worker_id, data, ephemeral=True)
        self._unjoined.clear()

    def _known_dead(self) -> list[str]:
        return [worker_id for worker_id, known_dead in self._departed.items() if known_dead]

    def _refresh(self) -> None:
        """Read what has changed, and watch it."""
        everything, changed = self._session.take_changes()
        dirty = {name for name in DIRECTORIES if everything or "" in changed.get(name, ())}
        topics = changed.get("assignment", set()) - {""}
        self.leader.forget(None if everything else changed.get("workers", ()))
        self._claims.unblock(None if everything else changed.get("slots", ()))
        if everything:
            topics.update(self._assignment)
        if "leader" in dirty:
            self.leader.find_leader()
        if "assignment" in dirty:
            names = self._names("assignment")
            topics |= names ^ {name for name, each in self._assignment.items() if each.version >= 0}
        self._read_assignment(sorted(topics))
        if "dead" in dirty:
            self._dead = self._names("dead")
        if "drain" in dirty:
            self._drained = self._host in self._names("drain")
        if dirty.intersection(INPUTS):
            self.leader.inputs_changed()

    def _names(self, directory: str) -> frozenset[str]:
        """Return the names of nodes in a directory, and watch it."""
        return frozenset(self._session.children(directory, watch=True))

    def _read_assignment(self, names: list[str]) -> None:
        nodes = self._session.read("assignment", names, watch=True)
        for name in names:
            node = nodes.get(name)
            if node is not None and (owners := znodes.owners_of(name, node.data)):
                if (read := znodes.Assigned(owners, node.version)) != self._assignment.get(name):
                    self.leader.inputs_changed()  # another wrote it, perhaps by hand
                self._assignment[name] = read
            elif node is not None:  # another program's: without it, the leader writes what is in force
                self._session.delete("assignment", [name])
            elif (known := self._assignment.pop(name, None)) and name in self.leader.topics:
                # Its node was deleted. It stays in force, and the leader writes it again.
                self._assignment[name] = znodes.Assigned(known.owners, -1)
                self.leader.inputs_changed()


def _same(before: Directory | None, now: Directory | None) -> bool:
    """Whether it is still the same directory, perhaps with other nodes in it."""
    return before is not None and now is not None and before.made == now.made


class Claims:
    """The slots that this daemon's workers hold, and their claims in ZooKeeper: for each, an ephemeral node.

    Claims last as long as the daemon's session, so no other daemon has their slots. A claim that passes from
    one of its workers to another is replaced in one step, so that it is never free in between.

    ``ours`` are the workers that ever joined this daemon, and those that it has proved gone. Methods with a
    ``session_id`` raise CoordinationUnavailable.
    """

    def __init__(self, session: Session, clock: Clock, ours: Set[str]) -> None:
        self._session = session
        self._clock = clock
        self._ours = ours
        self.held: dict[Slot, str] = {}
        """slot -> worker_id."""
        self.unwritten: set[Slot] = set()
        """Slots whose claim in ZooKeeper may be ours and not what ``held`` says."""
        self._blocked: set[Slot] = set()
        """Slots that workers of other daemons hold; a watch tells when a claim changes. Without this,
        a handover of 100 slots made six times the claims, as each look claimed all that were left, and took
        half as long again."""

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
        return [slot for slot in slots if slot not in self.held and slot not in self._blocked]

    def unblock(self, names: Iterable[str] | None) -> None:
        """Try slots again whose claims have changed; None: all, as watches may have been lost."""
        self._blocked = set() if names is None else self._blocked.difference(map(znodes.slot_of, names))

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
        nodes = self._session.read("slots", sorted(self.unwritten - self.held.keys()))
        self._session.delete("slots", self._of_ours(nodes, session_id))
        self.unwritten.clear()

    def _make(self, wanted: Mapping[Slot, str], session_id: int) -> dict[Slot, str]:
        """Create claims for workers of ours. Returns those that were granted; watches the others."""
        self.unwritten.update(wanted)  # until the outcome of each is known
        now = self._clock.now_ms()
        data = {slot: znodes.encode(worker_id=owner, since=now) for slot, owner in wanted.items()}
        granted = self._session.create("slots", data)
        refused = wanted.keys() - granted
        self._blocked |= refused
        nodes = self._session.read("slots", sorted(refused), watch=True)
        ours = self._of_ours(nodes, session_id)  # of one that has released it, or of an earlier session
        over = {slot: (data[slot], nodes[slot].version) for slot in ours}
        granted |= self._session.take_over("slots", over)
        asked = (refused - nodes.keys()).union(ours)
        self._blocked -= granted | asked
        if not asked <= granted:
            self._session.signal()  # it is free by now, or another worker was quicker: claim again
        self.unwritten -= wanted.keys()
        return {slot: wanted[slot] for slot in granted}

    def _of_ours(self, nodes: Mapping[Slot, Znode], session_id: int) -> list[Slot]:
        """Return the slots whose claims, as read, are those of workers of ours."""

        def is_ours(slot: Slot, node: Znode) -> bool:
            mine = node.session in (session_id, 0)  # 0: not ephemeral, so no claim of anybody
            return mine or znodes.holder_of(str(slot), node.data) in self._ours

        return [slot for slot, node in nodes.items() if is_ours(slot, node)]
