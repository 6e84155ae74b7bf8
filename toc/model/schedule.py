"""Schedules: what a recurring task's definition says, and when it fires. Pure; times are ms since 1970 UTC.

A schedule has a definition (when, which topic, what to do about trouble) and a state
(toc.model.schedule_state). It fires by a cron expression in a time zone, or at intervals in UTC.

cronsim parses and matches cron expressions. When a zone's offset changes, they behave as in
Debian's cron, as cronsim has it:

- A fixed time (neither its minutes nor its hours begin with ``*``) in a gap runs right after the gap; one
  that comes twice runs the first time.
- All others run whenever the clock on the wall matches, so they have no gap and run twice where an hour does.
  Where a gap is at midnight, or half an hour long, cronsim makes a few minutes of ``*`` too many or too few.
  ``0 */6`` leaves out one time on the days on which Lord Howe moves its clocks by half an hour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import islice, takewhile
from typing import Any, NamedTuple, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from cronsim.cronsim import SYMBOLIC_DAYS, SYMBOLIC_MONTHS

from toc.model.clock import from_ms, parse_duration, to_ms
from toc.model.documents import check_depth, parse_object
from toc.model.errors import InvalidSchedule, shown
from toc.model.sharding import crc32
from toc.model.target import ATTRIBUTE as ROUTE
from toc.model.task import SCHEDULED_FOR, decode_attribute, encode_attribute, scheduled_for_text
from toc.model.topic import NAME, NAME_HINT, check_topic_name

MIN_PERIOD = timedelta(seconds=1)
MIN_WINDOW = timedelta(minutes=1)
"""Anything shorter could be a worker that died."""
MAX_JITTER = timedelta(days=1)
LONGEST = timedelta(days=3660)
PREVIEW_AHEAD_MS = 36_525 * 86_400_000
"""A preview searches a hundred years ahead. For a rule that fires rarely, to find the next time
takes a search through years."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = timedelta(days=1)
_UTC = "UTC"


class Dst(StrEnum):
    """What becomes of a fixed time in a gap, as clocks are put forward."""

    CRON = "cron"
    """It runs right after the gap."""
    SKIP = "skip"
    """It does not run that day."""


class Missed(StrEnum):
    """What becomes of late occurrences after a stop longer than ``window``."""

    LATEST = "latest"
    """Only the last late occurrence runs. If the task of the occurrence before it has not ended, it
    waits until that ends."""
    ALL = "all"
    """All run that the overlap policy lets run, 1,000 at most: the last ones."""
    SKIP = "skip"
    """None runs."""


class Overlap(StrEnum):
    """What becomes of an occurrence that is due while the task of the one before has not ended."""

    SKIP = "skip"
    """It does not run."""
    ALLOW = "allow"
    """It runs at the same time."""
    BUFFER_ONE = "buffer_one"
    """It waits until that task has ended, and then runs. If another occurrence waits already, it
    does not run."""


