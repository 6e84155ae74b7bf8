"""What was found when a server, or the whole, was looked at."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """Nothing to do, and good to know."""
    WARN = "warn"
    """It works, and an operator should see to it."""
    REFUSE = "wrong"
    """Tasks would be late, or lost from the index or for good: a daemon does not start on such a server."""


class Finding(NamedTuple):
    """One fact about one server or part, and what to do about it ('' where there is nothing to do)."""

    level: Level
    server: str
    what: str
    do: str


def clock_finding(server: str, ahead_ms: float, unsure_ms: float, limit_ms: float) -> Finding:
    """How far a server's clock is ahead of this machine's, known to within ``unsure_ms``."""
    off = abs(ahead_ms) - unsure_ms > limit_ms
    side = "ahead of" if ahead_ms >= 0 else "behind"
    what = f"its clock is {abs(ahead_ms):.0f} ms {side} this machine's (+/- {unsure_ms:.0f})"
    if not off:
        return Finding(Level.OK, server, what, "")
    return Finding(Level.WARN, server, what, "let NTP keep the clocks of all hosts: tasks are late by it")
