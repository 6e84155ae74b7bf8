"""Waiting for what must come about, on a machine that may stand still for seconds."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from toc.model.errors import NotInFuture

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds that a condition is waited for at the least: a busy machine stands still for seconds, and patience
costs nothing where all is well."""
MIN_PAUSE, MAX_PAUSE = 0.01, 0.5
MAX_LATE = 0.1
"""Seconds by which patience alone makes a look come later."""


def pause(asked: float, waited: float) -> None:
    """Sleep until the next look. ``asked``: what the last one took; ``waited``: how long this has gone on.

    Whoever looks leaves most of the processor to those who are to bring it about. What has taken long is seen
    a twentieth later: a look each hundredth of a second, at a server, is a twentieth of a processor.
    """
    time.sleep(min(max(MIN_PAUSE, 6 * asked, min(waited / 20, MAX_LATE)), MAX_PAUSE))


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Poll ``condition``; return whether it held in time.

    ``seconds`` is what it takes at the most where nothing else runs; a busy machine gets more. A test of how
    long something takes measures it.
    """
    start = time.monotonic()
    end = start + max(seconds, PATIENCE)
    while True:
        began = time.monotonic()
        if condition():
            return True
        now = time.monotonic()
        if now > end:
            return False
        pause(now - began, now - start)


def in_a_moment(set_deadline: Callable[[datetime], T], seconds: float = 0.3) -> T:
    """Call ``set_deadline`` with an instant so many seconds ahead, and return what it gave.

    It is called again with a later instant if the machine stood still until that had passed.
    """
    while True:
        try:
            return set_deadline(datetime.now(UTC) + timedelta(seconds=seconds))
        except NotInFuture:
            continue
