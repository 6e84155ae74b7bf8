"""Assigns slots to workers: a pure function of members, topics, operators' intents and the previous
assignment.

Guarantees, in order of priority:

1. Complete: a slot is without an owner only when no member may have it.
2. A member gets only what it can handle; drained hosts get nothing; a pin holds while its target may have the
   slot.
3. Balanced: moving a slot from one member to another, directly or along a chain of members, never makes the
   loads per weight more equal. With members that are alike this means: within one of each other.
4. Sticky: as few slots move as 1 to 3 allow. When members come or go, slots move only to members that came or
   from members that went.
5. A ``rebalance`` spreads each topic as well: among members that are alike, the numbers of its slots differ
   by at most one. Only this moves slots that 4 would keep.

The result depends only on the arguments, not on their order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from toc.model.topic import Delivery

TABLES = "~tables"
"""The pseudo topic whose slots are the tables to sweep. Every member can sweep."""

Owners = dict[str, list[str | None]]
"""topic -> the worker_id of each slot's owner, None where no member may have it."""

_NOBODY = -1
_MORE = 1 + 1e-9  # a gain must exceed rounding, or two slots could swap forever


PROTOCOL = 1
"""The protocol version that members announce. A release that adds what members of earlier ones would ignore
raises it, and refuses that until all members have it."""


