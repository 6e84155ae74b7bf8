"""What an application may do to its programs when it is imported, and its handlers to each other."""

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from harness import forks
from harness.system import TOPICS, Process, System

from toc import TaskStatus

HEAD = """
import asyncio, os, threading, time
from toc import TimeoutCenter
center = TimeoutCenter()
"""
NOTHING = """
@center.handler("test.sync")
def nothing(task):
    pass
"""
Run = Callable[..., Process]


@pytest.fixture
def run(system: System) -> Iterator[Run]:
    """Runs ``toc worker`` for an application in its working directory; ``whole``: in new interpreters."""
    started: list[Process] = []
    system.create_topics(slots=2, retries=2, backoff_base=0.1)

    def start(app: str, *, whole: bool = False, **more: str) -> Process:
        (system.directory / "odd_app.py").write_text(app)
        words = ["worker", "--app", "odd_app:center", "--processes", "1"]
        env, place, log = {**system.env, **more}, system.directory, system.directory / "odd.log"
        log.touch()
        if whole:
            command = [sys.executable, "-m", "toc", *words]
            with log.open("w") as file:
                started.append(subprocess.Popen(command, cwd=place, env=env, stdout=file, stderr=file))
        else:
            streams = dict.fromkeys(("stdout", "stderr"), str(log))
            started.append(forks.start(words, env=env, directory=place, streams=streams))
        return started[-1]

    yield start
    for program in started:
        if program.poll() is None:
            program.kill()
        program.wait()
    if started:
        print(log_of(system))  # shown if the test has failed


def log_of(system: System) -> str:
    return (system.directory / "odd.log").read_text()


def done(system: System, topic: str = "test.sync") -> None:
    """A task runs to its end."""
    job_id = system.center.submit(topic, biz_id=1, delay=0.1)
    system.wait(lambda: system.row(job_id).status == TaskStatus.PROCESSED, "a task has run", 60)


SET = """
from contextvars import ContextVar
tenant = ContextVar("tenant", default=None)
def check():
    assert tenant.get() is None, "another try has set it"
    tenant.set("mine")
@center.handler("test.sync")
def one(task):
    check()
@center.handler("test.async")
async def coroutine(task):
    await asyncio.get_running_loop().run_in_executor(None, check)
    check()
    await asyncio.create_task(asyncio.sleep(0))
@center.handler("test.batch", batch=2)
def batch(tasks):
    check()
@center.handler("test.doomed", batch=2)
async def coroutines(tasks):
    check()
    await asyncio.sleep(0)
"""

TOLD = """
from contextvars import ContextVar
tenant = ContextVar("tenant", default=None)
@center.handler("test.sync")
def one(task):
    raise ValueError
@center.on_dead
def dead(task, reason):
    print("tenant:", tenant.get(), flush=True)
    tenant.set(task.biz_id)
center.on_late(0)(lambda task, late: dead(task, ""))
"""

FORGOTTEN = """
async def work(task):
    raise AssertionError("nobody awaits it")
@center.handler("test.sync")
def one(task):
    return work(task)
@center.handler("test.async")
async def coroutine(task):
    return work(task)
@center.handler("test.batch", batch=2)
def batch(tasks):
    return (work(task) for task in tasks)
@center.handler("test.doomed")
async def dies_at_first(task):
    if task.attempt <= 1:
        os.kill(os.getpid(), 9)
    return work(task)
"""


CONFIGURED = """
import structlog, sys
factory = structlog.PrintLoggerFactory(sys.stderr)
structlog.configure(processors=[structlog.processors.KeyValueRenderer()], logger_factory=factory)
@center.handler("test.sync")
def one(task):
    structlog.get_logger().info("theirs")
    if task.attempt == 1:
        raise ValueError
"""


def test_an_application_keeps_its_own_structlog_and_toc_logs_as_its_settings_say(
    system: System, run: Run
) -> None:
    """Its processors may leave out what no log may show."""
    run(HEAD + CONFIGURED, TOC_LOG_FORMAT="json")
    done(system)
    system.wait(lambda: '"event": "try_failed"' in log_of(system), "the failure is told", 60)
    assert log_of(system).count("\nevent='theirs'\n") == 2


def test_no_try_sees_what_another_has_set_in_its_context(system: System, run: Run) -> None:
    for topic in TOPICS:
        system.center.store.topics.alter(topic, concurrency=2)  # then one that ends starts the next
    run(HEAD + SET)
    job_ids = [system.center.submit(topic, biz_id=n, delay=0.5) for n in range(30) for topic in TOPICS]
    system.wait(lambda: not system.pending(job_ids), "all have ended", 60)
    assert {(row.status, row.last_error) for row in system.center.store.read(job_ids).values()} == {
        (TaskStatus.PROCESSED, None)
    }


