"""Systems with a gateway in front of them."""

from collections.abc import Iterator

import pytest
from harness.gateway import Gateway
from harness.system import NewSystem, System

from toc.dialects.process import DIALECTS


@pytest.fixture
def system(new_system: NewSystem, database_prefix: str) -> System:
    """One Redis, two databases with eight tables, the topics of the test application."""
    one = new_system(namespace=database_prefix.rstrip("_"))
    one.create_topics()
    return one


@pytest.fixture(scope="module")
def shared(module_system: NewSystem) -> Iterator[Gateway]:
    """A gateway for all tests of a module: none may harm it."""
    system = module_system()
    system.create_topics()
    with Gateway(system) as one:
        for role in ("produce", "consume", "read", "values", "operate"):
            one.make_token(role, role)
        one.make_token("sync-only", "admin", topics=("test.sync",))
        yield one


@pytest.fixture(scope="module")
def dialects(module_system: NewSystem) -> Iterator[Gateway]:
    """A gateway with every dialect, for all tests of a module: none may harm it."""

    system = module_system()
    system.create_topics()
    with Gateway(system, *(word for name in DIALECTS for word in (f"--{name}", "127.0.0.1:0"))) as one:
        yield one
