"""Schedules: recurring tasks. Pure; times are milliseconds since 1970 UTC.

A schedule is a definition (when, which topic, what to do about trouble) and a state: the row. Its task for
one nominal time is an *occurrence*. ``step`` is the only way forward: it says which occurrences to make now,
and the row after that. It depends on time, never on the run of a task, with one exception: the overlap policy
may ask whether the occurrence before has ended.

    ahead    an occurrence becomes a task up to LEAD_MS before it is due, so that a host that dies in the
             meantime, or a burst of others, does not make it late
    overlap  is judged when the occurrence is due. One whose predecessor has ended by LEAD_MS before that
             is not checked again. Otherwise the row is checked again until then, the last time when it is due
    late     what could not become a task in time does so late. After a stop longer than ``window`` it is
             *missed*, and the policy decides
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, NamedTuple, Self

from toc.model.calendar import END, Calendar, Cron, Interval, zone_named
from toc.model.clock import from_ms, to_ms
from toc.model.documents import parse_object
from toc.model.errors import InvalidSchedule, shown
from toc.model.sharding import crc32
from toc.model.target import ATTRIBUTE as ROUTE
from toc.model.task import SCHEDULED_FOR, decode_attribute, encode_attribute, scheduled_for_text
from toc.model.topic import NAME, NAME_HINT, check_topic_name

LEAD_MS = 30_000
"""An occurrence becomes a task this long before it is due. After a host has died, its tables get
another owner in less time than this."""
MOST_AHEAD = 100
"""Most occurrences that one step makes ahead."""
MOST_MISSED = 1000
"""Most late occurrences that one step makes."""
NEAR_MS = 1000
"""A change does not touch an occurrence that is due within this time (ms).

Its task may be starting.
"""
PLAN_AGAIN_MS = 86_400_000
"""After this time the next occurrence is computed anew: the rules of its zone may have changed."""
LEAST_PERIOD = timedelta(seconds=1)
LEAST_WINDOW = timedelta(minutes=1)
"""Anything shorter could be a worker that died."""
MOST_JITTER = timedelta(days=1)
LONGEST = timedelta(days=3660)
PREVIEW_AHEAD_MS = 36_525 * 86_400_000
"""A preview searches a hundred years ahead. For a rule that fires rarely, to find the next time
takes a search through years."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BUFFER_LOOK_MS = (1000, 30_000)
"""How often the predecessor of a waiting occurrence is checked: a tenth of the wait, within these bounds."""
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
            _within("every", self.every, LEAST_PERIOD, LONGEST)
        _within("window", self.window, LEAST_WINDOW, LONGEST)
        _within("jitter", self.jitter, timedelta(0), MOST_JITTER)
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


class State(NamedTuple):
    """The rest of a schedule's row. Instants are milliseconds.

    Everything up to the nominal time ``after`` is decided. ``next_time`` is the next nominal time, ``look``
    when ``step`` must be called next (None: it is paused). ``buffered`` is the nominal time of an occurrence
    that waits for the one before. ``last_job_id`` is the task of the last occurrence. ``fired``, ``skipped``
    (for overlap) and ``missed`` count occurrences; ``missed_at`` is when the last stop was noticed.
    """

    schedule_id: int
    version: int
    paused: bool
    after: int
    next_time: int | None
    look: int | None
    buffered: int | None
    last_job_id: int | None
    fired: int
    skipped: int
    missed: int
    missed_at: int | None
    created: int
    modified: int


class Occurrence(NamedTuple):
    """One task of a schedule: its nominal time, and when it is due."""

    nominal: int
    due: int


class Step(NamedTuple):
    """What happens to a schedule now: the occurrences to make, in order, and its row after that."""

    made: list[Occurrence]
    state: State


class Planned(NamedTuple):
    """An occurrence that is a task already, not yet due, and as the schedule made it."""

    job_id: int
    nominal: int


class Change(NamedTuple):
    """What a change of a schedule does: it cancels every planned occurrence.

    ``instead`` are the occurrences that replace them, one for each in order; if there are none, the next step
    plans anew. Which task is the last one, ``state`` does not say yet.
    """

    instead: list[Occurrence]
    state: State


def new_state(definition: Definition, schedule_id: int, now: int, *, paused: bool = False) -> State:
    """Return the state of a schedule that begins now."""
    after = now - definition.offset
    look = None if paused else now
    following = next(definition.calendar.after(after), None)
    return State(schedule_id, 0, paused, after, following, look, None, None, 0, 0, 0, None, now, now)


