"""Runs commands of ``toc`` with any stdin, stdout and stderr: full, closed, or without a reader.

A command takes half a second to import what it needs, so one process imports it all, once, and forks. What
its children run is ``toc.cli.main.run`` up to the end of the interpreter.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

FULL, CLOSED, GONE = "full", "closed", "gone"
"""What a stream can be instead of a file: a full disk, closed, or a pipe whose reader has left."""
SECONDS = 30
"""A command that runs longer is killed; its code is -14 then."""
AT_ONCE = 4
"""So many commands run at the same time."""


@dataclass(frozen=True)
class Ended:
    """What a command ended with; "" where its stream was not a file."""

    words: Sequence[str]
    code: int
    out: str
    err: str

    @property
    def trace(self) -> bool:
        """Whether Python has shown its inside."""
        return any(sign in self.err for sign in ("Traceback", "Exception ignored", 'File "'))


class Commands:
    """Runs commands in ``directory`` with the settings ``env`` alone."""

    def __init__(self, server: subprocess.Popen[str], directory: Path, env: Mapping[str, str]) -> None:
        self._server = server
        self._directory = directory
        self._env = dict(env)
        self._count = 0

    def __call__(self, *words: object, env: Mapping[str, str] | None = None, **streams: str) -> Ended:
        [ended] = self.all([[str(word) for word in words]], env=env, **streams)
        return ended

    def all(
        self, commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None, **streams: str
    ) -> list[Ended]:
        """Run several, some at the same time. ``streams``: ``stdout=FULL``."""
        jobs: list[dict[str, Any]] = []
        for words in commands:
            self._count += 1
            files = {name: str(self._directory / f"{self._count}.{name}") for name in ("stdout", "stderr")}
            place = {"cwd": str(self._directory), "env": self._env | dict(env or {})}
            jobs.append({"words": list(words), **files, **streams, **place})
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(jobs) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        return [
            Ended(job["words"], code, _text(job["stdout"]), _text(job["stderr"]))
            for job, code in zip(jobs, codes, strict=True)
        ]


@contextmanager
def commands(directory: Path, env: Mapping[str, str]) -> Iterator[Commands]:
    """Commands that run in ``directory``."""
    directory.mkdir(exist_ok=True)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain
    )
    with server:
        yield Commands(server, directory, plain | dict(env))
        assert server.stdin is not None
        server.stdin.close()


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text(errors="backslashreplace") if file.is_file() else ""


# --- the process that forks


def _serve() -> None:
    # whatever a command imports when it is run, for all of them at once
    import rich.live
    import rich.progress

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

    gc.freeze()  # else every child, at its end, looks through all that was imported
    for line in sys.stdin:
        jobs = json.loads(line)
        codes: list[int | None] = [None] * len(jobs)
        running: dict[int, int] = {}
        for number in range(len(jobs) + AT_ONCE):
            if len(running) >= AT_ONCE or (number >= len(jobs) and running):
                pid, status = os.wait()
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if number < len(jobs):
                pid = os.fork()
                if not pid:
                    _become(jobs[number])
                running[pid] = number
        print(json.dumps(codes), flush=True)


def _become(job: dict[str, Any]) -> NoReturn:
    from toc.cli.main import run

    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    files: list[Any] = []
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        kind = job.get(name, os.devnull)
        _open(descriptor, kind)
        mode, errors = (
            ("r", None) if descriptor == 0 else ("w", "backslashreplace" if descriptor == 2 else None)
        )
        files.append(None if kind == CLOSED else open(descriptor, mode, errors=errors, closefd=False))  # noqa: SIM115
    # as the interpreter makes them at its start
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = files  # type: ignore[misc]
    sys.argv = ["toc", *job["words"]]
    signal.alarm(SECONDS)
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
    else:
        source = os.open("/dev/full" if kind == FULL else kind, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(source, descriptor)
    os.close(source)


if __name__ == "__main__":
    _serve()
