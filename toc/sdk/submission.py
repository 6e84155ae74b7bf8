"""Checks what a caller submits and makes it a row; raises a named error before anything is written."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any

from toc.model import errors
from toc.model.clock import MILLISECOND, Clock, from_ms, named_seconds, to_ms
from toc.model.sharding import BizId, JobIds, check_key, crc32, is_whole, valid_job_id
from toc.model.target import ATTRIBUTE, NOTHING_ALLOWED, Allow, check_not_reserved, named_route
from toc.model.task import (
    UNLIMITED,
    DialectTask,
    NewTask,
    OnConflict,
    Request,
    Submission,
    TaskRow,
    TaskStatus,
    check_body,
    check_expiry,
    encode_attribute,
)
from toc.model.topic import Delivery, Topic, TopicType, check_native

MAX_DELAY_SECONDS = 1e12
"""Larger delays are refused without comparing them with TOC_MAX_DELAY, which is always smaller."""

OF_TIMES = (errors.NotInFuture, errors.InvalidExpiry)
"""What refuses a task for a time that may have been right before."""

EARLIEST_MS = 0
"""The earliest instant that is accepted, on instant topics: scans of rows begin here."""
LATEST_MS = to_ms(datetime(9999, 12, 31, tzinfo=UTC))
"""The latest instant that is accepted: the last day that a DATETIME can hold."""


class RowMaker:
    """Makes submissions of new tasks. ``max_delay`` is in seconds, ``max_body`` in bytes; ``allow`` is for
    URLs."""

    def __init__(self, clock: Clock, max_delay: float, max_body: int, allow: Allow = NOTHING_ALLOWED) -> None:
        self._clock = clock
        self._allow = allow
        self._max_body = max_body
        self._max_delay_ms = int(max_delay * 1000)
        self._job_ids = JobIds(clock)

    def submission(
        self, task: NewTask, topic_named: Callable[[str], Topic], request: Request | None = None
    ) -> Submission:
        """Return what a submit of a new task writes, with a new job_id. Raises an InvalidInput.

        Also raises what ``topic_named`` raises. That is called last, because it may have to ask a server.
        """
        if not isinstance(task, NewTask):
            raise errors.InvalidInput(f"submit_many takes NewTask objects, not {type(task).__name__}")
        biz = BizId.of(task.biz_id)
        check_not_reserved(task.attribute)
        attribute = encode_attribute(task.attribute)
        route = named_route(task.target, task.url, self._allow)
        if route is not None:
            attribute = encode_attribute({**(task.attribute or {}), ATTRIBUTE: route})
        if not is_whole(task.tries, 0, UNLIMITED):
            raise errors.InvalidTries(
                f"tries must be a whole number from 0 (as many as the topic gives) to {UNLIMITED} (without "
                f"limit), not {errors.shown(task.tries)}"
            )
        content = check_body(task.body, task.content_type, self._max_body)
        if task.dedup_key is not None:
            check_key("dedup_key", task.dedup_key)
        slot_crc = biz.crc if task.slot_basis is None else crc32(check_key("slot_basis", task.slot_basis))
        on_conflict = _conflict_of(task)
        by_dialect = isinstance(task, DialectTask)
        if not by_dialect:
            check_native(task.topic)
        topic = topic_named(task.topic)
        if topic.closed:
            raise errors.TopicClosed(f"topic {topic.name!r} is being deleted and takes no new task")
        if route is not None and topic.delivery is not Delivery.WEBHOOK:
            raise errors.InvalidTarget(
                f"{'url' if task.target is None else 'target'} goes with a topic whose delivery is webhook; "
                f"that of {topic.name!r} is {topic.delivery.value}"
            )
        if task.expires_at is not None and task.expires_in is not None:
            raise errors.InvalidInput("give expires_at or expires_in, not both", "expires_at")
        if task.past not in ("refuse", "run"):
            raise errors.InvalidInput(f"past must be refuse or run, not {errors.shown(task.past)}")
        now = self._clock.now_ms()
        max_delay_ms = LATEST_MS if by_dialect else self._max_delay_ms
        expires_in = topic.expires_in if task.expires_in is None else task.expires_in
        due = self._due(topic, task.delay, task.action_time, now, max_delay_ms, runs=task.past == "run")
        size, fingerprint = (None, None) if content is None else (len(content.data), content.fingerprint())
        row = TaskRow(
            self._job_ids.make(biz.crc), biz.number, biz.key, topic.biz_type, TaskStatus.PENDING, due, due,
            attribute, 0, 0, 0, slot_crc, topic.slot_amount, task.dedup_key, None, now, now, task.tries,
            self.expiry(task.expires_at, due, expires_in), 0, size, fingerprint,
        )  # fmt: skip
        return Submission(row, content, on_conflict, request, topic.name)

    def deadline(self, topic: Topic | None, delay: object, action_time: object) -> int:
        """Return the action_time in milliseconds, rounded up. Raises InvalidInput if it is not allowed.

        If ``topic`` is None (unknown), the deadline is checked as for a timed topic.
        """
        return self._due(topic, delay, action_time, self._clock.now_ms(), self._max_delay_ms)

    def expiry(self, expires_at: object, due: int, expires_in: object = 0) -> int:
        """Return ``expires_at`` in milliseconds, rounded up; for None what ``expires_in`` makes of ``due``.

        ``due`` is the action_time in milliseconds. 0: it never expires. Raises InvalidInput.
        """
        if expires_at is None:
            wait = _delay_ms(expires_in, "expires_in")
            return min(due + wait, LATEST_MS) if wait else 0
        at = instant_ms(expires_at, "expires_at")
        if not 0 < at <= LATEST_MS:
            raise errors.InvalidExpiry(
                f"expires_at {expires_at} must be after 1970 and before the year 10000"
            )
        check_expiry(at, due)
        return at

    def _due(
        self, topic: Topic | None, delay: object, action_time: object, now: int, max_delay_ms: int, *,
        runs: bool = False,
    ) -> int:  # fmt: skip
        """``runs``: what is past is due now."""
        if delay is not None and action_time is not None:
            raise errors.InvalidInput("give a delay or an action_time, not both", "delay")
        if action_time is not None:
            due = instant_ms(action_time, "action_time")
        elif delay is not None:
            wait = _delay_ms(delay)
            # now is rounded down, and a deadline is never early
            due = now + self._clock.step_ms + wait if wait else now
        elif topic is not None and topic.topic_type is TopicType.INSTANT:
            return now
        else:
            do = "give a delay or an action_time (only tasks of instant topics run now)"
            raise errors.InvalidInput(do, "delay")
        field = "delay" if action_time is None else "action_time"
        if due <= now and runs:
            return now
        if due <= now and (topic is None or topic.topic_type is TopicType.TIMED):
            given = "a delay of 0" if action_time is None else f"action_time {action_time}"
            raise errors.NotInFuture(
                f"{given} is not after now ({from_ms(now).isoformat(timespec='milliseconds')}); "
                "a task of a timed topic must be due later than now, unless past='run'",
                field,
            )
        if due < EARLIEST_MS:
            raise errors.InvalidInput(
                f"action_time {action_time} is before 1970; give a later one, or none to run it now",
                "action_time",
            )
        if due - now > max_delay_ms + 1:
            raise errors.InvalidDelay(
                f"the deadline is {(due - now) / 86_400_000:.0f} days ahead; at most "
                f"{max_delay_ms / 86_400_000:.0f} are allowed (TOC_MAX_DELAY)",
                field,
            )
        return due


def at_any_time(task: NewTask) -> NewTask:
    """Return a task as one that no time refuses: to look for that which has its dedup_key."""
    return task._replace(delay=1, action_time=None, expires_at=None, expires_in=None)


def _conflict_of(task: NewTask) -> OnConflict:
    """Return what a task's submit does if its dedup_key is taken. Raises InvalidInput."""
    if task.on_conflict == OnConflict.KEEP:
        return OnConflict.KEEP
    try:
        what = OnConflict(task.on_conflict)
    except ValueError:
        raise errors.InvalidInput(
            f"on_conflict must be one of {', '.join(OnConflict)}, not {errors.shown(task.on_conflict)}"
        ) from None
    if task.dedup_key is None:
        raise errors.InvalidKey(f"dedup_key is needed with on_conflict={what.value!r}: it names the task")
    return what