def step(definition: Definition, state: State, now: int, *, ended: bool) -> Step:
    """Return what is to be done at ``now``. ``ended``: whether the task of the last occurrence has ended."""
    offset, overlap, calendar = definition.offset, definition.overlap, definition.calendar
    free = ended or overlap is Overlap.ALLOW
    made: list[Occurrence] = []
    buffered, skipped, missed, missed_at = state.buffered, state.skipped, state.missed, state.missed_at

    def make(nominal: int) -> None:
        nonlocal free
        made.append(Occurrence(nominal, max(nominal + offset, now)))
        free = overlap is Overlap.ALLOW

    if buffered is not None and free:
        make(buffered)
        buffered = None
    late = calendar.latest(state.after, now - offset, MOST_MISSED)
    after = late.last[-1] if late.last else state.after
    stopped = _stopped(definition, late.first, late.total, now)
    kept = _kept(definition, late.last) if stopped else late.last
    # After a stop the last late occurrence waits for the task before it, whatever the overlap
    # policy: a task that was made before the stop must not replace it.
    waits = overlap is Overlap.BUFFER_ONE or (stopped and definition.missed is Missed.LATEST)
    for nominal in kept:
        if free:
            make(nominal)
        elif waits and buffered is None:
            buffered = nominal
        else:
            skipped += 1
    if late.total > len(kept):
        missed, missed_at = missed + late.total - len(kept), now
    upcoming = calendar.after(after)
    following = next(upcoming, None)
    while following is not None and free and following + offset - now <= LEAD_MS and len(made) < MOST_AHEAD:
        make(following)
        after, following = following, next(upcoming, None)
    look = now + PLAN_AGAIN_MS
    if following is not None:
        look = min(look, _look(now, following + offset, made, free=free))
    if buffered is not None:
        least, most = _BUFFER_LOOK_MS
        look = min(look, now + min(max((now - buffered) // 10, least), most))
    after_this = state._replace(
        after=after,
        next_time=following,
        look=look,
        buffered=buffered,
        fired=state.fired + len(made),
        skipped=skipped,
        missed=missed,
        missed_at=missed_at,
    )
    return Step(made, after_this)


def change(
    before: Definition,
    state: State,
    definition: Definition,
    planned: Sequence[Planned],
    now: int,
    *,
    paused: bool | None,
) -> Change:
    """Return what it means to change a schedule from ``before`` to ``definition`` at ``now``.

    ``planned``, in order, are due later than NEAR_MS from now. ``paused`` is None if it stays as it is.

    While the times of a schedule stay the same, planned occurrences are replaced one by one. So what is
    decided stays decided: what somebody has cancelled or moved by hand is not made again, not even on another
    topic. Raises InvalidSchedule if this host does not know the zone, unless it pauses.
    """
    pausing = state.paused if paused is None else paused
    calendar = None if pausing and definition.unknown else definition.calendar
    former = None if before.unknown else before.calendar
    instead: list[Occurrence] = []
    after, missed = state.after, 0
    if calendar == former and not state.paused and not pausing:
        # The next step decides what is due and not decided, by the policy of missed: the former topic may
        # have been closed. Nor has what the former jitter delays beyond now happened yet.
        offset = definition.offset
        instead = [Occurrence(one.nominal, max(one.nominal + offset, now)) for one in planned]
    else:
        first = min((one.nominal for one in planned), default=after + 1)
        after = max(now - definition.offset, first - 1)
        if former is not None and not state.paused:
            missed = former.latest(state.after, now - before.offset, 1).total
    skips = definition.overlap is Overlap.SKIP and before.overlap is not Overlap.SKIP
    drops = state.buffered is not None and (pausing or skips)
    after_this = state._replace(
        paused=pausing,
        after=after,
        next_time=None if calendar is None else next(calendar.after(after), None),
        look=None if pausing else now,
        buffered=None if drops else state.buffered,
        skipped=state.skipped + drops,
        fired=state.fired - len(planned) + len(instead),
        missed=state.missed + missed,
        missed_at=now if missed else state.missed_at,
    )
    return Change(instead, after_this)


def _stopped(definition: Definition, first: int | None, count: int, now: int) -> bool:
    """Whether ``count`` late occurrences, from ``first`` on, mean a stop, to which ``missed`` applies."""
    if first is None:
        return False
    return count > MOST_MISSED or now - (first + definition.offset) > _ms(definition.window)


def _kept(definition: Definition, late: list[int]) -> list[int]:
    """The late occurrences of a stop that are not missed."""
    if definition.missed is Missed.ALL:
        return late
    return late[-1:] if definition.missed is Missed.LATEST else []


def _look(now: int, due: int, made: list[Occurrence], *, free: bool) -> int:
    """When to check again for an occurrence that is due later."""
    ahead = max(due - LEAD_MS, now)
    if free:
        return ahead
    # It depends on its predecessor, which cannot have ended before it was due.
    ahead = max(ahead, min(made[-1].due + 1000, due)) if made else ahead
    return ahead if ahead > now else min(due, now + max((due - now) // 2, 1000))


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
LEAST_BACKFILL_RATE = 0.001


def check_instant(at: datetime) -> datetime:
    """Return ``at`` if calendars can begin there. Raises InvalidSchedule."""
    if not 0 <= to_ms(at) <= END:
        raise InvalidSchedule(f"{at.isoformat()} is not in the years 1970 to 9000")
    return at


def _policy(name: str, kind: type[Dst] | type[Missed] | type[Overlap], value: object) -> StrEnum:
    try:
        return kind(str(value))
    except ValueError:
        raise InvalidSchedule(f"{name} must be one of {', '.join(kind)}, not {shown(value)}", name) from None


def _duration(name: str, value: object) -> timedelta:
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = timedelta(seconds=value)
        if isinstance(value, timedelta):
            return timedelta(milliseconds=_ms(value))
    except (OverflowError, ValueError):
        pass
    raise InvalidSchedule(f"{name} must be a timedelta or seconds, not {shown(value)}", name)


def _within(name: str, value: timedelta, low: timedelta, high: timedelta) -> None:
    if not low <= value <= high:
        raise InvalidSchedule(
            f"{name} must be {_in_words(low)} to {_in_words(high)}, not {_in_words(value)}", name
        )


def _in_words(duration: timedelta) -> str:
    """A duration in the unit that suits it, a whole number of it if there is one."""
    for unit, length in (("days", _DAY), ("hours", timedelta(hours=1)), ("minutes", timedelta(minutes=1))):
        if duration and not duration % length:
            return f"{duration // length} {unit if duration != length else unit.removesuffix('s')}"
    return f"{duration / timedelta(seconds=1):.15g} s"


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


def _set(definition: Definition, name: str, value: object) -> None:
    object.__setattr__(definition, name, value)  # it is frozen, and in the making
