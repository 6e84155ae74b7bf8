"""The interface of a peer, and the supervisor of its workers.

A peer's file is imported in two roles: by ``benchmarks.host``, which submits, and by the peer's own worker
command, which finds its handler there. The environment names the servers: BENCH_REDIS, BENCH_POSTGRES,
BENCH_BEANSTALKD, or the TOC_* variables.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

NS = 1_000_000_000


class Peer(ABC):
    """A system that runs tasks at their due time. Instants are nanoseconds since 1970."""

    @abstractmethod
    def version(self) -> str:
        """Return name and version of what is measured."""

    @abstractmethod
    def commands(self, processes: int) -> list[list[str]]:
        """Return the commands that together run ``processes`` worker processes."""

    @abstractmethod
    def submit(self, number: int, due: int) -> None:
        """Store one task; return when the peer reports it stored."""

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        """Store tasks in the fastest way that the peer offers; one by one if it has no other."""
        for number, due in zip(numbers, dues, strict=True):
            self.submit(number, due)

    @abstractmethod
    def pending(self) -> int:
        """Return how many tasks the servers still hold: waiting, taken, or not yet acknowledged."""

    def close(self) -> None:
        """Close the connections."""
        return


class Workers:
    """Running worker commands. One that ends by itself is started again, as a service manager would do."""

    def __init__(self, commands: Sequence[Sequence[str]], log: Path) -> None:
        self._commands = commands
        self._log = log
        self._stopping = threading.Event()
        self._running = [self._spawn(command) for command in commands]
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._watcher.start()

    def pids(self) -> list[int]:
        """Return the process ids of the commands."""
        return [process.pid for process in self._running]

    def stop(self) -> None:
        """End the commands, by force after 8 s."""
        self._stopping.set()
        self._watcher.join()
        for process in self._running:
            process.terminate()
        until = time.monotonic() + 8
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes it has left behind
            process.wait()

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _watch(self) -> None:
        while not self._stopping.wait(0.05):
            for index, process in enumerate(self._running):
                if process.poll() is not None:
                    self._running[index] = self._spawn(self._commands[index])
