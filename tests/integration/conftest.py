"""A system that several files here run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.system import System

from toc.dev.local.servers import MariaDB, RedisServer, ZooKeeper


@pytest.fixture
def hosts(
    tmp_path: Path,
    clean_redis: RedisServer,
    mariadb: MariaDB,
    database_prefix: str,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
) -> Iterator[System]:
    """Several hosts and little else: one Redis, two databases with eight tables, ZooKeeper."""
    one = System(
        tmp_path,
        database_urls=[mariadb.url],
        databases=2,
        tables=8,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
    )
    yield one
    one.stop()
