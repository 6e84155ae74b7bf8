"""Injected time. Instants are whole milliseconds since 1970 UTC; durations use the monotonic clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import monotonic, sleep, time, time_ns

MAX_CLOCK_SKEW_MS = 100
"""Milliseconds the clocks of servers and workers may differ before toc stops trusting one of them."""

SET_BACK_MS = 60_000
"""A clock that goes back by more than this (ms) was wrong before, if only for a moment. What never repeats
does not follow a clock that goes back by less."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_KEYS = 1000
_MILLISECOND = timedelta(milliseconds=1)


class Clock:
    """The machine's clocks. Tests pass a subclass that they can set.

    The functions are bound at import: a handler that patches the module ``time``, as tests do, and does not
    undo it must not stop the clock of other handlers.
    """

    step_ms = 1
    """How much later than ``now_ms`` it may be."""

    def now_ms(self) -> int:
        """Wall clock in milliseconds since 1970 UTC, rounded down (so it never runs ahead)."""
        return time_ns() // 1_000_000

    time: Callable[[], float] = staticmethod(time)
    """Wall clock in seconds, unrounded. Use it only to compute how long to sleep until an instant."""
    monotonic: Callable[[], float] = staticmethod(monotonic)
    """Seconds on a clock that is never set back. Only differences are meaningful. Each task reads it a dozen
    times, so no Python is in between."""
    wait: Callable[[float], None] = staticmethod(sleep)
    """Let these seconds go by."""


class RateLimit:
    """Says yes once per ``seconds``, for each key: for events that would be logged over and over."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._said: dict[object, float] = {}

    def __call__(self, key: object = None) -> bool:
        """Whether it is time again."""
        now = self._clock.monotonic()
        if now - self._said.get(key, float("-inf")) < self._seconds:
            return False
        if len(self._said) >= _MAX_KEYS:
            self._said.clear()
        self._said[key] = now
        return True


def to_ms(instant: datetime) -> int:
    """Milliseconds since 1970 UTC of an aware datetime, rounded *up*: a deadline is never early."""
    return -((_EPOCH - instant) // _MILLISECOND)


def from_ms(milliseconds: int) -> datetime:
    """Aware UTC datetime of an instant in milliseconds."""
    return _EPOCH + timedelta(0, 0, milliseconds * 1000)  # positional: a keyword would double the cost
