"""The checker sees what is broken: builds that are wrong on purpose turn it red, the right one stays green.

Every scenario befalls the right build and the broken ones alike; see tests/fault/broken.
"""

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Case
from harness import forks
from harness.checker import Verdict
from harness.final import read_final
from harness.history import Event
from harness.patience import in_a_moment
from harness.rows import known
from harness.system import System

from toc import CancelOutcome, TaskStatus
from toc.index.calls import Call
from toc.model.topic import Slot


@pytest.fixture(params=["mariadb", pytest.param("sqlite", marks=pytest.mark.slow)])
def builds(request: pytest.FixtureRequest, case: Case) -> dict[str, System]:
    """The right build and three broken ones, each with a namespace and a table of its own on one Redis."""
    systems: dict[str, System] = {}
    for name in ("right", "row_check_skipped", "held_ids_forgotten", "cancel_blind"):
        sqlite: dict[str, Any] = {"database_urls": [f"sqlite:///{case.path}/{name}.db"]}
        systems[name] = case.build(
            **(sqlite if request.param == "sqlite" else {}),
            database_prefix=f"{case.prefix}{len(systems)}_",
            databases=1,
            namespace=name,
            topic_prepare_timeout=3,
        )
    return systems


def test_a_stale_index_and_late_cancels_turn_broken_builds_red_and_leave_the_right_one_green(
    builds: dict[str, System], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds["cancel_blind"].center, "cancel", lambda job_id: _blind(builds, job_id))
    plans = {name: _Plan(system) for name, system in builds.items()}
    for name, system in builds.items():
        system.start(processes=1, app=_app(name))
    for step in (_Plan.submit, _Plan.settle, _Plan.disturb, _Plan.bite, _Plan.end):
        for plan in plans.values():
            step(plan)
    # On a busy machine a handler of the right build may start late; in the others no such start is excused.
    verdicts = {
        name: system.verdict() if name == "right" else system.verdict(hold=1.0)
        for name, system in builds.items()
    }
    assert verdicts["right"].clean, verdicts["right"]
    assert verdicts["right"].counts["acknowledged"] == 90
    _expect(verdicts["row_check_skipped"], "ECDU")
    _expect(verdicts["held_ids_forgotten"], "D")
    assert "twice at once" in verdicts["held_ids_forgotten"].findings["D"][0].text
    _expect(verdicts["cancel_blind"], "C")


class _Plan:
    """What befalls each build: running tasks are cancelled, or lose their PrepareQueue entries; entries of
    ended tasks come back, as after a failover to a replica that lagged; others stand too early. What runs
    goes on, and what is ahead stays so, until that has bitten.
    """

    def __init__(self, system: System) -> None:
        self.system = system
        self.client = system.client

    def submit(self) -> None:
        submit = self.client.submit
        self.released = self.system.directory / "released"
        waits = {"until": str(self.released)}
        self.done = [submit("test.sync", biz_id=n, delay=0.3) for n in range(20)]
        self.cancelled = [submit("test.batch", biz_id=n, delay=3600) for n in range(20, 40)]
        for job_id in self.cancelled:
            assert self.client.cancel(job_id) is CancelOutcome.CANCELLED
        self.later = [submit("test.sync", biz_id=n, delay=3600) for n in range(40, 50)]
        self.running = [submit("test.async", biz_id=n, delay=0.5, attribute=waits) for n in range(50, 90)]

    def settle(self) -> None:
        system = self.system
        system.wait(lambda: {e.job_id for e in _starts(system)} >= {*self.done, *self.running}, "all run", 60)
        system.wait(lambda: not system.pending(self.done), "the short ones have ended", 60)
        self.settled = time.monotonic()

    def disturb(self) -> None:
        system = self.system
        time.sleep(max(0.0, self.settled + 1 - time.monotonic()))  # the rows were written a while ago
        for job_id in self.running[:10]:
            assert self.client.cancel(job_id) is not CancelOutcome.UNKNOWN
        with system.recorder.fault("redis_loss", note="resurrected and lost entries"):
            now = system.center.clock.now_ms()
            for job_id in self.running[10:]:
                assert _forget(system, job_id)
            for job_id in (*self.done, *self.cancelled, *self.later, *self.running[10:]):
                assert system.center.queues.add({_slot(system, job_id): [(job_id, float(now))]})

    def bite(self) -> None:
        """Wait until what stood as due was taken, and until a broken build has begun what it must not."""
        system = self.system

        def due() -> bool:
            final = read_final(system.center)
            places = [place for found in final.index.values() for place in found]
            return any(place.queue == "store" and place.score <= final.now_ms for place in places)

        system.wait(lambda: not due(), "all that is due was taken", 60)
        again = {"held_ids_forgotten": (self.running[10:], 2), "row_check_skipped": (self.later, 1)}
        job_ids, times = again.get(system.settings.namespace or "", ([], 0))

        def begun() -> bool:
            counts = Counter(event.job_id for event in _starts(system))
            return all(counts[job_id] >= times for job_id in job_ids)

        system.wait(begun, "it bit", 60)

    def end(self) -> None:
        self.released.touch()
        for job_id in self.later:
            in_a_moment(lambda soon: self.client.reschedule(job_id, action_time=soon))  # noqa: B023
        self.system.wait(lambda: not self.system.pending([*self.later, *self.running]), "the end", 60)


