"""Private servers: they start, keep what was durable through a crash, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
import pytest
from harness import forks
from harness.patience import until
from sqlalchemy.engine import make_url

from toc.dev.local import cluster
from toc.dev.local import private as server
from toc.dev.local.cluster import LocalCluster
from toc.dev.local.embedded import EmbeddedStack
from toc.dev.local.private import PrivateServer
from toc.dev.local.process import StartFailed, free_port, tail
from toc.dev.local.resp import Refused
from toc.dev.local.servers import MariaDB, RedisServer, ZooKeeper
from toc.model.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Launch


def command_line(server: PrivateServer) -> str:
    return Path(f"/proc/{server.pid}/cmdline").read_text()


# --- Redis and Valkey --------------------------------------------------------------------------------------


def test_redis_keeps_what_it_acknowledged_through_a_kill_on_the_same_port(launch: Launch) -> None:
    redis = launch(RedisServer)
    redis.call("ZADD", "order.close_3", "1766301234567.5", "42")
    url, pid = redis.url, redis.pid
    redis.kill()
    assert not redis.running()
    redis.start()
    assert (redis.url, redis.running()) == (url, True)
    assert redis.pid != pid
    assert redis.call("ZSCORE", "order.close_3", "42") == "1766301234567.5"


def test_the_valkey_of_the_wheel_answers_on_a_unix_socket(valkey_server: RedisServer, launch: Launch) -> None:
    valkey = launch(RedisServer, binary=valkey_server.binary, unixsocket=True)
    assert valkey.url == f"unix://{valkey.socket}"
    assert "valkey_version" in str(valkey.call("INFO", "server"))
    assert valkey.call("CONFIG", "GET", "port") == ["port", "0"]


def test_the_password_of_redis_is_needed_and_stands_on_no_command_line(launch: Launch) -> None:
    redis = launch(RedisServer, password='se"cret\\')
    assert redis.call("PING") == "PONG"
    assert "cret" not in command_line(redis)
    assert (redis.directory / "redis.conf").stat().st_mode & 0o77 == 0
    redis.password = None
    with pytest.raises(Refused, match="NOAUTH"):
        redis.call("PING")


def test_a_port_that_was_taken_in_between_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(server, "free_port", lambda: next(ports))
        with RedisServer(tmp_path) as redis:
            assert redis.port != taken.getsockname()[1]
            assert redis.call("PING") == "PONG"


def test_a_port_that_was_asked_for_and_is_taken_is_an_error_with_the_end_of_the_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        redis = RedisServer(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(StartFailed, match="ddress already in use"):
            redis.start()
    assert not redis.running()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"redis did not start in .*(?s:.*)no-such-line"):
        RedisServer(tmp_path, config=["no-such-line"]).start()


# --- MariaDB -----------------------------------------------------------------------------------------------


def test_mariadb_lets_nobody_in_without_the_password_and_shows_it_nowhere(mariadb: MariaDB) -> None:
    password = str(make_url(mariadb.url).password)
    assert len(password) == 32
    assert password not in command_line(mariadb)
    assert password not in mariadb.log.read_text()
    for name in ("password", "accounts.sql", "my.cnf"):
        assert (mariadb.directory / name).stat().st_mode & 0o77 == 0
    for user in ("root", ""):
        with pytest.raises(pymysql.err.OperationalError, match="Access denied"):
            pymysql.connect(host="127.0.0.1", port=mariadb.port, user=user, password="")


# --- ZooKeeper ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("milliseconds", [1000, 30_000])
def test_zookeeper_grants_short_and_long_sessions(zookeeper: ZooKeeper, milliseconds: int) -> None:
    # A session's first packet: protocol, last zxid, timeout, session id, password; the answer's second
    # number is the timeout that the server grants.
    request = struct.pack(">iqiqi16s", 0, 0, milliseconds, 0, 16, b"")
    with socket.create_connection(("127.0.0.1", zookeeper.port), timeout=60) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        _size, _protocol, granted = struct.unpack(">iii", connection.recv(12, socket.MSG_WAITALL))
    assert granted == milliseconds


# --- the embedded stack and the local cluster --------------------------------------------------------------


def test_the_embedded_stack_keeps_its_index_and_is_not_started_twice(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path / "toc") as stack:
        stack.redis.call("SET", "a", "b")
        assert stack.settings["redis_url"] == f"unix://{tmp_path}/toc/redis/redis.sock"
        assert stack.settings["database_urls"] == [f"sqlite:///{tmp_path}/toc/toc.sqlite3"]
        with pytest.raises(ConfigError, match="in use by another process"):
            EmbeddedStack(tmp_path / "toc").start()
        assert stack.redis.running()
    assert not stack.redis.running()
    with EmbeddedStack(tmp_path / "toc") as stack:
        assert stack.redis.call("GET", "a") == "b"


# Stands for `toc worker`: says how it was called, and ends when it is told to.
STUB = """
import os, signal, sys
names = ("TOC_HOST", "TOC_CONFIG", "TOC_REDIS_URL")
print(sys.argv[1:], *(os.environ.get(name) for name in names), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("stopped", flush=True)))
signal.pause()
"""
START = f"""
import sys
from pathlib import Path
from toc.dev.local import cluster
cluster._DAEMON = [sys.executable, "-c", {STUB!r}, "worker"]
local = cluster.LocalCluster(Path(sys.argv[1]), processes=3)
local.start(lambda settings: print("prepared", settings["cluster"]))
"""


def test_a_local_cluster_survives_the_command_that_started_it_until_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mariadb: MariaDB, zookeeper: ZooKeeper
) -> None:
    assert mariadb.running()  # that is: these servers are to be had on this machine
    assert zookeeper.running()
    monkeypatch.setenv("TOC_REDIS_URL", "redis://elsewhere")
    local = LocalCluster(tmp_path / "cluster")
    try:
        command = [sys.executable, "-c", START, str(local.directory)]
        # not through a pipe: what survives must not hold the command's output open
        with (tmp_path / "out").open("w") as out:
            subprocess.run(command, check=True, stdout=out, stderr=subprocess.STDOUT, timeout=240)
        assert (tmp_path / "out").read_text() == "prepared local\n"

        status = {part["name"]: part for part in local.status()}
        keepers = ["zookeeper1", "zookeeper2", "zookeeper3"]
        assert list(status) == ["redis1", "redis2", "redis3", "mariadb", *keepers, "host1", "host2"]
        assert all(part["running"] for part in status.values())
        assert all(
            Path(f"/proc/{part['pid']}/stat").read_text().split()[5] == str(part["pid"])
            for part in status.values()
        ), "each leads a session of its own"

        settings = tomllib.loads(local.config.read_text())
        assert settings["redis_url"] == "redis+cluster://" + ",".join(
            status[f"redis{number}"]["address"] for number in (1, 2, 3)
        )
        assert settings["zookeeper"] == ",".join(status[name]["address"] for name in keepers)
        assert settings["database_urls"][0].endswith("@" + status["mariadb"]["address"])
        assert local.config.stat().st_mode & 0o77 == 0

        said = tail(Path(status["host2"]["log"]))
        assert said == (
            f"['worker', '--app', 'toc.dev.demo.app:center', '--processes', '3'] host2 {local.config} None"
        )
        with pytest.raises(ConfigError, match="is already running"):
            local.start(lambda _settings: None)

        lost = ["redis2", "mariadb", "zookeeper1", "host1"]
        local.kill(*lost)
        with pytest.raises(ConfigError, match="'host7' is not one of: redis1"):
            local.kill("host7")
        local.stop_parts(["host2"])
        assert tail(Path(status["host2"]["log"])).endswith("stopped")
        assert {part["name"] for part in local.status() if not part["running"]} == {*lost, "host2"}

        monkeypatch.setattr(cluster, "_DAEMON", [sys.executable, "-c", STUB, "worker"])
        local.start_parts([*lost, "host2", "host3"])
        back = {part["name"]: part for part in local.status()}
        assert list(back) == [*status, "host3"]
        assert all(part["running"] for part in back.values())
        assert all(back[name]["address"] == status[name]["address"] for name in lost[:3])
        assert back["redis1"]["pid"] == status["redis1"]["pid"], "what runs is left alone"
        assert "'--processes', '3'" in tail(Path(back["host3"]["log"])), "as the other hosts"
        with pytest.raises(ConfigError, match="'redis7' is not one of"):
            local.start_parts(["redis7"])
    finally:
        local.stop()
    assert all(tail(Path(back[f"host{n}"]["log"])).endswith("stopped") for n in (1, 2, 3))
    assert not any(_exists(part["pid"]) for part in (*status.values(), *back.values()))
    assert local.status() == []
    local.stop()  # again: nothing happens


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_of_a_local_cluster_that_is_broken_off_leaves_nothing_running(
    tmp_path: Path, mariadb: MariaDB, number: signal.Signals
) -> None:
    assert mariadb.running()
    directory, said = tmp_path / "cluster", tmp_path / "said"
    words = ["cluster", "start", "--directory", str(directory), "--zookeepers", "1"]
    start = forks.start(words, env=dict(os.environ), streams={"stderr": str(said)})
    try:
        assert until(lambda: said.exists() and "starting mariadb" in said.read_text(), 60)
        assert _at_work_in(directory), "servers of the cluster run"
        start.send_signal(number)
        assert start.wait(60) == 128 + number
        assert until(lambda: not _at_work_in(directory), 10)  # one that was killed takes a moment to end
        assert LocalCluster(directory).status() == []
    finally:
        start.kill()
        for pid in _at_work_in(directory):
            os.kill(pid, signal.SIGKILL)


def _at_work_in(directory: Path) -> list[int]:
    """The servers whose logs are in the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "fd/1").readlink().is_relative_to(directory):
                found.append(int(path.name))
    return found


def test_a_local_cluster_that_cannot_be_prepared_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mariadb: MariaDB, zookeeper: ZooKeeper
) -> None:
    assert mariadb.running()
    assert zookeeper.running()
    monkeypatch.setattr(cluster, "_DAEMON", [sys.executable, "-c", "raise SystemExit('no such app')"])
    local = LocalCluster(tmp_path / "cluster", zookeepers=1)
    seen: list[dict[str, Any]] = []
    with pytest.raises(StartFailed, match=r"(?s)a daemon ended at once.*no such app"):
        local.start(lambda _settings: seen.extend(local.status()))
    assert len(seen) == 5
    assert not any(_exists(part["pid"]) for part in seen)
    assert local.status() == []


def _exists(pid: int) -> bool:
    """Whether a process runs; one that ended and was not reaped by its parent does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
