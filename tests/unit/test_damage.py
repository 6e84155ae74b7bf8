"""What handlers do to their process is found."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from toc.sockets import none_left
from toc.worker import damage


@pytest.fixture
def most() -> Iterator[int]:
    """The number of descriptors that there may be: some hundred more than there are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 300
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what is opened."""
    with ExitStack() as stack:
        yield stack


def _open_up_to(number: int, opened: ExitStack) -> None:
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) < number:
        opened.callback(os.close, descriptor)
    opened.callback(os.close, descriptor)


def test_a_process_is_short_of_descriptors_before_there_are_none(most: int, opened: ExitStack) -> None:
    _open_up_to(most - 2 * damage.LEFT, opened)
    assert not damage.short()
    assert not none_left()
    _open_up_to(most - damage.LEFT // 2, opened)
    assert damage.short()
    assert not none_left()
    _open_up_to(most - 1, opened)
    assert damage.short()
    assert none_left()


def test_a_descriptor_that_somebody_has_given_a_high_number_is_no_lack_of_them(
    most: int, opened: ExitStack
) -> None:
    os.dup2(2, most - damage.LEFT)
    opened.callback(os.close, most - damage.LEFT)
    assert not damage.short()


@pytest.mark.parametrize("reused", [False, True])
def test_a_guarded_descriptor_that_was_closed_is_found(monkeypatch: pytest.MonkeyPatch, reused: bool) -> None:
    monkeypatch.setattr(damage, "_guarded", None)
    damage.check_descriptors()
    receiver, sender = os.pipe()
    damage.guard(sender)
    damage.check_descriptors()
    os.close(sender)
    if reused:
        os.dup2(2, sender)
    with pytest.raises(RuntimeError, match="closed descriptors"):
        damage.check_descriptors()
    if reused:
        os.close(sender)
    os.close(receiver)


DEEDS = {
    "its descriptor 1": "os.close(1)",
    "a connection has the number": "ends = socket.socketpair(); os.dup2(ends[0].fileno(), 2)",
    "RLIMIT_FSIZE": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))",
    "time.monotonic": "time.monotonic = lambda: 1.0",
}
PROGRAM = """
import os, resource, socket, sys, time
from toc.worker import damage
damage.keep()
out = os.dup(1)
assert not damage.found()
with open(os.devnull) as file:
    os.dup2(file.fileno(), 0)
assert not damage.found(), "a redirection is intended"
{deed}
os.write(out, damage.found().encode())
"""


@pytest.mark.parametrize("what", DEEDS)
def test_a_damaged_process_is_found(what: str) -> None:
    program = PROGRAM.replace("{deed}", DEEDS[what])
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert what in told.stdout
