"""Systems on real servers: one Redis or a Redis Cluster, MariaDB with eight databases, ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.system import System

from toc.local.servers import MariaDB, RedisCluster, RedisServer, ZooKeeper


@pytest.fixture
def system(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str
) -> Iterator[System]:
    """One host: one Redis, two databases with eight tables, the local coordinator."""
    one = System(
        tmp_path,
        database_urls=[mariadb.url],
        databases=2,
        tables=8,
        database_prefix=database_prefix,
        redis_url=clean_redis.url,
    )
    yield one
    one.stop()


@pytest.fixture
def cluster(
    tmp_path: Path,
    clean_cluster: RedisCluster,
    mariadb: MariaDB,
    database_prefix: str,
    zookeeper: ZooKeeper,
    zookeeper_root: str,
) -> Iterator[System]:
    """Several hosts: a Redis Cluster, eight databases with 64 tables, ZooKeeper."""
    one = System(
        tmp_path,
        database_urls=[mariadb.url],
        databases=8,
        tables=64,
        database_prefix=database_prefix,
        redis_url=clean_cluster.url,
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
    )
    yield one
    one.stop()
