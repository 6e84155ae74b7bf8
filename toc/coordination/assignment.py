"""Assigns slots to workers: a pure function of members, topics, operators' intents and the previous
assignment.

Guarantees, in order of priority:

1. Complete: a slot is without an owner only when no member may have it.
2. A member gets only what it can handle; drained hosts get nothing; a pin holds while its target may have the
   slot.
3. Balanced: moving a slot from one member to another never makes the loads per weight more equal. With
   members that are alike this means: within one of each other.
4. Sticky: as few slots move as 1 to 3 allow. When members come or go that are of one kind with the others,
   slots move only to members that came or from members that went.
5. A ``rebalance`` spreads each topic as well: among members that are alike, the numbers of its slots differ
   by at most one. Only this moves slots that 4 would keep.
6. Near: where 1 to 5 leave the choice, a member gets slots whose tasks are on one database server, its home,
   so that it needs few connections. Hosts that restart keep it so. Where hosts come one by one, 4 mixes the
   servers; a rebalance sorts them.

The result depends only on the arguments, not on their order. Members that can handle the same topics are of
one kind. Choices are made by kind, and from heaps: 16,000 members and 100,000 slots take a leader seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from toc.model.topic import Delivery, Slot

TABLES = "~tables"
"""The pseudo topic whose slots are the tables to sweep. Every member can sweep."""

Owners = dict[str, list[str | None]]
"""topic -> the worker_id of each slot's owner, None where no member may have it."""

DEAD_FOR_MS = 600_000
"""How long a known death is remembered (ms): longer than others need to put back the dead worker's
entries."""

Entry = tuple[tuple[float, float], int]
"""How full a worker is, and the worker."""

_NOBODY = -1
_ANY = -1
"""In place of a home: all of them."""
_MORE = 1 + 1e-9  # a gain must exceed rounding, or two slots could swap forever


PROTOCOL = 1
"""The protocol version that members announce. A release that adds what members of earlier ones would ignore
raises it, and refuses that until all members have it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How the task table is spread: so many databases, in equal blocks on so many servers."""

    databases: int = 1
    servers: int = 1

    def server(self, topic_slots: int, number: int) -> int | None:
        """Return the server of a slot's tasks; None if they may be on several: the topic has fewer slots than
        there are databases (or a ``slot_basis``, of which nothing is known here)."""
        if topic_slots % self.databases:
            return None
        return number % self.databases * self.servers // self.databases


ONE_SERVER = Spread()


@dataclass(frozen=True, slots=True)
class Member:
    """One consuming member of the cluster: a worker process.

    ``worker_id`` is never reused by any process. ``weight`` (more than 0) is its share of the load.
    ``serves`` are the deliveries of the topics that it can serve. Of topics that are delivered to
    handlers it serves only ``topics`` (None: all).

    ``assign`` ignores the rest. ``pid`` is for operators. ``metrics`` is the host:port of its daemon's
    metrics, valid on ``machine``. ``version`` is the release that it runs, ``protocol`` that release's
    PROTOCOL. ``out_of_reach`` are the servers that it does not reach. ``lost_threads`` is how many threads
    of an application's own process run handlers past max_runtime, of members before. ``joined`` is when (ms).
    """

    worker_id: str
    host: str
    weight: float = 1
    topics: frozenset[str] | None = None
    pid: int = 0
    metrics: str | None = None
    machine: str | None = None
    serves: frozenset[str] = frozenset({Delivery.HANDLER.value})
    version: str = ""
    protocol: int = 0
    out_of_reach: frozenset[str] = frozenset()
    lost_threads: int = 0
    joined: int = 0

    def can_handle(self, topic: str, delivery: str = Delivery.HANDLER.value) -> bool:
        """Whether the member can have slots of ``topic``, which has this ``delivery``."""
        if topic == TABLES:
            return True
        if delivery not in self.serves:
            return False
        return delivery != Delivery.HANDLER.value or self.topics is None or topic in self.topics


def assign(
    members: Iterable[Member],
    topics: Mapping[str, int],
    *,
    previous: Mapping[str, Sequence[str | None]] | None = None,
    pins: Mapping[tuple[str, int], str] | None = None,
    drained_hosts: Collection[str] = frozenset(),
    deliveries: Mapping[str, str] | None = None,
    rebalance: bool = False,
    spread: Spread = ONE_SERVER,
) -> Owners:
    """Return the owner of every slot of ``topics`` (topic -> number of slots).

    ``previous`` is the assignment in force. ``pins`` maps (topic, number) to a worker_id, or to a host (any
    of its workers). ``deliveries`` has the topics that are not delivered to
    handlers. With ``rebalance``, slots also move to spread each topic evenly. ``spread`` says on which
    servers the tasks of a slot are.
    """
    undrained = [member for member in members if member.host not in drained_hosts]
    plan = _Plan(undrained, topics, deliveries or {}, spread, evenly=rebalance)
    plan.keep(previous or {}, pins or {})
    plan.place()
    plan.balance()
    return plan.owners()


