"""Faults 30 and 34: what handlers do to their process, others in it, its loops and descriptors."""

import os
import re
import resource
import signal
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import pytest
from fault.conftest import Case
from fault.kit.load import Load
from harness import forks
from harness.system import DaemonProcess, System

from toc import NewTask, TaskStatus
from toc.loop import EXIT_THREAD_DIED

# Fault 30: handlers that end their process, and an application whose files are replaced under a daemon.

APP = "fault.apps.hostile:center"
EXIT_CODES = (0, 1, 2, 70, 75, 130, 255)
BY_HAND = ("raise SystemExit", "SIGTERM")
"""Deeds that end no process at once, but were taken for an end in good order."""


def test_whatever_exit_code_a_handler_ends_its_process_with_the_daemon_lives_on(case: Case) -> None:
    line, system = case.begin(30, "a handler ends its process", "each exit code, SystemExit, SIGTERM")
    daemon = system.start(processes=2, app=APP)
    first = set(daemon.workers())
    deeds = [*(f"exit {code}" for code in EXIT_CODES), *BY_HAND]
    job_ids = []
    with Load(system.client, rate=30):
        for n, deed in enumerate(deeds):
            topic = ("test.sync", "test.async")[n % 2]
            job_ids.append(system.client.submit(topic, biz_id=n, delay=0.1, attribute={"deed": deed}))
            died = min(n + 1, len(EXIT_CODES))
            system.wait(lambda: len(daemon.events("worker_died")) == died, "its process died", 20)  # noqa: B023
        system.wait(lambda: not system.pending(job_ids), "all have ended", 40)
        system.wait(lambda: len(set(daemon.workers()) - first) == 2, "all processes are others", 30)
    told = daemon.events("worker_died")
    codes = sorted(event["exit_code"] for event in told)
    recycled = [event["reason"] for event in daemon.events("worker_recycled")]
    line.prove(
        codes == sorted(EXIT_CODES) and recycled == ["SIGTERM was sent to it"],
        f"processes ended with {', '.join(map(str, codes))}; one was sent SIGTERM by its handler",
    )
    rows = system.center.store.read(job_ids)
    assert all(row.status == TaskStatus.PROCESSED for row in rows.values())
    line.judge(system, within=15, at_most=200)
    assert daemon.process.poll() is None
    daemon.terminate()
    assert daemon.process.wait(60) == 0


@pytest.mark.slow
def test_a_task_that_ends_every_process_with_the_code_of_an_orderly_end_dies_of_it(case: Case) -> None:
    line, system = case.begin(30, "a handler ends its process", "each time, with 0 and 2")
    daemon = system.start(processes=2, app=APP)
    with Load(system.client, rate=30):
        job_ids = [
            system.client.submit("test.sync", biz_id=n, delay=0.2, attribute={"deed": deed, "deeds": 99})
            for n, deed in enumerate(("exit 0", "exit 2"))
        ]
        system.wait(lambda: not system.pending(job_ids), "both are dead", 60)
    rows = system.center.store.read(job_ids)
    errors = [rows[job_id].last_error or "" for job_id in job_ids]
    died = len(daemon.events("worker_died"))
    line.prove(died >= 3, f"{died} processes died; the last errors: {'; '.join(errors)}")
    assert [error.rpartition("alone ")[2] for error in errors] == ["(exit code 0)", "(exit code 2)"]
    assert daemon.process.poll() is None
    line.judge(system, within=60, at_most=120 * died, crash_limit=3)


