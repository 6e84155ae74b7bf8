"""Private servers: they start, keep what was durable through a crash, and leave nothing behind."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql
import pytest
from sqlalchemy.engine import make_url

from benchmarks import private as server
from benchmarks.local import MariaDB, RedisServer, ZooKeeper
from benchmarks.private import PrivateServer, free_port
from benchmarks.resp import Refused, call
from toc.dev.local.embedded import EmbeddedStack
from toc.dev.local.process import StartFailed
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


# --- the embedded stack -----------------------------------------------------------------------------------


def test_the_embedded_stack_keeps_its_index_and_is_not_started_twice(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path / "toc") as stack:
        call(str(stack.redis.socket), "SET", "a", "b")
        assert stack.settings["redis_url"] == f"unix://{tmp_path}/toc/redis/redis.sock"
        assert stack.settings["database_urls"] == [f"sqlite:///{tmp_path}/toc/toc.sqlite3"]
        with pytest.raises(ConfigError, match="in use by another process"):
            EmbeddedStack(tmp_path / "toc").start()
        assert stack.redis.running()
    assert not stack.redis.running()
    with EmbeddedStack(tmp_path / "toc") as stack:
        assert call(str(stack.redis.socket), "GET", "a") == "b"
