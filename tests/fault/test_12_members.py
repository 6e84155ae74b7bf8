"""Fault 12: what becomes of daemons that share the work by rows, without ZooKeeper, and of their slots."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from fault.test_13_paused_worker import go_on, stand_still
from harness.system import DaemonProcess, System

from benchmarks.local import MariaDB
from toc.coordination.coordinator import SlotState
from toc.coordination.znodes import host_of
from toc.operate.cluster import slot_owners

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
    build: Build, resumed: MariaDB, verdict: Verdict, request: pytest.FixtureRequest, index: bool
) -> None:
    line = verdict(12, "hosts without ZooKeeper stop, die, lose the database", request.node.callspec.id)
    quick: dict[str, Any] = {"session_timeout": TIMEOUT, "connect_timeout": 0.5, "read_timeout": 1.0}
    system = build(index=index, topic_prepare_timeout=3, **quick)
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
