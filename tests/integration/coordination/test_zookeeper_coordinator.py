"""Daemons share slots through a real ZooKeeper: joins, leaves, hand-overs, outages, operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from toc.coordination.assignment import Member
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.local.servers import ZooKeeper
from toc.topic import Slot

TOPICS = {"order.close": 16, "order.remind": 8, "~tables": 4}


class Daemon:
    """A daemon with workers ``{host}-0``, ``{host}-1``, ... that takes and gives slots as it is told.

    ``held`` is what its workers consume. With ``reluctant`` they do not let go of what they should, as if
    handlers were still running.
    """

    def __init__(
        self,
        address: str,
        cluster: str,
        host: str,
        *,
        workers: int = 1,
        topics: dict[str, int],
        handles: Iterable[str] | None = None,
        weight: float = 1,
        session_timeout: float = 4.0,
    ) -> None:
        self.coordinator = ZooKeeperCoordinator(
            address, cluster=cluster, host=host, session_timeout=session_timeout
        )
        self.host = host
        self.reluctant = False
        self.held: dict[str, set[Slot]] = {}
        self.coordinator.start()
        self.coordinator.set_topics(topics)
        self._handles = None if handles is None else frozenset(handles)
        self._weight = weight
        for number in range(workers):
            self.join(f"{host}-{number}")

    def join(self, worker_id: str) -> None:
        self.coordinator.join(Member(worker_id, self.host, self._weight, self._handles))
        self.held[worker_id] = set()

    def worker_died(self, worker_id: str) -> None:
        del self.held[worker_id]
        self.coordinator.leave(worker_id, known_dead=True)

    def work(self, timeout: float = 0.0) -> None:
        """One round of a daemon's supervising thread."""
        self.coordinator.wait(timeout)
        desired, claimed = self.coordinator.desired(), self.coordinator.claimed()
        for worker_id, held in self.held.items():
            held &= claimed[worker_id]
            if not self.reluctant:
                dropped = held - desired[worker_id]
                held -= dropped
                self.coordinator.release(worker_id, dropped)
        for worker_id, held in self.held.items():
            held |= self.coordinator.claim(worker_id, desired[worker_id] - held)

    @property
    def slots(self) -> set[Slot]:
        return set().union(*self.held.values())

    def stop(self) -> None:
        self.coordinator.stop()


class Daemons:
    """Several daemons, driven in turn by the test's thread."""

    def __init__(self, address: str, cluster: str, topics: dict[str, int]) -> None:
        self.address = address
        self.cluster = cluster
        self.topics = topics
        self.all: list[Daemon] = []

    def start(
        self, host: str, *, workers: int = 1, handles: Iterable[str] | None = None, weight: float = 1
    ) -> Daemon:
        daemon = Daemon(
            self.address,
            self.cluster,
            host,
            workers=workers,
            topics=self.topics,
            handles=handles,
            weight=weight,
        )
        self.all.append(daemon)
        return daemon

    def stop(self, daemon: Daemon) -> None:
        self.all.remove(daemon)
        daemon.stop()

    def stop_all(self) -> None:
        for daemon in self.all:
            daemon.stop()

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Let all daemons work until the condition holds. It is an error when it does not come to hold."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.describe()
            for daemon in self.all:
                daemon.work(0.02 / len(self.all))

    def calm(self) -> bool:
        """Whether each slot is held, by the worker that it is assigned to, and by no other."""
        slots = [slot for daemon in self.all for held in daemon.held.values() for slot in held]
        return sorted(slots) == sorted(self.every_slot()) and all(
            daemon.coordinator.desired() == daemon.held for daemon in self.all
        )

    def every_slot(self) -> set[Slot]:
        return {Slot(topic, number) for topic, slots in self.topics.items() for number in range(slots)}

    def describe(self) -> str:
        return "; ".join(
            f"{worker_id} holds {len(held)} of {len(daemon.coordinator.desired()[worker_id])}"
            for daemon in self.all
            for worker_id, held in daemon.held.items()
        )


@pytest.fixture
def daemons(zookeeper: ZooKeeper, zookeeper_root: str) -> Iterator[Daemons]:
    """Daemons of a cluster of this test's own, on the shared ZooKeeper."""
    running = Daemons(zookeeper.url, zookeeper_root, dict(TOPICS))
    yield running
    running.stop_all()


def test_two(daemons: Daemons) -> None:
    daemons.start("a", workers=2); daemons.start("b", workers=2)
    daemons.until(daemons.calm)
    print(daemons.describe())
    c = daemons.start("c", workers=2)
    daemons.until(lambda: daemons.calm() and c.slots)
    print(daemons.describe())
    for r in c.coordinator.workers(): print(r)
    for r in c.coordinator.slots()[:5]: print(r)
