"""Fixtures of the fault tests, and the table that they end with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pytest
from fault.kit import servers, table
from fault.kit.proxy import Proxy
from fault.kit.reader import Reader
from fault.kit.table import Line
from harness.machine import Machine
from harness.programs import missing
from harness.system import System

from benchmarks.local import MariaDB

_PASSED = pytest.StashKey[bool]()


class Verdict(Protocol):
    """Registers the line of a test: ``line = verdict(3, "failover loses adds")``."""

    def __call__(self, fault: int, name: str, variant: str = "") -> Line: ...


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def verdict(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Verdict]:
    """Registers lines of the table; they say "held" once the test has passed and named its proof."""
    lines: list[Line] = []
    began = time.monotonic()

    def register(fault: int, name: str, variant: str = "") -> Line:
        line = Line(fault, name, variant, machine=machine)
        lines.append(line)
        return line

    yield register
    for line in lines:
        line.machine = None
        line.seconds = round(time.monotonic() - began, 1)
        if request.node.stash.get(_PASSED, False):
            line.verdict = "held" if line.proof else "unproven"
        request.node.user_properties.append((table.PROPERTY, asdict(line)))  # to the end of the run
    passed = request.node.stash.get(_PASSED, False)
    assert not passed or all(line.proof for line in lines), "a line without a proof that the fault bit"


@pytest.fixture
def relay() -> Iterator[Callable[[int], Proxy]]:
    """Puts proxies in front of servers: ``relay(redis.port)``."""
    proxies: list[Proxy] = []

    def start(port: int, **options: Any) -> Proxy:
        proxies.append(Proxy(port, **options))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


class Build(Protocol):
    """Makes a system, with the topics of the test app, over servers that run already."""

    def __call__(
        self,
        redis_url: str | None = None,
        *,
        hosts: bool = False,
        index: bool = True,
        slots: int = 8,
        **settings: object,
    ) -> System: ...


@pytest.fixture
def build(
    request: pytest.FixtureRequest, tmp_path: Path, mariadb: MariaDB, database_prefix: str
) -> Iterator[Build]:
    """Makes systems: ``build()``, on the shared Redis and MariaDB unless told otherwise.

    ``hosts``: of several hosts, with the shared ZooKeeper. ``index``: or on the database alone.
    ``topic_...`` settings are policies of the topics: ``topic_prepare_timeout=3``.
    """
    systems: list[System] = []

    def make(
        redis_url: str | None = None,
        *,
        hosts: bool = False,
        index: bool = True,
        slots: int = 8,
        **settings: object,
    ) -> System:
        directory = tmp_path / f"system{len(systems)}"
        directory.mkdir()
        if hosts:
            shared = {"zookeeper": "zookeeper", "cluster": "zookeeper_root"}
            found = {name: request.getfixturevalue(fixture) for name, fixture in shared.items()}
            settings = {**found, "zookeeper": found["zookeeper"].url, **settings}
        policies = {
            name.removeprefix("topic_"): settings.pop(name)
            for name in list(settings)
            if name.startswith("topic_")
        }
        given = {
            **({"redis_url": redis_url or request.getfixturevalue("clean_redis").url} if index else {}),
            "databases": 2,
            "tables": 8,
            "database_prefix": database_prefix,
            "database_urls": [mariadb.url],
            **settings,
        }
        system = System(directory, **given)
        systems.append(system)
        system.create_topics(slots=slots, **{"backoff_base": 0.2, **policies})
        return system

    yield make
    with ThreadPoolExecutor() as pool:  # daemons take a moment to leave
        list(pool.map(System.stop, systems))


@pytest.fixture
def resumed(mariadb: MariaDB) -> Iterator[MariaDB]:
    """The shared MariaDB, which goes on after the test whatever happens."""
    try:
        yield mariadb
    finally:
        mariadb.resume()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Reads what is written to ``reader.sender``, until it is told otherwise."""
    reader = Reader(tmp_path / "read.log")
    yield reader
    reader.leave()
    os.close(reader.sender)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes directories on disks of their own: ``small_disk(64)``, in megabytes. Needs root."""
    if os.geteuid() != 0:
        missing("A FULL DISK WAS NOT TESTED: mounting a tmpfs needs root")
    with ExitStack() as stack:
        yield lambda megabytes: stack.enter_context(
            servers.small_disk(tmp_path / f"disk-{megabytes}", megabytes)
        )
