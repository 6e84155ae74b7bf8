"""Silent processes: how long a silence lasts, and how long it may.

A process sends a heartbeat each second. One that does not is stopped, starved, or blocked by a handler that
does not release the interpreter: a call into C, a regular expression that backtracks for ever. None of its
other threads runs then, so the process cannot help itself.

The bound is not max_runtime, which is an hour. The process's tries time out after prepare_timeout in any case
and would run beside it. The try that holds the interpreter would then hold the next process as well, and so
on through the fleet. Within two thirds of the default prepare_timeout, nothing that the process holds has
timed out. So killing it makes its death a known one: the other tasks run at once and only once, and the
culprit meets the next process only when this one has a successor. After three times it runs alone, where the
same bound holds: its child sends heartbeats too.

Silence is counted in looks of the daemon, so a machine that slept, or a daemon that was stopped itself, kills
no process. A process under a debugger is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
"""How often a process sends a heartbeat."""
SILENT_SECONDS = 10.0
"""A process silent for this long loses its slots. It may come back."""
ENDED_SECONDS = 20.0
"""A process silent for this long is killed. Two thirds of the default prepare_timeout, after which others
would start the tasks that it holds. So nothing runs twice, and a task that blocks one process after the other
never blocks two at once."""
_STEP_SECONDS = 2.0
"""The most that one look adds. A listener that looks less often was stopped itself, perhaps with all."""


def patience(max_runtime: float) -> float:
    """How many seconds a process may be silent whose handlers may run for ``max_runtime`` seconds."""
    return min(ENDED_SECONDS, max_runtime + SILENT_SECONDS)


class Silence:
    """How long a process has been silent, counted while the listener was awake."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._looked = monotonic()
        self.seconds = 0.0
        """Seconds of silence as of the last look."""

    def broken(self) -> None:
        """Record a message."""
        self._looked = self._monotonic()
        self.seconds = 0.0

    def look(self) -> float:
        """The seconds of silence until now. Call at least once a second."""
        now = self._monotonic()
        self.seconds += min(now - self._looked, _STEP_SECONDS)
        self._looked = now
        return self.seconds
