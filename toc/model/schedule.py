"""Schedules: what a recurring task's definition says. Pure; times are milliseconds since 1970 UTC.

A schedule has a definition (when, which topic, what to do about trouble) and a state
(toc.model.schedule_state).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, NamedTuple, Self

from toc.model.calendar import END, Calendar, Cron, Interval, zone_named
from toc.model.clock import from_ms, to_ms
from toc.model.documents import parse_object
from toc.model.duration import parse_duration
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
            raise InvalidSchedule(
                f"anchor must be a datetime with a time zone, not {shown(self.anchor)}", "anchor"
            )
        try:
            _set(self, "anchor", from_ms(to_ms(self.anchor)))
        except OverflowError:
            raise InvalidSchedule(
                f"anchor = {self.anchor.isoformat()} is not in the years 1 to 9999 in UTC", "anchor"
            ) from None
        if (self.cron is None) == (self.every is None):
            raise InvalidSchedule("give a schedule a cron expression or a period (every), not both", "cron")
        if self.cron is not None and not isinstance(self.cron, str):
            raise InvalidSchedule(f"cron must be a str, not {type(self.cron).__name__}", "cron")
        if self.every is not None:
            _within("every", self.every, MIN_PERIOD, LONGEST)
        _within("window", self.window, MIN_WINDOW, LONGEST)
        _within("jitter", self.jitter, timedelta(0), MAX_JITTER)
        if SCHEDULED_FOR in (self.attribute or {}):
            raise InvalidSchedule(
                f"attribute[{SCHEDULED_FOR!r}] is set to the nominal time of each occurrence", "attribute"
            )
        if ROUTE in (self.attribute or {}):
            raise InvalidSchedule(
                f"attribute[{ROUTE!r}] is reserved: the tasks of a schedule go to the target of their topic "
                "(toc topic alter TOPIC --target NAME)",
                "attribute",
            )
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
            raise InvalidSchedule(
                "anchor has no effect on a cron expression, only on a period (every)", "anchor"
            )
        for name, usual in (("dst", Dst.CRON), ("zone", _UTC)):
            if name in given and self.cron is None and getattr(self, name) != usual:
                raise InvalidSchedule(
                    f"{name} has no effect on a period (every), which is counted in UTC", name
                )
        _ = self.calendar, zone_named(self.zone)
        return self

    def to_json(self) -> str:
        """The definition, without its name, as stored."""
        values: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, timedelta):
                value = _ms(value)
            elif isinstance(value, datetime):
                value = to_ms(value)
            values[each.name] = value
        del values["name"]
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"), sort_keys=True)

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
            raise InvalidSchedule(
                f"the row of schedule {name!r} cannot be read ({type(exc).__name__}): a later version of "
                "toc, or another program, has written it"
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
