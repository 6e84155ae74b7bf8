"""When a schedule fires: cron expressions in a time zone, and intervals in UTC. Instants are milliseconds.

cronsim parses and matches cron expressions. When a zone's offset changes, they behave as in
Debian's cron, as cronsim has it:

- A fixed time (neither its minutes nor its hours begin with ``*``) in a gap runs right after the gap; one
  that comes twice runs the first time.
- All others run whenever the clock on the wall matches, so they have no gap and run twice where an hour does.
  Where a gap is at midnight, or half an hour long, cronsim makes a few minutes of ``*`` too many or too few.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from cronsim.cronsim import SYMBOLIC_DAYS, SYMBOLIC_MONTHS

from toc.model.clock import from_ms, to_ms
from toc.model.errors import InvalidSchedule, shown

MAX_COUNTED = 10_000
"""Most occurrences that are counted one by one: a fifth of a second."""
MAX_CRON = 1000
"""Most characters of a cron expression."""
_STEP_OF_ONE = re.compile(r"(\w+)-(\w+)/(?=0*[1-9])\d+")
_NAMES = {
    **{name: str(number) for number, name in enumerate(SYMBOLIC_MONTHS, 1)},
    **{name: str(number or "") for number, name in enumerate(SYMBOLIC_DAYS)},
}
"""Names of months and days -> their numbers, without leading zeros."""
_NICKNAMES = {
    "@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *",
}  # fmt: skip
_FIELDS = "write minute, hour, day of month, month and day of week; six fields begin with seconds"
_LAST_YEAR = 9000
END = to_ms(datetime(_LAST_YEAR, 12, 31, 23, 59, 59, tzinfo=UTC))
"""No occurrence is later than this: Python's dates end soon after it, in the year 9999."""


class Latest(NamedTuple):
    """The last occurrences of a range, the first one of it, and how many there are in all.

    A cron expression is counted up to ``MAX_COUNTED``.
    """

    last: list[int]
    first: int | None
    total: int


@dataclass(frozen=True, slots=True)
class Interval:
    """``anchor`` + n * ``period``, in UTC and from the anchor on; both in milliseconds."""

    period: int
    anchor: int

    def after(self, instant: int) -> Iterator[int]:
        """The occurrences later than ``instant``, in order."""
        number = self._number_after(instant)
        while (found := self.anchor + number * self.period) <= END:
            yield found
            number += 1

    def latest(self, after: int, until: int, most: int) -> Latest:
        """The last ``most`` occurrences in (after, until]."""
        begin, end = self._number_after(after), self._number_after(until)
        if begin >= end:
            return Latest([], None, 0)
        numbers = range(max(begin, end - most), end)
        return Latest(
            [self.anchor + number * self.period for number in numbers],
            self.anchor + begin * self.period,
            end - begin,
        )

    def _number_after(self, instant: int) -> int:
        return max((instant - self.anchor) // self.period + 1, 0)


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression of five fields (six: with seconds first) in a time zone.

    ``skip_gaps``: a fixed time that a gap leaves out does not run that day. Raises InvalidSchedule.
    """

    expression: str
    zone: str = "UTC"
    skip_gaps: bool = False

    def __post_init__(self) -> None:
        zone_named(self.zone)
        if len(self.expression) > MAX_CRON:
            raise InvalidSchedule(f"a cron expression has at most {MAX_CRON} characters", "cron")
        try:
            next(_matching(self.expression, datetime(2024, 1, 1)))  # noqa: DTZ001 - local time
        except (CronSimError, StopIteration) as exc:
            hint = _hint(self.expression, exc)
            raise InvalidSchedule(f"cron expression {shown(self.expression)}: {hint}", "cron") from exc

    def after(self, instant: int) -> Iterator[int]:
        """The occurrences later than ``instant``, in order."""
        for found in _matching(self.expression, from_ms(instant).astimezone(zone_named(self.zone))):
            at = to_ms(found)
            if at > instant and not (self.skip_gaps and self._was_moved(found)):
                instant = at  # a time that comes twice is over when it comes again
                yield at

    def latest(self, after: int, until: int, most: int) -> Latest:
        """The last ``most`` occurrences in (after, until]."""
        found: list[int] = []
        for instant in islice(self.after(after), MAX_COUNTED + 1):
            if instant > until:
                return Latest(found[-most:], found[0] if found else None, len(found))
            found.append(instant)
        # Too many to go through them all: from the end, in ranges that double until they hold enough.
        span = most * 60_000
        while True:
            last: list[int] = []
            for instant in self.after(max(after, until - span)):
                if instant > until:
                    break
                last.append(instant)
            if len(last) >= most or until - span <= after:
                return Latest(last[-most:], found[0], MAX_COUNTED)
            span *= 2

    def _was_moved(self, found: datetime) -> bool:
        """Whether this occurrence is that of a fixed time in a gap: its own local time does not match."""
        local = found.replace(tzinfo=None, fold=0)
        return next(_matching(self.expression, local - timedelta(seconds=1))) != local


Calendar = Interval | Cron
"""The instants (ms) of a series, until ``END`` or some hours longer."""


def _matching(expression: str, begin: datetime) -> Iterator[datetime]:
    """The times after ``begin``, in its zone, that match the expression. Raises CronSimError."""
    for found in CronSim(_STEP_OF_ONE.sub(_one, expression), begin):
        if found.year > _LAST_YEAR:
            return
        yield found


def _one(step: re.Match[str]) -> str:
    """Return ``9-9/2`` as Debian's cron reads it: a range of one number. cronsim goes on to the end."""
    first, last = (_NAMES.get(text.upper(), text.lstrip("0")) for text in step.group(1, 2))
    return step[1] if first == last else step[0]


def _hint(expression: str, error: Exception) -> str:
    """Return what is wrong with a cron expression, and what to write instead."""
    fields = expression.split()
    first = fields[0].lower() if fields else ""
    if first in _NICKNAMES:
        return f"write {_NICKNAMES[first]!r}"
    if first.startswith("@"):
        return "write five fields, or give a period as every"
    if "=" in first:
        return f"give the time zone as zone, and write {' '.join(fields[1:])!r}"
    if "?" in expression:
        return f"write {expression.replace('?', '*')!r}"
    if len(fields) not in (5, 6):
        return f"{len(fields)} fields; {_FIELDS}"
    if isinstance(error, StopIteration) or str(error) == "Bad day-of-month":
        return "there is no such day of the month; the last one is L"
    return f"{error}; {_FIELDS}" if len(fields) == 6 else str(error)


_NO_PLACES = frozenset({"localtime", "posixrules", "Factory"})
"""Files beside those of zones. Like those in right/, which count leap seconds, and in posix/, they are other
ones on each host."""


@lru_cache(1024)
def zone_named(name: str) -> ZoneInfo:
    """The time zone of a name such as Europe/Berlin. Raises InvalidSchedule."""
    cause: Exception | None = None
    if name not in _NO_PLACES and not str(name).startswith(("right/", "posix/")):
        try:
            return ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError, TypeError) as exc:
            cause = exc
    raise InvalidSchedule(
        f"there is no time zone {shown(name)} here; write a name such as Europe/Berlin, or UTC", "zone"
    ) from cause
