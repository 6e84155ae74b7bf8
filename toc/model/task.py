"""Tasks: what callers submit, what handlers get, what rows hold, and the outcomes of changes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum, IntEnum, StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from toc.model import errors
from toc.model.clock import Duration, from_ms, seconds_of
from toc.model.documents import MAX_DEPTH, check_depth, instant, parse_object
from toc.model.errors import InvalidAttribute, InvalidBody, UnreadableTask, reduced, shown

if TYPE_CHECKING:
    from toc.model.pull import PullRow

SCHEDULED_FOR = "scheduled_for"
"""The key of an attribute that holds the nominal time of a schedule's occurrence."""
MAX_RETRY_SECONDS = 3653 * 86_400
UNLIMITED = 65_535
"""``tries`` of a task that is tried without limit."""
MAX_ATTEMPTS = 65_535
"""Largest value of the column. Further tries of a task reuse the last 31 numbers, in turn."""
MAX_ATTRIBUTE_CHARS = 4096
ROW_BYTES = 300
"""Approximate bytes of a row in SQL without its attribute and body."""
_FLAT = frozenset({str, int, float, bool, type(None)})
"""Types of values that are the same after JSON."""
_ATTRIBUTES = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
"""Made once: ``json.dumps`` would make one for each attribute."""


class TaskStatus(IntEnum):
    """The status column. Whether a pending task is waiting, prepared or running is known only by the
    index."""

    PENDING = 0
    """Acknowledged; its handler has not succeeded yet."""
    PROCESSED = 2
    """Its handler returned. Final."""
    CANCELLED = 3
    """Cancelled or withdrawn before it was processed, or expired before its first try. Final."""
    DEAD = 4
    """Out of tries, or expired after a try. Final until an operator redrives or purges it."""


class CancelOutcome(Enum):
    """The outcome of a cancel."""

    CANCELLED = "cancelled"
    """The handler has never run and never will. Also of a task that expired before its
    first try."""
    MAY_HAVE_STARTED = "may_have_started"
    """Cancelled, but a try may be running or may have run. No later try follows."""
    TOO_LATE = "too_late"
    """The task had ended by itself: it was processed or dead."""
    UNKNOWN = "unknown"
    """No such task exists."""


class RescheduleOutcome(Enum):
    """The outcome of a reschedule."""

    RESCHEDULED = "rescheduled"
    """The handler has not run for the old time and will run at the new one."""
    MAY_HAVE_STARTED = "may_have_started"
    """The handler will run at the new time, but a try for the old time may be running or may have run."""
    TOO_LATE = "too_late"
    """The task was already processed, cancelled or dead."""
    UNKNOWN = "unknown"
    """No such task exists."""


class OnConflict(StrEnum):
    """What a submit does if a task with its dedup_key is stored."""

    KEEP = "keep"
    """Leaves that task as it is; a conflict if its attribute or body differs."""
    ERROR = "error"
    """Is refused."""
    REPLACE = "replace"
    """Gives that task the new time and content if it is pending; else stores a new task."""


class PutOutcome(Enum):
    """The outcome of a ``put``."""

    NEW = "new"
    """A task was stored. One that had ended has lost its dedup_key to it."""
    KEPT = "kept"
    """The task with this dedup_key is as it was."""
    REPLACED = "replaced"
    """The task that was pending has the new time and content. No try had started for the old time."""
    MAY_HAVE_STARTED = "may_have_started"
    """Replaced, but a try for the old time may be running or may have run. No try for the new time
    starts before the lease of that try has ended."""


class Put(NamedTuple):
    """The task that a ``put`` stored, kept or replaced, and which of these it was."""

    job_id: int
    outcome: PutOutcome


class Request(NamedTuple):
    """The name of a request to submit. A request with the same name within a day gets the first
    answer and changes nothing.

    ``key`` is a hash of the name and of who may use it, ``payload`` a hash of all that was asked
    for. ``part``: whether this is one task of a request for many tasks. ``Store.requests`` then
    records the name once, for the whole request.
    """

    key: bytes
    payload: bytes
    part: bool = False

    @classmethod
    def of(cls, scope: str, name: str, payload: bytes) -> Request:
        """Return the request that ``scope`` (such as a caller's name and path) calls ``name``."""
        whose = len(scope.encode()).to_bytes(4) + scope.encode() + name.encode()
        return cls(hashlib.sha256(whose).digest(), hashlib.sha256(payload).digest())

    def part_of(self, number: int) -> Request:
        """Return the part that asks for the task of this number."""
        return Request(hashlib.sha256(self.key + b"%d" % number).digest(), self.payload, True)


