"""Daemons share slots through a real ZooKeeper: joins, leaves, hand-overs, outages, operators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from harness import secured
from harness.clocks import PushedClock
from harness.coordination import Driven
from harness.rows import known
from kazoo.client import KazooClient  # type: ignore[import-untyped]  # kazoo has no type information
from kazoo.security import ACL, Permissions  # type: ignore[import-untyped]  # kazoo has no type information

from benchmarks.local import ZooKeeper
from toc.coordination import leader, session
from toc.coordination.assignment import Member
from toc.coordination.operator import Operator
from toc.coordination.session import Session
from toc.coordination.views import SlotRow, WorkerRow
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.model.errors import CoordinationUnavailable
from toc.model.topic import Slot

TOPICS = {"order.close": 16, "order.remind": 8, "~tables": 4}


class Client(KazooClient):  # type: ignore[misc]  # kazoo has no type information
    """What a daemon's session is made of; known to its daemon."""

    maker: ClassVar[Daemon | None] = None
    """Whose turn it is."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.maker is not None:
            self.maker.client = self


@pytest.fixture(autouse=True)
def clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "KazooClient", Client)


class Daemon(Driven):
    """A daemon with workers ``{host}-0``, ``{host}-1``, ..."""

    coordinator: ZooKeeperCoordinator

    def __init__(
        self,
        address: str,
        cluster: str,
        host: str,
        *,
        topics: dict[str, int],
        workers: int = 1,
        **options: Any,
    ) -> None:
        self.woken = threading.Event()
        options = {"session_timeout": 4.0, "gather": 0.1} | options
        coordinator = ZooKeeperCoordinator(
            address, cluster=cluster, host=host, on_change=self.woken.set, **options
        )
        super().__init__(coordinator, host)
        self.due: float | None = None
        self.client: Client
        Client.maker = self
        self.coordinator.start()
        Client.maker = None
        self.coordinator.set_topics(topics)
        self.weight = 1.0
        for number in range(workers):
            self.join(f"{host}-{number}")

    def join(self, worker_id: str) -> None:
        self.coordinator.join(Member(worker_id, self.host, self.weight))
        self.held.setdefault(worker_id, set())

    def set_weight(self, weight: float) -> None:
        self.weight = weight
        for worker_id in self.held:
            self.join(worker_id)

    def worker_died(self, worker_id: str) -> None:
        del self.held[worker_id]
        self.coordinator.leave(worker_id, known_dead=True)

    def work(self, timeout: float = 0.0) -> None:
        """One round of a daemon's supervising thread."""
        self.woken.wait(timeout if self.due is None else min(timeout, self.due))
        self.woken.clear()
        Client.maker = self
        self.due = self.coordinator.step()
        Client.maker = None
        self.align()

    @property
    def session(self) -> int | None:
        """The id of its session; None without a connection."""
        identity = self.client.client_id
        return identity[0] if identity is not None else None

    def stop(self) -> None:
        self.coordinator.stop()


