"""Fault 23: SIGTERM: nothing burned, nothing doubled."""

from __future__ import annotations

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness.system import System

from toc import NewTask


@pytest.mark.slow
def test_a_rolling_restart_under_load_doubles_and_charges_nothing(build: Build, verdict: Verdict) -> None:
    line = verdict(23, "SIGTERM", "two hosts restarted twice each under load")
    system = build(hosts=True)
    hosts = {host: system.start(host, processes=2) for host in ("host-a", "host-b")}
    running = 0
    client = system.client
    with Load(client, rate=100, ahead=(0.2, 1.5), attribute={"sleep": 0.02}) as load:
        for number in range(4):
            host = ("host-a", "host-b")[number % 2]
            long_ones = [NewTask("test.async", n, 0.3, attribute={"sleep": 2}) for n in range(40)]
            began = client.submit_many(long_ones)
            system.wait(lambda: len(system.late(began)) == 40, "handlers run", 20)  # noqa: B023
            running += _running(system, set(hosts[host].workers()))
            with system.recorder.fault("stop", note=host):
                hosts[host].terminate()
                assert hosts[host].process.wait(60) == 0, system.logs()
                hosts[host] = system.start(host, processes=2)
    line.prove(running > 20, f"4 stops while {running} handlers were running there")
    assert not load.errors
    judged = line.judge(system, within=10)
    assert not judged.duplicates


def _running(system: System, pids: set[int]) -> int:
    """How many handlers run in these processes now."""
    events = [event for event in system.history() if event.pid in pids]
    return sum(1 if event.event == "start" else -1 for event in events)