def check_job_id(job_id: int) -> int:
    """Return ``job_id`` if it is well formed. Raises InvalidInput."""
    if not valid_job_id(job_id):
        raise errors.InvalidInput(f"{errors.shown(job_id)} is not a job_id; submit returned one as an int")
    return int(job_id)


def instant_ms(instant: object, name: str) -> int:
    """Return an aware datetime in milliseconds, rounded up. Raises InvalidInput, NaiveDatetime."""
    if not isinstance(instant, datetime):
        raise errors.InvalidInput(f"{name} must be a datetime, not {type(instant).__name__}")
    if instant.utcoffset() is None:
        raise errors.NaiveDatetime(
            f"{name} {instant.isoformat()} has no time zone; use datetime.now(UTC) + ... or "
            f"datetime(..., tzinfo=...)"
        )
    return to_ms(instant)


def _delay_ms(delay: Any, name: str = "delay") -> int:
    """Return a duration in milliseconds, rounded up. Raises InvalidDelay."""
    seconds = named_seconds(name, delay)
    if seconds > MAX_DELAY_SECONDS:
        raise errors.InvalidDelay(f"{name} {seconds:g} s is not allowed", name)
    return -(-delay // MILLISECOND) if isinstance(delay, timedelta) else ceil(seconds * 1000)
