"""What operators see and ask for, and how a connection to ZooKeeper is made or refused."""

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from harness.coordination import Driven
from harness.secured import zookeeper_client, zookeeper_url

from benchmarks.local import ZooKeeper
from benchmarks.private import free_port
from toc.coordination.assignment import Member
from toc.coordination.operator import Move, Operator
from toc.coordination.session import DIRECTORIES
from toc.coordination.views import SlotState
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.model.errors import CoordinationUnavailable
from toc.model.topic import Slot
from toc.observe.log import configure

TOPICS = {"order.close": 8, "order.remind": 4}


class Cluster:
    """Coordinators of two hosts with one worker each, driven by the test's thread."""

    def __init__(self, address: str, cluster: str) -> None:
        self.address, self.cluster = address, cluster
        self.running: dict[str, Driven] = {}

    def start(self, host: str, pid: int = 0) -> None:
        coordinator = ZooKeeperCoordinator(self.address, cluster=self.cluster, host=host)
        coordinator.start()
        coordinator.set_topics(TOPICS)
        coordinator.join(Member(f"{host}-0", host, pid=pid))
        self.running[host] = Driven(coordinator, host)
        self.running[host].held[f"{host}-0"] = set()

    def operator(self) -> Operator:
        return Operator(self.address, cluster=self.cluster)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            for one in self.running.values():
                time.sleep(0.02)
                one.coordinator.step()
                one.align()

    def load(self, host: str) -> int:
        one = self.running[host]
        return len(one.slots) if one.held == one.coordinator.desired() else -1


@pytest.fixture
def cluster(zookeeper: ZooKeeper, zookeeper_root: str) -> Iterator[Cluster]:
    made = Cluster(zookeeper.url, zookeeper_root)
    yield made
    for one in made.running.values():
        one.coordinator.stop()


@pytest.fixture
def seen(zookeeper: ZooKeeper) -> Iterator[Callable[[str], list[str]]]:
    """What stands below a node."""
    client = zookeeper_client(zookeeper)
    client.start()
    yield lambda path: sorted(client.get_children(path))
    client.stop()
    client.close()


@pytest.fixture
def pair(cluster: Cluster) -> Cluster:
    """A cluster of the hosts h1 and h2, with 6 slots each."""
    cluster.start("h1", pid=101)
    cluster.start("h2", pid=102)
    cluster.until(lambda: cluster.load("h1") == cluster.load("h2") == 6)
    return cluster


# --- what they see ----------------------------------------------------------------------------------------


def test_a_visitor_sees_every_slot_and_worker_without_joining(pair: Cluster) -> None:
    with pair.operator() as operator:
        slots, workers = operator.slots(), operator.workers()
    assert [(row.topic, row.number) for row in slots] == [
        (topic, number) for topic, amount in TOPICS.items() for number in range(amount)
    ]
    assert {(row.state, row.owner == row.assigned, row.reason) for row in slots} == {
        (SlotState.OWNED, True, "balance")
    }
    assert [
        (row.member.worker_id, row.member.host, row.member.pid, row.assigned, row.owned, row.leader)
        for row in workers
    ] == [("h1-0", "h1", 101, 6, 6, True), ("h2-0", "h2", 102, 6, 6, False)]


def test_a_visitor_to_a_cluster_that_never_was_sees_nothing_and_leaves_nothing(
    cluster: Cluster, seen: Callable[[str], list[str]]
) -> None:
    with cluster.operator() as operator:
        assert not operator.slots() + operator.workers()
        assert not operator.intents().drains | operator.intents().pins
        assert operator.rebalance(by="me", dry_run=True) == []
    assert cluster.cluster not in seen("/toc")


# --- what they ask for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["h2", "h2-0"])
def test_a_pinned_slot_goes_to_its_host_or_worker_and_stays_when_repinned(pair: Cluster, target: str) -> None:
    slot = min(pair.running["h1"].slots)

    def at(host: str) -> bool:
        return slot in pair.running[host].slots and min(map(pair.load, pair.running)) >= 0

    def reason(operator: Operator) -> str:
        [row] = [row for row in operator.slots() if (row.topic, row.number) == slot]
        return row.reason

    with pair.operator() as operator:
        operator.want("pin", slot, target=target, by="ann")
        pair.until(lambda: at("h2"))
        [(pinned, pin)] = operator.intents().pins.items()
        assert (pinned, pin.to, pin.by) == (slot, target, "ann")
        assert reason(operator) == f"pinned to {target} by ann"
        operator.want("drain", "h2", by="bob")
        pair.until(lambda: at("h1"))  # so the pin is not why it is there
        assert reason(operator) == f"pinned to {target} by ann, but that is drained"
        operator.want("pin", slot, target="h3", by="ann")
        assert reason(operator) == "pinned to h3 by ann, but that is not running"
        operator.want("pin", slot, target="h1", by="bob")
        assert [pin.by for pin in list(operator.intents().pins.values())] == ["bob"]
        assert operator.unwant("pin", slot)
        assert not operator.unwant("pin", slot)
        assert list(operator.intents().pins.values()) == []


