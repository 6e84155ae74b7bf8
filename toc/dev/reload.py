"""Runs a program in a child process, and anew whenever a Python file changes: the reloads of ``toc dev``."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.5
"""How often files are looked at. A change is followed once none has come for as long."""
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})

Versions = dict[str, tuple[int, int]]


def run_with_reloads(run: Callable[[], object], root: Path, say: Callable[[str], None]) -> int:
    """Have child processes call ``run``, which ends its process, until a signal comes; return the exit code.

    When a Python file below ``root`` changes, the child gets SIGTERM and another one follows. If the first
    one ends by itself, that is the end; a later one has met a broken file, perhaps half-written, and the
    next change is waited for. Call this from the main thread, while it is the only one.
    """
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = {signal.SIGCHLD, *(one for one in ends if signal.getsignal(one) is not signal.SIG_IGN)}  # nohup
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    seen, changed = versions(root), False
    child, code, runs = _start(run), 0, 1
    stopping = asked = False
    while True:
        info = signal.sigtimedwait(heard, POLL_SECONDS)
        if info is not None and info.si_signo != signal.SIGCHLD:
            stopping = True
            _send(child, info.si_signo)
        if child and (ended := os.waitpid(child, os.WNOHANG))[0]:
            child, code = 0, os.waitstatus_to_exitcode(ended[1])
            if not stopping and runs == 1 and not asked:
                return code
            if not stopping and not asked:
                say("waiting for a file to change; Ctrl-C ends it")
        if stopping:
            if not child:
                return code
            continue
        now = versions(root)
        if now != seen:
            for path in sorted(dict(now.items() ^ seen.items()))[:3]:
                say(f"changed: {os.path.relpath(path, root)}")
            seen, changed = now, True
        elif changed and info is None and child and not asked:
            asked = True
            _send(child, signal.SIGTERM)
        elif changed and not child:
            child, runs, changed, asked = _start(run), runs + 1, False, False


def versions(root: Path) -> Versions:
    """Return when the Python files below ``root`` were changed, and their sizes; environments' are not."""
    found: Versions = {}
    for directory, below, names in os.walk(root):
        below[:] = [] if "pyvenv.cfg" in names else [n for n in below if n[0] != "." and n not in _SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = f"{directory}/{name}"
                with contextlib.suppress(OSError):  # it has gone meanwhile
                    status = os.stat(path)  # noqa: PTH116 - thousands of them, twice a second
                    found[path] = status.st_mtime_ns, status.st_size
    return found


def _start(run: Callable[[], object]) -> int:
    """Fork, and return the child's pid. In a process group of its own, it gets Ctrl-C from here alone."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # it ends with its parent
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() == parent:
            run()
    finally:
        os._exit(1)


def _send(child: int, number: int) -> None:
    if child:
        os.kill(child, number)  # ours, and not waited for: no other has its pid
