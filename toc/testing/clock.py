"""The clock of a test: it stands still until the test moves it.

Libraries that replace Python's clock, such as time_machine and freezegun, move it along: while what they show
is not the machine's time, this clock shows theirs, and what the test has added.
"""

import time
from datetime import datetime

from toc.model.clock import Clock, from_ms

REPLACED_MS = 500
"""If Python's clock is this far from where it should be, it was replaced (ms)."""


ROUNDING_MS = 2
"""How much later a deadline may be because it is rounded up, and the two clocks are rounded down."""


class VirtualClock(Clock):
    """Shows the time at which it was made until it is moved."""

    step_ms = 0

    def __init__(self) -> None:
        self._past = 0.0
        """Seconds that have gone by on it."""
        self.restart()

    def restart(self) -> None:
        """Show the present time."""
        self._began = _machine_ms()
        self._began_ms = time.time_ns() // 1_000_000
        self._lag: int | None = None
        """How far (ms) the machine's was ahead when it was first moved."""
        self.runs = False
        """Whether another library has replaced Python's clock, which it may let run."""
        self._added = 0
        """How far the test has moved it (ms)."""
        self._shown = self._began_ms

    def now_ms(self) -> int:
        """Milliseconds since 1970 UTC."""
        python = time.time_ns() // 1_000_000
        expected = self._began_ms + _machine_ms() - self._began
        self.runs = abs(python - expected) >= REPLACED_MS
        now = (python if self.runs else self._began_ms) + self._added
        if now > self._shown:
            self._past += (now - self._shown) / 1000
        self._shown = now
        return now

    def time(self) -> float:
        """Seconds since 1970 UTC."""
        return self.now_ms() / 1000

    def monotonic(self) -> float:
        """Seconds, never set back, also if a library sets Python's clock back."""
        self.now_ms()
        return self._past

    def wait(self, seconds: float) -> None:
        """Let these seconds go by on the monotonic clock alone."""
        self._past += seconds

    @property
    def now(self) -> datetime:
        """The time it shows, aware UTC."""
        return from_ms(self.now_ms())

    @property
    def lag_ms(self) -> int:
        """How much later (ms) a deadline may be that the application has computed from Python's clock."""
        lag = _machine_ms() - self._began + ROUNDING_MS if self._lag is None else self._lag
        return 0 if self.runs else lag

    def move_to(self, instant_ms: int) -> None:
        """Show this instant (ms), unless it is past."""
        self._lag = None if self.runs else self.lag_ms
        self._added += max(0, instant_ms - self.now_ms())


def _machine_ms() -> int:
    """A clock of the machine that nobody replaces, in milliseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