@dataclass(frozen=True)
class Definition:
    """What a schedule does. Give ``cron`` or ``every``. Raises InvalidSchedule.

    Its expression and its zone are checked by ``calendar`` and ``check_given``: a stored schedule can be
    shown, paused and altered also where its zone is ``unknown``.

    ``cron`` has five fields, or six with seconds first, and holds in ``zone``. ``every`` is a
    period from ``anchor`` on, in UTC. ``jitter`` is the longest delay: every occurrence is delayed
    by the same time within it, which is computed from the name. ``attribute`` is the attribute of
    each task, to which the nominal time is added as ``scheduled_for``.
    """

    name: str
    topic: str
    cron: str | None = None
    every: timedelta | None = None
    anchor: datetime = EPOCH
    zone: str = _UTC
    dst: Dst = Dst.CRON
    missed: Missed = Missed.LATEST
    window: timedelta = _DAY
    overlap: Overlap = Overlap.SKIP
    jitter: timedelta = timedelta(0)
    attribute: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_schedule_name(self.name)
        check_topic_name(self.topic)
        for name, kind in (("dst", Dst), ("missed", Missed), ("overlap", Overlap)):
            _set(self, name, _policy(name, kind, getattr(self, name)))
        for name in ("every", "window", "jitter"):
            if getattr(self, name) is not None:
                _set(self, name, _duration(name, getattr(self, name)))
        if not isinstance(self.anchor, datetime) or self.anchor.utcoffset() is None:
            what = f"anchor must be a datetime with a time zone, not {shown(self.anchor)}"
            raise InvalidSchedule(what, "anchor")
        try:
            _set(self, "anchor", from_ms(to_ms(self.anchor)))
        except OverflowError:
            what = f"anchor = {self.anchor.isoformat()} is not in the years 1 to 9999 in UTC"
            raise InvalidSchedule(what, "anchor") from None
        if (self.cron is None) == (self.every is None):
            raise InvalidSchedule("give a schedule either a cron expression or a period (every)", "cron")
        if self.cron is not None and not isinstance(self.cron, str):
            raise InvalidSchedule(f"cron must be a str, not {type(self.cron).__name__}", "cron")
        if self.every is not None:
            _within("every", self.every, MIN_PERIOD, LONGEST)
        _within("window", self.window, MIN_WINDOW, LONGEST)
        _within("jitter", self.jitter, timedelta(0), MAX_JITTER)
        if SCHEDULED_FOR in (self.attribute or {}):
            what = f"attribute[{SCHEDULED_FOR!r}] is set to the nominal time of each occurrence"
            raise InvalidSchedule(what, "attribute")
        if ROUTE in (self.attribute or {}):
            why = "the tasks of a schedule go to the target of their topic"
            do = "toc topic alter TOPIC --target NAME"
            raise InvalidSchedule(f"attribute[{ROUTE!r}] is reserved: {why} ({do})", "attribute")
        self.occurrence_attribute(0)  # with it, the attribute must fit
        _set(self, "attribute", decode_attribute(encode_attribute(self.attribute)))

    @cached_property
    def calendar(self) -> Calendar:
        """When it fires. Raises InvalidSchedule where that is ``unknown``."""
        if self.every is not None:
            return Interval(_ms(self.every), to_ms(self.anchor))
        return Cron(self.cron or "", self.zone, self.dst is Dst.SKIP)

    @property
    def unknown(self) -> str:
        """Why this host cannot tell when it fires: it does not know its zone. Empty if it can."""
        try:
            _ = self.calendar, zone_named(self.zone)
        except InvalidSchedule as exc:
            return str(exc)
        return ""

    @cached_property
    def offset(self) -> int:
        """How long (ms) after its nominal time every occurrence is due."""
        return crc32(self.name) * 2_654_435_761 % 2**32 % (_ms(self.jitter) + 1)

    def occurrence_attribute(self, nominal: int) -> str:
        """The attribute, as stored, of the occurrence of a nominal time."""
        return encode_attribute({**self.attribute, SCHEDULED_FOR: scheduled_for_text(nominal)})

    def changed(self, **changes: Any) -> Self:
        """Return the definition with changes; a new cron expression replaces a period and vice versa."""
        for one, other in (("cron", "every"), ("every", "cron")):
            if changes.get(one) is not None:
                changes.setdefault(other, None)
        unknown = changes.keys() - {each.name for each in fields(self)} | ({"name"} & changes.keys())
        if unknown:
            raise InvalidSchedule(f"{', '.join(sorted(unknown))} of a schedule cannot be changed")
        if changes.get("attribute", {}) is None:
            changes["attribute"] = {}
        try:
            return replace(self, **changes).check_given(changes)
        except TypeError as exc:
            raise InvalidSchedule(str(exc)) from exc

    def check_given(self, given: Collection[str]) -> Self:
        """Return the definition if every field that the caller has set takes effect, and this host can
        follow it. Raises InvalidSchedule.

        ``given`` names these fields. A stored row may hold fields without effect: when a period
        replaces a cron expression, the zone and the policy for gaps stay on the row.
        """
        if "anchor" in given and self.every is None and self.anchor != EPOCH:
            what = "anchor has no effect on a cron expression, only on a period (every)"
            raise InvalidSchedule(what, "anchor")
        for name, usual in (("dst", Dst.CRON), ("zone", _UTC)):
            if name in given and self.cron is None and getattr(self, name) != usual:
                what = f"{name} has no effect on a period (every), which is counted in UTC"
                raise InvalidSchedule(what, name)
        _ = self.calendar, zone_named(self.zone)
        return self

    def to_json(self) -> str:
        """The definition, without its name, as stored.

        Raises InvalidDocument if ``of_json`` could not read it: it is a level deeper than the attribute.
        """
        values: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, timedelta):
                value = _ms(value)
            elif isinstance(value, datetime):
                value = to_ms(value)
            values[each.name] = value
        del values["name"]
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        check_depth(text.encode())
        return text

    @classmethod
    def of_json(cls, name: str, text: str) -> Self:
        """Read what ``to_json`` wrote. Raises InvalidSchedule if it is something else."""
        try:
            values = parse_object(text)
            for key in ("every", "window", "jitter"):
                if values[key] is not None:
                    values[key] = timedelta(milliseconds=values[key])
            values["anchor"] = from_ms(values["anchor"])
            return cls(name, **values)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
            if isinstance(exc, InvalidSchedule):
                raise
            what = f"the row of schedule {name!r} cannot be read ({type(exc).__name__})"
            raise InvalidSchedule(
                f"{what}: a later version of toc, or another program, has written it"
            ) from exc