@pytest.mark.slow
def test_an_application_that_cannot_be_loaded_for_a_while_is_tried_again_once_it_could(case: Case) -> None:
    line, system = case.begin(30, "files replaced under a daemon", "half-written, then whole")
    shop = system.directory / "shop.py"
    whole = "from harness.app import center\n"
    shop.write_text(whole)
    path = os.pathsep.join((str(system.directory), system.env["PYTHONPATH"]))
    env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    daemon = system.start(processes=2, app="shop:center", env=env)
    with Load(system.client, rate=30):
        shop.write_text(whole[:12])
        (victim, _) = before = daemon.workers()
        with system.recorder.fault("kill", pids=[victim]):
            os.kill(victim, signal.SIGKILL)
        system.wait(lambda: len(daemon.events("worker_unfit")) >= 3, "it was tried again", 30)
        assert daemon.process.poll() is None
        shop.write_text(whole)
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is loaded again", 30)
    unfit = daemon.events("worker_unfit")
    line.prove(
        all("importing it failed: SyntaxError" in event["error"] for event in unfit),
        f"{len(unfit)} processes could not load the application, then one could",
    )
    assert before[1] in daemon.workers(), "the other process served meanwhile"
    line.judge(system, within=5, at_most=60)
    assert _refused(system, shop.with_name("broken.py"), env) == 2


def _refused(system: System, path: os.PathLike[str], env: dict[str, str]) -> int:
    """What a daemon ends with whose application never could be loaded in a process of its own."""
    with open(path, "w") as module:  # noqa: PTH123
        # It can be loaded where it is looked at first, in the daemon, and not where it is to run.
        module.write("import sys\nif sys.argv[0].endswith('process.py'): import nowhere\n")
        module.write("from harness.app import center\n")
    words = ["worker", "--app", "broken:center", "--processes", "2"]
    done = forks.run(words, env={**system.env, **env})
    assert "error: --app 'broken:center': importing it failed: there is no module 'nowhere'" in done.stderr
    return done.returncode


# Faults 30 and 34: what handlers do to their process, beside others; internal loops that end.

NEIGHBOURS = 60


class Deed(NamedTuple):
    """What a handler does, and what comes of it."""

    name: str
    topic: str = "test.sync"
    beside: Mapping[str, Any] = {}
    """What others of its topic do meanwhile."""
    culprits: int = 1
    reason: str = ""
    """Why its process is replaced, if it is."""
    event: str = ""
    """What is logged for each."""
    error: str = ""
    """How its own try fails, if it does."""


ON_THREADS = [
    # Each failure beside it is a line of the log.
    Deed("close 0 to 2", beside={"fail": 1}, reason="a handler has closed its descriptor"),
    Deed("connection at 2", beside={"fail": 1}, reason="a handler has closed its descriptor 2"),
    Deed("kill 0", reason="SIGTERM was sent to it"),
    Deed("leak descriptors", reason="a handler has left it hardly any descriptors", error="OSError"),
    Deed("use copies", culprits=2),
    # A copy has those that wait, and those that run, as its original has them.
    Deed("fork", beside={"sleep": 0.05}, culprits=2, event="copy_ended"),
]
COROUTINES = [
    Deed("stop the event loop", "test.async", {"sleep": 0.5}, 3, "a handler stopped the event loop"),
    Deed("use copies", "test.async"),
    Deed("fork", "test.async", {"sleep": 0.05}, 2, event="copy_ended"),
    Deed("fork and go on", "test.async", {"sleep": 0.05}, 2, event="copy_ended"),
]


@pytest.mark.parametrize(
    "deeds",
    [ON_THREADS, COROUTINES],
    ids=["on threads", "coroutines"],
)
def test_what_a_handler_does_to_its_process_costs_no_other_task_a_try(case: Case, deeds: list[Deed]) -> None:
    """One deed after the other; what outlives it, the next one finds."""
    system = case.build(topic_max_runtime=60)
    daemon = system.start(processes=1, app=APP)
    lines = [case.verdict(34, f"a handler lets its process {deed.name}", deed.topic) for deed in deeds]
    for deed, line in zip(deeds, lines, strict=True):
        try:
            line.prove(True, _do(system, daemon, deed))
        except AssertionError as exc:
            exc.add_note(deed.name)
            raise
    assert not daemon.events("worker_died")
    lines[0].judge(system, within=10, at_most=len(daemon.events("try_disturbed")))
    lines[0].on_time(system.late(), most=5000)


