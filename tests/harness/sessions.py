"""Whole hosts, as a machine ends them that loses its power."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def kill_session(leader: int) -> None:
    """SIGKILL to every process of the session that ``leader`` began, be it alive or not.

    Worker processes have groups of their own, so no group holds all of a host. The leader is stopped first
    and ends last: a daemon that sees its processes die says so to others, which one whose host dies cannot.
    """
    with suppress(ProcessLookupError):
        os.kill(leader, signal.SIGSTOP)
        while _state(leader) not in "TZX":
            time.sleep(0.001)
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader != pid:
                os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(leader, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process has not ended, waited for or not."""
    return _state(pid) not in "ZX"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
