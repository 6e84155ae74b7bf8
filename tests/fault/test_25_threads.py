"""Faults 25, 33 and 34: a thread dies, and that may not be said; trouble with the log stops nothing."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from fault.conftest import Case
from fault.kit.load import Load
from fault.kit.reader import Reader
from fault.kit.servers import fill
from harness.forks import FULL
from harness.patience import until
from harness.sessions import kill_session
from harness.system import DaemonProcess, System

from benchmarks.private import free_port
from toc import TaskStatus
from toc.loop import EXIT_THREAD_DIED
from toc.observe.log import LogWriter

# Fault 25: a background thread dies: its process says so and ends, another takes its place.

APP = "fault.broken.thread_dies:center"
KNOWN = {
    *("main", "poll", "handler", "async-handlers", "finish-0", "heartbeat", "quarantine", "alone", "reclaim"),
    *("watch", "sweep-0", "retention", "wake", "catalog", "leases-0", "rows-0", "dead", "beat"),
    *("bodies-0", "schedules-0", "declared-schedules", "adopt", "due", "episodes", "horizon"),
}
"""Threads that a worker process has."""
STEPS = {"a start on the event loop", "a report on the event loop", "a row check on a thread of the store"}
"""Steps on threads that are not theirs."""


@pytest.mark.parametrize(
    ("processes", "spared"),
    [(2, KNOWN), pytest.param(5, set(), marks=pytest.mark.slow)],
    ids=["steps", "all"],
)
def test_a_process_whose_background_thread_dies_says_so_and_is_replaced(
    case: Case, processes: int, spared: set[str]
) -> None:
    line = case.verdict(
        25, "a background thread dies", "steps on others' threads" if spared else "each of a worker process"
    )
    deaths = case.path / "deaths"
    deaths.mkdir()
    for name in spared:
        (deaths / name).touch()
    system = case.build()
    faults = [
        system.recorder.fault("kill", note="a thread dies") for _ in range(len(KNOWN - spared) + len(STEPS))
    ]
    daemon = system.start(processes=processes, env={"TOC_TEST_DEATHS": str(deaths)}, app=APP)
    with Load(system.client, rate=50):
        system.wait((deaths / "none-left").exists, "all have had their turn", 120)
        victims = {path.name for path in deaths.iterdir()} - {"none-left"} - spared
        system.wait(lambda: len(daemon.events("worker_died")) >= len(victims), "all have died", 30)
        died = daemon.events("worker_died")
        for fault, event in zip(faults, died, strict=True):
            fault.end(pids=[event["pid"]])
        system.wait(lambda: len(daemon.workers()) == processes, "all have been replaced", 60)
    named = {re.sub(r"handler-\d+", "handler", event["thread"]) for event in daemon.events("thread_died")}
    codes = [event["exit_code"] for event in died]
    assert victims - STEPS == KNOWN - spared
    assert victims >= STEPS
    line.prove(
        named == victims - STEPS | {"async-handlers", "store"} and codes == [EXIT_THREAD_DIED] * len(victims),
        f"an error raised in {len(victims - STEPS)} threads, in {len(STEPS) - 1} steps on the event loop and "
        f"in a row check on a thread of the store: each named in the log, exit code {EXIT_THREAD_DIED}",
    )
    line.judge(system, within=15, at_most=200)


@pytest.mark.parametrize("victim", ["catalog", "main"])
def test_a_daemon_whose_background_thread_dies_ends(case: Case, victim: str) -> None:
    line, system = case.begin(25, "a background thread dies", f"of the daemon: {victim}")
    env = {"TOC_TEST_DEATHS": str(case.path), "TOC_TEST_DAEMON_DIES": victim}
    with suppress(AssertionError):  # it may have ended before its process is ready
        system.start(processes=1, env=env, app=APP)
    (daemon,) = system.daemons
    try:
        assert until(lambda: daemon.process.poll() is not None, 60)
    finally:
        kill_session(daemon.process.pid)  # its processes would work on for a while
    code = daemon.process.wait(0)
    if victim == "main":
        said, right = "Unthought" in daemon.log.read_text(), code > 0
    else:
        said, right = daemon.events("thread_died")[0]["thread"] == victim, code == EXIT_THREAD_DIED
    line.prove(said and right, f"exit code {code}, said in the log")


# Fault 34: a thread dies, and that it did cannot be said: the process is replaced at once all the same.

VICTIM = "poll"
AT_ONCE = 5.0
"""Seconds: LAST_WORDS_SECONDS and the way out."""


@pytest.mark.parametrize(
    "obstacle",
    [
        "the log is stalled",
        pytest.param("the log is gone", marks=pytest.mark.slow),
        pytest.param("the error's text hangs", marks=pytest.mark.slow),
    ],
)
def test_a_process_is_replaced_though_its_last_line_cannot_be_written(
    case: Case, reader: Reader, obstacle: str
) -> None:
    line = case.verdict(34, "a thread dies and that cannot be said", obstacle)
    death = case.path / VICTIM
    system = case.build()
    env = {**system.env, "TOC_TEST_DEATHS": str(case.path), "TOC_TEST_VICTIM": VICTIM}
    if obstacle == "the error's text hangs":
        env["TOC_TEST_NO_TEXT"] = "1"
    daemon = DaemonProcess(
        system.directory, "host-a", env, app=APP, processes=1, threads=4, output=reader.stream
    )
    system.daemons.append(daemon)
    system.wait(lambda: "worker_ready" in reader.told(), "it is ready", 60)
    (worker,) = daemon.workers()
    with Load(system.client, rate=50) as load:
        load.more(20)
        if obstacle == "the log is stalled":
            reader.stall(fill=True)
        elif obstacle == "the log is gone":
            reader.leave()
        with system.recorder.fault("kill", note="a thread dies") as fault:
            death.touch()
            assert until(lambda: not death.exists())
            began = time.monotonic()
            assert until(lambda: worker not in daemon.workers()), "it lives on"
            took = time.monotonic() - began
            fault.end(pids=[worker])
        line.prove(not death.exists(), f"an error raised in its thread {VICTIM}")
        line.within(took, AT_ONCE)
        system.wait(lambda: len(daemon.workers()) == 1, "another has taken its place", 30)
        load.more(150)
    assert "thread_died" not in reader.told()
    assert until(lambda: not system.pending(load.job_ids), 60), reader.told()[-5000:]
    assert daemon.process.poll() is None
    line.judge(system, within=20, at_most=100)


# Fault 33: the log's disk is full, its reader gone or stalled: work goes on, lines are dropped, counted.


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param("disk full", marks=pytest.mark.slow),
        "reader gone",
        pytest.param("reader stalled", marks=pytest.mark.slow),
    ],
)
def test_trouble_with_the_log_stops_nothing(case: Case, reader: Reader, trouble: str) -> None:
    line = case.verdict(33, "the log cannot be written", trouble)
    talk = case.path / "talk"
    system = case.build(metrics_address=f"127.0.0.1:{free_port()}", max_crashes=1)
    daemon = DaemonProcess(
        system.directory,
        "host-a",
        {**system.env, "TOC_HOST": "host-a", "TOC_TEST_TALK": str(talk)},
        app="fault.apps.talkative:center",
        processes=2,
        threads=4,
        output=FULL if trouble == "disk full" else reader.stream,
    )
    system.daemons.append(daemon)
    system.wait(lambda: _ask(system, "readyz") == "ok\n", "it is ready", 60)
    with Load(system.client, rate=50) as load:
        load.more(50)
        {"reader gone": reader.leave, "reader stalled": reader.stall}.get(trouble, lambda: None)()
        talk.touch()
        began = time.time()
        system.wait(lambda: _dropped(system) > 1000, "lines are dropped", 30)
        with system.recorder.fault("kill", note="a task ends its process") as fault:
            dead = daemon.workers()
            poison = system.client.submit("test.sync", biz_id=1, delay=0.2, attribute={"die": 1})
            system.wait(
                lambda: system.row(poison).status == TaskStatus.PROCESSED, "it has run, alone at last", 60
            )
            fault.end(pids=dead)
        load.more(100)
        over = time.time()
        if trouble == "reader stalled":
            talk.unlink()
            reader.go_on()
            told = len(reader.told())
            system.wait(lambda: len(reader.told()) > told, "what waited is told", 30)
            reader.stall()
            talk.touch()
    assert until(lambda: not system.pending(load.job_ids), 30), system.logs()
    line.prove(_dropped(system) > 1000, f"{_dropped(system):,.0f} lines dropped by daemon and processes")
    line.on_time(system.late(since=began, before=over), p50=50)
    daemon.terminate()
    asked = time.monotonic()
    assert daemon.process.wait(60) == 0
    line.within(time.monotonic() - asked, 10)
    line.judge(system, within=10, at_most=100)


def test_a_log_whose_disk_has_room_again_goes_on_with_whole_lines(small_disk: Callable[[int], Path]) -> None:
    directory = small_disk(1)
    path = directory / "log"
    lost: list[int] = []
    with path.open("ab") as file:
        writer = LogWriter(file.fileno(), dropped=lost.append)
        writer.write(b"begun\n")
        assert until(lambda: path.read_bytes() == b"begun\n", 10)
        ballast = fill(directory)  # the file has the rest of its page
        for number in range(200):
            writer.write(f"{number:099d}\n".encode())
        # Each is in the log, after "begun", or lost: while one waits, it may find room again.
        assert until(lambda: path.read_bytes().count(b"\n") - 1 + sum(lost) == 200, 10)
        ballast.unlink()
        writer.write(b"whole\n")
        writer.close(60.0)
    begun, *lines, torn, whole = path.read_text().splitlines()
    assert (begun, whole) == ("begun", "whole")
    assert lines == [f"{number:099d}" for number in range(200 - sum(lost))]
    assert f"{len(lines):099d}".startswith(torn)
    assert len(torn) < 99


def _ask(system: System, path: str) -> str:
    with (
        suppress(URLError, OSError),
        urlopen(f"http://{system.settings.metrics_address}/{path}", timeout=30) as answer,
    ):
        return str(answer.read().decode())
    return ""


def _dropped(system: System) -> float:
    (found,) = re.findall(r"^toc_dropped_log_lines_total (\S+)$", _ask(system, "metrics"), re.MULTILINE)
    return float(found)
