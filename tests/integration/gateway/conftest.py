"""Systems with a gateway in front of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.gateway import Gateway
from harness.system import System, small_system

from benchmarks.local import MariaDB, RedisServer
from toc.dialects.process import DIALECTS


def _system(directory: Path, redis: RedisServer, mariadb: MariaDB, prefix: str) -> Iterator[System]:
    with small_system(directory, redis, mariadb, prefix, namespace=prefix.rstrip("_")) as one:
        one.create_topics()
        yield one


@pytest.fixture
def system(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str
) -> Iterator[System]:
    """One Redis, two databases with eight tables, the topics of the test application."""
    yield from _system(tmp_path, clean_redis, mariadb, database_prefix)


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    mariadb: MariaDB,
    module_database_prefix: str,
) -> Iterator[Gateway]:
    """A gateway for all tests of a module: none may harm it."""
    directory = tmp_path_factory.mktemp("gateway")
    for system in _system(directory, redis_server, mariadb, module_database_prefix):
        with Gateway(system) as one:
            for role in ("produce", "consume", "read", "values", "operate"):
                one.make_token(role, role)
            one.make_token("sync-only", "admin", topics=("test.sync",))
            yield one


@pytest.fixture(scope="module")
def dialects(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    mariadb: MariaDB,
    module_database_prefix: str,
) -> Iterator[Gateway]:
    """A gateway with every dialect, for all tests of a module: none may harm it."""
    directory = tmp_path_factory.mktemp("dialects")
    for system in _system(directory, redis_server, mariadb, module_database_prefix):
        with Gateway(system, *(word for name in DIALECTS for word in (f"--{name}", "127.0.0.1:0"))) as one:
            yield one
