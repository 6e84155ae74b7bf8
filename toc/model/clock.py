"""Injected time, and durations as people write them.

Instants are whole milliseconds since 1970 UTC; durations use the monotonic clock.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from math import isfinite, isnan, nan
from time import monotonic, sleep, time, time_ns

from toc.model.errors import InvalidDelay, shown

MAX_CLOCK_SKEW_MS = 100
"""Milliseconds the clocks of servers and workers may differ before toc stops trusting one of them."""

SET_BACK_MS = 60_000
"""A clock that goes back by more than this (ms) was wrong before, if only for a moment. What never repeats
does not follow a clock that goes back by less."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_KEYS = 1000
MILLISECOND = timedelta(milliseconds=1)


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

    def __init__(self, clock: Clock, seconds: float = 60.0) -> None:
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
    return -((_EPOCH - instant) // MILLISECOND)


def from_ms(milliseconds: int) -> datetime:
    """Aware UTC datetime of an instant in milliseconds."""
    return _EPOCH + timedelta(0, 0, milliseconds * 1000)  # positional: a keyword would double the cost


Duration = timedelta | float | str
"""A timedelta, seconds, or a text such as ``"30m"`` or ``"7d"``."""
_DURATION = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(ms|[smhdwSHDW])?")  # M might be a month
_WRITE = "write seconds, or one number and one unit: ms, s, m, h, d or w"
_UNITS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def parse_duration(text: str) -> float:
    """Return seconds: ``90``, ``0.5``, ``500ms``, ``30m``, ``12h``, ``7d``, ``2w``. Raises InvalidDelay."""
    match = _DURATION.fullmatch(text.strip())
    try:
        seconds = float(match[1]) * _UNITS[match[2] and match[2].lower()] if match else nan
    except ValueError:  # such as 1.2.3
        seconds = nan
    if isnan(seconds):
        raise InvalidDelay(f"{shown(text)} is not a duration; {_WRITE}")
    if not isfinite(seconds) or seconds < 0:
        raise InvalidDelay(f"{shown(text)} is not a duration: it must be finite and not negative")
    return seconds


def seconds_of(duration: Duration) -> float:
    """Return the seconds of a duration. Raises InvalidDelay."""
    if isinstance(duration, str):
        return parse_duration(duration)
    if isinstance(duration, timedelta):
        duration = duration.total_seconds()
    if isinstance(duration, bool) or not isinstance(duration, (int, float)) or not isfinite(duration):
        raise InvalidDelay(f"{shown(duration)} is not a duration; give a timedelta, seconds, or 30m, 12h, 7d")
    if duration < 0:
        raise InvalidDelay(f"{shown(duration)} is not a duration: it must not be negative")
    return duration


def named_seconds(name: str, duration: Duration) -> float:
    """Return the seconds of the option ``name``. Raises InvalidDelay, which names it."""
    try:
        return seconds_of(duration)
    except (InvalidDelay, OverflowError) as exc:
        raise InvalidDelay(f"{name}: {exc}", name) from exc


def span(value: float) -> str:
    """Return seconds as a text for people: 12 ms, 4.5 s, 3 min 20 s, 5 h 10 min, 3 d 4 h."""
    if not value:
        return "0 s"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    for size, unit, part, below in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= size:
            whole, rest = divmod(int(value), size)
            return f"{whole} {unit}" + (f" {rest // part} {below}" if rest // part else "")
    return f"{value:.3g} s"
