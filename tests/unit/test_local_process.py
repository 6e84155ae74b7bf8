"""Private processes and the search for programs: what can be seen without a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.patience import until

from benchmarks.local import RedisServer
from toc.dev.local import redis
from toc.dev.local.embedded import lock
from toc.dev.local.process import spawn, stop, tail
from toc.dev.local.redis import MissingServer, find_redis
from toc.model.errors import ConfigError, UnfitServer

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    program = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    )
    process = spawn([sys.executable, "-c", program], tmp_path / "log")
    assert until(lambda: tail(tmp_path / "log").isdigit(), 60)
    child = Path("/proc", tail(tmp_path / "log"), "stat")
    stop(process, 0.05)
    assert process.poll() is not None
    stop(process, 0.05)
    assert until(lambda: not child.exists() or ") Z " in child.read_text(), 60)


def test_a_process_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from toc.dev.local.process import spawn; "
        f"bound = spawn({SLEEP!r}, Path({str(tmp_path / 'log')!r})); "
        "print(bound.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        bound = Path("/proc", parent.stdout.readline().strip(), "stat")
        assert until(lambda: tail(tmp_path / "log") == "up", 60)
        assert ") S " in bound.read_text()
        parent.kill()
        parent.wait()
    assert until(lambda: not bound.exists() or ") Z " in bound.read_text(), 60)


def test_a_redis_too_old_is_passed_over_and_named_when_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.7 sha=00000000:0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(redis, "bundled_valkey", lambda: None)
    with pytest.raises(MissingServer, match=r"redis-server is too old: pip install 'timeout-center"):
        find_redis()


def test_the_unix_socket_of_a_deep_directory_has_a_short_path_that_never_changes(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    first, second = RedisServer(deep, unixsocket=True), RedisServer(deep, unixsocket=True)
    assert first.socket is not None
    try:
        assert first.url == second.url
        assert len(str(first.socket)) < 108
        assert first.socket.parent.stat().st_mode & 0o777 == 0o700
        first.socket.parent.chmod(0o755)
        with pytest.raises(UnfitServer, match="shorter path"):
            RedisServer(deep, unixsocket=True)
    finally:
        first.socket.parent.rmdir()


def test_a_directory_is_locked_by_one_process_at_a_time(tmp_path: Path) -> None:
    descriptor = lock(tmp_path)
    with pytest.raises(ConfigError, match="in use by another process"):
        lock(tmp_path)
    os.close(descriptor)
    os.close(lock(tmp_path))
