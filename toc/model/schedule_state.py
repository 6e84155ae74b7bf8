"""The state of a schedule, and how it moves on. Pure; times are milliseconds since 1970 UTC.

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

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from toc.model.schedule import Definition, Missed, Overlap

LEAD_MS = 30_000
"""An occurrence becomes a task this long before it is due. After a host has died, its tables get
another owner in less time than this."""
MAX_AHEAD = 100
"""Most occurrences that one step makes ahead."""
MAX_MISSED = 1000
"""Most late occurrences that one step makes."""
NEAR_MS = 1000
"""An edit does not replace an occurrence that is due within this time (ms): its task may be starting."""
PLAN_AGAIN_MS = 86_400_000
"""After this time the next occurrence is computed anew: the rules of its zone may have changed."""
_BUFFER_LOOK_MS = (1000, 30_000)
"""How often the predecessor of a waiting occurrence is checked: a tenth of the wait, within these bounds."""


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
    late = calendar.latest(state.after, now - offset, MAX_MISSED)
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
    while following is not None and free and following + offset - now <= LEAD_MS and len(made) < MAX_AHEAD:
        make(following)
        after, following = following, next(upcoming, None)
    look = now + PLAN_AGAIN_MS
    if following is not None:
        look = min(look, _look(now, following + offset, made, free=free))
    if buffered is not None:
        least, most = _BUFFER_LOOK_MS
        look = min(look, now + min(max((now - buffered) // 10, least), most))
    after_this = state._replace(
        after=after, next_time=following, look=look, buffered=buffered, fired=state.fired + len(made),
        skipped=skipped, missed=missed, missed_at=missed_at,
    )  # fmt: skip
    return Step(made, after_this)


def change(
    before: Definition, state: State, definition: Definition, planned: Sequence[Planned], now: int, *,
    paused: bool | None,
) -> Change:  # fmt: skip
    """Return what it means to change a schedule from ``before`` to ``definition`` at ``now``.

    ``planned``, in order, are due later than now, by NEAR_MS unless it pauses. ``paused`` is None if it
    stays as it is.

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
        paused=pausing, after=after,
        next_time=None if calendar is None else next(calendar.after(after), None),
        look=None if pausing else now, buffered=None if drops else state.buffered,
        skipped=state.skipped + drops, fired=state.fired - len(planned) + len(instead),
        missed=state.missed + missed, missed_at=now if missed else state.missed_at,
    )  # fmt: skip
    return Change(instead, after_this)


def _stopped(definition: Definition, first: int | None, count: int, now: int) -> bool:
    """Whether ``count`` late occurrences, from ``first`` on, mean a stop, to which ``missed`` applies."""
    if first is None:
        return False
    late = timedelta(milliseconds=now - (first + definition.offset))
    return count > MAX_MISSED or late > definition.window


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
