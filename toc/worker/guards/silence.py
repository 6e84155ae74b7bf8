"""Silent processes: how long a silence lasts, and how long it may last.

A process sends its daemon a beat each second. A silent process is stopped, starved, or blocked by a handler
that does not release the interpreter: in a call into C, or in a regular expression that backtracks endlessly.
None of its other threads runs then, so the process cannot help itself.

The bound is not max_runtime, by default an hour. The entries that the process holds would time out after
prepare_timeout and run elsewhere too. The task that holds the interpreter would then block the next process,
and so on through all hosts. Within half the default prepare_timeout, no entry of the process has timed out.
So killing it then makes its death a known one: its slots go to others, the other tasks run at once and only
once, and the culprit blocks one process at a time. After three times it runs alone, within the same bound.

Silence is counted in looks of the daemon, so that no process is killed because its machine slept or the
daemon itself was stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
"""How often a process sends a beat."""
SILENT_SECONDS = 15.0
"""A process that is silent for this long is killed: half the default prepare_timeout."""
_STEP_SECONDS = 2.0
"""The most that one look adds. A listener that looks less often was stopped itself, perhaps with its
machine."""


class Silence:
    """How long a process has been silent, counted while its listener was awake."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = monotonic()
        self.seconds = 0.0
        """Seconds of silence as of the last look."""

    def broken(self) -> None:
        """Record that a message came."""
        self._looked = self._monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """Return the seconds of silence until now. Call it at least once a second."""
        now = self._monotonic()
        self.seconds += min(now - self._looked, _STEP_SECONDS)
        self._looked = now
        return self.seconds
