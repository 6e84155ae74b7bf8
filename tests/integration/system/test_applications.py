"""What an application may do to its programs when it is imported, and its handlers to each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.system import System

from toc import TaskStatus

HEAD = """
import os, threading, time
from toc import TimeoutCenter
center = TimeoutCenter()
"""
NOTHING = """
@center.handler("test.sync")
def nothing(task):
    pass
"""
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(system: System) -> Iterator[Run]:
    """Runs ``toc worker`` with an interpreter of its own, for an application in its working directory."""
    started: list[subprocess.Popen[str]] = []
    system.create_topics(slots=2, retries=2, backoff_base=0.1)

    def start(app: str, **env: str) -> subprocess.Popen[str]:
        (system.directory / "odd_app.py").write_text(app)
        words = ["-m", "toc", "worker", "--app", "odd_app:center", "--processes", "1"]
        with (system.directory / "odd.log").open("w") as log:
            program = subprocess.Popen(
                [sys.executable, *words],
                cwd=system.directory,
                env={**system.env, **env},
                stdout=log,
                stderr=log,
                text=True,
            )
        started.append(program)
        return program

    yield start
    for program in started:
        if program.poll() is None:
            program.kill()
        program.wait()


def log_of(system: System) -> str:
    return (system.directory / "odd.log").read_text()


def done(system: System, topic: str = "test.sync") -> None:
    """A task runs to its end."""
    job_id = system.center.submit(topic, biz_id=1, delay=0.1)
    system.wait(
        lambda: system.row(job_id).status == TaskStatus.PROCESSED, "a task has run:\n" + log_of(system), 60
    )


@pytest.mark.parametrize("import_fails", [False, True])
def test_a_daemon_ends_though_its_application_left_a_thread_that_does_not(
    system: System, run: Run, import_fails: bool
) -> None:
    thread = "threading.Thread(target=threading.Event().wait).start()\n"
    program = run(HEAD + NOTHING + thread + ("raise KeyError('no')" if import_fails else ""))
    if not import_fails:
        done(system)
        program.terminate()
    assert program.wait(60) == (2 if import_fails else 0)


def test_an_application_in_the_working_directory_may_leave_it(
    system: System, run: Run, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(HEAD + NOTHING + f"os.chdir({str(elsewhere)!r})")
    done(system)
