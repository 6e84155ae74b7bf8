"""Private servers: they start, keep what was durable through a crash, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.local import RedisServer
from benchmarks.resp import call
from toc.dev.local.embedded import EmbeddedStack
from toc.dev.local.process import StartFailed
from toc.model.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Launch


def test_the_valkey_of_the_wheel_answers_on_a_unix_socket(valkey_server: RedisServer, launch: Launch) -> None:
    valkey = launch(RedisServer, binary=valkey_server.binary, unixsocket=True)
    assert valkey.url == f"unix://{valkey.socket}"
    assert "valkey_version" in str(valkey.call("INFO", "server"))
    assert valkey.call("CONFIG", "GET", "port") == ["port", "0"]


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"redis did not start in .*(?s:.*)no-such-line"):
        RedisServer(tmp_path, config=["no-such-line"]).start()


def test_the_embedded_stack_keeps_its_index_and_is_not_started_twice(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path / "toc", redis=True) as stack:
        assert stack.redis is not None
        call(str(stack.redis.socket), "SET", "a", "b")
        assert stack.settings["redis_url"] == f"unix://{tmp_path}/toc/redis/redis.sock"
        assert stack.settings["database_urls"] == [f"sqlite:///{tmp_path}/toc/toc.sqlite3"]
        with pytest.raises(ConfigError, match="in use by another process"):
            EmbeddedStack(tmp_path / "toc", redis=False).start()
        assert stack.redis.running()
    assert not stack.redis.running()
    with EmbeddedStack(tmp_path / "toc", redis=True) as stack:
        assert stack.redis is not None
        assert call(str(stack.redis.socket), "GET", "a") == "b"