def test_no_hook_sees_what_another_has_set_in_its_context(system: System, run: Run) -> None:
    run(HEAD + TOLD)
    for biz_id in (1, 2):
        system.center.submit("test.sync", biz_id=biz_id, delay=0.1)
    system.wait(lambda: log_of(system).count("tenant:") == 4, "each is told to be late, and dead", 60)
    assert log_of(system).count("tenant: None") == 4


def test_a_handler_that_leaves_its_work_to_an_unawaited_coroutine_failed(system: System, run: Run) -> None:
    run(HEAD + FORGOTTEN, TOC_MAX_CRASHES="1")
    job_ids = [system.center.submit(topic, biz_id=1, delay=0.1) for topic in TOPICS]
    system.wait(lambda: not system.pending(job_ids), "all have ended:\n" + log_of(system), 60)
    rows = system.center.store.read(job_ids).values()
    assert {row.status for row in rows} == {TaskStatus.DEAD}
    assert all("never run" in str(row.last_error) for row in rows), rows


def test_a_program_that_never_closes_its_center_ends_without_a_word(system: System) -> None:
    system.create_topics(slots=2)
    program = (
        "from datetime import timedelta\nfrom toc import TimeoutCenter\ncenter = TimeoutCenter()\n"
        "center.submit('test.sync', biz_id=1, delay=timedelta(hours=1))"
    )
    ended = subprocess.run([sys.executable, "-c", program], env=system.env, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("app", "line", "why"),
    [
        ("{}['no']", 5, "KeyError"),
        ("import no_such_module", 5, "no_such_module"),
        ("x = (", 5, "SyntaxError"),
    ],
)
def test_an_application_that_cannot_be_imported_is_refused_with_the_line(
    system: System, run: Run, app: str, line: int, why: str
) -> None:
    assert run(HEAD + app).wait(60) == 2
    assert why in log_of(system)
    assert re.search(rf"odd_app\.py(:|, line ){line}\b", log_of(system)), log_of(system)


@pytest.mark.parametrize("import_fails", [False, True])
def test_a_daemon_ends_though_its_application_left_a_thread_that_does_not(
    system: System, run: Run, import_fails: bool
) -> None:
    thread = "threading.Thread(target=threading.Event().wait).start()\n"
    program = run(HEAD + NOTHING + thread + ("raise KeyError('no')" if import_fails else ""), whole=True)
    if not import_fails:
        done(system)
        program.terminate()
    assert program.wait(60) == (2 if import_fails else 0)


def test_an_application_may_leave_its_directory_and_a_forgotten_breakpoint_uses_up_no_try(
    system: System, run: Run, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(HEAD + NOTHING.replace("pass", "breakpoint()") + f"os.chdir({str(elsewhere)!r})")
    done(system)
    system.wait(lambda: '"event": "breakpoint_skipped"' in log_of(system), "it is told", 60)


LIMITED = """
import resource, sys
if "toc.worker.process" in sys.orig_argv:
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + (32 << 20)  # as ulimit -v does: too little for the threads
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
"""


def test_a_daemon_whose_processes_end_in_a_loop_says_so_and_is_not_ready(system: System, run: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    run(HEAD + NOTHING + LIMITED, whole=True, TOC_METRICS_ADDRESS=address)

    def readiness() -> str:
        try:
            with urlopen(f"http://{address}/readyz", timeout=10) as answer:
                return str(answer.read())
        except HTTPError as exc:
            with exc:
                return f"{exc.code} {exc.read()!r}"
        except OSError:
            return ""

    system.wait(lambda: log_of(system).count('"event": "thread_died"') > 2, "they say why they end", 60)
    system.wait(
        lambda: re.match("503 .*0 of 1 worker processes are ready", readiness()), "it is not ready", 60
    )


HANGING = """
import sys
import toc.worker.beat, toc.worker.take.poll
@center.handler("test.sync")
def hang(task):
    if task.attempt == 1:  # its successor may be slow: for that one the limit stays as it is
        toc.worker.beat.STUCK_SECONDS = 5.0
        toc.worker.take.poll.Agenda.choose = lambda *_: threading.Event().wait()
        center.submit("test.async", biz_id=1, delay=0.1)  # the poller would sleep for long
@center.handler("test.async")
async def nothing(task):
    pass
"""


def test_a_process_that_beats_and_runs_nothing_is_replaced(system: System, run: Run) -> None:
    run(HEAD + HANGING, whole=True)
    system.center.submit("test.sync", biz_id=1, delay=0.1)
    system.wait(lambda: "hanging: poll" in log_of(system), "it is killed", 60)
    done(system, "test.async")
