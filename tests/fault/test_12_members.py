"""Faults 12 and 13: members without ZooKeeper, ZooKeeper out of reach, workers that stand still,
two owners."""

import os
import signal
import socket
import time
from contextlib import ExitStack, closing
from typing import Any

import pytest
from fault.conftest import Case
from fault.kit.load import TOPICS, Load, tasks
from fault.kit.owners import hosts_by_slot, operator_of, owners, wait_for_shares
from harness.secured import zookeeper_client
from harness.system import TOPICS as ALL_TOPICS
from harness.system import DaemonProcess, System

from benchmarks.local import MariaDB, ZooKeeper
from toc import NewTask
from toc.coordination import znodes
from toc.coordination.assignment import Member
from toc.coordination.operator import Operator
from toc.coordination.views import SlotState
from toc.coordination.znodes import host_of
from toc.model.topic import Slot
from toc.operate.cluster import slot_owners
from toc.worker.control import ControlPipe
from toc.worker.daemon.processes import Child
from toc.worker.daemon.slots import WorkerSlots

# Fault 12: what becomes of daemons that share the work by rows, without ZooKeeper, and of their slots.

BOTH = {"host-a", "host-b"}
TIMEOUT = 3
HELD = 60
"""How many tasks a host may have begun, or ended and not written, as it is stopped or killed."""


def shared_by(system: System, hosts: set[str]) -> dict[Any, str | None]:
    """Who has each slot and table, once these hosts share them all; empty until then."""
    rows = slot_owners(system.center)
    owners = {(row.topic, row.number): row.owner for row in rows if row.state is SlotState.OWNED}
    settled = len(owners) == len(rows) and {host_of(str(owner)) for owner in owners.values()} == hosts
    return owners if settled else {}


def pids_of(daemon: DaemonProcess) -> list[int]:
    return [daemon.process.pid, *daemon.workers()]


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(True, id="with Redis"),
        pytest.param(False, id="the database alone", marks=pytest.mark.slow),
    ],
)
def test_hosts_that_stand_still_or_die_leave_their_slots_to_others_and_without_the_database_keep_them(
    case: Case, resumed: MariaDB, request: pytest.FixtureRequest, index: bool
) -> None:
    line = case.verdict(12, "hosts without ZooKeeper stop, die, lose the database", request.node.callspec.id)
    quick: dict[str, Any] = {"session_timeout": TIMEOUT, "connect_timeout": 0.5, "read_timeout": 1.0}
    system = case.build(index=index, topic_prepare_timeout=3, **quick)
    first, second = (system.start(host, processes=2) for host in ("host-a", "host-b"))
    system.wait(lambda: shared_by(system, BOTH), "both share the work", 60)
    with Load(system.client, rate=60, ahead=(0.2, 1.0)) as load:
        with system.recorder.fault("pause", pids=second.workers()):
            pids = stand_still(second)
            system.wait(lambda: shared_by(system, {"host-a"}), "the first has everything", 60)
            load.more(60)
            go_on(pids)
        system.wait(lambda: shared_by(system, BOTH), "they share again", 60)
        stopped = "member_called_dead" in second.told()
        with system.recorder.fault("kill", pids=pids_of(second)):
            second.kill()
        system.wait(lambda: shared_by(system, {"host-a"}), "the first has everything", 60)
        load.more(60)
        second = system.start("host-b", processes=2)
        before = system.wait(lambda: shared_by(system, BOTH), "they share again", 60)
        with system.recorder.fault("store_down"):
            resumed.pause()
            away = [first.events("members_out_of_reach"), second.events("members_out_of_reach")]
            for daemon, told in zip((first, second), away, strict=True):
                system.wait(
                    lambda daemon=daemon, told=told: len(daemon.events("members_out_of_reach")) > len(told),  # type: ignore[misc]
                    "it meets that",
                    60,
                )
            gone = time.monotonic()
            system.wait(lambda: time.monotonic() > gone + 2 * TIMEOUT, "nobody is sure of what he has", 60)
            resumed.resume()
        load.more(60)
        system.wait(lambda: shared_by(system, BOTH), "they share the work", 60)
        after = shared_by(system, BOTH)
    line.prove(
        stopped and before == after,
        f"{len(before)} slots and tables went to the other host twice, and stayed while nobody could write",
    )
    line.judge(system, within=6, at_most=2 * HELD)


# Fault 12: ZooKeeper is out of reach for minutes.

SLOTS = TABLES = 8
RATE = 60
RESTARTED_MS = 3000
"""By which a task may be late whose process ends: until its successor is there."""
UNWRITTEN = 15
"""How many tasks a process may run, or have run and not written, as it is killed."""


