"""What a row says about its task, and what a try makes of the row: the decisions of the protocol.

Pure functions: who meets a task reads its row, asks here and applies the answer. Their table of cases is
``tests/unit/test_verdict.py``; the tags name the rules of the model in ``spec/``.

    belongs        where the index entry of a task belongs
    check          whether an entry that was taken may start
    entry_score    the StoreQueue score that follows from a row
    beyond_horizon whether a task waits in its row alone
    after_failure  what a try that failed makes of the row
    after_crash    what a try makes of it whose worker died or fell silent
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
"""What the column holds; a task that has killed its worker so often is not counted further."""
CRASHED = "the worker that ran it died or fell silent"


class Place(Enum):
    """Where the index entry of a task belongs."""

    STORE_QUEUE = "store queue"
    """The task is pending: at the time of its row."""
    DEAD_QUEUE = "dead queue"
    """The task is dead."""
    NOWHERE = "nowhere"
    """The task was processed or cancelled, or has no row."""


def belongs(row: TryRow | TaskRow | None) -> Place:
    """Where the entry of this row's task belongs; ``None`` is a task without a row."""
    # [rule: row-decides]
    if row is None or row.status in (TaskStatus.PROCESSED, TaskStatus.CANCELLED):
        return Place.NOWHERE
    return Place.DEAD_QUEUE if row.status == TaskStatus.DEAD else Place.STORE_QUEUE


class Check(Enum):
    """What becomes of an entry that was taken from the StoreQueue, by its row."""

    START = "start"
    SOON = "soon"
    """It is due in a moment: it waits here."""
    LEASED = "leased"
    """Another worker has a lease on the row, or had one that ran out."""
    CLOCK_BEHIND = "clock behind"
    """It is due by Redis's clock and not by ours."""
    ELSEWHERE = "elsewhere"
    """The entry is wrong: it goes to where it ``belongs``."""


def check(row: TryRow, *, now: int, taken: int) -> Check:
    """Whether an entry may start, in ms: ``now`` is this machine's time, ``taken`` Redis's of the prepare."""
    if row.status != TaskStatus.PENDING:
        return Check.ELSEWHERE
    ahead = row.next_time - now
    if ahead <= MAX_CLOCK_SKEW_MS:
        if row.lease:
            return Check.LEASED
        return Check.START if ahead <= 0 else Check.SOON  # [rule: row-check]
    return Check.CLOCK_BEHIND if row.next_time <= taken else Check.ELSEWHERE


def entry_score(topic: Topic, due: int, attempts: int) -> float:
    """The StoreQueue score of a pending task: due at ``due`` (ms), with ``attempts`` tries used up."""
    return store_score(due, topic.remaining(attempts), attempts)


def beyond_horizon(topic: Topic, due: int, now: int) -> bool:
    """Whether a task that is due at ``due`` waits in its row alone. The sweep indexes it in time."""
    return due - now > topic.horizon * 1000


def is_suspect(row: TryRow, max_crashes: int) -> bool:
    """Whether so many tries in a row ended with their worker that the task may run only alone."""
    return row.crashes >= max_crashes


class Failure(NamedTuple):
    """A try that failed: the row as it was read, and what it becomes. Instants are milliseconds."""

    job_id: int
    version: int
    attempts: int
    crashes: int
    new_attempts: int
    new_crashes: int
    next_time: int
    error: str | None
    """None: the row keeps the error that it has."""

    @classmethod
    def of(
        cls, row: TryRow, *, attempts: int, crashes: int, next_time: int, error: str | None = None
    ) -> Failure:
        """What makes a row of these values out of one that is still as ``row``."""
        return cls(row.job_id, row.version, row.attempts, row.crashes, attempts, crashes, next_time, error)


class Outcome(NamedTuple):
    """What a failed try makes of its row, and whether the task is dead by that."""

    failure: Failure
    dead: bool


def after_failure(row: TryRow, topic: Topic, raised: Raised, now: int) -> Outcome:
    """What a try that failed at ``now`` (ms) makes of its row.

    The try is used up, and crashes are forgotten, since it ended by itself. Two are different: a task that
    ended the process in which it ran alone keeps its crashes; and a try that another handler has broken off
    uses up nothing, but counts as a crash, so that a task to which that happens again and again runs alone.
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
    next_time = max(now + delay, row.action_time)  # not before it, even if the clock was set back
    failure = Failure.of(row, attempts=attempts, crashes=crashes, next_time=next_time, error=raised.text)
    return Outcome(failure, dead)


def after_crash(
    row: TryRow | None, topic: Topic, remaining: int, now: int, max_crashes: int, *, dead: bool
) -> Failure | None:
    """How a row changes because a try ended with its worker; None when it stays as it is.

    ``remaining`` are the tries left by the entry. Charges a try, but never the last one: no task dies of a
    crash of its worker. Where the row was written before (more tries are used up than by the entry), a try is
    not charged again. But unless its worker is known to be ``dead``, the crash is counted all the same: the
    entry may carry stale tries, its holder may be running on, and its late failure must find another row.

    Not counted: a suspect, since the quarantine counts its runs when they begin; and what a living worker has
    leased, since that has lost Redis and still runs the task.
    """
    if row is None or row.status != TaskStatus.PENDING or row.lease > 0:  # [rule: reclaim-waits]
        return None
    written = row.attempts > topic.retries - remaining
    if row.next_time > now or is_suspect(row, max_crashes) or (written and dead):  # [rule: crash-counted]
        return None
    attempts, error = row.attempts, None
    if not written:
        # max, as retries may have been lowered  [rule: never-the-last]
        attempts = max(attempts, min(attempts + 1, topic.retries - 1))
        error = CRASHED
    return Failure.of(
        row,
        attempts=attempts,
        crashes=min(row.crashes + 1, MAX_CRASHES),
        next_time=max(now, row.action_time),  # not before it, even if the clock was set back
        error=error,
    )
