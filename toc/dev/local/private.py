"""What private servers have in common: a directory, a port, a process that is started and ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from toc.dev.local.process import Process, StartFailed, free_port, tail, until
from toc.model.errors import UnfitServer


class MissingServer(UnfitServer):
    """A server's program is not on this machine; the message says what to install."""


class Started:
    """What runs between ``start`` and ``stop``, or within a ``with`` block."""

    def start(self) -> Self:
        """Start what does not run."""
        raise NotImplementedError

    def stop(self) -> None:
        """End what runs."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()


class PrivateServer(Started):
    """One private server. Not thread-safe: one owner starts and stops it.

    The kernel kills it when the thread that called start() ends, however it ends.
    ``port`` 0 means a free one, chosen at the first start in that directory and kept from then on.
    """

    name = "server"
    ready_text = ""
    """What it logs when it is ready."""
    start_timeout = 60.0
    stop_timeout = 20.0

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self.directory = directory.absolute()
        self.port = port
        self.log = self.directory / f"{self.name}.log"
        self.process: Process | None = None

    @property
    def pid(self) -> int:
        """The process id. Raises UnfitServer when it was never started."""
        if self.process is None:
            raise UnfitServer(f"{self.name} in {self.directory} was not started")
        return self.process.pid

    def start(self) -> Self:
        """Start the server and wait until it answers. Does nothing when it runs already.

        Raises MissingServer, or StartFailed with the end of the log.
        """
        if self.running():
            return self
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.log.touch(mode=0o600)
        fixed = bool(self.port)
        for retry in range(5):
            if not fixed:
                self.port = free_port() if retry else self.kept_port("port")
            command = self._prepare()
            start = self.log.stat().st_size
            process = self.process = Process.spawn(command, self.log)
            ready = until(lambda: self._ready(start) or not process.alive(), self.start_timeout)  # noqa: B023
            if ready and process.alive():
                self._write("port", [str(self.port)])
                return self
            process.kill()
            said = tail(self.log, start)
            if fixed or "ddress already in use" not in said:
                break
        raise StartFailed(f"{self.name} did not start in {self.directory}; its log ends with:\n{said}")

    def stop(self) -> None:
        """End the server in good order, or by force after ``stop_timeout`` seconds. May be called twice."""
        if self.process is not None:
            self.process.stop(self.stop_timeout)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        if self.process is not None:
            self.process.kill()

    def pause(self) -> None:
        """Send SIGSTOP and wait until it holds: connections stay open and nothing answers, until resume()."""
        if self.process is not None:
            self.process.signal(signal.SIGSTOP)
            until(self.process.halted, 10)

    def resume(self) -> None:
        """Send SIGCONT."""
        if self.process is not None:
            self.process.signal(signal.SIGCONT)

    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.alive()

    def _prepare(self) -> list[str | Path]:
        """Write what the server reads at its start; return the command."""
        raise NotImplementedError

    def _ready(self, log_start: int) -> bool:
        """Whether it serves requests. ``log_start``: where the log of this start begins, in bytes."""
        # Its own log, not a PING: an answer on the port may come from another server.
        return self.ready_text in tail(self.log, log_start, size=1 << 20)

    def kept_port(self, name: str) -> int:
        """Return the port in the directory's file ``name``; write a free one there first if it is missing."""
        file = self.directory / name
        if not file.exists():
            self._write(name, [str(free_port())])
        return int(file.read_text())

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        """Write a file into the server's directory, readable only by its owner."""
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path
