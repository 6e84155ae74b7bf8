"""Decisions of the protocol: what a row says about its task, and how a try changes the row.

Pure functions: callers read a task's row, call one of these and apply the result. The table of cases is
``tests/unit/test_verdict.py``. The tags name the rules of the model in ``spec/``.

    belongs        where the index entry of a task belongs
    check          whether a prepared entry may start
    entry_score    the StoreQueue score that follows from a row
    beyond_horizon whether a task waits in its row alone
    no_try_left    whether a task has used up its tries
    has_expired    whether no try may start any more
    after_failure  how a failed try changes the row
    is_undecided   whether a failure that was refused may still change the row
    after_crash    how a try whose worker died or fell silent changes the row
    after_expiry   how an expired row ends
    is_suspect     whether a task may run only alone
    unpulled       what becomes of an entry that could not be handed out to a consumer
    after_lapse    how a pulled task ends whose time is over
    after_nack     how a consumer's failure changes the row
"""

from enum import Enum, StrEnum
from typing import NamedTuple

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.pull import LEASE_ENDED, PullRow
from toc.model.raised import Raised, Sent
from toc.model.scores import store_score
from toc.model.task import MAX_ATTEMPTS, UNLIMITED, TaskRow, TaskStatus, TryRow
from toc.model.topic import MAX_RETRIES, Delivery, Topic

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
    """The task was processed or cancelled, has no row, or one of a status that is none of ours."""


def belongs(row: TryRow | TaskRow | PullRow | None) -> Place:
    """Return where the entry of this row's task belongs. ``None`` is a task without a row."""
    # [rule: row-decides]
    if row is not None and row.status == TaskStatus.PENDING:
        return Place.STORE_QUEUE
    return Place.DEAD_QUEUE if row is not None and row.status == TaskStatus.DEAD else Place.NOWHERE


class Check(StrEnum):  # a key for each task that starts: the hash of an Enum is written in Python
    """What to do with an entry taken from the StoreQueue, according to its row."""

    START = "start"
    SOON = "soon"
    """It is due within MAX_CLOCK_SKEW_MS and waits in the worker."""
    LEASED = "leased"
    """Another worker has a lease on the row, or its lease ran out."""
    CLOCK_BEHIND = "clock behind"
    """It is due by Redis's clock but not by this machine's."""
    EXPIRED = "expired"
    """No try may start any more, and none runs: the row ends."""
    ELSEWHERE = "elsewhere"
    """The entry is wrong: it moves to where it ``belongs``."""


def check(row: TryRow, *, now: int, taken: int) -> Check:
    """Decide whether an entry may start. ``now``: this machine's ms; ``taken``: Redis's ms at the prepare."""
    if row.status != TaskStatus.PENDING:
        return Check.ELSEWHERE
    ahead = row.next_time - now
    if row.expires_at and ahead <= 0 and has_expired(row.expires_at, now) and row.lease <= 0:
        return Check.EXPIRED  # a try that runs may finish
    if ahead <= MAX_CLOCK_SKEW_MS:
        if row.lease:
            return Check.LEASED
        return Check.START if ahead <= 0 else Check.SOON  # [rule: row-check]
    return Check.CLOCK_BEHIND if row.next_time <= taken else Check.ELSEWHERE


def entry_score(topic: Topic, due: int, attempts: int) -> float:
    """Return the StoreQueue score of a pending task due at ``due`` (ms) that used up ``attempts`` tries."""
    return store_score(due, topic.remaining(attempts) if attempts else 0, attempts)


def beyond_horizon(topic: Topic, due: int, now: int) -> bool:
    """Whether a task due at ``due`` (ms) waits in its row alone, until the sweep indexes it."""
    return due - now > topic.horizon * 1000


def is_suspect(row: TryRow, max_crashes: int, delivery: Delivery) -> bool:
    """Whether ``max_crashes`` consecutive tries or more ended with their worker: the task may run only alone.
    A webhook never: it runs nothing of the application."""
    return row.crashes >= max_crashes and delivery is Delivery.HANDLER


def no_try_left(row: TryRow | PullRow, topic: Topic, attempts: int) -> bool:
    """Whether a task has no try left after ``attempts``."""
    tries = row.tries or topic.retries
    return tries != UNLIMITED and attempts >= tries


