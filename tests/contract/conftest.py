"""Systems for the tests of the contract."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, cast

import pytest
from contract.kit_system import KitContract
from contract.looped import looped
from contract.system import Contract
from harness import secured

from benchmarks.local import MariaDB, RedisServer, ZooKeeper


class NewContract(Protocol):
    """Makes a system with all topics, and stops it at the end of the module."""

    def __call__(self, name: str, redis: RedisServer | None, **settings: object) -> Contract: ...


@pytest.fixture(scope="module")
def new_contract(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDB, module_database_prefix: str
) -> Iterator[NewContract]:
    """Systems for the tests of a module, each of its own databases."""
    with ExitStack() as ends:

        def make(name: str, redis: RedisServer | None, **settings: object) -> Contract:
            directory, prefix = tmp_path_factory.mktemp(name), f"{module_database_prefix}{name}_"
            one = Contract(directory, redis, mariadb, prefix, **settings)
            ends.callback(one.stop)
            one.create_topics()
            return one

        yield make


@pytest.fixture(scope="module")
def own_redis(server_directory: Path) -> Iterator[RedisServer]:
    """A Redis for the tests of a module."""
    with secured.redis_server(server_directory / f"contract-{secrets.token_hex(3)}") as own:
        yield own


@pytest.fixture(scope="module")
def contract(new_contract: NewContract, own_redis: RedisServer) -> Contract:
    """One system for the tests of a module, with an index, without a worker."""
    return new_contract("index", own_redis)


@pytest.fixture(scope="module")
def alone(new_contract: NewContract) -> Contract:
    """One without an index, without a worker."""
    return new_contract("alone", None)


@pytest.fixture(scope="module")
def running(contract: Contract) -> Contract:
    """The one with an index, with one daemon that runs every topic."""
    contract.start()
    return contract


@pytest.fixture(scope="module")
def running_alone(alone: Contract) -> Contract:
    """The one without an index, with one daemon."""
    alone.start()
    return alone


@pytest.fixture(scope="module")
def spread(new_contract: NewContract, own_redis: RedisServer, zookeeper: ZooKeeper) -> Contract:
    """One with an index, whose workers are spread by ZooKeeper, without one."""
    cluster = f"test-{secrets.token_hex(4)}"
    return new_contract("spread", own_redis, zookeeper=zookeeper.url, cluster=cluster, namespace="spread")


@pytest.fixture(scope="module")
def running_spread(spread: Contract) -> Contract:
    """The same with one daemon."""
    spread.start()
    return spread


@pytest.fixture(scope="module")
def awaited(new_contract: NewContract, own_redis: RedisServer) -> Contract:
    """One with an index and a daemon, for an asynchronous client."""
    one = new_contract("awaited", own_redis, namespace="awaited")
    one.start()
    return one


IDLE = {"with an index": "contract", "the database alone": "alone", "with ZooKeeper": "spread"}
"""By rung of the ladder, the fixture of a system without a worker."""
RUNNING = {
    "with an index": "running",
    "the database alone": "running_alone",
    "with ZooKeeper": "running_spread",
}
"""And that of one with a daemon."""
RUNGS = [*list(IDLE)[:2], pytest.param("with ZooKeeper", marks=pytest.mark.slow)]
"""ZooKeeper is known to workers alone, so most tests meet it with the slow ones only."""
ASYNC = "an asynchronous client"
KIT = "the kit for tests"


@pytest.fixture(params=RUNGS)
def either(request: pytest.FixtureRequest) -> Contract:
    """A system without a worker, of each rung."""
    found: Contract = request.getfixturevalue(IDLE[request.param])
    return found


@pytest.fixture(params=[*RUNGS, KIT])
def idle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Contract]:
    """The same, and the kit for tests of applications, whose time stands still."""
    yield from _system(request, tmp_path, IDLE)


@pytest.fixture(params=[*RUNGS, KIT])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Contract]:
    """A system of each rung with one daemon, and the kit, whose time passes."""
    yield from _running(request, tmp_path)


@pytest.fixture(params=[*RUNGS, ASYNC, KIT])
def every(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Contract]:
    """These, and one with an asynchronous client: for what callers are told."""
    if request.param == ASYNC:
        with looped(request.getfixturevalue("awaited")) as system:
            yield system
    else:
        yield from _running(request, tmp_path)


def _running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Contract]:
    for one in _system(request, tmp_path, RUNNING):
        if request.param == KIT:
            one.start()
        yield one


def _system(request: pytest.FixtureRequest, tmp_path: Path, rungs: Mapping[str, str]) -> Iterator[Contract]:
    if request.param != KIT:
        yield request.getfixturevalue(rungs[request.param])
        return
    kit = KitContract(tmp_path)
    try:
        kit.create_topics()
        yield cast(Contract, kit)
    finally:
        kit.stop()