class Retry(Exception):
    """Raised or returned by a handler: this try failed; run the task again after ``after``, a Duration.

    Uses up a try.
    """

    def __init__(self, after: Duration, reason: str = "") -> None:
        seconds = seconds_of(after)
        if seconds > MAX_RETRY_SECONDS:
            raise errors.InvalidDelay(f"Retry(after=...) must be at most 10 years, not {after!r}")
        super().__init__(reason or f"retry after {seconds:g} s")
        self.after = after if isinstance(after, timedelta) else timedelta(seconds=seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


class Dead(Exception):
    """Raised or returned by a handler: the task can never succeed. It is dead at once, with this reason."""

    def __init__(self, reason: str = "no reason given") -> None:
        super().__init__(reason)
        self.reason = reason


class Task(NamedTuple):
    """A task as handlers and callers see it.

    ``action_time`` is aware UTC in whole milliseconds. ``attempt`` is the number of the running or next try,
    starting at 1. ``biz_id`` is the int or text that was submitted. ``version`` counts reschedules and
    redrives. ``tries`` is the number of all its tries; 0: that of its topic; 65,535: no limit. No try starts
    after ``expires_at`` (aware UTC); ``expired``: the task ended because of it. ``redrives``: how many of
    ``version`` are redrives; known only of the task that a handler gets, otherwise 0.

    A handler gets the ``body`` with its task. For a task that was looked up, the first use reads it.
    """

    job_id: int
    topic: str
    biz_id: int | str
    biz_type: int
    status: TaskStatus
    action_time: datetime
    attribute: dict[str, Any]
    attempt: int
    version: int
    tries: int = 0
    expires_at: datetime | None = None
    expired: bool = False
    stored_body: Body | None = None
    redrives: int = 0

    @property
    def body(self) -> bytes | None:
        """The body, None without one. Raises BodyGone or StoreUnavailable if it cannot be read now."""
        return None if self.stored_body is None else self.stored_body.content.data

    @property
    def content_type(self) -> str | None:
        """The body's content type, None without a body. Raises what ``body`` raises."""
        return None if self.stored_body is None else self.stored_body.content.content_type

    @property
    def body_length(self) -> int | None:
        """The body's length in bytes, None without one. Reads nothing."""
        return None if self.stored_body is None else self.stored_body.length

    @property
    def scheduled_for(self) -> datetime | None:
        """The nominal time (aware UTC) of a schedule's occurrence, whose biz_id is the schedule's name.

        None for any other task.
        """
        text = self.attribute.get(SCHEDULED_FOR)
        try:
            at = datetime.fromisoformat(text) if isinstance(text, str) else None
        except ValueError:
            return None
        return at.astimezone(UTC) if at is not None and at.tzinfo is not None else None


def scheduled_for_text(nominal: int) -> str:
    """A nominal time (ms) as attributes and dedup_keys hold it: such texts sort like their times."""
    return instant(nominal)


class NewTask(NamedTuple):
    """A task to submit. Give ``delay`` or ``action_time``, not both. On an instant topic, neither means now.

    ``delay`` and ``expires_in`` (from the action_time; 0: never) are a timedelta, seconds, or a text such as
    "30m". ``tries`` and ``expires_at`` are those of Task.
    ``content_type`` is the body's, by default application/octet-stream. ``on_conflict`` is an
    OnConflict. ``target`` names the webhook target that the task is sent to, instead of its
    topic's. ``url`` is a URL of the task's own; if ``target`` is given, it is a path of that
    target's host. ``past`` says what becomes of a passed deadline on a timed topic: ``"refuse"``, or
    ``"run"`` at once.
    """

    topic: str
    biz_id: int | str
    delay: Duration | None = None
    action_time: datetime | None = None
    attribute: Mapping[str, Any] | None = None
    dedup_key: str | None = None
    slot_basis: str | None = None
    tries: int = 0
    expires_at: datetime | None = None
    body: bytes | None = None
    content_type: str | None = None
    on_conflict: str = OnConflict.KEEP
    target: str | None = None
    url: str | None = None
    past: str = "refuse"
    expires_in: Duration | None = None


class DialectTask(NewTask):
    """A task as a protocol of another queue submits it: its topic may be of those that dialects alone fill,
    and it may be due after TOC_MAX_DELAY, as they have bounds of their own."""


class TaskRow(NamedTuple):
    """A row of the task table, in plain types. Instants are milliseconds since 1970 UTC.

    ``next_time`` is when the next try is due: action_time until a try fails. After the task has
    ended, it is when it ended (one index serves sweep, dead list and purge). ``attempts`` counts
    tries used up. ``crashes`` counts consecutive tries that ended because their worker died or fell
    silent, or another handler broke them off. (attempts, crashes, version) never repeats for one
    pending row: it is the fencing token of failures. (Beyond MAX_ATTEMPTS it repeats, but only
    after 31 tries.)

    ``tries``: 0 means those of the topic, UNLIMITED that there is no limit. ``expires_at``: 0 means never.
    ``expired`` is 1 if that is why it ended. ``body_sha256`` is the body's fingerprint
    (``Content.fingerprint``); both are None without a body. ``redrives`` is how many of the
    changes that ``version`` counts are redrives; ``late`` are its late starts (``toc.model.lateness``). No
    insert writes these two.
    """

    job_id: int
    biz_id: int
    biz_key: str | None
    biz_type: int
    status: int
    action_time: int
    next_time: int
    attribute: str
    version: int
    attempts: int
    crashes: int
    slot_crc: int
    slot_amount: int
    dedup_key: str | None
    last_error: str | None
    gmt_create: int
    gmt_modified: int
    tries: int = 0
    expires_at: int = 0
    expired: int = 0
    body_length: int | None = None
    body_sha256: bytes | None = None
    redrives: int = 0
    late: str | None = None

    def to_task(self, topic: str, body: Body | None = None) -> Task:
        """Return the row as callers see it, with its body if it has one. Raises UnreadableTask."""
        return task_of(self, self.status, topic, body, expired=bool(self.expired))

    @property
    def size(self) -> int:
        """Roughly how many bytes it takes on its way, with its body, which goes as hexadecimal digits."""
        return ROW_BYTES + len(self.attribute) + 2 * (self.body_length or 0)


class Submission(NamedTuple):
    """A task to store, checked: its row and body, and what to do if its name is taken. ``topic`` is the name
    of its topic, for spans."""

    row: TaskRow
    content: Content | None = None
    on_conflict: OnConflict = OnConflict.KEEP
    request: Request | None = None
    topic: str = ""

    @property
    def plain(self) -> bool:
        """Whether one INSERT stores it, unless its name is taken."""
        return self.on_conflict is OnConflict.KEEP and self.request is None


class TryRow(NamedTuple):
    """The columns that a try needs: for the row check, the handler's Task, and the end of the try.

    Fields as in TaskRow. ``lease`` is 0 if no other worker has a lease on the row, the milliseconds
    left of a live worker's lease, or -1 if the lease's worker died or fell silent. ``begun`` is 1
    if the row has a last error, so that a try has begun even if it charged nothing. ``body_length``
    is -1 without a body. ``redrives`` is how many of the changes that ``version`` counts are
    redrives.
    """

    job_id: int
    biz_id: int
    biz_type: int
    status: int
    action_time: int
    next_time: int
    version: int
    attempts: int
    crashes: int
    lease: int
    biz_key: str | None
    attribute: str
    tries: int = 0
    expires_at: int = 0
    begun: int = 0
    body_length: int = -1
    redrives: int = 0

    def to_task(self, topic: str, body: Body | None = None) -> Task:
        """Return the Task for the handler of a row known to be pending. Raises UnreadableTask."""
        return task_of(self, TaskStatus.PENDING, topic, body, redrives=self.redrives)


def task_of(
    row: TaskRow | TryRow | PullRow, status: int, topic: str, body: Body | None, *,
    attempt: int | None = None, expired: bool = False, redrives: int = 0,
) -> Task:  # fmt: skip
    """Return the Task of a row. ``attempt``: by default the next one. Raises UnreadableTask."""
    check_body_length(row)
    try:
        return Task(
            row.job_id, topic, row.biz_id if row.biz_key is None else row.biz_key, row.biz_type,
            status if isinstance(status, TaskStatus) else TaskStatus(status),
            _cached_from_ms(row.action_time), decode_attribute(row.attribute),
            row.attempts + 1 if attempt is None else attempt, row.version, row.tries,
            from_ms(row.expires_at) if row.expires_at else None, expired, body, redrives,
        )  # fmt: skip
    except errors.InvalidDocument as exc:
        raise UnreadableTask(row.job_id, f"its attribute: {exc}") from None
    except (ValueError, OverflowError) as exc:
        raise UnreadableTask(row.job_id, type(exc).__name__) from None


def check_body_length(row: TaskRow | TryRow | PullRow) -> None:
    """Raise UnreadableTask for the length of a body that no body can have: who reads it makes room first."""
    if row.body_length is not None and row.body_length > MAX_BODY:
        raise UnreadableTask(row.job_id, f"its body_length: {row.body_length}")


_cached_from_ms = lru_cache(256)(from_ms)
"""The tasks of a burst share few instants."""


def check_expiry(expires_at: int, action_time: int) -> None:
    """Raise InvalidExpiry if a task (times in ms; 0: never) expires before it is due."""
    if expires_at and expires_at < action_time:
        end, due = (from_ms(at).isoformat(timespec="milliseconds") for at in (expires_at, action_time))
        what = f"the task would expire at {end}, before its action_time {due}"
        raise errors.InvalidExpiry(f"{what}; give a later expires_at")


def decode_attribute(text: str) -> dict[str, Any]:
    """Parse a stored attribute. Raises InvalidDocument."""
    return parse_object(text) if text != "{}" else {}


def encode_attribute(attribute: Mapping[str, Any] | None) -> str:
    """Encode the attribute as stored: a JSON object with sorted keys, so that equal ones are equal texts.

    Raises InvalidAttribute if it is not JSON (NaN and infinity are not), nested more than 64 deep, or longer
    than its column.
    """
    if attribute is None:
        return "{}"
    if not isinstance(attribute, (dict, Mapping)):  # a dict is recognized at once
        raise InvalidAttribute(f"attribute must be a dict, not {type(attribute).__name__}")
    try:
        text = _ATTRIBUTES.encode(dict(attribute))
        data = text.encode()
        same = _FLAT.issuperset(map(type, attribute.values())) and {str}.issuperset(map(type, attribute))
        if not same:
            check_depth(data)
            same = json.loads(text) == attribute
    except UnicodeEncodeError as exc:
        raise InvalidAttribute("attribute contains a lone surrogate, which UTF-8 cannot encode") from exc
    except (errors.InvalidDocument, RecursionError):
        raise InvalidAttribute(f"attribute is nested more than {MAX_DEPTH} deep, or within itself") from None
    except (TypeError, ValueError) as exc:
        raise InvalidAttribute(f"attribute is not JSON: {exc}") from exc
    if not same:
        raise InvalidAttribute("attribute changes when it is stored as JSON: use string keys and lists")
    if len(text) > MAX_ATTRIBUTE_CHARS:
        what = f"attribute has {len(text)} characters ({len(data)} bytes) as JSON"
        do = "keep the payload elsewhere and put its id here"
        raise InvalidAttribute(f"{what}; {MAX_ATTRIBUTE_CHARS} characters are allowed: {do}")
    return text


DEFAULT_CONTENT_TYPE = "application/octet-stream"
MAX_CONTENT_TYPE_CHARS = 255
MAX_BODY = 4 << 20
"""Most bytes of a body that a setting can allow."""


class Content(NamedTuple):
    """What a body consists of."""

    content_type: str
    data: bytes

    def fingerprint(self) -> bytes:
        """Return the row's ``body_sha256``: of the content type, a zero byte and the data.

        If two bodies differ in their type or their data, the fingerprints differ. So bodies can be
        compared without reading them.
        """
        digest = hashlib.sha256(self.content_type.encode() + b"\0")
        digest.update(self.data)
        return digest.digest()


class Body:
    """A stored body. ``length`` is known; the rest is read from the task table when it is first asked for."""

    __slots__ = ("_content", "_read", "length")

    def __init__(
        self, length: int, content: Content | None = None, read: Callable[[], Content] | None = None
    ) -> None:
        self.length = length
        self._content = content
        self._read = read

    @property
    def content(self) -> Content:
        """The bytes and their type. Raises BodyGone or StoreUnavailable if they cannot be read."""
        if self._content is None:
            assert self._read is not None  # noqa: S101 - it is one of the two
            self._content = self._read()
        return self._content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and (self is other or self.content == other.content)

    def __hash__(self) -> int:
        return hash(self.length)

    def __repr__(self) -> str:  # tasks are logged: never the bytes
        return f"<{self.length} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled task carries its body
        return Body, (self.length, self.content)


def check_body(body: object, content_type: object, most: int) -> Content | None:
    """Return what a caller submits as a body of at most ``most`` bytes, None without one.

    Raises InvalidBody.
    """
    if body is None:
        if content_type is not None:
            raise InvalidBody("a content_type is given without a body", "content_type")
        return None
    if not isinstance(body, bytes):
        raise InvalidBody(f"body must be bytes, not {type(body).__name__}")
    if len(body) > most:
        do = "keep it elsewhere and put its address here"
        raise errors.BodyTooLarge(f"body has {len(body)} bytes; {most} are allowed (TOC_MAX_BODY): {do}")
    if content_type is None:
        return Content(DEFAULT_CONTENT_TYPE, body)
    if not isinstance(content_type, str):
        raise InvalidBody(f"content_type must be a text, not {type(content_type).__name__}", "content_type")
    plain = content_type.isascii() and content_type.isprintable()
    if not plain or not 0 < len(content_type) <= MAX_CONTENT_TYPE_CHARS:
        what = f"1 to {MAX_CONTENT_TYPE_CHARS} printable ASCII characters, such as application/json"
        raise InvalidBody(f"content_type {shown(content_type)} must be {what}", "content_type")
    return Content(content_type, body)