class Daemons:
    """Several daemons, driven in turn by the test's thread."""

    def __init__(self, server: ZooKeeper, cluster: str, topics: dict[str, int]) -> None:
        self.address = server.url
        self.cluster = cluster
        self.topics = topics
        self.all: list[Daemon] = []
        self.onlooker = secured.zookeeper_client(server)
        self.onlooker.start()

    def start(self, host: str, **options: Any) -> Daemon:
        daemon = Daemon(self.address, self.cluster, host, topics=self.topics, **options)
        self.all.append(daemon)
        return daemon

    def rows(self) -> list[SlotRow]:
        """The slots as ZooKeeper has them."""
        with Operator(self.address, cluster=self.cluster) as operator:
            return operator.slots()

    def workers(self) -> list[WorkerRow]:
        """The workers as ZooKeeper has them."""
        with Operator(self.address, cluster=self.cluster) as operator:
            return operator.workers()

    def settled(self) -> bool:
        """Whether ZooKeeper tells what is: each worker, one leader, and each slot with who holds it."""
        if sum(daemon.coordinator.leader.leading for daemon in self.all) != 1:
            return False
        rows = self.rows()
        shown = {Slot(row.topic, row.number): row.owner for row in rows if row.owner == row.assigned}
        workers = self.workers()
        return shown == self.holders() and {each.member.worker_id for each in workers} == {
            name for each in self.all for name in each.held
        }

    def holders(self) -> dict[Slot, str]:
        """Who holds each slot."""
        return {
            slot: worker for daemon in self.all for worker, slots in daemon.held.items() for slot in slots
        }

    def read(self, name: str) -> tuple[bytes, Any] | None:
        """Data and status of the cluster's node of that name."""
        path = f"/toc/{self.cluster}/{name}"
        return self.onlooker.get(path) if self.onlooker.exists(path) else None

    def stop_all(self) -> None:
        for daemon in self.all:
            daemon.stop()
        self.onlooker.stop()
        self.onlooker.close()

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Let all daemons work until the condition holds. It is an error when it does not come to hold."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.describe()
            for daemon in self.all:
                daemon.work(0.02 / len(self.all))

    def calm(self) -> bool:
        """Whether each slot is held, by the worker that it is assigned to, and by no other, and each worker
        holds some."""
        slots = [slot for daemon in self.all for held in daemon.held.values() for slot in held]
        idle = any(not held for daemon in self.all for held in daemon.held.values())
        return (
            not idle
            and sorted(slots) == sorted(self.every_slot())
            and all(daemon.coordinator.desired() == daemon.held for daemon in self.all)
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
    running = Daemons(zookeeper, zookeeper_root, dict(TOPICS))
    yield running
    running.stop_all()


def expire(daemon: Daemon) -> None:
    """End the daemon's session from outside, as ZooKeeper does when it has heard nothing for too long."""
    client = daemon.client
    host, port = client.hosts[0]
    other = KazooClient(f"{host}:{port}", client_id=client.client_id, use_ssl=client.use_ssl, ca=client.ca)
    other.start()
    other.stop()
    other.close()


def suspended(daemon: Daemon) -> bool:
    return daemon.session is None


# --- sharing ----------------------------------------------------------------------------------------------


def test_a_slot_is_taken_over_only_after_its_owner_has_released_it(daemons: Daemons) -> None:
    first = daemons.start("a")
    daemons.until(daemons.calm)
    first.reluctant = True
    second = daemons.start("b")
    daemons.until(lambda: len(second.coordinator.desired()["b-0"]) == 14)
    for _ in range(5):
        second.work()
        first.work()
    assert second.slots == set()

    one = min(second.coordinator.desired()["b-0"])
    first.held["a-0"].remove(one)
    first.coordinator.release("a-0", [one])
    daemons.until(lambda: second.slots == {one})

    first.reluctant = False
    daemons.until(daemons.calm)


# --- deaths -----------------------------------------------------------------------------------------------


def test_a_known_death_is_marked_before_the_dead_workers_nodes_vanish(daemons: Daemons) -> None:
    first, second = daemons.start("a", workers=2), daemons.start("b")
    daemons.until(daemons.calm)
    taken_over = sorted(first.held["a-1"])
    first.worker_died("a-1")
    daemons.until(daemons.calm)
    # ZooKeeper numbers its changes
    marker, workers = daemons.read("dead/a-1"), daemons.read("workers")
    assert marker is not None
    assert workers is not None
    assert marker[1].czxid < workers[1].pzxid
    for slot in taken_over:
        assert marker[1].czxid < known(daemons.read(f"slots/{slot}"))[1].czxid
    assert second.coordinator.dead_workers() == first.coordinator.dead_workers() == {"a-1"}


def test_the_leader_removes_markers_of_old_deaths(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = PushedClock()
    first = daemons.start("a", workers=2, clock=clock)
    daemons.until(daemons.calm)
    first.worker_died("a-1")
    daemons.until(lambda: first.coordinator.dead_workers() == {"a-1"})
    clock.ahead_ms = 700_000
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))  # a minute
    daemons.until(lambda: first.coordinator.dead_workers() == frozenset())
    assert daemons.read("dead/a-1") is None