def by_worker(workers: Iterable[str], owners: Mapping[Slot, str | None]) -> dict[str, set[Slot]]:
    """Return the slots that each of these workers has."""
    found: dict[str, set[Slot]] = {worker_id: set() for worker_id in workers}
    for slot, owner in owners.items():
        if owner in found:
            found[owner].add(slot)
    return found


class _Plan:
    """An assignment under construction. Workers are numbers: their rank by worker_id.

    ``kept[worker]`` has, by topic, the slots with their previous owner, ``moved`` those with a new one.
    Pinned slots are in neither, so that nothing moves them, but count in ``load`` and ``count``.
    """

    def __init__(
        self, members: list[Member], topics: Mapping[str, int], deliveries: Mapping[str, str], spread: Spread,
        *, evenly: bool,
    ) -> None:  # fmt: skip
        self.evenly = evenly
        self.spread = spread
        self.members = sorted(members, key=lambda member: member.worker_id)
        self.topics = dict(sorted(topics.items()))
        self.everyone = range(len(self.members))
        self.weight = [member.weight for member in self.members]
        self.load = [0] * len(self.members)
        self.count: dict[str, Counter[int]] = {topic: Counter() for topic in self.topics}
        self.owner = {topic: [_NOBODY] * slots for topic, slots in self.topics.items()}
        self.before = {topic: [_NOBODY] * slots for topic, slots in self.topics.items()}
        self.kept: list[dict[str, list[int]]] = [{} for _ in self.members]
        self.moved: list[dict[str, list[int]]] = [{} for _ in self.members]
        self.homes = [0] * len(self.members)
        """The server of most tasks of each worker's slots; of one without slots, a server that few have."""
        self.topics_of: list[dict[str, None]] = []
        """The topics that each kind of workers can handle, sorted. Usually there are one or two kinds."""
        self.kind = self._kinds(deliveries)
        kinds = range(len(self.topics_of))
        self.kinds_of = {t: tuple(k for k in kinds if t in self.topics_of[k]) for t in self.topics}
        able = {of: [w for w in self.everyone if self.kind[w] in of] for of in set(self.kinds_of.values())}
        self.able = {topic: able[self.kinds_of[topic]] for topic in self.topics}
        self.weights = {of: sum(self.weight[w] for w in workers) for of, workers in able.items()}
        # loose[worker][kind]: how many slots the worker could give to a worker of that kind
        self.loose = [[0] * len(kinds) for _ in self.members]
        self.receivers: list[list[tuple[float, int]]] = []
        """By kind, a heap of its workers, the least loaded first, with outdated entries in between."""
        self.givers: list[dict[int, list[tuple[float, int]]]] = []
        """By kind and home, heaps of those that can give to a worker of the kind, the most loaded first; like
        that. All homes together: ``_ANY``."""

    def _kinds(self, deliveries: Mapping[str, str]) -> list[int]:
        """Return the kind of each worker, and fill ``topics_of``."""
        by_topics: dict[tuple[str, ...], int] = {}
        by_ability: dict[tuple[frozenset[str] | None, frozenset[str]], int] = {}
        found = []
        for member in self.members:
            ability = (member.topics, member.serves)
            kind = by_ability.get(ability)
            if kind is None:
                handler = Delivery.HANDLER.value
                can = tuple(t for t in self.topics if member.can_handle(t, deliveries.get(t, handler)))
                kind = by_ability[ability] = by_topics.setdefault(can, len(by_topics))
            found.append(kind)
        self.topics_of = [dict.fromkeys(can) for can in by_topics]
        return found

    # --- the steps ---

    def keep(self, previous: Mapping[str, Sequence[str | None]], pins: Mapping[tuple[str, int], str]) -> None:
        """Leave every slot with its previous owner if allowed, and put the pinned ones in their places."""
        rank = {member.worker_id: worker for worker, member in enumerate(self.members)}
        for topic, slots in self.topics.items():
            for number, worker_id in enumerate(previous.get(topic, ())[:slots]):
                worker = rank.get(worker_id, _NOBODY) if worker_id is not None else _NOBODY
                if worker != _NOBODY and self._can(worker, topic):
                    self.before[topic][number] = worker
        self._find_homes()
        pinned = set()
        named: dict[str, list[int]] = {}
        for worker, member in enumerate(self.members) if pins else ():
            for name in {member.worker_id, member.host}:
                named.setdefault(name, []).append(worker)
        for (topic, number), target in sorted(pins.items()):
            if topic not in self.topics or not 0 <= number < self.topics[topic]:
                continue
            fit = [worker for worker in named.get(target, ()) if self._can(worker, topic)]
            if fit:
                was = self.before[topic][number]
                worker = was if was in fit else min(fit, key=lambda w: (self._if_given(w), w))
                self._count(topic, number, worker)
                pinned.add((topic, number))
        for topic, before in self.before.items():
            for number, worker in enumerate(before):
                if worker == _NOBODY or (topic, number) in pinned:
                    continue
                home = self._server(topic, number) in (None, self.homes[worker])
                if not self.evenly or (home and self._within_share(topic, worker)):
                    self._take(topic, number, worker)

    def _find_homes(self) -> None:
        """Share the servers out as homes: to each the one of most of its slots that has room left."""
        if self.spread.servers == 1:
            return
        servers: list[Counter[int]] = [Counter() for _ in self.members]
        for topic, workers in self.before.items():
            for number, worker in enumerate(workers):
                if worker != _NOBODY and (server := self._server(topic, number)) is not None:
                    servers[worker][server] += 1
        room, homed = -(-len(self.members) // self.spread.servers), [0] * self.spread.servers
        ranked = [counts.most_common() or [(0, 0)] for counts in servers]
        for worker in sorted(self.everyone, key=lambda worker: -ranked[worker][0][1]):
            fit = (server for server, slots in ranked[worker] if slots and homed[server] < room)
            self.homes[worker] = home = next(fit, homed.index(min(homed)))
            homed[home] += 1

    def place(self) -> None:
        """Give slots without an owner to the least loaded worker, those that the fewest can handle first."""
        for topic in sorted(self.topics, key=lambda topic: (len(self.able[topic]), topic)):
            free = [number for number, worker in enumerate(self.owner[topic]) if worker == _NOBODY]
            if not free or not self.able[topic]:
                continue
            count = self.count[topic]

            def full(worker: int, count: Counter[int] = count) -> tuple[float, float]:
                """How full a worker is: of slots, or at first of this topic's."""
                has, load = count.get(worker, 0) / self.weight[worker], self._if_given(worker)
                return (has, load) if self.evenly else (load, has)

            def current(heap: list[Entry]) -> list[Entry]:
                """Drop entries from the top of a heap that say what is not so any more."""
                while heap and heap[0][0] != full(heap[0][1]):
                    heappop(heap)
                return heap

            everyone: list[Entry] = sorted((full(worker), worker) for worker in self.able[topic])
            by_home: dict[int | None, list[Entry]] = {}
            for entry in everyone if self.spread.servers > 1 else ():
                by_home.setdefault(self.homes[entry[1]], []).append(entry)
            for number in free:
                least, worker = current(everyone)[0]
                was, near = self.before[topic][number], current(by_home.get(self._server(topic, number), []))
                if near and (near[0][0] == least or self._has_room(topic, near[0], least)):
                    worker = near[0][1]
                elif was != _NOBODY and full(was) == least:
                    worker = was
                self._take(topic, number, worker)
                heappush(everyone, (full(worker), worker))
                if by_home:
                    heappush(by_home[self.homes[worker]], (full(worker), worker))

    def balance(self) -> None:
        """Move slots from the most to the least loaded for as long as that makes loads more equal."""
        kinds = range(len(self.topics_of))
        self.receivers = [
            [(self._if_given(worker), worker) for worker in self.everyone if self.kind[worker] == kind]
            for kind in kinds
        ]
        self.givers = [{} for _ in kinds]
        for worker in self.everyone:
            self._may_give(worker)
        for heap in self.receivers:
            heapify(heap)
        # A move that is worth it to any worker is so to the least loaded of its kind.
        while move := next(filter(None, map(self._move_to, self._least_loaded())), None):
            self._move(self._best_topic(*move), *move)

    def _least_loaded(self) -> list[int]:
        """Return the least loaded worker of each kind, the least loaded first."""
        for heap in self.receivers:
            while heap[0][0] != self._if_given(heap[0][1]):
                heappop(heap)
        return [worker for _, worker in sorted(heap[0] for heap in self.receivers)]

    def owners(self) -> Owners:
        """Return the result with worker_ids."""
        return {
            topic: [None if worker == _NOBODY else self.members[worker].worker_id for worker in slots]
            for topic, slots in self.owner.items()
        }

    # --- how loaded a worker would be with one more slot, and with its last one ---
    # These are the Sainte-Lague divisors. With them, slots move only to members that came or from those that
    # went (4).

    def _if_given(self, worker: int) -> float:
        return (2 * self.load[worker] + 1) / self.weight[worker]

    def _if_taken(self, worker: int) -> float:
        return (2 * self.load[worker] - 1) / self.weight[worker]

    # --- moves ---

    def _server(self, topic: str, number: int) -> int | None:
        return self.spread.server(self.topics[topic], number) if self.spread.servers > 1 else None

    def _within_share(self, topic: str, worker: int) -> bool:
        """Whether one more slot of the topic is within what the worker has in an even spread."""
        share = self.topics[topic] * self.weight[worker] / self.weights[self.kinds_of[topic]]
        return self.count[topic][worker] + 1 <= share * _MORE

    def _has_room(self, topic: str, entry: Entry, least: tuple[float, float]) -> bool:
        """Whether a worker may be fuller than the least loaded: by as many slots as one server has in a row.
        The next ones lie on others, and `balance` mends what is left."""
        if self.evenly:
            return self._within_share(topic, entry[1])
        row = self.spread.databases // self.spread.servers
        return entry[0][0] <= least[0] + 2 * row / self.weight[entry[1]]

    def _can(self, worker: int, topic: str) -> bool:
        return topic in self.topics_of[self.kind[worker]]

    def _count(self, topic: str, number: int, worker: int) -> None:
        self.owner[topic][number] = worker
        self.load[worker] += 1
        self.count[topic][worker] += 1

    def _take(self, topic: str, number: int, worker: int) -> None:
        self._count(topic, number, worker)
        stayed = self.before[topic][number] == worker
        (self.kept if stayed else self.moved)[worker].setdefault(topic, []).append(number)
        for kind in self.kinds_of[topic]:
            self.loose[worker][kind] += 1

    def _move(self, topic: str, giver: int, taker: int) -> None:
        """Move one slot of the topic, preferably one that has moved already, and to where its server is."""
        numbers = self.moved[giver].get(topic) or self.kept[giver][topic]
        place = len(numbers) - 1
        if self.spread.servers > 1:
            server = [self._server(topic, number) for number in numbers]
            there, here = self.homes[taker], self.homes[giver]
            place = max(range(len(numbers)), key=lambda at: (server[at] == there, server[at] != here, at))
        number = numbers.pop(place)
        self.load[giver] -= 1
        self.count[topic][giver] -= 1
        for kind in self.kinds_of[topic]:
            self.loose[giver][kind] -= 1
        self._take(topic, number, taker)
        for worker in (giver, taker):
            heappush(self.receivers[self.kind[worker]], (self._if_given(worker), worker))
            self._may_give(worker)

    def _may_give(self, worker: int) -> None:
        """Note that the worker can give slots, as loaded as it is now."""
        entry = (-self._if_taken(worker), worker)
        for kind, heaps in enumerate(self.givers):
            if self.loose[worker][kind]:
                for home in {_ANY, self.homes[worker]}:
                    heappush(heaps.setdefault(home, []), entry)

    def _move_to(self, receiver: int) -> tuple[int, int] | None:
        """Return who should give a slot to ``receiver``, of the most loaded one of the same home, and
        ``receiver``; None if it is not worth it."""
        kind = self.kind[receiver]
        giver = self._most_loaded(kind, _ANY)
        if not giver or -giver[0] <= self._if_given(receiver) * _MORE:
            return None
        near = self._most_loaded(kind, self.homes[receiver])
        return (near if near and near[0] == giver[0] else giver)[1], receiver  # not the same: it is worth it

    def _most_loaded(self, kind: int, home: int) -> tuple[float, int] | None:
        """Return the top of a heap of givers, without what is not so any more."""
        heap = self.givers[kind].get(home, [])
        while heap and not (self.loose[heap[0][1]][kind] and -heap[0][0] == self._if_taken(heap[0][1])):
            heappop(heap)
        return heap[0] if heap else None

    def _best_topic(self, giver: int, taker: int) -> str:
        """Return the topic of which the giver has most and the taker least."""
        moved, kept = self.moved[giver], self.kept[giver]

        def merit(topic: str) -> tuple[float, float]:
            count = self.count[topic]
            gap = count.get(giver, 0) / self.weight[giver] - count.get(taker, 0) / self.weight[taker]
            has_moved = float(bool(moved.get(topic)))
            return (gap, has_moved) if self.evenly else (has_moved, gap)

        topics = self.topics_of[self.kind[taker]]
        return max((t for t in topics if moved.get(t) or kept.get(t)), key=merit)