def next_attempts(attempts: int) -> int:
    """Return ``attempts`` after one more try: 1 more, within the column.

    A task that was tried MAX_ATTEMPTS times counts on in the last 31 numbers, so that one try still differs
    from the next on the row.
    """
    return attempts + 1 if attempts < MAX_ATTEMPTS else MAX_ATTEMPTS + 1 - MAX_RETRIES


def has_expired(expires_at: int, now: int) -> bool:
    """Whether no try of a task may start at ``now`` (ms), given when it expires (0: never)."""
    return 0 != expires_at < now


class Failure(NamedTuple):
    """A failed try, or an end: the row as read, and its new values. Instants are milliseconds."""

    job_id: int
    version: int
    attempts: int
    crashes: int
    new_attempts: int
    new_crashes: int
    next_time: int
    error: str | None = None
    """None keeps the row's error."""
    expired: bool = False
    """Whether the task ends because it has expired."""
    started: bool = True
    """Whether a try has ever started. If not, the task ends as cancelled instead of dead."""
    sent: Sent | None = None
    """The request that the try made, for the history."""
    by_time: bool = False
    """Whether no try has failed: the task ends because it is too late for one."""
    stack: str = ""
    """The lines of code that what was raised has passed."""
    dead: bool = False
    """Whether the task is dead then (or cancelled: ``started``)."""
    nonce: bytes | None = None
    """Of a pulled task: that of its row as read, empty if it was not handed out."""


def try_as_read(row: TryRow | PullRow) -> tuple[int, int, int, int]:
    """Return the first fields of a Failure: it applies only while the row is unchanged."""
    return row.job_id, row.version, row.attempts, row.crashes


def after_failure(row: TryRow, topic: Topic, raised: Raised, now: int) -> Failure:
    """Return how a try that failed at ``now`` (ms) changes its row.

    The try is used up. The crash count is reset, because the try ended by itself, with two exceptions. A task
    that ended the process in which it ran alone keeps its crash count. A try that another handler broke off
    uses up nothing but counts as a crash, so that a task to which that happens repeatedly runs alone.

    A task whose next try would be due after it has expired is dead at once.

    A postponed try did not take place: it uses up nothing, and the row keeps its crash count, because
    (attempts, crashes, version) must not repeat. A task that expires meanwhile is checked then. Only a
    payload that does not fit becomes the row's error.
    """
    if raised.expired:
        return after_expiry(row, now)
    if raised.until is not None:  # [rule: postponed]
        until = min(raised.until, row.expires_at + 1) if row.expires_at else raised.until
        next_time, error = max(now, until, row.action_time), raised.text if raised.misfit else None
        return Failure(*try_as_read(row), row.attempts, row.crashes, next_time, error)
    if raised.disturbed:
        attempts, dead, crashes = row.attempts, False, min(row.crashes + 1, MAX_CRASHES)
    else:
        attempts = next_attempts(row.attempts)
        dead = raised.dead or no_try_left(row, topic, attempts)
        crashes = row.crashes if raised.crashed else 0
    if dead or raised.disturbed:
        delay = 0
    else:
        delay = topic.retry_delay_ms(attempts) if raised.after_ms is None else raised.after_ms
    next_time = max(now + delay, row.action_time)  # also if the clock was set back
    expired = not dead and has_expired(row.expires_at, next_time)
    failure = Failure(*try_as_read(row), attempts, crashes, next_time, raised.text, expired)
    return failure._replace(sent=raised.sent, stack=raised.stack, dead=dead or expired)


def is_undecided(read: TryRow, row: TryRow | None) -> bool:
    """Whether the failure of a try that ``read`` this row may still be written although it was refused.

    If the row is unchanged, only another worker's lease can have refused the failure. If that
    worker ends a try of its own, the row changes and this failure is dropped. If that worker gives
    the task back without a try, this failure is written.
    """
    return (  # [rule: failure-waits]
        row is not None
        and row.status == TaskStatus.PENDING
        and (row.version, row.attempts, row.crashes) == (read.version, read.attempts, read.crashes)
    )


def after_expiry(row: TryRow, now: int) -> Failure:
    """Return how a pending row ends that has expired by ``now`` (ms), and whose task no worker runs.

    If no try of the task has ever started, it ends as cancelled, otherwise as dead with its last
    error. A lease that ran out means that a try has started and its worker died or fell silent.
    """
    attempts, error = row.attempts, None
    if row.lease < 0:
        attempts, error = max(attempts, 1), CRASHED
    started = bool(attempts or row.crashes or row.begun)
    failure = Failure(*try_as_read(row), attempts, row.crashes, now, error)
    return failure._replace(expired=True, started=started, by_time=True, dead=True)


