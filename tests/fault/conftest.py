"""Fixtures of the fault tests, and the table that they end with."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import Launch
from fault.kit import servers, table
from fault.kit.doors import create_pulled
from fault.kit.proxy import Proxy
from fault.kit.reader import Reader
from fault.kit.table import Line
from harness.gateway import Gateway
from harness.machine import Machine
from harness.programs import missing
from harness.system import System

from benchmarks.local import MariaDB, RedisServer

_PASSED = pytest.StashKey[bool]()
Servers = tuple[MariaDB, MariaDB]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


def pytest_sessionfinish() -> None:
    servers.forget_clocks()


class Case:
    """What a fault test begins with: lines of the table, systems, and servers and proxies of its own."""

    def __init__(self, request: pytest.FixtureRequest, path: Path, machine: Machine, launch: Launch) -> None:
        self.path = path
        self.launch = launch
        self._request, self._machine = request, machine
        self._lines: list[Line] = []
        self._systems: list[System] = []
        self._proxies: list[Proxy] = []
        self._began = time.monotonic()

    @property
    def redis(self) -> RedisServer:
        """The shared Redis, empty when the test begins."""
        found: RedisServer = self._shared("clean_redis")
        return found

    @property
    def mariadb(self) -> MariaDB:
        """The shared MariaDB."""
        found: MariaDB = self._shared("mariadb")
        return found

    @property
    def prefix(self) -> str:
        """That of the names of the test's databases."""
        found: str = self._shared("database_prefix")
        return found

    def _shared(self, fixture: str) -> Any:
        return self._request.getfixturevalue(fixture)

    def verdict(self, fault: int, name: str, variant: str = "") -> Line:
        """A line of the table: it says "held" once the test has passed and named its proof."""
        self._lines.append(Line(fault, name, variant, machine=self._machine))
        return self._lines[-1]

    def begin(self, fault: int, name: str, variant: str = "", **of_system: Any) -> tuple[Line, System]:
        """A line of the table and a system: how most tests begin."""
        return self.verdict(fault, name, variant), self.build(**of_system)

    def relay(self, port: int, **options: Any) -> Proxy:
        """A proxy in front of a server."""
        self._proxies.append(Proxy(port, **options))
        return self._proxies[-1]

    def build(
        self,
        redis_url: str | None = None,
        *,
        hosts: bool = False,
        index: bool = True,
        slots: int = 8,
        **settings: object,
    ) -> System:
        """A system with the topics of the test app, on the shared Redis and MariaDB unless told otherwise.

        ``hosts``: of several hosts, with the shared ZooKeeper. ``index``: or on the database alone.
        ``topic_...`` settings are policies of the topics: ``topic_prepare_timeout=3``.
        """
        directory = self.path / f"system{len(self._systems)}"
        directory.mkdir()
        if hosts:
            shared = {"zookeeper": self._shared("zookeeper").url, "cluster": self._shared("zookeeper_root")}
            settings = {**shared, **settings}
        policies = {
            name.removeprefix("topic_"): settings.pop(name)
            for name in list(settings)
            if name.startswith("topic_")
        }
        given = {
            **({"redis_url": redis_url or self.redis.url} if index else {}),
            "databases": 2,
            "tables": 8,
            "database_prefix": self.prefix,
            "database_urls": [self.mariadb.url],
            **settings,
        }
        self._systems.append(System(directory, **given))
        self._systems[-1].create_topics(slots=slots, **{"backoff_base": 0.2, **policies})
        return self._systems[-1]

    def end(self) -> None:
        """Register the lines, end the systems, which takes daemons a moment, and the proxies."""
        node = self._request.node
        passed = node.stash.get(_PASSED, False)
        for line in self._lines:
            line.machine = None
            line.seconds = round(time.monotonic() - self._began, 1)
            if passed:
                line.verdict = "held" if line.proof else "unproven"
            node.user_properties.append((table.PROPERTY, asdict(line)))  # to the end of the run
        with ThreadPoolExecutor() as pool:
            list(pool.map(System.stop, self._systems))
        for proxy in self._proxies:
            proxy.close()
        proven = all(line.proof for line in self._lines)
        assert proven or not passed, "a line without a proof that the fault bit"


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path, machine: Machine, launch: Launch) -> Iterator[Case]:
    one = Case(request, tmp_path, machine, launch)
    yield one
    one.end()


@pytest.fixture
def resumed(case: Case) -> Iterator[MariaDB]:
    """The shared MariaDB, which goes on after the test whatever happens, before its databases are dropped."""
    assert case.prefix
    try:
        yield case.mariadb
    finally:
        case.mariadb.resume()


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


@pytest.fixture(scope="module")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two servers of the task table."""
    place = tmp_path_factory.mktemp("servers")
    with (
        MariaDB(place / "first", buffer_pool="64M") as first,
        MariaDB(place / "second", buffer_pool="64M") as second,
    ):
        yield first, second


@pytest.fixture(name="servers")
def servers_that_go_on(two_servers: Servers) -> Iterator[Servers]:
    """They serve, and go on after the test whatever happens."""
    yield two_servers
    for server in two_servers:
        server.resume()
        server.start()  # does nothing when it runs


@pytest.fixture
def pulled(case: Case) -> System:
    """Several gateways, with topics that are pulled, and nobody else."""
    system = case.build(hosts=True, slots=1)
    create_pulled(system)
    return system


@pytest.fixture
def gateways(pulled: System) -> Iterator[tuple[Gateway, Gateway]]:
    """Two on hosts of their own, which end in good order."""
    here = Gateway(pulled)
    there = Gateway(pulled, host="away", beside=here)
    yield here, there
    assert [there.stop(), here.stop()] == [0, 0]
