"""Processes that say nothing: how long that lasts, and how long it may.

A process gives a sign of life each second. One that does not is stopped, starved, or held by a handler in
code that does not let go of the interpreter: a call into C, a regular expression that backtracks for ever.
None of its other threads runs then, so nobody in it can help.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
"""How often a process gives a sign of life."""
SILENT_SECONDS = 10.0
"""A process that has been silent for so long has no slots any more; it may come back."""
ENDED_SECONDS = 20.0
"""One that has been silent for so long is ended. Two thirds of the prepare_timeout that topics have by
default: after that others would begin what it holds. So nothing runs twice, and a task that holds one process
after the other does not hold two at once."""
_STEP_SECONDS = 2.0
"""The most that one look adds: who looks no oftener stood still itself, perhaps with all others."""


def patience(max_runtime: float) -> float:
    """For how many seconds a process may be silent whose handlers may run for ``max_runtime``."""
    return min(ENDED_SECONDS, max_runtime + SILENT_SECONDS)


class Silence:
    """For how long a process has said nothing, in time that the listener has been awake for."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = monotonic()
        self.seconds = 0.0
        """As of the last look."""

    def broken(self) -> None:
        """It has said something."""
        self._looked = self._monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """The seconds until now. To be called each second or oftener."""
        now = self._monotonic()
        self.seconds += min(now - self._looked, _STEP_SECONDS)
        self._looked = now
        return self.seconds
