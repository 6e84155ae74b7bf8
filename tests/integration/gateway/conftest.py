"""A system with a gateway in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.gateway import Gateway
from harness.system import System

from toc.dev.local.servers import MariaDB, RedisServer


@pytest.fixture
def system(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str
) -> Iterator[System]:
    """One Redis, two databases with eight tables, the topics of the test application."""
    one = System(
        tmp_path,
        database_urls=[mariadb.url],
        databases=2,
        tables=8,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
    )
    one.create_topics()
    one.center.catalog.refresh()
    yield one
    one.stop()


@pytest.fixture
def gateway(system: System) -> Iterator[Gateway]:
    """A gateway in front of it."""
    one = Gateway(system)
    yield one
    one.stop()