def _do(system: System, daemon: DaemonProcess, deed: Deed) -> str:
    """Have it done beside others; returns what showed that it was."""
    system.wait(lambda: len(daemon.workers()) == 1, "the process that the last deed cost is gone", 60)
    before = daemon.workers()
    recycled, logged = (len(daemon.events(name)) for name in ("worker_recycled", deed.event))
    others = system.client.submit_many(
        [NewTask(deed.topic, n, 0.3 + n / NEIGHBOURS, attribute=deed.beside) for n in range(NEIGHBOURS)]
    )
    culprits = [
        system.client.submit(deed.topic, biz_id=1000 + n, delay=0.6 + n / 4, attribute={"deed": deed.name})
        for n in range(deed.culprits)
    ]
    system.wait(lambda: not system.pending([*others, *culprits]), f"all have ended: {deed.name}", 60)
    if deed.reason:
        system.wait(lambda: daemon.workers() not in ([], before), "another process serves", 30)
        system.wait(lambda: len(daemon.events("worker_recycled")) > recycled, "it is said why", 30)
    reasons = [event["reason"] for event in daemon.events("worker_recycled")[recycled:]]
    assert bool(reasons) == bool(deed.reason), reasons
    assert all(reason.startswith(deed.reason) for reason in reasons), reasons
    assert not deed.event or len(daemon.events(deed.event)) == logged + deed.culprits
    assert deed.reason or daemon.workers() == before
    if deed.event:  # of copies, none of which has run or ended anything
        assert {event.pid for event in system.history() if event.job_id in {*others, *culprits}} == {*before}
    rows = system.center.store.read([*others, *culprits])
    assert {(rows[one].status, rows[one].attempts) for one in others} == {
        (TaskStatus.PROCESSED, deed.beside.get("fail", 0))
    }
    disturbed = {event["job_id"] for event in daemon.events("try_disturbed")}
    assert not any(rows[one].crashes for one in {*others} - disturbed)
    own = [rows[job_id] for job_id in culprits]
    assert {(row.status, row.attempts) for row in own} == {(TaskStatus.PROCESSED, int(bool(deed.error)))}
    errors = [row.last_error or "" for row in own]
    assert all(error.startswith(deed.error) and len(error) <= 1000 for error in errors), errors
    return (
        "; ".join([*dict.fromkeys(reasons), *filter(None, errors)])
        or f"done {deed.culprits} times beside others"
    )


def test_a_successor_that_dies_is_replaced_while_the_process_before_it_still_runs_a_handler(
    case: Case,
) -> None:
    line, system = case.begin(34, "a successor dies", "while the process before it leaves")
    daemon = system.start(processes=1, app=APP)
    (first,) = daemon.workers()
    attribute = {"deed": "run on"}
    running = system.client.submit("test.sync", biz_id=1, delay=0.1, attribute=attribute)
    system.wait(lambda: bool(system.starts(running)), "it runs", 20)
    os.kill(first, signal.SIGTERM)
    system.wait(lambda: len(daemon.events("worker_ready")) == 2, "it has a successor", 30)
    (second,) = set(daemon.workers()) - {first}
    with system.recorder.fault("kill", pids=[second]):
        os.kill(second, signal.SIGKILL)
        system.wait(lambda: bool(daemon.events("worker_died")), "its death is noticed", 20)
    other = system.client.submit("test.sync", biz_id=2, delay=0.1)
    system.wait(lambda: not system.pending([other]), "a third process has run it", 30)
    line.prove(system.pending([running]) == [running], "meanwhile the first one still ran its handler")
    (system.directory / "released").touch()
    system.wait(lambda: not system.pending([running]), "that has ended", 30)
    line.judge(system, within=60)


