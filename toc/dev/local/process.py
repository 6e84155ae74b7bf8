"""One private process: started in its own group, watched, and ended by its own id only.

It is a child of this process, so its id is given to no other before its end was noticed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
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


class Process:
    """A child of this process, started by ``spawn``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = False

    @classmethod
    def spawn(
        cls, command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start ``command`` in its own session; append its output to ``log``.

        It is killed when the calling *thread* ends, so call this from a thread that lives as long as the
        process should.
        """
        argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *map(str, command)]
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        pid = os.posix_spawn(
            argv[0],
            argv,
            dict(os.environ if env is None else env),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
        )
        return cls(pid)

    def alive(self) -> bool:
        """Whether it still runs."""
        if not self._ended:
            try:
                self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # its end was noticed elsewhere
                self._ended = True
        return not self._ended

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the process, unless it has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for the end; return whether it came."""
        return until(lambda: not self.alive(), timeout)

    def stop(self, timeout: float) -> None:
        """Send SIGTERM, and SIGKILL to the whole group if it has not ended after ``timeout`` seconds."""
        self.signal(signal.SIGTERM)
        if not self.wait(timeout):
            self.kill()

    def kill(self) -> None:
        """SIGKILL the process and those that it forked; return when it is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(10)


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
