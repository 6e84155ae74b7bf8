"""The leading daemon, which alone writes the assignment.

Each daemon puts an ephemeral sequential node into ``leader/``; the daemon with the lowest leads. Every write
is one transaction that checks that the leader's node still exists and that the assignment has the version
from which the new one was computed. So a leader that was deposed, or that wakes up after a pause, writes
nothing, whatever it believes; one without a connection sends nothing.
"""

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from toc.coordination import znodes
from toc.coordination.assignment import DEAD_FOR_MS, ONE_SERVER, Member, Owners, Spread
from toc.coordination.operator import INTENTS, read_intents
from toc.coordination.session import Session
from toc.coordination.znodes import Assigned
from toc.model.clock import Clock
from toc.observe.log import get_logger

log = get_logger(__name__)

INPUTS = ("workers", *INTENTS)
"""The directories that the assignment depends on. Only the leader watches them."""

DEBOUNCE = 0.3
"""Seconds from a change until the inputs are read. So workers that join or leave together cost one
assignment; each further one could move slots again."""

GATHER = 2.5
"""Seconds that a newly registered leader waits for the workers of the assignment in force; without one, for
any worker. After an outage or a loss of all nodes all daemons register anew, and the first must not take all
slots from the next ones. Each notices a loss within a second."""

GATHER_LOST = 5.0
"""Seconds of that wait if this daemon has seen nodes deleted: the others notice it at about the same time."""

GATHER_LOOK = 0.3
"""Seconds between two checks for those workers."""

SWEEP_DEAD = 60.0
"""Seconds between two checks for markers of known deaths that are old enough to delete."""