@dataclass(frozen=True, slots=True)
class Member:
    """One consuming member of the cluster: a worker process.

    ``worker_id`` is never reused by any process. ``weight`` (more than 0) is its share of the load.
    ``serves`` are the deliveries of the topics that it can serve. Of topics that are delivered to
    handlers it serves only ``topics`` (None: all).

    ``assign`` ignores the rest. ``pid`` is for operators. ``metrics`` is the host:port of its daemon's
    metrics, valid on ``machine``. ``version`` is the release that it runs, ``protocol`` that release's
    PROTOCOL. ``keys`` are the marks of the keys with which it can read the secrets of webhook targets.
    ``out_of_reach`` are the servers that it does not reach. ``lost_threads`` is how many threads of an
    application's own process ran handlers past max_runtime when the member began. ``joined`` is when (ms).
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
    keys: frozenset[str] = frozenset()
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
) -> Owners:
    """Return the owner of every slot of ``topics`` (topic -> number of slots).

    ``previous`` is the assignment in force. ``pins`` maps (topic, number) to a worker_id, or to a host (any
    of its workers). ``deliveries`` has the topics that are not delivered to
    handlers. With ``rebalance``, slots also move to spread each topic evenly.
    """
    undrained = [member for member in members if member.host not in drained_hosts]
    plan = _Plan(undrained, topics, deliveries or {}, evenly=rebalance)
    plan.keep(previous or {}, pins or {})
    plan.place()
    plan.balance()
    return plan.owners()


class _Plan:
    """An assignment under construction. Workers are numbers: their rank by worker_id.

    ``kept[worker][topic]`` are slots with their previous owner, ``moved`` those with a new one. Pinned slots
    are in neither, so that nothing moves them, but count in ``load`` and ``count``.
    """

    def __init__(
        self,
        members: list[Member],
        topics: Mapping[str, int],
        deliveries: Mapping[str, str],
        *,
        evenly: bool,
    ) -> None:
        self.evenly = evenly
        self.members = sorted(members, key=lambda member: member.worker_id)
        self.topics = dict(sorted(topics.items()))
        self.everyone = range(len(self.members))
        self.weight = [member.weight for member in self.members]
        self.load = [0] * len(self.members)
        self.count = {topic: [0] * len(self.members) for topic in self.topics}
        self.owner = {topic: [_NOBODY] * slots for topic, slots in self.topics.items()}
        self.before = {topic: [_NOBODY] * slots for topic, slots in self.topics.items()}
        self.kept: list[dict[str, list[int]]] = [{topic: [] for topic in self.topics} for _ in self.members]
        self.moved: list[dict[str, list[int]]] = [{topic: [] for topic in self.topics} for _ in self.members]

        def able(topic: str) -> list[int]:
            delivery = deliveries.get(topic, Delivery.HANDLER.value)
            return [worker for worker in self.everyone if self.members[worker].can_handle(topic, delivery)]

        self.able = {topic: able(topic) for topic in self.topics}
        # Workers that can handle the same topics are of one kind; usually there are one or two kinds.
        kinds: dict[frozenset[str], int] = {}
        self.kind = [kinds.setdefault(frozenset(handled), len(kinds)) for handled in self._topics_by_worker()]
        self.kinds_of = {
            topic: [kind for handled, kind in kinds.items() if topic in handled] for topic in self.topics
        }
        self.topics_of = [sorted(handled) for handled in kinds]
        # loose[worker][kind]: how many slots the worker could give to a worker of that kind
        self.loose = [[0] * len(kinds) for _ in self.members]

    def _topics_by_worker(self) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in self.members]
        for topic, able in self.able.items():
            for worker in able:
                found[worker].append(topic)
        return found

    # --- the steps ---

    def keep(self, previous: Mapping[str, Sequence[str | None]], pins: Mapping[tuple[str, int], str]) -> None:
        """Leave every slot with its previous owner if allowed, and put the pinned ones in their places."""
        rank = {member.worker_id: worker for worker, member in enumerate(self.members)}
        for topic, slots in self.topics.items():
            able = set(self.able[topic])
            for number, worker_id in enumerate(previous.get(topic, ())[:slots]):
                worker = rank.get(worker_id, _NOBODY) if worker_id is not None else _NOBODY
                self.before[topic][number] = worker if worker in able else _NOBODY
        pinned = set()
        for (topic, number), target in sorted(pins.items()):
            if topic not in self.topics or not 0 <= number < self.topics[topic]:
                continue
            fit = [w for w in self.able[topic] if target in (self.members[w].worker_id, self.members[w].host)]
            if fit:
                was = self.before[topic][number]
                worker = was if was in fit else min(fit, key=lambda w: (self._if_given(w), w))
                self._count(topic, number, worker)
                pinned.add((topic, number))
        for topic, before in self.before.items():
            weights = sum(self.weight[w] for w in self.able[topic])
            for number, worker in enumerate(before):
                if worker == _NOBODY or (topic, number) in pinned:
                    continue
                share = len(before) * self.weight[worker] / weights * _MORE
                if not self.evenly or self.count[topic][worker] + 1 <= share:
                    self._take(topic, number, worker)

    def place(self) -> None:
        """Give slots without an owner to the least loaded worker, those that the fewest can handle first."""
        for topic in sorted(self.topics, key=lambda topic: (len(self.able[topic]), topic)):
            able, count = self.able[topic], self.count[topic]

            def full(worker: int, count: list[int] = count) -> tuple[float, float]:
                """How full a worker is: of slots, or at first of this topic's."""
                has, load = count[worker] / self.weight[worker], self._if_given(worker)
                return (has, load) if self.evenly else (load, has)

            for number, worker in enumerate(self.owner[topic]):
                if worker == _NOBODY and able:
                    was = self.before[topic][number]
                    least = min(able, key=lambda w: (full(w), w != was, w))
                    self._take(topic, number, least)

    def balance(self) -> None:
        """Move slots from the most to the least loaded for as long as that makes loads more equal.

        No improving chain is left at the end, so the sum of load**2 / weight is the least possible.
        """
        while True:
            for receiver in sorted(self.everyone, key=lambda w: (self._if_given(w), w)):
                chain = self._chain_to(receiver)
                if chain:
                    for giver, taker in pairwise(chain):
                        self._move(self._best_topic(giver, taker), giver, taker)
                    break
            else:
                return

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

    def _count(self, topic: str, number: int, worker: int) -> None:
        self.owner[topic][number] = worker
        self.load[worker] += 1
        self.count[topic][worker] += 1

    def _take(self, topic: str, number: int, worker: int) -> None:
        self._count(topic, number, worker)
        stayed = self.before[topic][number] == worker
        (self.kept if stayed else self.moved)[worker][topic].append(number)
        for kind in self.kinds_of[topic]:
            self.loose[worker][kind] += 1

    def _move(self, topic: str, giver: int, taker: int) -> None:
        """Move one slot of the topic, preferably one that has moved already."""
        number = (self.moved[giver][topic] or self.kept[giver][topic]).pop()
        self.load[giver] -= 1
        self.count[topic][giver] -= 1
        for kind in self.kinds_of[topic]:
            self.loose[giver][kind] -= 1
        self._take(topic, number, taker)

    def _chain_to(self, receiver: int) -> list[int] | None:
        """Return the shortest chain of workers that should each pass on a slot, ending at ``receiver``."""
        limit = self._if_given(receiver)
        onward = {receiver: _NOBODY}
        edge = [receiver]
        while edge:
            found: list[int] = []
            for giver in self.everyone:
                if giver not in onward:
                    taker = next((w for w in edge if self.loose[giver][self.kind[w]]), None)
                    if taker is not None:
                        found.append(giver)
                        onward[giver] = taker
            richest = max(found, key=lambda w: (self._if_taken(w), -w), default=None)
            if richest is not None and self._if_taken(richest) > limit * _MORE:
                chain = [richest]
                while chain[-1] != receiver:
                    chain.append(onward[chain[-1]])
                return chain
            edge = found
        return None

    def _best_topic(self, giver: int, taker: int) -> str:
        """Return the topic of which the giver has most and the taker least."""

        def merit(topic: str) -> tuple[float, float]:
            count = self.count[topic]
            gap = count[giver] / self.weight[giver] - count[taker] / self.weight[taker]
            moved = float(bool(self.moved[giver][topic]))
            return (gap, moved) if self.evenly else (moved, gap)

        topics = self.topics_of[self.kind[taker]]
        return max((t for t in topics if self.moved[giver][t] or self.kept[giver][t]), key=merit)