def after_crash(
    row: TryRow | None, topic: Topic, remaining: int, now: int, max_crashes: int, *, dead: bool
) -> Failure | None:
    """Return how a try that ended with its worker changes the row, or None for no change.

    ``remaining`` is what the entry's score carries. Charges a try, but never the last one: no task becomes
    dead by a crash of its worker. A try is not charged twice: if the entry carries another number than the
    score that follows from the row, the try was charged before. The crash is counted even then, unless the
    worker is known to be ``dead``: the entry's tries may be stale, its owner may still run it, and the
    owner's late failure must find a changed row.

    No change for a suspect, because the quarantine counts its runs when they begin (a webhook runs no handler
    of the application, so it is never a suspect); for a row that a live worker has leased, because that
    worker has lost Redis and still runs the task; and for a pulled topic, because the row says what a gateway
    that died had handed out.
    """
    if topic.delivery is Delivery.PULL:
        return None
    if row is None or row.status != TaskStatus.PENDING or row.lease > 0:  # [rule: reclaim-waits]
        return None
    written = topic.remaining(row.attempts) != remaining
    suspect = is_suspect(row, max_crashes, topic.delivery)
    if row.next_time > now or suspect or (written and dead):  # [rule: crash-counted]
        return None
    attempts, error = row.attempts, None
    if not written:
        after = next_attempts(attempts)
        if not no_try_left(row, topic, after):  # [rule: never-the-last]
            attempts = after
        error = CRASHED
    crashes, next_time = min(row.crashes + 1, MAX_CRASHES), max(now, row.action_time)  # a clock may go back
    return Failure(*try_as_read(row), attempts, crashes, next_time, error)


class Unpulled(Enum):
    """What to do with an entry whose row refused to be handed out."""

    NOT_DUE = "not due"
    """A consumer has it, or its time has not come: it waits until the row's next_time."""
    OVER = "over"
    """No try may start any more: it has expired, or the ttr of its last try has ended. The sweep ends it."""
    AGAIN = "again"
    """It is due by its row: another gateway was faster and has given it back, or a clock is behind."""
    ELSEWHERE = "elsewhere"
    """It has ended: the entry moves to where it ``belongs``."""


def unpulled(row: PullRow, topic: Topic) -> Unpulled:
    """Decide about an entry that was not handed out, by its row as read in the same transaction.

    Mirrors the guard of ``store.pulls.hand_out``.
    """
    if row.status != TaskStatus.PENDING:
        return Unpulled.ELSEWHERE
    if row.next_time > row.now:
        return Unpulled.NOT_DUE
    lapsed = row.nonce and no_try_left(row, topic, row.attempts)  # [rule: last-lapse]
    return Unpulled.OVER if lapsed or has_expired(row.expires_at, row.now) else Unpulled.AGAIN


def after_lapse(row: PullRow) -> Failure:
    """Return how a pulled task ends that is ``OVER``.

    A task that expired without a try becomes cancelled. Any other becomes dead with its last error.
    """
    error, expired = LEASE_ENDED if row.nonce else None, has_expired(row.expires_at, row.now)
    failure = Failure(*try_as_read(row), row.attempts, row.crashes, row.now, error, expired)
    started = bool(row.attempts or row.crashes or row.begun)
    return failure._replace(started=started, by_time=True, dead=True, nonce=row.nonce)


class Nack(NamedTuple):
    """A try that its consumer gave back as failed: the row as read, and when it is due again, in ms from
    now."""

    row: PullRow
    dead: bool
    delay_ms: int
    error: str


def after_nack(row: PullRow, topic: Topic, *, delay_ms: int | None, dead: bool, error: str) -> Nack:
    """Return how a nack changes its row. The try was charged when it was handed out.

    Without a delay the topic's backoff applies. The nack of the last try makes the task dead.
    """
    dead = dead or no_try_left(row, topic, row.attempts)
    delay = topic.retry_delay_ms(row.attempts) if delay_ms is None else delay_ms
    return Nack(row, dead, 0 if dead else delay, error)
