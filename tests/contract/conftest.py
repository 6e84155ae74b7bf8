"""Systems for the tests of the contract."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from contract.kit_system import KitContract
from contract.looped import looped
from contract.system import Contract
from harness import secured

from benchmarks.local import MariaDB


@pytest.fixture(scope="module")
def contract(
    tmp_path_factory: pytest.TempPathFactory,
    server_directory: Path,
    mariadb: MariaDB,
    module_database_prefix: str,
) -> Iterator[Contract]:
    """One system for the tests of a module, on a Redis of its own, without a worker."""
    with secured.redis_server(server_directory / f"contract-{secrets.token_hex(3)}") as own:
        one = Contract(tmp_path_factory.mktemp("contract"), own, mariadb, module_database_prefix)
        try:
            one.create_topics()
            yield one
        finally:
            one.stop()


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDB, module_database_prefix: str
) -> Iterator[Contract]:
    """One without an index, with one daemon that runs every topic."""
    prefix = module_database_prefix.replace("toc_", "toc_alone_")
    one = Contract(tmp_path_factory.mktemp("alone"), None, mariadb, prefix)
    try:
        one.create_topics()
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def awaited(
    tmp_path_factory: pytest.TempPathFactory,
    server_directory: Path,
    mariadb: MariaDB,
    module_database_prefix: str,
) -> Iterator[Contract]:
    """One with an index and a daemon that runs every topic, for an asynchronous client."""
    prefix = module_database_prefix.replace("toc_", "toc_awaited_")
    with secured.redis_server(server_directory / f"awaited-{secrets.token_hex(3)}") as own:
        one = Contract(tmp_path_factory.mktemp("awaited"), own, mariadb, prefix)
        try:
            one.create_topics()
            one.start()
            yield one
        finally:
            one.stop()


RUNGS = {"with an index": "running", "the database alone": "alone"}
"""The rungs of the ladder on one host, and the fixture of each."""
KIT = "the kit for tests"
ASYNC = "an asynchronous client"


@pytest.fixture(params=RUNGS)
def either(request: pytest.FixtureRequest) -> Contract:
    """A system with one daemon, on each rung."""
    found: Contract = request.getfixturevalue(RUNGS[request.param])
    return found


@pytest.fixture(params=[*RUNGS, ASYNC, KIT])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Contract]:
    """The same, one with an asynchronous client, and the kit for tests of applications."""
    if request.param == ASYNC:
        with looped(request.getfixturevalue("awaited")) as system:
            yield system
        return
    if request.param != KIT:
        yield request.getfixturevalue(RUNGS[request.param])
        return
    kit = KitContract(tmp_path)
    try:
        kit.create_topics()
        kit.start()
        yield cast(Contract, kit)
    finally:
        kit.stop()


@pytest.fixture(scope="module")
def running(contract: Contract) -> Contract:
    """The same with one daemon that runs every topic."""
    contract.start()
    return contract
