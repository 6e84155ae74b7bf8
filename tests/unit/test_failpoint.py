"""Failpoints: every listed one is in the code, and an armed one ends the process at its line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from toc import failpoint

PACKAGE = Path(failpoint.__file__).parent

PROGRAM = """
from toc.failpoint import failpoint
for number in range(4):
    failpoint("poll.taken")
    failpoint("finish.rows-written")
    print(number, flush=True)
"""


def run(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, check=False
    )


def test_the_names_in_the_code_are_those_that_are_listed() -> None:
    used = {
        name
        for file in PACKAGE.rglob("*.py")
        if file.name != "failpoint.py"
        for name in re.findall(r'failpoint\("([^"]+)"\)', file.read_text())
    }
    assert used == set(failpoint.NAMES)


def test_without_the_variable_nothing_happens_and_nothing_is_looked_up() -> None:
    assert failpoint.failpoint is failpoint.unarmed
    assert run().stdout.split() == ["0", "1", "2", "3"]


def test_an_armed_failpoint_kills_the_process_at_its_line() -> None:
    done = run(TOC_FAILPOINT="finish.rows-written")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_it_can_wait_for_a_later_time() -> None:
    done = run(TOC_FAILPOINT="finish.rows-written:3")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1"])


def test_of_several_processes_one_alone_dies_and_leaves_its_name(tmp_path: Path) -> None:
    once = tmp_path / "once"
    first, second = (run(TOC_FAILPOINT="poll.taken", TOC_FAILPOINT_ONCE=str(once)) for _ in range(2))
    assert first.returncode == -signal.SIGKILL
    assert second.returncode == 0
    name, pid = once.read_text().split()
    assert name == "poll.taken"
    assert int(pid) > 0


def test_a_name_that_is_not_listed_is_refused() -> None:
    done = run(TOC_FAILPOINT="nowhere")
    assert done.returncode == 1
    assert "poll.taken" in done.stderr