# --- the leader -------------------------------------------------------------------------------------------


def test_an_assignment_that_changed_since_it_was_read_is_not_overwritten(daemons: Daemons) -> None:
    first = daemons.start("a")
    daemons.until(lambda: daemons.calm() and first.coordinator.leader.leading)
    root = f"/toc/{daemons.cluster}"
    (leads,) = daemons.onlooker.get_children(f"{root}/leader")
    there = known(daemons.read("assignment/order.close"))
    data, version = there[0], there[1].version
    one = Session(daemons.address, daemons.cluster, lambda: None)
    one.start()
    try:
        assert one.write_assignment(leads, [("order.close", b"{}", version + 1)]) == [None]
        assert one.write_assignment(leads, [("order.close", b"{}", -1)]) == [None]
        no_such_leader = one.write_assignment(f"{leads}0", [("order.close", b"{}", version)])
        assert no_such_leader == [None]
        assert daemons.read("assignment/order.close") == there
        assert one.write_assignment(leads, [("order.close", data, version)]) == [version + 1]
        with pytest.raises(CoordinationUnavailable, match="lost the directory"):
            one.replace("gone", "w1", b"{}", ephemeral=True)
    finally:
        one.stop()


# --- outages ----------------------------------------------------------------------------------------------


def test_slots_that_went_to_others_when_the_session_ended_are_dropped(daemons: Daemons) -> None:
    first, second = daemons.start("a"), daemons.start("b")
    daemons.until(daemons.calm)
    lost = set(first.slots)
    daemons.all.remove(first)  # paused: it sees nothing of what follows
    expire(first)
    daemons.until(daemons.calm)
    assert lost < second.slots
    second.reluctant = True

    daemons.all.append(first)
    daemons.until(lambda: first.slots == set())
    assert second.slots == daemons.every_slot()
    second.reluctant = False
    daemons.until(lambda: daemons.calm() and bool(first.slots))
    assert (len(first.slots), len(second.slots)) == (14, 14)


