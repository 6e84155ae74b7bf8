"""Faults 22 to 24, 26 and 37: mixed hosts, SIGTERM, kill -9 of processes and hosts,
one failure in a batch."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest
from fault.conftest import Case
from fault.kit.load import Load
from fault.kit.owners import wait_for_shares
from harness.sessions import alive
from harness.system import System

from toc import NewTask, TaskStatus
from toc.model.task import TaskRow

# Fault 22: a rolling upgrade: hosts that do not know every topic, a topic that none knows for a while.


@pytest.mark.slow
def test_what_a_host_has_no_handler_for_waits_uncharged_for_one_that_has(case: Case) -> None:
    line = case.verdict(
        22, "rolling upgrade, unknown handlers", "an older host beside a newer one, then alone"
    )
    system = case.build(hosts=True)
    older = system.start("host-a", processes=1, app="fault.apps.older:center")
    newer = system.start("host-b", processes=1)
    older_pids = set(older.workers())
    new_ones = system.client.submit_many([NewTask("test.batch", n, 2 + n / 60) for n in range(900)])
    with Load(system.client, rate=60, ahead=(0.2, 1.0), topics=("test.sync", "test.async")) as load:
        system.wait(lambda: len(system.late(new_ones)) > 100, "the newer host runs the new topic", 30)
        with system.recorder.fault("stop", note="the newer host"):
            newer.terminate()
            assert newer.process.wait(60) == 0, system.logs()
            left = len(system.late(new_ones))
            wait_for_shares(system, "host-a")
            system.wait(lambda: len(_overdue(system, new_ones)) > 100, "many are overdue", 30)
            assert len(system.late(new_ones)) == left
            waiting = _uncharged(system, new_ones)
            overdue = _overdue(system, new_ones)
            system.start("host-b", processes=1)  # upgraded
        system.wait(lambda: len(system.late(new_ones)) == len(new_ones), "they all run", 40)
    on_older = {event.job_id for event in system.history() if event.pid in older_pids}
    line.prove(
        len(on_older) > 50 and len(waiting) == len(new_ones) - left and len(overdue) > 100,
        f"{len(on_older)} tasks ran on the older host, none of the new topic; {len(overdue)} of it were due "
        "and waited uncharged",
    )
    assert not on_older & set(new_ones)
    assert not load.errors
    judged = line.judge(system, within=10)
    assert not judged.duplicates


def _overdue(system: System, job_ids: list[int]) -> list[TaskRow]:
    """Those of the uncharged that are due for a second and more."""
    now = system.center.clock.now_ms()
    return [row for row in _uncharged(system, job_ids) if row.action_time < now - 1000]


def _uncharged(system: System, job_ids: list[int]) -> list[TaskRow]:
    """Those that are pending and of which no try and no crash has been charged."""
    rows = system.center.store.read(job_ids).values()
    return [r for r in rows if r.status == TaskStatus.PENDING and not r.attempts and not r.crashes]


# Fault 23: SIGTERM: nothing burned, nothing doubled.


@pytest.mark.slow
def test_a_rolling_restart_under_load_doubles_and_charges_nothing(case: Case) -> None:
    line, system = case.begin(23, "SIGTERM", "two hosts restarted twice each under load", hosts=True)
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


# Faults 24 and 37: kill -9 of worker processes, of all of them, of a daemon, of a whole host, which perhaps

PREPARE_TIMEOUT = 3
AGAIN = 1.0
"""Seconds until what a dead process ran runs again, where its daemon lives or is started again."""
TAKEN_OVER = 5.0
"""Seconds until what is due on a dead host and had not started runs: its session lasts two."""
UNWRITTEN = 15
"""How many more a process may have begun, or ended and not written, as it is killed."""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_what_a_killed_process_ran_runs_again_at_once_while_its_daemon_lives(case: Case, kills: int) -> None:
    line = case.verdict(24, "kill -9 of a worker process", f"{kills} times, one of two processes")
    # The long ones, some killed three times in a row, would run alone from then on, one after the other.
    system = case.build(max_crashes=100)
    daemon = system.start(processes=2)
    again: list[float] = []
    flying = 0
    with Load(system.client, rate=60, ahead=(0.2, 1.0), attribute={"sleep": 0.01}):
        for number in range(kills):
            # Else nobody would be left to take it over.
            system.wait(lambda: len(daemon.events("worker_ready")) == number + 2, "two are ready", 60)  # noqa: B023
            long_ones, release = _run_long(system, 20, 1000 * number)
            victim = max(daemon.workers(), key=lambda pid: len(_held(system, pid) & long_ones))
            running = _held(system, victim)
            flying += len(running)
            again += _again(system, running & long_ones, _kill(system, [victim]))
            release()
    line.prove(len(again) >= kills, f"{kills} kills, {flying} in flight; again within {max(again):.2f} s")
    line.within(max(again), AGAIN)
    line.judge(system, within=3, at_most=flying + UNWRITTEN * kills)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["all workers of a daemon", "a whole host"])
def test_a_killed_host_is_replaced(case: Case, whole: bool) -> None:
    line = case.verdict(24, "kill -9 of all workers", "a whole host" if whole else "the daemon lives")
    system = case.build(hosts=True, session_timeout=2, topic_prepare_timeout=PREPARE_TIMEOUT)
    first = system.start("host-a", processes=2)
    system.start("host-b", processes=1)
    with Load(system.client, rate=100, ahead=(0.2, 1.0)):
        long_ones, release = _run_long(system, 60)
        workers = first.workers()
        running = {job_id for pid in workers for job_id in _held(system, pid)}
        held = running & long_ones
        unstarted = system.client.submit_many([NewTask("test.async", n, 1.0) for n in range(200)])
        killed = _kill(system, [first.process.pid, *workers] if whole else workers)
        again = _again(system, held, killed)
        release()
        system.wait(lambda: len(system.late(unstarted)) == 200, "the others run", 60)
    late = system.late(unstarted)
    line.prove(len(held) > 5, f"{len(held)} ran, and again within {max(again):.2f} s; meanwhile {late}")
    line.within(max(again), PREPARE_TIMEOUT + 1 if whole else AGAIN)
    line.on_time(late, most=1000 * (TAKEN_OVER if whole else AGAIN))
    line.judge(system, within=TAKEN_OVER, at_most=len(running) + UNWRITTEN * len(workers))


@pytest.mark.parametrize(
    "cluster",
    [pytest.param(False, id="alone", marks=pytest.mark.slow), pytest.param(True, id="with ZooKeeper")],
)
def test_what_a_killed_daemon_and_its_processes_held_runs_as_soon_as_they_are_started_again(
    case: Case, request: pytest.FixtureRequest, cluster: bool
) -> None:
    line = case.verdict(37, "kill -9 of a host's processes, started again", request.node.callspec.id)
    # A session that lasts, and leases and prepared entries for 30 s: nothing here runs out by itself.
    system = case.build(hosts=cluster, session_timeout=10)
    daemon = system.start(processes=2)
    long_ones, release = _run_long(system, 40)

    def leased() -> int:
        return sum(row.lease != 0 for row in system.center.store.read_tries(list(long_ones)).values())

    system.wait(lambda: leased() == 40, "each has a lease", 30)
    with system.recorder.fault("kill", pids=[daemon.process.pid, *daemon.workers()]):
        killed = time.time()
        daemon.kill()
    release()
    later = system.start(processes=2)
    ready = time.time() - killed
    worst = max(_again(system, long_ones, killed)) - ready
    line.prove(
        any(event in later.told() for event in ("workers_proved_gone", "member_buried")),
        f"40 ran, with leases; the new processes were ready after {ready:.1f} s, all ran {worst:.2f} s later",
    )
    line.within(worst, AGAIN)
    line.judge(system, within=10, at_most=40 + UNWRITTEN)


@pytest.mark.parametrize(
    "cluster",
    [pytest.param(False, id="alone"), pytest.param(True, id="with ZooKeeper", marks=pytest.mark.slow)],
)
def test_processes_that_outlive_their_daemon_finish_what_they_run_and_are_not_taken_for_gone(
    case: Case, request: pytest.FixtureRequest, cluster: bool
) -> None:
    line = case.verdict(37, "kill -9 of a daemon alone, started again", request.node.callspec.id)
    system = case.build(hosts=cluster)
    daemon = system.start(processes=2)
    orphans = set(daemon.workers())
    released = system.directory / "released"
    wait = {"until": str(released)}
    long_ones = system.client.submit_many([NewTask("test.sync", n, 0.2, attribute=wait) for n in range(16)])
    system.wait(lambda: all(_held(system, pid) for pid in orphans), "both run some", 60)
    try:
        with system.recorder.fault("other", note="the daemon was killed"):
            daemon.process.kill()
            daemon.process.wait()
        held = {job_id for pid in orphans for job_id in _held(system, pid)}
        later = system.start(processes=2)
        meanwhile = system.client.submit_many([NewTask("test.async", 100 + n, 0.2) for n in range(40)])
        system.wait(lambda: len(system.late(meanwhile)) == 40, "others run", 30)
        assert "workers_proved_gone" not in later.told()
    finally:
        released.touch()
    system.wait(lambda: not system.pending(long_ones), "they end", 30)
    ended = {event.pid for event in system.history() if event.event == "end" and event.job_id in held}
    line.prove(
        "daemon_gone" in daemon.log.read_text() and ended <= orphans,
        f"{len(held)} tasks ran on in processes without a daemon, beside those of the new one, each once",
    )
    assert not system.not_run_once([*long_ones, *meanwhile])
    line.judge(system, within=10)
    system.wait(lambda: not any(map(alive, orphans)), "they have left", 60)


def _run_long(system: System, count: int, first: int = 0) -> tuple[set[int], Callable[[], None]]:
    """Submit tasks and wait until they run; also returns what lets them end."""
    released = system.directory / f"released-{first}"
    attribute = {"until": str(released)}
    job_ids = system.client.submit_many(
        [NewTask("test.async", first + n, 0.2, attribute=attribute) for n in range(count)]
    )
    system.wait(lambda: len(system.late(job_ids)) == count, "the long ones run", 60)
    return set(job_ids), released.touch


def _held(system: System, pid: int) -> set[int]:
    """What this process runs now."""
    running: set[int] = set()
    for event in system.history():
        if event.pid == pid:
            (running.add if event.event == "start" else running.discard)(event.job_id)
    return running


def _kill(system: System, pids: list[int]) -> float:
    """Returns when, in seconds since 1970."""
    with system.recorder.fault("kill", pids=pids):
        at = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return at


def _again(system: System, job_ids: set[int], killed: float) -> list[float]:
    """How long after the kill each of these ran again; those that had ended just before it are left out."""
    ended = {event.job_id for event in system.history() if event.event == "end" and event.at / 1e9 <= killed}
    wanted = job_ids - ended

    def starts() -> dict[int, float]:
        found: dict[int, float] = {}
        for event in system.history():
            if event.event == "start" and event.job_id in wanted and event.at / 1e9 > killed:
                found.setdefault(event.job_id, event.at / 1e9 - killed)
        return found

    system.wait(lambda: starts().keys() == wanted, "all of them run again", 45)
    return list(starts().values())


# Fault 26: one failure in a batch: only that one is retried.


def test_of_five_hundred_in_batches_only_the_one_that_failed_runs_again(case: Case) -> None:
    line, system = case.begin(26, "one failure in a batch", "1 of 500")
    system.start(processes=1)
    tasks = [NewTask("test.batch", n, 1.0, attribute={"fail": 1} if n == 250 else None) for n in range(500)]
    job_ids = system.client.submit_many(tasks)
    line.judge(system, within=5)
    events = system.history()
    failed = [event.job_id for event in events if event.outcome == "raise"]
    line.prove(failed == [job_ids[250]], "one of 500 failed")
    tries = Counter(event.job_id for event in events if event.event == "start")
    assert tries.pop(job_ids[250]) == 2
    assert set(tries.values()) == {1}
