"""A browser, and a gateway whose console has something to show on every page."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from harness.chromium import Visitor, chromium
from harness.gateway import Gateway
from harness.system import NewSystem
from playwright.sync_api import Browser

from toc.store.records.targets import new_key

Visit = Callable[..., Visitor]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests of a module."""
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def gateway(module_system: NewSystem) -> Iterator[Gateway]:
    """A gateway with a token for each role, and a worker beside it."""
    system = module_system(secret_key=[new_key()], webhook_allow=["http://127.0.0.1:9"])
    system.create_topics(retries=2, backoff_base=0.05)
    with Gateway(system) as one:
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