def test_a_process_waits_for_its_begin_while_several_before_it_still_run_handlers(case: Case) -> None:
    """Else what has each process replaced fills the host's memory with those that leave."""
    line, system = case.begin(34, "each process must be replaced", "while a handler runs in it")
    daemon = system.start(processes=1, app=APP)
    running = []
    for n in range(1, 4):
        system.wait(lambda: len(daemon.events("worker_ready")) == n, "the next process is ready", 30)  # noqa: B023
        running.append(system.client.submit("test.sync", biz_id=n, delay=0.1, attribute={"deed": "run on"}))
        system.wait(lambda: bool(system.starts(running[-1])), "it runs", 20)
        os.kill(daemon.events("worker_ready")[-1]["pid"], signal.SIGTERM)
    system.wait(lambda: len(daemon.events("worker_ready")) == 4, "the last process is ready", 60)
    assert len(daemon.workers()) == 4
    ended, begun = (
        datetime.fromisoformat(daemon.events(name)[-1]["timestamp"])
        for name in ("worker_recycled", "worker_ready")
    )
    assert begun - ended >= timedelta(seconds=1), "with one more than two that leave"
    line.prove(len(system.pending(running)) == 3, "three processes left, each with a handler that ran")
    (system.directory / "released").touch()
    system.wait(lambda: not system.pending(running), "all have ended", 30)
    line.judge(system, within=60)


@pytest.mark.parametrize(
    "deed", ["cancel all", pytest.param("cancel all from a thread", marks=pytest.mark.slow)]
)
def test_coroutines_that_a_neighbour_cancels_are_not_charged(case: Case, deed: str) -> None:
    line, system = case.begin(34, "a handler cancels every coroutine", deed)
    daemon = system.start(processes=1, app=APP)
    # Some wait, some of them for a child, and some are due at that instant: these have had no step yet.
    others = [
        *(NewTask("test.async", n, 0.5, attribute={"sleep": 2.0}) for n in range(50)),
        *(NewTask("test.async", n, 0.5, attribute={"sleep": 2.0, "child": True}) for n in range(50, 100)),
        *(NewTask("test.async", n, 1.0) for n in range(100, 200)),
    ]
    topic = "test.sync" if "thread" in deed else "test.async"
    culprits = [NewTask(topic, 200 + n, 1.0, attribute={"deed": deed}) for n in range(2)]
    job_ids = system.client.submit_many([*others, *culprits])
    system.wait(lambda: not system.pending(job_ids), "all have ended", 20)
    refused = daemon.events("cancel_refused")
    disturbed = {event["job_id"] for event in daemon.events("try_disturbed")}
    line.prove(
        len(disturbed) >= 50,
        f"{len(disturbed)} of {len(others)} coroutines ended by that, {len(refused)} times it was refused",
    )
    rows = system.center.store.read(job_ids)
    assert {(rows[one].status, rows[one].attempts) for one in job_ids[: len(others)]} == {(2, 0)}
    if topic == "test.async":
        assert {event["job_id"] for event in refused} == set(job_ids[len(others) :]), "it is known who it was"
        assert not disturbed & set(job_ids[:50]), "a coroutine without children noticed nothing"
        assert {rows[one].attempts for one in job_ids[len(others) :]} == {1}, "who cancels himself has failed"
    line.judge(system, within=10, at_most=3 * len(job_ids))


