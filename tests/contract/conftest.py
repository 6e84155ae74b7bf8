"""Systems for the tests of the contract."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
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


@pytest.fixture(scope="module", params=["with an index", "the database alone"])
def either(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mariadb: MariaDB
) -> Iterator[Contract]:
    """A system with one daemon that runs every topic, on each rung of the ladder."""
    if request.param == "with an index":
        yield request.getfixturevalue("running")
        return
    prefix = request.getfixturevalue("module_database_prefix").replace("toc_", "toc_alone_")
    one = Contract(tmp_path_factory.mktemp("alone"), None, mariadb, prefix)
    try:
        one.create_topics()
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(scope="module")
def running(contract: Contract) -> Contract:
    """The same with one daemon that runs every topic."""
    contract.start()
    return contract
