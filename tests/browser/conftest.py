"""A browser, and a gateway whose console has something to show on every page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness.chromium import Visitor, chromium
from harness.gateway import Gateway
from harness.system import small_system
from playwright.sync_api import Browser

from benchmarks.local import MariaDB, RedisServer
from toc.store.records.targets import new_key

Visit = Callable[..., Visitor]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests of a module."""
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def gateway(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    mariadb: MariaDB,
    module_database_prefix: str,
) -> Iterator[Gateway]:
    """A gateway with a token for each role, and a worker beside it."""
    prefix = module_database_prefix
    directory = tmp_path_factory.mktemp("console")
    system = small_system(
        directory, redis_server, mariadb, prefix, namespace=prefix.rstrip("_"), secret_key=[new_key()],
        webhook_allow=["http://127.0.0.1:9"],
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(system.stop)
        system.create_topics(retries=2, backoff_base=0.05)
        one = Gateway(system)
        stack.callback(one.stop)
        for role in ("produce", "consume", "read", "operate"):
            one.make_token(role, role)
        system.start(processes=1)
        yield one


@pytest.fixture
def visit(browser: Browser, gateway: Gateway) -> Iterator[Visit]:
    """Opens a browser's profile of this test's own: ``visit("read", color_scheme="dark")``."""
    with ExitStack() as stack:

        def start(token: str | None = "all", **options: Any) -> Visitor:
            one = Visitor(browser, gateway, token, **options)
            stack.callback(one.close)
            return one

        yield start
