"""What many hosts and slots cost ZooKeeper: ``python -m benchmarks.ensemble [HOSTS] [SLOTS]``

Two daemons' coordinators are real; one leads. All other hosts are nodes that a session of their own has
written, 16 workers each. Prints how long the leader takes, how large its nodes are, what a daemon asks at
rest, and what ZooKeeper writes while a host leaves and comes back.
"""

from __future__ import annotations

import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.local import ZooKeeper
from toc.coordination.assignment import Member
from toc.coordination.session import DIRECTORIES, Session
from toc.coordination.znodes import encode, member_data, owners_of
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.model.topic import Slot
from toc.observe.log import configure

PROCESSES = 16
PER_TOPIC = 1000
REST_SECONDS = 10
"""How long a daemon at rest is watched."""


class Daemon:
    """A daemon's coordinator with its workers, driven by hand."""

    def __init__(self, address: str, host: str, topics: dict[str, int]) -> None:
        self.coordinator = ZooKeeperCoordinator(address, cluster="scale", host=host, session_timeout=30)
        self.workers = [Member(f"{host}-{number:02}-00000000", host) for number in range(PROCESSES)]
        self.coordinator.start()
        self.coordinator.set_topics(topics)
        for worker in self.workers:
            self.coordinator.join(worker)

    def step(self) -> None:
        """Do what is due, and hand over slots as the daemon does, without any work in between."""
        self.coordinator.step()
        claimed = self.coordinator.claimed()
        for worker_id, wanted in self.coordinator.desired().items():
            if surplus := claimed[worker_id] - wanted:
                self.coordinator.release(worker_id, surplus)
            if missing := wanted - claimed[worker_id]:
                self.coordinator.claim(worker_id, missing)

    def settled(self) -> bool:
        """Whether its workers hold all that they should."""
        wanted = self.coordinator.desired()
        return any(wanted.values()) and wanted == self.coordinator.claimed()


class Crowd:
    """The other hosts: their nodes, and a session that claims what is theirs."""

    def __init__(self, address: str, hosts: int) -> None:
        self.session = Session(address, "scale", lambda: None, session_timeout=30)
        self.session.start()
        self.session.make_directories()
        self.held: set[Slot] = set()
        names = [f"other{host:04}" for host in range(hosts)]
        members = [
            Member(f"{host}-{number:02}-00000000", host) for host in names for number in range(PROCESSES)
        ]
        self.workers = {member.worker_id for member in members}
        self.session.create("workers", {member.worker_id: member_data(member) for member in members})

    def follow(self) -> int:
        """Release and claim as the assignment says. Returns how many claims changed."""
        nodes = self.session.nodes("assignment")
        mine = {
            Slot(topic, number): owner
            for topic, node in nodes.items()
            for number, owner in enumerate(owners_of(topic, node.data))
            if owner in self.workers
        }
        gone, new = self.held - mine.keys(), sorted(mine.keys() - self.held)
        self.session.delete("slots", gone)
        made = self.session.create("slots", {slot: encode(worker_id=mine[slot], since=0) for slot in new})
        self.held = self.held - gone | made
        return len(gone) + len(made)


def main(hosts: int = 1000, slots: int = 100_000) -> int:
    """Measure and print."""
    configure("warning")
    topics = {f"scale.{number:04}": PER_TOPIC for number in range(slots // PER_TOPIC)}
    with tempfile.TemporaryDirectory(prefix="toc-ensemble-") as directory:
        server = ZooKeeper(Path(directory))
        server.start()
        try:
            _measure(server, hosts, topics)
        finally:
            server.stop()
    return 0


def _measure(server: ZooKeeper, hosts: int, topics: dict[str, int]) -> None:
    began = time.monotonic()
    crowd = Crowd(server.url, hosts - 2)
    say(f"{len(crowd.workers):,} members are written", f"{time.monotonic() - began:.1f} s")

    leader = Daemon(server.url, "leader", topics)
    took = until(leader, lambda: any(leader.coordinator.desired().values()))
    say("the first assignment: longest step of the leader, processor", f"{took:.2f} s")
    nodes = crowd.session.nodes("assignment")
    say("largest node of the assignment", f"{max(len(node.data) for node in nodes.values()) / 1e3:.0f} KB")
    began = time.monotonic()
    claims = crowd.follow()
    say(f"{claims:,} slots are claimed", f"{claims / (time.monotonic() - began):,.0f} a second")
    until(leader, leader.settled)

    other = Daemon(server.url, "other", topics)

    def both() -> bool:
        other.step()
        return not crowd.follow() and leader.settled() and other.settled()

    writes = Writes(server)
    took = until(leader, both)
    say("a host comes: longest step of the leader, processor", f"{took:.2f} s")
    say("a host comes: writes", f"{writes.since():,}")
    longest = max(len("".join(crowd.session.children(name))) for name in DIRECTORIES)
    say("longest listing of a directory", f"{longest / 1e6:.1f} MB")

    began = time.monotonic()
    while time.monotonic() < began + REST_SECONDS:
        due = other.coordinator.step()
        time.sleep(min(due or 1.0, 1.0))
    before = server_says(server, "Received")
    began = time.monotonic()
    while time.monotonic() < began + REST_SECONDS:
        due = other.coordinator.step()
        time.sleep(min(due or 1.0, 1.0))
    asked = (server_says(server, "Received") - before) / REST_SECONDS
    say("requests of a daemon at rest", f"{asked:.0f} a second")

    gone = {worker.worker_id for worker in other.workers}

    def without_it() -> bool:
        nodes = crowd.session.nodes("assignment")
        owners = {owner for topic, node in nodes.items() for owner in owners_of(topic, node.data)}
        return gone.isdisjoint(owners) and not crowd.follow() and leader.settled()

    writes = Writes(server)
    other.coordinator.stop()
    took = until(leader, without_it)
    say("a host goes: longest step of the leader, processor", f"{took:.2f} s")
    say("a host goes: writes", f"{writes.since():,}")
    leader.coordinator.stop()
    crowd.session.stop()


def until(leader: Daemon, state: Callable[[], bool], seconds: float = 300) -> float:
    """Step until it is so. Returns the longest step of the leader, in seconds of processor time."""
    longest, end = 0.0, time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.process_time()
        leader.step()
        longest = max(longest, time.process_time() - began)
        if state():
            return longest
        time.sleep(0.05)
    raise RuntimeError("the cluster did not settle")


class Writes:
    """Counts what ZooKeeper writes: each write has the next transaction number."""

    def __init__(self, server: ZooKeeper) -> None:
        self._server = server
        self._before = server_says(server, "Zxid")

    def since(self) -> int:
        """Return the writes since it was made."""
        return server_says(self._server, "Zxid") - self._before


def server_says(server: ZooKeeper, what: str) -> int:
    """Return a number of the server's own statistics."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"srvr")
        said = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
    found = re.search(rf"^{what}: (\S+)$", said, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"ZooKeeper does not say {what}")
    return int(found[1], 0)


def say(what: str, result: str) -> None:
    """Print one line."""
    print(f"{what:66} {result}", flush=True)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