def test_a_rebalance_names_its_moves_first_and_makes_exactly_those_once(
    pair: Cluster, seen: Callable[[str], list[str]]
) -> None:
    """All slots of one topic were pinned to one host, and stay there once they are unpinned."""
    requests = f"/toc/{pair.cluster}/rebalance"
    pinned = [Slot("order.remind", number) for number in range(TOPICS["order.remind"])]

    def owners(operator: Operator) -> dict[Slot, str | None]:
        return {Slot(row.topic, row.number): row.owner for row in operator.slots()}

    def at_rest(operator: Operator) -> bool:
        return not seen(requests) and {row.state for row in operator.slots()} == {SlotState.OWNED}

    with pair.operator() as operator:
        for slot in pinned:
            operator.want("pin", slot, target="h1", by="ann")
        pair.until(lambda: pair.running["h1"].slots >= {*pinned} and at_rest(operator))
        for slot in pinned:
            operator.unwant("pin", slot)
        before = owners(operator)
        named = operator.rebalance(by="ann", dry_run=True)
        assert Counter((topic, old, new) for topic, _, old, new in named) == {
            ("order.remind", "h1-0", "h2-0"): 2,
            ("order.close", "h2-0", "h1-0"): 2,
        }
        assert (seen(requests), owners(operator)) == ([], before)
        assert operator.rebalance(by="ann") == named
        pair.until(lambda: at_rest(operator))
        after = owners(operator)
        moved = [Move(*slot, old, after[slot]) for slot, old in before.items() if after[slot] != old]
        assert sorted(moved) == sorted(named)
        assert operator.rebalance(by="ann", dry_run=True) == []


def test_intents_outlive_every_daemon(cluster: Cluster) -> None:
    slot = Slot("order.close", 0)
    with cluster.operator() as operator:
        operator.want("drain", "h1", by="ann")
        operator.want("weight", "h2", weight=3, by="bob")
        operator.want("pin", slot, target="h3", by="eve")
    for _ in range(2):
        for host in ("h1", "h2", "h3"):
            cluster.start(host)
        cluster.until(lambda: (cluster.load("h1"), cluster.load("h2"), cluster.load("h3")) == (0, 9, 3))
        assert slot in cluster.running["h3"].slots
        for one in cluster.running.values():
            one.coordinator.stop()
    with cluster.operator() as operator:
        wanted = operator.intents()
    assert (wanted.drains["h1"].by, wanted.weights["h2"].by, wanted.pins[slot].by) == ("ann", "bob", "eve")


def test_while_a_slot_moves_it_is_shown_where_to_why_and_who_is_waited_for(pair: Cluster) -> None:
    """h1 is told to let go and does not, as if handlers were running."""
    with pair.operator() as operator:
        operator.want("drain", "h1", by="ann")
        stays = pair.running["h1"].coordinator
        deadline = time.monotonic() + 60
        while stays.desired()["h1-0"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            stays.step()
        moving = [row for row in operator.slots() if row.state is SlotState.MOVING]
        assert {(row.owner, row.assigned, row.reason) for row in moving} == {
            ("h1-0", "h2-0", "h1 is drained by ann; h1-0 has not released it yet")
        }
        assert len(moving) == 6
        assert all(row.since for row in moving)


# --- connections ------------------------------------------------------------------------------------------


def test_zookeeper_out_of_reach_is_said_in_time_with_its_address_and_the_cause() -> None:
    address = f"127.0.0.1:{free_port()}"
    coordinator = ZooKeeperCoordinator(address, cluster="c", host="h", connect_timeout=2.5)
    with pytest.raises(CoordinationUnavailable, match=rf"{address} .*within 2.5 s .*refused.*TOC_ZOOKEEPER"):
        coordinator.start()
    coordinator.stop()
    with (
        pytest.raises(CoordinationUnavailable, match=address),
        Operator(address, cluster="c", connect_timeout=0.5),
    ):
        pass


def test_a_chroot_is_made_when_it_is_missing(
    zookeeper: ZooKeeper, zookeeper_root: str, seen: Callable[[str], list[str]]
) -> None:
    cluster = Cluster(zookeeper_url(zookeeper, chroot=f"/{zookeeper_root}/deep"), "c")
    try:
        cluster.start("h1")
        cluster.until(lambda: cluster.load("h1") == 12)
        assert seen(f"/{zookeeper_root}/deep/toc/c") == sorted(DIRECTORIES)
    finally:
        cluster.running["h1"].coordinator.stop()


def test_with_a_user_the_nodes_are_his_alone_and_his_password_is_in_no_log(
    zookeeper: ZooKeeper,
    zookeeper_root: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.NOTSET)
    configure("debug")
    place = {"chroot": f"/{zookeeper_root}"}
    cluster = Cluster(zookeeper_url(zookeeper, user="toc:canary", **place), "c")
    try:
        cluster.start("h1")
        cluster.until(lambda: cluster.load("h1") == 12)
        with cluster.operator() as operator:
            operator.want("drain", "h1", by="ann")
            cluster.until(lambda: cluster.load("h1") == 0)
        for stranger in ("", "toc:wrong"):
            with (
                Operator(zookeeper_url(zookeeper, user=stranger, **place), cluster="c") as operator,
                pytest.raises(CoordinationUnavailable, match="NoAuth"),
            ):
                operator.want("drain", "h1", by="eve")
        written = caplog.text + "".join(capsys.readouterr())
        assert "zookeeper_connected" in written
        assert "canary" not in written
    finally:
        cluster.running["h1"].coordinator.stop()


@contextmanager
def silent_host() -> Iterator[str]:
    """The address of one that answers nothing: as of a machine without power, connects to it go nowhere."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.socket() as one,
        socket.socket() as two,
    ):
        for waiting in (one, two):  # nobody accepts them: the queue is full, and the next ones are dropped
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield "{}:{}".format(*server.getsockname())


def test_a_silent_member_keeps_no_operator_from_the_others(zookeeper: ZooKeeper, zookeeper_root: str) -> None:
    login, at, rest = zookeeper.url.rpartition("@")
    with silent_host() as silent:
        for _ in range(5):  # kazoo asks them in any order
            with Operator(
                f"{login}{at}{silent},{rest}", cluster=zookeeper_root, connect_timeout=4.0
            ) as operator:
                assert operator.workers() == []
