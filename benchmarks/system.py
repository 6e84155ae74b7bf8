"""One peer under measurement: its servers, its host process, its workers, and their record of starts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from benchmarks import environment, processes, record
from benchmarks.catalog import Entry
from benchmarks.environment import CannotRun
from benchmarks.local import MariaDB
from benchmarks.peer import NS
from benchmarks.servers import Servers
from toc.model.errors import Unavailable, UnfitServer

LOOK = 0.02
ENOUGH = 200
"""From this many tasks on, the measured rate of a submit is trusted."""
READY = 60.0
"""Seconds in which workers must have run their first tasks: busy machines need many."""
PATIENCE = 10.0
"""Seconds without a new start after which the remaining tasks are given up."""


class System:
    """A context manager. Raises CannotRun if the peer cannot run here. ``database``: in place of a fresh
    MariaDB."""

    def __init__(self, entry: Entry, database: MariaDB | None = None) -> None:
        self.entry = entry
        self._database = database
        self._next = 1
        self._before = 0
        self._directory = Path(tempfile.mkdtemp(prefix="toc-bench-"))
        self._directory.chmod(0o711)  # servers that run as another user must pass through
        self.starts = self._directory / "starts"
        self.starts.mkdir()
        self.servers: Servers | None = None
        self._host: subprocess.Popen[str] | None = None
        self.processes = 0
        self.rate = 0.0
        """The latest measured rate of batched submits, in tasks a second."""
        self.took = 0.0
        """Seconds of the last submit."""

    def __enter__(self) -> Self:
        try:
            python = environment.python_of(self.entry)
            self.servers = Servers(self.entry, self._directory, self._database)
            self._host = self._spawn_host(python)
            self.version = self._ask("version")
        except (CannotRun, Unavailable, UnfitServer, OSError) as exc:
            self.__exit__()
            raise CannotRun(str(exc)) from exc
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._host is not None:
            assert self._host.stdin is not None
            assert self._host.stdout is not None
            self._host.stdin.close()
            try:
                self._host.wait(15)
            except subprocess.TimeoutExpired:
                self._host.kill()
                self._host.wait()
            self._host.stdout.close()
        if self.servers is not None:
            self.servers.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn_host(self, python: Path) -> subprocess.Popen[str]:
        assert self.servers is not None
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        with (self._directory / "host.log").open("ab") as log:
            return subprocess.Popen(
                [str(python), "-m", "benchmarks.host", self.entry.module, str(self._directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                cwd=environment.ROOT,
                env={
                    **inherited,
                    **self.servers.environment,
                    "PATH": path,
                    "PYTHONPATH": str(environment.ROOT),
                    record.STARTS_DIRECTORY: str(self.starts),
                },
            )

    def _ask(self, do: str, **arguments: Any) -> Any:
        assert self._host is not None
        assert self._host.stdin is not None
        assert self._host.stdout is not None
        try:
            self._host.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            line = self._host.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": f"its host process ended: {self.log('host')}"}
        if "error" in answer:
            raise CannotRun(f"{do}: {answer['error']}")
        return answer["ok"]

    def log(self, name: str) -> str:
        """Return the end of a log: host or workers."""
        path = self._directory / f"{name}.log"
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    # --- workers

    def start(self, count: int) -> None:
        """Start workers and wait until they have run their first tasks. Raises CannotRun if they do not."""
        self.stop()
        self._ask("start", processes=count)
        self.processes = count
        until = time.monotonic() + READY
        while True:
            first, due = self.submit(50, _now() + NS, 0)
            self.await_starts(due, patience=max(3.0, until - time.monotonic()))
            if len(self.started(due)) == len(due):
                return
            if time.monotonic() > until:
                raise CannotRun(
                    f"its workers did not run task {first} within {READY:.0f} s: {self.log('workers')[-300:]}"
                )

    def stop(self) -> None:
        """Stop the workers."""
        if self.processes:
            self._ask("stop")
            self.processes = 0

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers and their descendants."""
        return [one for pid in self._ask("pids") for one in processes.tree(pid)]

    # --- tasks

    def numbers(self, count: int) -> int:
        """Reserve ``count`` numbers that no task of this system has had; return the first."""
        first, self._next = self._next, self._next + count
        return first

    def submit(
        self, count: int, first_due: int, step: int, *, batch: bool = True, bits: int = 0
    ) -> tuple[int, dict[int, int]]:
        """Submit tasks due from ``first_due`` on, ``step`` nanoseconds apart, each at a whole millisecond.

        Returns the first number and the due times; ``rate`` holds the speed afterwards. ``bits`` are set in
        each number.
        """
        self._before = record.count(self.starts)
        first = self.numbers(count) | bits
        dues = [-(-(first_due + n * step) // 1_000_000) * 1_000_000 for n in range(count)]
        seconds = self._ask("submit", numbers=[first, first + count], dues=dues, batch=batch)
        if batch and (count >= ENOUGH or not self.rate):
            self.rate = count / max(seconds, 1e-6)
        self.took = float(seconds)
        return first, dict(zip(range(first, first + count), dues, strict=True))

    def submit_ahead(self, count: int, step: int, *, bits: int = 0) -> dict[int, int]:
        """Submit tasks so early that all are stored before the first is due; return their due times.

        ``step`` is in nanoseconds. Raises CannotRun if storing takes too long.
        """
        lead = 1.5 * count / self.rate + 0.5
        for _ in range(4):
            first_due = _now() + int(lead * NS)
            due = self._submit_before(first_due, count, step, bits)
            if due is not None:
                return due
            lead *= 2.5
        raise CannotRun(f"storing {count} tasks took longer than {lead / 2.5:.0f} s")

    def _submit_before(self, first_due: int, count: int, step: int, bits: int) -> dict[int, int] | None:
        try:
            _, due = self.submit(count, first_due, step, bits=bits)
        except CannotRun:
            if _now() < first_due - NS:
                raise
            return None  # refused, because it was too late
        if _now() < first_due - NS // 5:
            return due
        self.await_starts(due)
        return None

    def await_starts(self, due: Mapping[int, int], *, patience: float = PATIENCE, most: float = 60) -> None:
        """Wait until all have started, or no start for ``patience`` seconds; at most ``most`` seconds."""
        last_due = max(due.values())
        time.sleep(max(0, last_due - _now()) / NS)
        seen, at = -1, time.monotonic()
        until = at + most
        while time.monotonic() < until:
            count = record.count(self.starts)
            if count != seen:
                seen, at = count, time.monotonic()
                if count >= self._before + len(due) and len(self.started(due)) == len(due):
                    return
            elif time.monotonic() - at > patience:
                return
            time.sleep(LOOK)

    def started(self, due: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the starts of these tasks."""
        found: dict[int, list[int]] = {}
        for number, at in record.read(self.starts):
            if number in due:
                found.setdefault(number, []).append(at)
        return found

    def await_finished(self, most: float = 30) -> int | None:
        """Return when the servers hold no task, in ns since 1970; None if not within ``most`` seconds."""
        until = time.monotonic() + most
        while self._ask("pending") > 0:
            if time.monotonic() > until:
                return None
            time.sleep(LOOK)
        return _now()

    def pending(self) -> int:
        """Return how many tasks the servers hold."""
        return int(self._ask("pending"))


def _now() -> int:
    return time.time_ns()


def warn(text: str) -> None:
    """Print a remark for the person who watches."""
    print(text, file=sys.stderr, flush=True)
