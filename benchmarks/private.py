"""What private servers have in common: a directory, a port, a process that is started and ended."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from toc.dev.local import StartFailed, kill, spawn, stop, tail, until
from toc.model.errors import UnfitServer


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
        self.process: subprocess.Popen[bytes] | None = None

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
            process = self.process = spawn(command, self.log)
            ready = until(lambda: self._ready(start) or not self.running(), self.start_timeout)  # noqa: B023
            if ready and self.running():
                self._write("port", [str(self.port)])
                return self
            kill(process)
            said = tail(self.log, start)
            if fixed or "ddress already in use" not in said:
                break
        raise StartFailed(f"{self.name} did not start in {self.directory}; its log ends with:\n{said}")

    def stop(self) -> None:
        """End the server in good order, or by force after ``stop_timeout`` seconds. May be called twice."""
        self.resume()  # a paused process would not receive the SIGTERM
        if self.process is not None:
            stop(self.process, self.stop_timeout)

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        if self.process is not None:
            kill(self.process)

    def pause(self) -> None:
        """Send SIGSTOP and wait until it holds: connections stay open and nothing answers, until resume()."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)
            until(lambda: _halted(self.pid) or not self.running(), 10)

    def resume(self) -> None:
        """Send SIGCONT."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

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


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens. Raises StartFailed when none is found.

    It lies below the kernel's range for outgoing connections. Otherwise a client that keeps trying to reach a
    stopped server may be given the server's own port.
    """
    ceiling = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if ceiling < 12_000:  # the range was widened to almost everything
        ceiling = 60_000
    for _ in range(200):
        port = random.randrange(10_000, ceiling)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise StartFailed("no free TCP port was found on 127.0.0.1")


def _halted(pid: int) -> bool:
    """Whether every thread of the process has stopped, by SIGSTOP, or has ended."""
    try:
        states = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # one of them has ended just now
        return False
    # The name of the command, in parentheses, may contain spaces.
    return all(state.rpartition(")")[2].split()[0] in "TtZX" for state in states)
