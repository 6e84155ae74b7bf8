"""Findings of a health check of a server or of the whole system."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from toc.model.clock import MAX_CLOCK_SKEW_MS


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    """No problem."""
    NOTE = "note"
    """For information; no action needed."""
    WARN = "warn"
    """It works, but an operator should act."""
    REFUSE = "wrong"
    """Tasks would be late, or lost from the index or for good: a daemon refuses to start."""


class Finding(NamedTuple):
    """One fact about one server or part. ``do`` says what to do about it ('' for nothing)."""

    level: Level
    server: str
    what: str
    do: str


def clock_finding(server: str, ahead_ms: float, unsure_ms: float) -> Finding:
    """Report how far a server's clock is ahead of this machine's, in ms, within ``unsure_ms``."""
    off = abs(ahead_ms) - unsure_ms > MAX_CLOCK_SKEW_MS
    side = "ahead of" if ahead_ms >= 0 else "behind"
    what = f"its clock is {abs(ahead_ms):.0f} ms {side} this machine's (+/- {unsure_ms:.0f})"
    if not off:
        return Finding(Level.OK, server, what, "")
    do = "keep the clocks of all hosts in step by NTP: tasks are late by the difference"
    return Finding(Level.WARN, server, what, do)


class Line(NamedTuple):
    """One line of what `toc doctor` reports: ``part`` is the subsystem, ``of`` the thing in it."""

    level: Level
    part: str
    of: str
    what: str
    do: str


def is_wrong(lines: Iterable[Line], part: str) -> bool:
    """Whether something is wrong with a part. Other errors may be due to that, and are not reported."""
    return any(line.part == part and line.level is Level.REFUSE for line in lines)


def count(number: int, what: str) -> str:
    """Return so many things for a sentence: 1 task, 2 tasks."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