@pytest.mark.parametrize(("how", "ends", "seconds"), [
    pytest.param("killed", "none ends", 20, marks=pytest.mark.slow),
    pytest.param("hangs", "none ends", 12, marks=pytest.mark.slow),
    pytest.param("killed", "none ends", 600, marks=[pytest.mark.chaos, pytest.mark.timeout(900)]),
    pytest.param("hangs", "one is killed", 2, marks=pytest.mark.slow),
    pytest.param("killed", "all are killed", 2, marks=pytest.mark.slow),
    pytest.param("killed", "all are recycled", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_without_zookeeper_every_slot_keeps_its_host_and_lateness_is_what_it_was(
    case: Case, how: str, ends: str, seconds: int
) -> None:
    """What a process had that ends meanwhile, another of its host takes up."""
    line = case.verdict(12, "ZooKeeper unreachable", f"{how}, {seconds} s; of two processes of a host {ends}")
    keeper = case.launch(ZooKeeper)
    system = case.build(zookeeper=keeper.url, cluster="fault", session_timeout=2, slots=SLOTS, tables=TABLES)
    daemon, other = daemons = [system.start("host-a", processes=2), system.start("host-b", processes=1)]
    wait_for_shares(system, "host-a", "host-b")
    first = daemon.workers()
    victims = {"none ends": [], "one is killed": first[:1]}.get(ends, first)
    with Load(system.client, rate=RATE, ahead=(0.2, 1.0), fail=0.0) as load:
        load.more(3 * RATE)
        before = time.time()
        with system.recorder.fault("zk_down"):
            (keeper.kill if how == "killed" else keeper.pause)()
            system.wait(lambda: all(each.events("zookeeper_suspended") for each in daemons), "away", 20)
            if ends == "all are recycled":
                for number, pid in enumerate(victims, start=3):
                    os.kill(pid, signal.SIGTERM)
                    system.wait(lambda: len(daemon.events("worker_ready")) == number, "its successor", 20)  # noqa: B023
            else:
                with system.recorder.fault("kill", pids=victims):
                    for pid in victims:
                        os.kill(pid, signal.SIGKILL)
                amount = 2 + len(victims)
                system.wait(lambda: len(daemon.events("worker_ready")) == amount, "the successors", 20)
            ready = time.time()
            for _ in range(seconds):  # no wait for the load is so long
                load.more(RATE)
            every = len(TOPICS) * SLOTS
            system.wait(
                lambda: len(hosts_by_slot(system, daemons, ready, time.time())) == every, "all slots", 20
            )
            ended, due = time.time(), list(load.job_ids)
            system.wait(lambda: not system.pending(due), "all have run, without ZooKeeper", 20)
            keeper.resume()
            keeper.start()  # does nothing when it runs
        with operator_of(system) as operator:
            system.wait(lambda: _all_owned(operator), "each slot has one owner, each process slots", 30)
        load.more(RATE)
    usual, without = system.late(since=before - 2, before=before), system.late(since=before, before=ended)
    line.prove(
        not set(victims) & set(daemon.workers()), f"both sessions suspended; {without}, before {usual}"
    )
    if victims:
        line.on_time(without, most=RESTARTED_MS)
    else:
        line.on_time(without, p50=usual.p50 + 50, p99=usual.p99 + 250)
    kept = hosts_by_slot(system, daemons, ready, ended)
    assert all(len(hosts) == 1 for hosts in kept.values()), f"slots changed hands: {kept}"
    assert (daemon.process.poll(), other.process.poll()) == (None, None)
    assert not load.errors
    line.judge(system, within=3, at_most=0 if "recycled" in ends else UNWRITTEN * len(victims))


def _all_owned(operator: Operator) -> bool:
    """Whether every slot and table has the owner that it should have; each of three processes has some."""
    owned, workers = owners(operator), {each.member.worker_id for each in operator.workers()}
    whole = len(owned) == len(ALL_TOPICS) * SLOTS + TABLES
    return whole and len(workers) == 3 and set(owned.values()) == workers


# Fault 13: workers that stand still, sessions that end, slots with two owners.

PREPARE_TIMEOUT = 3


def stand_still(daemon: DaemonProcess) -> list[int]:
    """SIGSTOP the daemon and its processes; returns the pids."""
    pids = [daemon.process.pid, *daemon.workers()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def go_on(pids: list[int]) -> None:
    """SIGCONT."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def long_ones(count: int, first: int, seconds: float) -> list[NewTask]:
    """Tasks that run so long and fail the first time. Due one after the other: where two hosts want
    them, neither gets all."""
    attribute = {"sleep": seconds, "fail": 1}
    return [NewTask("test.async", first + n, 1.0 + n / 40, attribute=attribute) for n in range(count)]


def test_two_owners_of_every_slot_and_a_pause_double_only_what_was_held(case: Case) -> None:
    line = case.verdict(13, "double owner, paused worker", "two hosts that do not know of each other")
    system = case.build(hosts=True, topic_prepare_timeout=PREPARE_TIMEOUT)
    first = system.start("host-a", processes=1)
    # In a cluster of its own, by mistake: each takes all slots.
    apart = {"TOC_CLUSTER": f"{system.settings.cluster}-apart"}
    second = system.start("host-b", processes=1, env=apart)
    burst = system.client.submit_many(tasks(600, ahead=(0.5, 2.0), fail=0.1))
    system.wait(lambda: not system.pending(burst), "the two have run what both wanted", 60)
    for batch in range(1, 6):  # until the first has got some of one
        long = set(system.client.submit_many(long_ones(20, 10_000 * batch, 4.0)))
        system.wait(lambda: len(system.late(long)) == 20, "the long ones run", 60)  # noqa: B023
        if len(_running(system, first) & long) > 3:
            break
    with system.recorder.fault("pause", pids=first.workers()):
        pids = stand_still(first)
        held = _running(system, first) & long
        system.wait(lambda: "reclaimed" in second.log.read_text(), "the second takes them over", 60)
        # Their second try runs there when the first one's late failures arrive.
        system.wait(lambda: len(held - _running(system, second)) == 0, "they run again", 60)
        go_on(pids)
    owners = {event.pid for event in system.history()}
    judged = line.judge(system, within=6, at_most=200)
    doubled = judged.duplicates["pause"]
    line.prove(
        len(owners) == 2 and held and doubled >= len(held),
        f"both hosts ran tasks of all slots; {len(held)} tries were running when one was stopped",
    )


@pytest.mark.slow
def test_a_host_that_stands_still_for_three_timeouts_loses_its_session_and_does_no_harm(case: Case) -> None:
    line = case.verdict(13, "session expiry", "host stopped for 3 timeouts")
    system = case.build(hosts=True, session_timeout=2, topic_prepare_timeout=PREPARE_TIMEOUT)
    first, second = (system.start(host, processes=1) for host in ("host-a", "host-b"))
    system.client.submit_many(tasks(3000, ahead=(2.0, 14.0), fail=0.1))
    system.client.submit_many(long_ones(40, 10_000, 4.0))
    system.wait(lambda: len(_running(system, first)) > 3, "long ones run on the first", 60)
    held = len(_running(system, first))
    with system.recorder.fault("pause", pids=first.workers()):
        pids = stand_still(first)
        time.sleep(3 * PREPARE_TIMEOUT)
        go_on(pids)
    system.wait(lambda: "zookeeper_session_ended" in first.log.read_text(), "its session has ended", 60)
    judged = line.judge(system, within=6, at_most=200)
    line.prove(
        "reclaimed" in second.log.read_text() and judged.duplicates["pause"],
        f"its session ended; {held} tries were running on it, the other host took over",
    )


def _running(system: System, daemon: DaemonProcess) -> set[int]:
    """The tasks whose handler has started in a process of the daemon and not ended."""
    workers = set(daemon.workers())
    found: set[int] = set()
    for event in system.history():
        if event.pid in workers:
            (found.add if event.event == "start" else found.discard)(event.job_id)
    return found


def test_a_worker_drops_a_slot_that_another_claimed_when_its_session_had_ended(
    case: Case, zookeeper: ZooKeeper, zookeeper_root: str
) -> None:
    line, system = case.begin(13, "session expiry", "another claims a slot meanwhile", hosts=True)
    ours, theirs = socket.socketpair()
    slots = WorkerSlots(system.center, system.settings, lambda: None)
    worker = Child(ControlPipe(ours), Member(slots.name("host-a-0"), "host-a", 1.0), 0)
    worker.member, lost = True, Slot("test.sync", 0)
    root = f"/toc/{zookeeper_root}"
    claim = f"{root}/slots/{lost}"

    def holds(wanted: bool) -> bool:
        slots.changed = True
        slots.reconcile([worker], stopping=False)
        return wanted == (lost in worker.held - worker.dropping)

    onlooker = zookeeper_client(zookeeper)
    with ExitStack() as stack:
        stack.callback(onlooker.close)
        stack.callback(onlooker.stop)
        onlooker.start()
        slots.start()
        stack.callback(slots.stop)
        slots.coordinator.join(worker.card)
        system.wait(lambda: holds(True), "it has every slot", 30)
        for path in (claim, f"{root}/workers/{worker.worker_id}"):
            onlooker.delete(path)  # as ZooKeeper does when a session ends
        onlooker.create(claim, znodes.encode(worker_id="host-b-0", since=0), ephemeral=True)
        line.prove(onlooker.get(claim)[1].ephemeralOwner == onlooker.client_id[0], "the claim is another's")
        system.wait(lambda: holds(False), "it is told to drop the slot", 30)
    with closing(ControlPipe(theirs)) as told:
        dropped = [message["slots"] for message in told.receive() if message["kind"] == "drop"]
    assert dropped == [[[*lost]]]
    worker.link.close()
