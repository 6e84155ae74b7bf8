"""Durations as people write them."""

from __future__ import annotations

import re
from datetime import timedelta
from math import isfinite, isnan, nan

from toc.model.errors import InvalidDelay, shown

Duration = timedelta | float | str
"""A timedelta, seconds, or a text such as ``"30m"`` or ``"7d"``."""
_DURATION = re.compile(r"([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)\s*(ms|s|m|h|d|w)?", re.IGNORECASE)
_UNITS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def parse_duration(text: str) -> float:
    """Return seconds: ``90``, ``0.5``, ``500ms``, ``30m``, ``12h``, ``7d``, ``2w``. Raises InvalidDelay."""
    match = _DURATION.fullmatch(text.strip())
    try:
        seconds = float(match[1]) * _UNITS[match[2] and match[2].lower()] if match else nan
    except ValueError:  # such as 1.2.3
        seconds = nan
    if isnan(seconds):
        raise InvalidDelay(f"{shown(text)} is not a duration; write seconds, or 500ms, 30m, 12h, 7d")
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
