"""Pulls on an event loop that a test and its fixtures share."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from toc import TimeoutCenter
from toc.pull.pulls import Pulls


@contextmanager
def opened_pulls(runner: asyncio.Runner, center: TimeoutCenter) -> Iterator[Pulls]:
    """Pulls on the runner's loop."""

    async def made() -> Pulls:
        return Pulls(center, center.store.identity.lease_secret())

    pulls = runner.run(made())
    try:
        yield pulls
    finally:
        runner.run(pulls.stop())
