"""Programs of ``toc`` in processes that are forked from one which has imported all of it.

A new interpreter takes half a second of a processor to import what a command or a daemon needs, and a run of
the tests has a thousand of them. What a forked one does is ``toc.cli.main.run``, up to the end of the
interpreter, with streams, variables, directory and session of its own. A variable that tells the interpreter
or the loader something has no effect on it: who sets one gets a new interpreter (see ``forkable``).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

FULL, CLOSED, GONE = "full", "closed", "gone"
"""What a stream can be instead of a file: a full disk, closed, or a pipe whose reader has left."""
STREAMS = ("stdin", "stdout", "stderr")


class Forked:
    """A process as ``subprocess.Popen`` has it, of which the one that forks is the parent."""

    def __init__(self, forks: _Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)  # nobody has waited for it yet, so the number is its own

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = self._forks.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("toc", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forks:
    """The process that forks; it ends with the one that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._leave)

    def _leave(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def ask(self, job: Mapping[str, Any]) -> int:
        with self._lock:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())


@cache
def _forks() -> _Forks:
    return _Forks()


def forkable(env: Mapping[str, str]) -> bool:
    """Whether a forked process does with these variables what a new interpreter would."""
    return not any(
        name.startswith(("LD_", "PYTHON")) and name != "PYTHONPATH" and os.environ.get(name) != value
        for name, value in env.items()
    )


def start(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    directory: Path | str | None = None,
    session: bool = False,
    seconds: int = 0,
    streams: Mapping[str, str],
) -> Forked:
    """Start ``toc WORDS``. ``streams``: files, which are appended to, or FULL, CLOSED, GONE; /dev/null else.

    ``session``: with a session of its own. ``seconds``: after so many SIGALRM ends it.
    """
    assert forkable(env), "start a new interpreter"
    place = {"cwd": str(directory or Path.cwd()), "env": dict(env)}
    job = {"words": list(words), "session": session, "seconds": seconds, **streams, **place}
    forks = _forks()
    return Forked(forks, forks.ask(job))


def run(
    words: Sequence[str], *, env: Mapping[str, str], directory: Path | str | None = None, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run ``toc WORDS`` to its end. Raises subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory(prefix="toc-") as name:
        streams = {stream: str(Path(name, stream)) for stream in ("stdout", "stderr")}
        process = start(words, env=env, directory=directory, streams=streams)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        out, err = (Path(path).read_text() for path in streams.values())
        return subprocess.CompletedProcess(words, process.wait(), out, err)


# --- the process that forks


def _serve() -> None:
    # whatever commands import when they are run, for all of them at once
    import rich.live
    import rich.progress  # noqa: F401

    import toc.cli.main
    import toc.coordination.operator
    import toc.coordination.zookeeper
    import toc.dev.demo.report
    import toc.dev.demo.run
    import toc.dev.demo.stage
    import toc.dev.local.cluster
    import toc.dev.local.embedded
    import toc.operate.admin
    import toc.operate.bulk
    import toc.operate.doctor
    import toc.operate.top
    import toc.store.migrate
    import toc.worker.daemon.start  # noqa: F401

    ours = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) | {str(Path(__file__).parent)}
    paths = [path for path in sys.path if path not in ours]
    gc.collect()
    gc.freeze()  # else every child, at its end, looks through all that was imported
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        elif not (answer := os.fork()):
            _become(job, paths)
        print(answer, flush=True)


def _become(job: dict[str, Any], paths: list[str]) -> NoReturn:
    from toc.cli.main import run

    if job["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(job["env"])
    time.tzset()
    os.chdir(job["cwd"])
    sys.path[:] = [job["cwd"], *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep)), *paths]
    importlib.invalidate_caches()
    files: list[Any] = []
    for descriptor, name in enumerate(STREAMS):
        kind = job.get(name, os.devnull)
        _open(descriptor, kind)
        mode, errors = (
            ("r", None) if descriptor == 0 else ("w", "backslashreplace" if descriptor == 2 else None)
        )
        files.append(None if kind == CLOSED else open(descriptor, mode, errors=errors, closefd=False))  # noqa: SIM115
    # as the interpreter makes them at its start
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = files  # type: ignore[misc]
    sys.argv = ["toc", *job["words"]]
    signal.alarm(job["seconds"])
    run()
    raise AssertionError("it has ended")


def _open(descriptor: int, kind: str) -> None:
    if kind == CLOSED:
        os.close(descriptor)
        return
    if kind == GONE:
        reader, source = os.pipe()
        os.close(reader)
    elif descriptor == 0:
        source = os.open(kind, os.O_RDONLY)
    elif kind == FULL:
        source = os.open("/dev/full", os.O_WRONLY)
    else:
        source = os.open(kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(source, descriptor)
    os.close(source)


if __name__ == "__main__":
    _serve()
