"""When which fault happens: a random schedule that its seed alone decides."""

import random
from typing import NamedTuple

HOSTS = ("host-1", "host-2", "host-3")
GATEWAYS = ("gateway-1", "gateway-2")
CONSUMERS = ("consumer-1", "consumer-2", "consumer-3")
NODES = ("redis-1", "redis-2", "redis-3")
DATABASES = ("mysql-1", "mysql-2")
QUIET_BEFORE = 5.0
"""Seconds of load before the first fault."""
QUIET_AFTER = 5.0
"""Seconds of load after the last one has ended."""


class Kind(NamedTuple):
    """What may happen to one of ``targets``, and how many seconds it lasts: from, to."""

    targets: tuple[str, ...]
    shortest: float
    longest: float


KINDS = {
    "kill worker": Kind(HOSTS, 0, 0), "pause worker": Kind(HOSTS, 1, 12),
    "kill host": Kind(HOSTS, 0.5, 8), "pause host": Kind(HOSTS, 1, 12),
    "kill daemon": Kind(HOSTS, 0, 0), "restart host": Kind(HOSTS, 0, 0),
    "cut host from MySQL": Kind(HOSTS, 1, 10), "kill gateway": Kind(GATEWAYS, 0.5, 8),
    "kill HTTP process": Kind(GATEWAYS, 0, 0), "restart gateway": Kind(GATEWAYS, 0, 0),
    "cut gateway from MySQL": Kind(GATEWAYS, 1, 10),
    "kill consumer": Kind(CONSUMERS, 0.2, 4),  # the words for consumers are told in consumers.py
    "leave": Kind(CONSUMERS, 0, 0), "ack late": Kind(CONSUMERS, 0, 0),
    "ack elsewhere": Kind(CONSUMERS, 0, 0), "ack twice": Kind(CONSUMERS, 0, 0),
    "kill Redis": Kind(NODES, 0.2, 6), "wipe Redis": Kind(NODES, 0.2, 4),
    "pause Redis": Kind(NODES, 0.5, 8), "cut Redis": Kind(NODES, 0.5, 6),
    "eat replies of Redis": Kind(NODES, 2, 8), "kill MySQL": Kind(DATABASES, 0.2, 4),
    "pause MySQL": Kind(DATABASES, 1, 8), "read-only MySQL": Kind(DATABASES, 1, 6),
    "lock a table": Kind(DATABASES, 1, 8), "eat commits": Kind(("application",), 2, 6),
    "kill ZooKeeper": Kind(("zookeeper",), 1, 15), "pause ZooKeeper": Kind(("zookeeper",), 1, 15),
    "wipe ZooKeeper": Kind(("zookeeper",), 0.5, 6), "empty ZooKeeper": Kind(("zookeeper",), 0, 0),
    "fill the log's disk": Kind(("logs",), 1, 10), "hold the interpreter": Kind(("handler",), 26, 30),
}  # fmt: skip


class Step(NamedTuple):
    """One fault: it begins ``at`` so many seconds after the load and ends ``lasts`` seconds later."""

    at: float
    lasts: float
    kind: str
    target: str
    choice: int
    """Which of the target's processes, modulo how many there are."""

    def __str__(self) -> str:
        lasts = f"for {self.lasts:.1f} s" if self.lasts else ""
        return f"{self.at:7.1f} s  {self.kind:<20} {self.target:<11} {lasts}".rstrip()


def schedule(seed: int, seconds: float) -> list[Step]:
    """The faults of a run of that many seconds, in their order.

    Every kind comes once before any comes again. Of each part of the system only one thing is broken at a
    time; any number of parts may be at once. A quarter follows the one before within half a second.
    """
    dice = random.Random(seed)
    busy: dict[str, float] = {}
    deck: list[str] = []
    steps: list[Step] = []
    at = QUIET_BEFORE
    while at < seconds - QUIET_AFTER:
        if not deck:
            deck = dice.sample(sorted(KINDS), len(KINDS))
        left = seconds - QUIET_AFTER - at
        free = {
            kind: [target for target in KINDS[kind].targets if busy.get(target, 0.0) <= at]
            for kind in deck
            if KINDS[kind].shortest
            <= left  # none is cut short: a handler that holds on cannot be told to end
        }
        kind = next((kind for kind in reversed(deck) if free.get(kind)), None)
        if kind is not None:
            deck.remove(kind)
            lasts = dice.uniform(KINDS[kind].shortest, KINDS[kind].longest)
            lasts = round(min(lasts, left), 1)
            target = dice.choice(free[kind])
            steps.append(Step(round(at, 1), lasts, kind, target, dice.randrange(100)))
            busy[target] = at + lasts + 1.5  # its processes come up again
        at += dice.uniform(0.0, 0.5) if dice.random() < 0.25 else dice.uniform(2.0, 8.0)
    return steps
