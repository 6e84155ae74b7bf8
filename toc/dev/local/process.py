"""One private process: started in a session of its own, and ended with the thread that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toc.model.errors import Unavailable

_POLL_S = 0.01

# Run by the child before it becomes the server. The kernel then kills the server when the thread that started
# it ends. A start function would be simpler, but is not safe in a process with threads; this setting survives
# the exec. If the parent died before the call, no signal would ever come: so check once.
_DIE_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class StartFailed(Unavailable):
    """A private server did not come up; the message ends with the last lines of its log."""


def spawn(
    command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session; append its output to ``log``.

    It is killed when the calling *thread* ends, so call this from a thread that lives as long as the process
    should.
    """
    argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *map(str, command)]
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - a program of this machine
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Send SIGTERM, and kill the process if it has not ended after ``timeout`` seconds."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the process and those that it forked; return when it is gone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll ``condition`` every 10 ms; return whether it held before ``timeout`` seconds were over."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def tail(log: Path, start: int = 0, size: int = 2000) -> str:
    """Return at most the last ``size`` bytes of what was written to ``log`` after byte ``start``."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - size))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
