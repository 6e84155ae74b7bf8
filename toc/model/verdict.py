"""Decisions of the protocol: what a row says about its task, and how a try changes the row.

Pure functions: callers read a task's row, call one of these and apply the result. The table of cases is
``tests/unit/test_verdict.py``. The tags name the rules of the model in ``spec/``.

    belongs        where the index entry of a task belongs
    check          whether a prepared entry may start
    entry_score    the StoreQueue score that follows from a row
    beyond_horizon whether a task waits in its row alone
    after_failure  how a failed try changes the row
    after_crash    how a try changes it whose worker died or fell silent
    is_suspect     whether a task may run only alone
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.raised import Raised
from toc.model.scores import store_score
from toc.model.task import TaskRow, TaskStatus, TryRow
from toc.model.topic import Topic

MAX_CRASHES = 60_000
"""Largest value of the column. Further crashes of a task are not counted."""
CRASHED = "the worker that ran it died or fell silent"


class Place(Enum):
    """Where the index entry of a task belongs."""

    STORE_QUEUE = "store queue"
    """The task is pending: its entry is due at the time in the row."""
    DEAD_QUEUE = "dead queue"
    """The task is dead."""
    NOWHERE = "nowhere"
    """The task was processed or cancelled, or has no row."""


def belongs(row: TryRow | TaskRow | None) -> Place:
    """Return where the entry of this row's task belongs. ``None`` is a task without a row."""
    # [rule: row-decides]
    if row is None or row.status in (TaskStatus.PROCESSED, TaskStatus.CANCELLED):
        return Place.NOWHERE
    return Place.DEAD_QUEUE if row.status == TaskStatus.DEAD else Place.STORE_QUEUE


class Check(Enum):
    """What to do with an entry taken from the StoreQueue, according to its row."""

    START = "start"
    SOON = "soon"
    """It is due within MAX_CLOCK_SKEW_MS and waits in the worker."""
    LEASED = "leased"
    """Another worker has a lease on the row, or its lease ran out."""
    CLOCK_BEHIND = "clock behind"
    """It is due by Redis's clock but not by this machine's."""
    ELSEWHERE = "elsewhere"
    """The entry is wrong: it moves to where it ``belongs``."""


def check(row: TryRow, *, now: int, taken: int) -> Check:
    """Decide whether an entry may start. ``now``: this machine's ms; ``taken``: Redis's ms at the prepare."""
    if row.status != TaskStatus.PENDING:
        return Check.ELSEWHERE
    ahead = row.next_time - now
    if ahead <= MAX_CLOCK_SKEW_MS:
        if row.lease:
            return Check.LEASED
        return Check.START if ahead <= 0 else Check.SOON  # [rule: row-check]
    return Check.CLOCK_BEHIND if row.next_time <= taken else Check.ELSEWHERE


def entry_score(topic: Topic, due: int, attempts: int) -> float:
    """Return the StoreQueue score of a pending task due at ``due`` (ms) that used up ``attempts`` tries."""
    return store_score(due, topic.remaining(attempts), attempts)


def beyond_horizon(topic: Topic, due: int, now: int) -> bool:
    """Whether a task due at ``due`` (ms) waits in its row alone, until the sweep indexes it."""
    return due - now > topic.horizon * 1000


def is_suspect(row: TryRow, max_crashes: int) -> bool:
    """Whether ``max_crashes`` consecutive tries or more ended with their worker: the task may run only
    alone."""
    return row.crashes >= max_crashes


class Failure(NamedTuple):
    """A failed try: the row as read, and its new values. Instants are milliseconds."""

    job_id: int
    version: int
    attempts: int
    crashes: int
    new_attempts: int
    new_crashes: int
    next_time: int
    error: str | None
    """None keeps the row's error."""

    @classmethod
    def of(
        cls, row: TryRow, *, attempts: int, crashes: int, next_time: int, error: str | None = None
    ) -> Failure:
        """Build the change to these values. It applies only while the row is unchanged."""
        return cls(row.job_id, row.version, row.attempts, row.crashes, attempts, crashes, next_time, error)


class Outcome(NamedTuple):
    """How a failed try changes its row, and whether the task is then dead."""

    failure: Failure
    dead: bool


def after_failure(row: TryRow, topic: Topic, raised: Raised, now: int) -> Outcome:
    """Return how a try that failed at ``now`` (ms) changes its row.

    The try is used up. The crash count is reset, since the try ended by itself, with two exceptions: a task
    that ended the process in which it ran alone keeps its crash count; and a try that another handler broke
    off uses up nothing but counts as a crash, so that a task to which that happens repeatedly runs alone.
    """
    if raised.disturbed:
        attempts, dead, crashes = row.attempts, False, min(row.crashes + 1, MAX_CRASHES)
    else:
        attempts = row.attempts + 1
        dead = raised.dead or attempts >= topic.retries
        crashes = row.crashes if raised.crashed else 0
    if dead or raised.disturbed:
        delay = 0
    else:
        delay = topic.retry_delay_ms(attempts) if raised.after_ms is None else raised.after_ms
    next_time = max(now + delay, row.action_time)  # also if the clock was set back
    failure = Failure.of(row, attempts=attempts, crashes=crashes, next_time=next_time, error=raised.text)
    return Outcome(failure, dead)


def after_crash(
    row: TryRow | None, topic: Topic, remaining: int, now: int, max_crashes: int, *, dead: bool
) -> Failure | None:
    """Return how a try that ended with its worker changes the row, or None for no change.

    ``remaining`` is the tries left according to the entry. Charges a try, but never the last one: no task
    becomes dead by a crash of its worker. A try is not charged twice: if the row has more tries used up than
    the entry, it was charged before. The crash is counted even then, unless the worker is known to be
    ``dead``: the entry's tries may be stale, its owner may still run it, and the owner's late failure must
    find a changed row.

    Two are not counted: a suspect, because the quarantine counts its runs when they begin; and a row that a
    live worker has leased, because that worker has lost Redis and still runs the task.
    """
    if row is None or row.status != TaskStatus.PENDING or row.lease > 0:  # [rule: reclaim-waits]
        return None
    written = row.attempts > topic.retries - remaining
    if row.next_time > now or is_suspect(row, max_crashes) or (written and dead):  # [rule: crash-counted]
        return None
    attempts, error = row.attempts, None
    if not written:
        # max, because retries may have been lowered  [rule: never-the-last]
        attempts = max(attempts, min(attempts + 1, topic.retries - 1))
        error = CRASHED
    return Failure.of(
        row,
        attempts=attempts,
        crashes=min(row.crashes + 1, MAX_CRASHES),
        next_time=max(now, row.action_time),  # also if the clock was set back
        error=error,
    )