def test_a_coroutine_that_blocks_the_event_loop_is_named_and_harms_no_handler_on_threads(case: Case) -> None:
    line, system = case.begin(34, "a coroutine blocks the event loop", "until the others have run")
    daemon = system.start(processes=1, app=APP)
    attribute = {"deed": "block the event loop"}
    blocking = system.client.submit("test.async", biz_id=1, delay=0.5, attribute=attribute)
    system.wait(lambda: bool(system.starts(blocking)), "it blocks", 10)
    on_threads, coroutines = (
        system.client.submit_many([NewTask(topic, n, 0.2 + n / 100) for n in range(2, 102)])
        for topic in ("test.sync", "test.async")
    )
    system.wait(lambda: not system.pending(on_threads), "those on threads have ended", 10)
    system.wait(lambda: bool(daemon.events("event_loop_blocked")), "it is said that it blocks", 10)
    late = system.late(on_threads)
    (system.directory / "released").touch()
    system.wait(lambda: not system.pending([blocking, *coroutines]), "all have ended", 10)
    told = daemon.events("event_loop_blocked")[0]
    assert (told["job_id"], told["topic"]) == (blocking, "test.async")
    assert "_block_the_event_loop" in told["stack"]
    assert "handler_loop.py" not in told["stack"], "the application's own lines"
    held_up = system.late(coroutines)
    line.prove(held_up.most > 500, f"coroutines: {held_up}; handlers on threads: {late}")
    line.judge(system, within=10)
    line.on_time(late, p99=200)


@pytest.mark.parametrize("how", ["longer than max_runtime", "until its process leaves"])
def test_coroutines_that_wait_for_a_blocked_event_loop_are_not_charged(case: Case, how: str) -> None:
    """They have started at the same instant, and had no step yet."""
    line, system = case.begin(34, "a coroutine blocks the event loop", how, topic_max_runtime=2)
    daemon = system.start(processes=1, app=APP)
    tasks = [NewTask("test.async", n, 1.0) for n in range(101)]
    tasks[50] = NewTask("test.async", 50, 1.0, attribute={"deed": "block the event loop"})
    others = system.client.submit_many(tasks)
    blocking = others.pop(50)
    system.wait(lambda: bool(system.starts(blocking)), "it blocks", 20)
    waiting = [job_id for job_id in others if not system.starts(job_id)]
    if how == "longer than max_runtime":
        time.sleep(4)
    else:
        system.wait(lambda: not system.pending(others), "those that waited have run elsewhere", 30)
    (system.directory / "released").touch()
    system.wait(lambda: not system.pending([blocking, *others]), "all have ended", 30)
    system.wait(lambda: len(daemon.workers()) == 1, "who left is gone", 30)
    rows = system.center.store.read(waiting)
    assert not any(row.attempts or row.crashes for row in rows.values())
    assert not system.not_run_once(waiting)
    if how == "until its process leaves":
        stacks = {event["job_id"]: event["stack"] or "" for event in daemon.events("handler_stuck")}
        assert "_block_the_event_loop" in stacks.pop(blocking)
        assert all("in on_event_loop > " in stack and "_block" not in stack for stack in stacks.values())
    line.prove(len(waiting) > 10, f"{len(waiting)} coroutines waited for it")
    line.judge(system, within=60)


def test_an_internal_loop_that_ends_without_an_error_ends_its_process(case: Case) -> None:
    line, system = case.begin(34, "a loop ends without an error", "poll, reclaim")
    faults = [system.recorder.fault("kill", note="a loop ends") for _ in range(2)]
    env = {"TOC_TEST_ENDS": str(case.path)}
    daemon = system.start(processes=2, env=env, app="fault.broken.loop_ends:center")
    with Load(system.client, rate=30):
        system.wait(lambda: len(daemon.events("worker_died")) == 2, "both have ended", 30)
        died = daemon.events("worker_died")
        for fault, event in zip(faults, died, strict=True):
            fault.end(pids=[event["pid"]])
        system.wait(lambda: len(daemon.workers()) == 2, "both have been replaced", 20)
    named = {event["thread"] for event in daemon.events("thread_died")}
    codes = [event["exit_code"] for event in died]
    line.prove(
        named == {"poll", "reclaim"} and codes == [EXIT_THREAD_DIED] * 2,
        f"{', '.join(sorted(named))} returned: each named in the log, exit code {EXIT_THREAD_DIED}",
    )
    line.judge(system, within=10, at_most=200)


# Fault 34: handlers that leave their process no descriptors, or not its own.

NO_MESSAGES = ("a number", "no fields", "deep nesting", "no reason", "no names")
"""As in that app."""