class Fire(NamedTuple):
    """A time at which a schedule fires: the nominal time in the zone of its cron expression, else in UTC, and
    when the task is due (UTC)."""

    nominal: datetime
    due: datetime


def preview(definition: Definition, after: int, count: int = 20) -> list[Fire]:
    """Return the next occurrences later than ``after`` (ms), within a hundred years."""
    zone = zone_named(definition.zone if definition.cron else _UTC)
    begin = after - definition.offset
    soon = takewhile(lambda nominal: nominal <= begin + PREVIEW_AHEAD_MS, definition.calendar.after(begin))
    return [
        Fire(from_ms(nominal).astimezone(zone), from_ms(nominal + definition.offset))
        for nominal in islice(soon, count)
    ]


def check_schedule_name(name: object) -> str:
    """Return ``name`` if it is a valid name of a schedule. Raises InvalidSchedule."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidSchedule(f"{shown(name)} is not a name of a schedule: {NAME_HINT}", "name")
    return name


BACKFILL_RATE = 10.0
"""How many occurrences of the past a backfill starts a second, unless it is told."""
MIN_BACKFILL_RATE = 0.001


def check_instant(at: datetime, field: str) -> datetime:
    """Return ``at`` if calendars can begin there. Raises InvalidSchedule."""
    if not 0 <= to_ms(at) <= END:
        raise InvalidSchedule(f"{at.isoformat()} is not in the years 1970 to 9000", field)
    return at


def _policy(name: str, kind: type[Dst] | type[Missed] | type[Overlap], value: object) -> StrEnum:
    try:
        return kind(str(value))
    except ValueError:
        raise InvalidSchedule(f"{name} must be one of {', '.join(kind)}, not {shown(value)}", name) from None


def _duration(name: str, value: object) -> timedelta:
    try:
        if isinstance(value, str):
            value = parse_duration(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = timedelta(seconds=value)
        if isinstance(value, timedelta):
            return timedelta(milliseconds=_ms(value))
    except (OverflowError, ValueError):
        pass
    what = f"{name} must be a timedelta, seconds or a text such as 30m, not {shown(value)}"
    raise InvalidSchedule(what, name)


def _within(name: str, value: timedelta, low: timedelta, high: timedelta) -> None:
    if not low <= value <= high:
        least, most, given = (f"{one.total_seconds():.15g} s" for one in (low, high, value))
        raise InvalidSchedule(f"{name} must be {least} to {most}, not {given}", name)


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


def _set(definition: Definition, name: str, value: object) -> None:
    object.__setattr__(definition, name, value)  # it is frozen, and in the making


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
        last = [self.anchor + number * self.period for number in numbers]
        return Latest(last, self.anchor + begin * self.period, end - begin)

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
        found = list(islice(self._between(after, until), MAX_COUNTED + 1))
        if len(found) <= MAX_COUNTED:
            return Latest(found[-most:], found[0] if found else None, len(found))
        # Too many to go through them all: from the end, in ranges that double until they hold enough.
        span = most * 1000
        while True:
            last = list(self._between(max(after, until - span), until))
            if len(last) >= most or until - span <= after:
                return Latest(last[-most:], found[0], MAX_COUNTED)
            span *= 2

    def _between(self, after: int, until: int) -> Iterator[int]:
        return takewhile(lambda instant: instant <= until, self.after(after))

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
