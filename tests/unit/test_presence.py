"""A process holds its name until it ends, and nobody concludes more than that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from toc.coordination.presence import LocalNames, Presence

HOLD = """
import sys, time
from toc.coordination.presence import Presence
held = Presence(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def here() -> LocalNames:
    """That of this process; the kernel must hold names here."""
    found = LocalNames.of("host-a")
    assert found.knows(found.name("host-a-0"))
    return found


def test_a_process_that_was_killed_is_proved_gone_and_not_before(here: LocalNames) -> None:
    name = here.name("host-a-0")
    with subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            assert not here.proves_gone(name)
        finally:
            process.kill()
    assert here.proves_gone(name)


FORK = HOLD.replace(
    'print("held"',
    "import os\nread, write = os.pipe()\nif child := os.fork(): os.read(read, 1)\n"
    "else: os.write(write, b'x'); time.sleep(60)\nprint(child",
)


def test_a_child_that_outlives_the_process_does_not_hold_its_name(here: LocalNames) -> None:
    name = here.name("host-a-0")
    with subprocess.Popen([sys.executable, "-c", FORK, name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert not here.proves_gone(name)
            process.kill()
            process.wait()
            assert here.proves_gone(name)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "name", ["host-a-0-1f3a9c2e", "a-0", "", "host-a-0-1f3a9c2e.", "host-a-0-x.1f3a9c2e"]
)
def test_of_a_name_without_a_mark_nothing_is_concluded(here: LocalNames, name: str) -> None:
    Presence(name).close()
    assert not here.knows(name)
    assert not here.proves_gone(name)


def test_of_processes_elsewhere_nothing_is_concluded(here: LocalNames) -> None:
    """Elsewhere is another host name, another kernel, another network namespace."""
    assert not here.proves_gone(LocalNames.of("host-b").name("host-a-0"))
    assert not here.proves_gone(LocalNames("00000000").name("host-a-0"))
    own = [
        sys.executable,
        "-c",
        "from toc.coordination.presence import *; print(LocalNames.of('host-a').name('x-0'))",
    ]
    try:
        said = subprocess.run(["unshare", "--net", *own], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as exc:
        # No package gives what the kernel or the container forbids.
        pytest.skip(f"ANOTHER NETWORK NAMESPACE WAS NOT TRIED: {exc}")
    name = said.stdout.strip()
    assert "." in name
    assert not here.knows(name)
    assert not here.proves_gone(name)


def test_where_the_kernel_tells_nothing_names_have_no_mark() -> None:
    nowhere = LocalNames(None)
    name = nowhere.name("host-a-0")
    assert "." not in name
    assert not nowhere.knows(name)
    assert not nowhere.proves_gone(LocalNames.of("host-a").name("host-a-0"))