def _blind(builds: dict[str, System], job_id: int) -> CancelOutcome:
    """A cancel that looks at the row alone."""
    center = builds["cancel_blind"].center
    center.store.cancel_many([job_id])
    return CancelOutcome.CANCELLED


@pytest.mark.parametrize(
    ("module", "breaks"),
    [("kit.producer", ""), ("broken.indexed_first", "O"), ("broken.acknowledged_first", "L")],
)
def test_an_sdk_that_writes_in_another_order_is_seen_if_it_dies(case: Case, module: str, breaks: str) -> None:
    system = case.build()
    done = forks.run(
        [],
        module=f"fault.{module}",
        given=json.dumps([{"do": "submit", "count": 40, "ahead": [30, 60]}]),
        env={**system.env, "TOC_FAILPOINT": "submit.row-stored:20"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    verdict = system.verdict()
    assert verdict.counts["acknowledged"] == 19
    assert verdict.counts["calls unknown"] == 1
    if breaks:
        _expect(verdict, breaks)
    else:
        assert verdict.clean, verdict


@pytest.mark.slow
def test_late_failures_after_a_pause_are_harmless_only_behind_fences(case: Case, zookeeper_root: str) -> None:
    systems: dict[str, System] = {}
    for name in ("right", "fence_dropped", "failure_guard_dropped"):
        systems[name] = system = case.build(
            hosts=True,
            session_timeout=2,
            namespace=name,
            database_prefix=f"{case.prefix}{len(systems)}_",
            cluster=f"{zookeeper_root}-{name}",
            topic_prepare_timeout=3,
        )
    paused = {name: system.start("host-a", processes=1, app=_app(name)) for name, system in systems.items()}
    for system in systems.values():
        for n in range(40):
            how = {"sleep": 11, "fail": n % 2, "dead": 1 - n % 2}
            system.client.submit("test.async", biz_id=n, delay=1, attribute=how)
    for name, system in systems.items():
        system.wait(lambda s=system: len(_starts(s)) == 40, f"all run on the one host ({name})", 10)  # type: ignore[misc]
    pids = {name: [daemon.process.pid, *daemon.workers()] for name, daemon in paused.items()}
    faults = [system.recorder.fault("pause", pids=pids[name]) for name, system in systems.items()]
    for pid in (pid for some in pids.values() for pid in some):
        os.kill(pid, signal.SIGSTOP)
    for name, system in systems.items():
        system.start("host-b", processes=1, app=_app(name))
    for name, system in systems.items():
        system.wait(lambda s=system: len(_starts(s)) == 80, f"all run on the other host ({name})", 15)  # type: ignore[misc]
    for pid in (pid for some in pids.values() for pid in some):
        os.kill(pid, signal.SIGCONT)
    for fault in faults:
        fault.end()
    verdicts = {}
    for name, system in systems.items():
        system.wait(lambda s=system: not _all_pending(s), f"all have ended ({name})", 40)  # type: ignore[misc]
        verdicts[name] = system.verdict(hold=1.0)
    assert "fence_lost" in paused["right"].log.read_text()
    assert verdicts["right"].clean, verdicts["right"]
    assert verdicts["right"].duplicates == {"pause": 40}
    _expect(verdicts["fence_dropped"], "D")
    _expect(verdicts["failure_guard_dropped"], "R")


def _app(build: str) -> str:
    """What a daemon of this build loads; some are broken in the SDK alone."""
    own = Path(__file__).parent / "broken" / f"{build}.py"
    return f"fault.broken.{build}:center" if own.exists() else "harness.app:center"


def _expect(verdict: Verdict, invariants: str) -> None:
    missed = [name for name in invariants if not verdict.breaches[name]]
    assert not missed, f"the checker did not see {missed}:\n{verdict}"


def _starts(system: System) -> list[Event]:
    return [event for event in system.history() if event.event == "start"]


def _all_pending(system: System) -> bool:
    return any(row.status == TaskStatus.PENDING for row in read_final(system.center).rows)


def _slot(system: System, job_id: int) -> Slot:
    row = known(system.center.store.get(job_id))
    return known(system.center.catalog.of_type(row.biz_type)).slot(row.slot_crc, row.slot_amount)


def _forget(system: System, job_id: int) -> bool:
    """Remove a PrepareQueue entry as a failover does that loses it; whether there was one."""
    keys = system.center.queues.keys(_slot(system, job_id))
    call = Call(keys.hash_slot, ("ZREM", keys.prepare, job_id))
    system.center.queues.run([call])
    return bool(call.result)