@dataclass(eq=False)
class Leader:
    """One daemon's candidacy and, while it leads, its work. Only ZooKeeperCoordinator's thread uses it."""

    session: Session
    host: str
    clock: Clock
    gather: float = GATHER
    spread: Spread = ONE_SERVER

    def __post_init__(self) -> None:
        self.topics: dict[str, int] = {}
        self._deliveries: dict[str, str] = {}
        self._members: dict[str, Member | None] = {}
        """The workers as read, by worker_id, None for what is not understood. A watch tells of changes: to
        read 16,000 anew would take a leader seconds."""
        self._token = ""
        self._gathered = 0.0
        """Until when to wait for missing workers."""
        self._node: str | None = None
        self._due = float("inf")
        """When to assign (monotonic)."""
        self._sweep_dead = 0.0

    @property
    def leading(self) -> bool:
        """Whether this daemon leads, as far as it knows."""
        return self._node is not None

    def set_topics(self, topics: Mapping[str, int], deliveries: Mapping[str, str]) -> bool:
        """Set what to assign. Returns whether it changed."""
        if (self.topics, self._deliveries) == (dict(topics), dict(deliveries)):
            return False
        self.topics, self._deliveries = dict(topics), dict(deliveries)
        self.inputs_changed()
        return True

    def inputs_changed(self) -> None:
        """Record that the assignment may have to change."""
        self._due = min(self._due, time.monotonic() + DEBOUNCE)

    def forget(self, workers: Iterable[str] | None) -> None:
        """Read these workers again, or all, at the next assignment."""
        for worker_id in list(self._members) if workers is None else workers:
            self._members.pop(worker_id, None)

    def enroll(self, session_id: int) -> None:
        """Become a candidate, in a new session or after a loss of nodes."""
        self._token = f"{session_id:x}-"
        self._gathered = max(self._gathered, time.monotonic() + self.gather)
        self.find_leader()

    def nodes_lost(self) -> None:
        """Record that this daemon's nodes were deleted, and so perhaps those of other daemons."""
        self._gathered = time.monotonic() + GATHER_LOST

    def find_leader(self) -> None:
        """Find the leader, and become a candidate again if our node is gone."""
        names = self.session.children("leader", watch=True)
        if not any(name.startswith(self._token) for name in names):
            self.session.create("leader", {self._token: znodes.encode(host=self.host)}, sequence=True)
            names = self.session.children("leader", watch=True)
        first = znodes.first_candidate(names)
        led = self.leading
        self._node = first if first.startswith(self._token) else None
        if self.leading and not led:
            log.info("leading", host=self.host)
            self.inputs_changed()

    def step(
        self, assignment: dict[str, Assigned], dead: frozenset[str], ours: Set[str]
    ) -> tuple[float, bool]:
        """Update ``assignment``, in ZooKeeper and here, if due. ``dead``: workers known to be dead; ``ours``:
        those of this daemon.

        Returns the seconds until the next step, and whether ``assignment`` must be read again because a write
        was refused.
        """
        if self._node is None:
            self._due = float("inf")
            return self._due, False
        now = time.monotonic()
        if now >= self._sweep_dead:
            self._sweep_dead = now + SWEEP_DEAD
            oldest, nodes = self.clock.now_ms() - DEAD_FOR_MS, self.session.nodes("dead")
            self.session.delete("dead", (name for name, node in nodes.items() if node.created_ms < oldest))
        refused = False
        if now >= self._due:
            self._due = float("inf")
            refused = not self._assign(self._node, assignment, dead, ours)
        return max(min(self._due, self._sweep_dead) - time.monotonic(), 0.0), refused

    def _assign(
        self, node: str, assignment: dict[str, Assigned], dead: frozenset[str], ours: Set[str]
    ) -> bool:
        """Compute the assignment and write what has changed, if it is time. False if a write was refused."""
        topics = self.topics
        workers = self._read_members()
        wanted = read_intents(self.session, watch=True)
        present = {member.worker_id for member in workers}
        if not ours <= present:  # nodes were deleted, perhaps those of others too: all make them again
            self.inputs_changed()
            return True
        # Topics without an assignment, new or lost, begin with the claims of their workers.
        previous = self._claimed({topic: topics[topic] for topic in topics.keys() - assignment.keys()})
        previous |= {topic: each.owners for topic, each in assignment.items()}
        owners_before = {owner for owners in previous.values() for owner in owners}
        if self._must_gather(owners_before, dead | present):
            return True
        asked = bool(wanted.requests)
        owners = wanted.assign(workers, topics, previous, self._deliveries, self.spread, rebalance=asked)
        if not self._write(node, owners, assignment, workers=len(workers)):
            self.inputs_changed()
            return False
        self.session.delete("rebalance", wanted.requests)
        return True

    def _read_members(self) -> list[Member]:
        """Return the workers that are alive, with the weights that their daemons gave them."""
        names = self.session.children("workers", watch=True)
        known = {name: self._members[name] for name in names if name in self._members}
        nodes = self.session.read("workers", (name for name in names if name not in known), watch=True)
        known |= {name: znodes.member_of(name, node.data) for name, node in nodes.items()}
        self._members = known
        return [member for member in known.values() if member is not None]

    def _must_gather(self, owners: Set[str | None], accounted_for: Set[str]) -> bool:
        """Whether owners of slots may still register; then a new leader looks again soon.

        None among the ``owners`` is a slot that nobody has claimed, whose owner may not have registered yet.
        """
        now = time.monotonic()
        if now >= self._gathered or (owners and owners <= accounted_for):
            return False
        self._due = min(now + GATHER_LOOK, self._gathered)
        return True

    def _claimed(self, topics: Mapping[str, int]) -> dict[str, list[str | None]]:
        """Return the workers that have claimed the slots of these topics."""
        owners: dict[str, list[str | None]] = {topic: [None] * slots for topic, slots in topics.items()}
        names = self.session.children("slots") if topics else []
        claimed = filter(None, map(znodes.slot_of, names))
        slots = [slot for slot in claimed if slot.number < topics.get(slot.topic, 0)]
        for slot, node in self.session.read("slots", slots).items():
            owners[slot.topic][slot.number] = znodes.holder_of(str(slot), node.data)
        return owners

    def _write(self, node: str, owners: Owners, assignment: dict[str, Assigned], *, workers: int) -> bool:
        """Write the topics whose owners have changed, remove those that are gone, and record that.

        Writes only while our ``node`` leads and no other write came between. False if a write was refused.
        """
        absent = Assigned([], -1)
        before = {topic: assignment.get(topic, absent) for topic in assignment.keys() | owners.keys()}
        after = {
            topic: owners.get(topic)
            for topic, each in sorted(before.items())
            if each.version < 0 or each.owners != owners.get(topic)
        }
        now_ms = self.clock.now_ms()
        data = {topic: new and znodes.assignment_data(new, self.host, now_ms) for topic, new in after.items()}
        versions = self.session.write_assignment(
            node, [(topic, data[topic] or None, before[topic].version) for topic in after]
        )
        for (topic, new), version in zip(after.items(), versions, strict=True):
            if version is not None and new is not None:
                assignment[topic] = Assigned(new, version)
            elif version is not None:
                del assignment[topic]
        if None in versions:
            log.warning("assignment_refused", topics=len(after))
            return False
        if after:
            log.info("assignment_written", workers=workers, topics=len(after))
        return True