@contextmanager
def lost_answers() -> Iterator[None]:
    """Whoever creates nodes does not hear that they were made."""
    create = Session.create

    def unheard(session: Session, directory: str, nodes: Any, **how: bool) -> set[Any]:
        create(session, directory, nodes, **how)
        raise CoordinationUnavailable("the answer was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "create", unheard)
        yield


def test_nothing_is_claimed_in_a_new_session_before_the_workers_have_joined_it(daemons: Daemons) -> None:
    first = daemons.start("a")
    daemons.until(daemons.calm)
    slot, before = min(first.slots), first.session
    first.held["a-0"].remove(slot)
    first.coordinator.release("a-0", [slot])
    expire(first)
    while first.session in (None, before):
        first.woken.wait(0.05)
        first.woken.clear()
    assert first.coordinator.claim("a-0", [slot]) == set()
    daemons.until(daemons.calm)


def test_a_claim_that_was_made_though_its_answer_was_lost_is_taken_or_removed(daemons: Daemons) -> None:
    first = daemons.start("a", workers=2)
    daemons.until(daemons.calm)
    mine, others = min(first.held["a-0"]), min(first.held["a-1"])
    coordinator = first.coordinator
    for slot, worker_id in ((mine, "a-0"), (others, "a-1")):
        first.held[worker_id].remove(slot)
        coordinator.release(worker_id, [slot])
        with lost_answers():
            assert coordinator.claim(worker_id, [slot]) == set()
    assert coordinator.claim("a-0", [mine, others]) == {mine, others}
    owners = {Slot(row.topic, row.number): row.owner for row in daemons.rows()}
    assert (owners[mine], owners[others]) == ("a-0", "a-0")


def test_kazoo_giving_up_is_not_the_end(daemons: Daemons) -> None:
    first = daemons.start("a")
    daemons.until(daemons.calm)
    client = first.client
    client.stop()  # what it does by itself when authentication fails or its thread has died
    daemons.until(lambda: first.client is not client and not suspended(first))
    daemons.until(lambda: daemons.calm() and daemons.settled())
    assert {row.owner for row in daemons.rows()} == {"a-0"}


# --- nothing there is truth ---------------------------------------------------------------------------------


def test_a_workers_node_that_somebody_overwrites_is_written_again(daemons: Daemons) -> None:
    daemons.start("a")
    daemons.until(lambda: daemons.calm() and daemons.settled())
    before = daemons.holders()
    path = f"/toc/{daemons.cluster}/workers/a-0"
    written, _ = daemons.onlooker.get(path)
    for value in (b"[" * 3000, b"", b"{}"):
        daemons.onlooker.set(path, value)
        daemons.until(lambda: daemons.onlooker.get(path)[0] == written)
    assert daemons.holders() == before


def test_claims_that_somebody_deletes_are_made_again_though_the_first_repair_breaks_off(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons.start("a")
    daemons.until(lambda: daemons.calm() and daemons.settled())
    tries: list[Session] = []

    def fail(session: Session) -> None:
        tries.append(session)
        raise CoordinationUnavailable("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "make_directories", fail)
        for slot in daemons.every_slot():
            daemons.onlooker.delete(f"/toc/{daemons.cluster}/slots/{slot}")
        daemons.until(lambda: bool(tries))
    daemons.until(lambda: daemons.calm() and daemons.settled())


def test_a_claim_that_zookeeper_refuses_is_not_made_again_at_once(daemons: Daemons) -> None:
    one = daemons.start("a")
    daemons.until(lambda: daemons.calm() and daemons.settled())
    slot, path = min(one.slots), f"/toc/{daemons.cluster}/slots"
    one.coordinator.release("a-0", [slot])
    one.coordinator.step()
    before, _ = daemons.onlooker.get_acls(path)
    daemons.onlooker.set_acls(path, [ACL(Permissions.READ | Permissions.ADMIN, before[0].id)])
    one.woken.clear()
    assert one.coordinator.claim("a-0", [slot]) == set()
    assert not one.woken.is_set()
    daemons.onlooker.set_acls(path, before)
    daemons.until(lambda: daemons.calm() and daemons.settled())


def test_an_assignment_to_nobody_that_somebody_writes_does_not_stand(daemons: Daemons) -> None:
    daemons.start("a")
    daemons.start("b")
    for topic in [*daemons.topics, *daemons.topics]:  # the node as it was made, and once it was written again
        daemons.until(lambda: daemons.calm() and daemons.settled())
        nobody = b'{"workers":["x-0-1"],"slots":%s}' % str([0] * daemons.topics[topic]).encode()
        path = f"/toc/{daemons.cluster}/assignment/{topic}"
        daemons.onlooker.set(path, nobody)
        daemons.until(lambda path=path: b"x-0-1" not in daemons.onlooker.get(path)[0])  # type: ignore[misc]


def test_a_claim_that_no_session_holds_is_nobodys(daemons: Daemons) -> None:
    for slot in daemons.every_slot():
        path = f"/toc/{daemons.cluster}/slots/{slot}"
        daemons.onlooker.create(path, b'{"worker_id":"x-0-1"}', makepath=True)
    daemons.start("a")
    daemons.until(lambda: daemons.calm() and daemons.settled())


def test_a_leader_that_knows_a_worker_notices_what_it_tells_anew(daemons: Daemons) -> None:
    leader = daemons.start("a")
    daemons.until(lambda: leader.coordinator.leader.leading)
    other = daemons.start("b")
    daemons.until(lambda: daemons.calm() and daemons.settled())
    light = len(other.slots)
    for weight in (3, 1):
        other.set_weight(weight)
        daemons.until(lambda: daemons.settled() and (len(other.slots) > light) == (other.weight == 3))
