"""Systems on real servers: one Redis or a Redis Cluster, MariaDB with eight databases, ZooKeeper."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hands import Pair
from harness.system import NewSystem, System, small_system

from benchmarks.local import MariaDB, RedisCluster, RedisServer, ZooKeeper
from toc.model.topic import Backoff


@pytest.fixture
def system(new_system: NewSystem) -> System:
    """One host: one Redis, two databases with eight tables, the local coordinator."""
    return new_system()


@pytest.fixture
def alone(tmp_path: Path, mariadb: MariaDB, database_prefix: str) -> Iterator[System]:
    """One host and its database alone: two databases with eight tables, no index."""
    with small_system(tmp_path, None, mariadb, database_prefix) as one:
        yield one


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
    more = {"zookeeper": zookeeper.url, "cluster": zookeeper_root, "databases": 8, "tables": 64}
    with small_system(tmp_path, clean_cluster, mariadb, database_prefix, **more) as one:
        yield one


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of a test and its fixtures."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def hands(system: System, clean_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two workers that own the same slot, their loops in the hands of the test."""
    system.create_topics(slots=1, retries=3, backoff=Backoff.IMMEDIATE)
    pair = Pair(system, clean_redis, monkeypatch)
    yield pair
    for one in pair:
        one.close()