def test_a_process_whose_descriptors_a_handler_closed_ends_at_once(case: Case) -> None:
    line, system = case.begin(34, "a handler closes all descriptors", "os.closerange(3, 65535)")
    daemon = system.start(processes=2, app=APP)
    with Load(system.client, rate=100, fail=0) as load:
        closing = system.client.submit("test.sync", biz_id=0, delay=1.0, attribute={"deed": "close from 3"})
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is replaced", 30)
        system.wait(lambda: not system.pending([closing]), "it has ended", 30)
    died = daemon.events("worker_died")
    line.prove(len(died) >= 1, "the process ended by itself")  # which thread notices first, and how, is open
    line.judge(system, within=5, at_most=50)
    line.on_time(system.late(load.job_ids), most=3000)
    rows = system.center.store.read(load.job_ids).values()
    assert all(row.attempts <= 1 for row in rows), "charged as for any death of their process"


def test_a_process_that_crashes_leaves_the_place_in_its_log(case: Case) -> None:
    line, system = case.begin(34, "a handler crashes the interpreter", "it reads where there is no memory")
    daemon = system.start(processes=1, app=APP)
    crashing = system.client.submit("test.sync", biz_id=0, delay=0.1, attribute={"deed": "crash"})
    system.wait(lambda: not system.pending([crashing]), "it has ended in another process", 30)
    (died,) = daemon.events("worker_died")
    (place,) = re.findall(r"^Current thread .*\n((?:  File .*\n)+)", daemon.told(), re.MULTILINE)
    line.prove(
        died["exit_code"] == -signal.SIGSEGV and "hostile.py" in place and "in on_thread" in place,
        f"the process ended by {signal.Signals(-died['exit_code']).name}, and the log names the handler",
    )
    line.judge(system, within=30, at_most=1)


@pytest.mark.slow
def test_a_handler_that_writes_to_the_line_to_the_daemon_ends_its_own_process_alone(case: Case) -> None:
    line, system = case.begin(34, "a handler writes to its daemon", "what is JSON and no message")
    daemon = system.start(processes=2, app=APP)
    job_ids = []
    with Load(system.client, rate=30):
        for n, what in enumerate(NO_MESSAGES, 1):
            attribute = {"deed": f"write {what} to the link"}
            job_ids.append(system.client.submit("test.sync", biz_id=n, delay=0.1, attribute=attribute))
            system.wait(lambda: len(daemon.events("worker_killed")) == n, "its process was killed", 20)  # noqa: B023
            system.wait(lambda: len(daemon.events("worker_ready")) == n + 2, "it is replaced", 20)  # noqa: B023
            assert daemon.process.poll() is None
        system.wait(lambda: not system.pending(job_ids), "all have ended", 20)
    reasons = [event["reason"] for event in daemon.events("worker_killed")]
    died = len(daemon.events("worker_died"))
    line.prove(
        all(reason.startswith("it sent a malformed message") for reason in reasons) and died == len(reasons),
        f"{died} processes were killed, each for the message that it sent",
    )
    line.judge(system, within=15, at_most=100)


@pytest.mark.slow
def test_a_daemon_that_has_no_descriptors_left_goes_on_with_the_processes_that_it_has(case: Case) -> None:
    line, system = case.begin(34, "no descriptors left", "for the daemon")
    daemon = system.start(processes=2, app=APP)
    pid = daemon.process.pid
    victim, other = daemon.workers()
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with Load(system.client, rate=30):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        with system.recorder.fault("kill", pids=[victim]):
            os.kill(victim, signal.SIGKILL)
            system.wait(lambda: bool(daemon.events("worker_not_started")), "it cannot be replaced", 20)
        assert daemon.process.poll() is None
        assert daemon.workers() == [other]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is replaced", 30)
    errors = {event["error"] for event in daemon.events("worker_not_started")}
    line.prove("Too many open files" in str(errors), "a process that was killed could not be replaced")
    line.judge(system, within=5, at_most=60)
