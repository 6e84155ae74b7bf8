"""Pulls on an event loop that a test and its fixtures share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from toc import TimeoutCenter
from toc.pull.pulls import Pulls

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
"""Runs the steps of a test on the loop."""


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
