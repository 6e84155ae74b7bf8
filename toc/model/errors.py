"""All errors that toc raises on purpose, in one tree. Imports nothing.

A message names the refused value and what to do about it. Drivers' errors are translated where they enter
(``toc.store``, ``toc.index``, ``toc.coordination``) with ``from exc``. A driver's text that could hold a
password is never passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toc.model.task import CancelOutcome

SHOWN_CHARS = 100


def shown(value: object) -> str:
    """Return the repr of any value, truncated, for use in a message."""
    try:
        text = repr(value)
    except Exception:  # such as an int of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def reduced(error: Exception) -> tuple[Any, ...]:
    """What pickle and copy make an error from again. By default they would call its class with the message,
    which fails where it takes something else."""
    return _made, (type(error), error.args), vars(error)


def _made(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    """Make an error with these ``args`` and no field yet."""
    return kind.__new__(kind, *args)


class TocError(Exception):
    """Base of all errors below. ``exit_code`` is the exit code of the command line."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


# --- invalid input; nothing was written


class InvalidInput(TocError, ValueError):
    """A value was refused before anything was written. ``field`` names the parameter, if the class does not
    tell which it is."""

    exit_code = 2

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NaiveDatetime(InvalidInput):
    """An ``action_time`` without a time zone."""


class NotInFuture(InvalidInput):
    """An ``action_time`` on a timed topic that is not after now."""


class InvalidDelay(InvalidInput):
    """A delay that is NaN, infinite, negative, or longer than ``max_delay``."""


class InvalidTries(InvalidInput):
    """``tries`` that are not a whole number from 0 to 65,535."""


class InvalidExpiry(InvalidInput):
    """An ``expires_at`` before the ``action_time``: no try could start in between."""


class InvalidDocument(InvalidInput):
    """A text that is no JSON, or nested too deeply."""


class InvalidAttribute(InvalidInput):
    """An attribute that is no JSON object, or longer than 4096 characters."""


class InvalidBody(InvalidInput):
    """A body that is not bytes, or a content_type that is not short printable ASCII."""


class BodyTooLarge(InvalidBody):
    """A body that is longer than ``max_body``."""


class InvalidBizId(InvalidInput):
    """A biz_id that is neither an int from 0 to 2**63-1 nor a text of 1 to 255 bytes."""


class InvalidKey(InvalidInput):
    """A dedup_key or slot_basis that is empty, too long, or holds control characters."""


class InvalidTopic(InvalidInput):
    """A topic name or policy is out of range."""


class UnknownTopic(InvalidInput):
    """No topic has that name or biz_type. ``topic`` is the name, if it is one."""

    def __init__(self, message: str, topic: str | None = None) -> None:
        super().__init__(message)
        self.topic = topic


class TopicExists(InvalidInput):
    """A topic has that name or biz_type."""


class TopicClosed(InvalidInput):
    """The topic is being deleted and takes no new task."""


class UnknownTemplate(InvalidInput):
    """No topic template has that pattern."""


class UnknownToken(InvalidInput):
    """No access token has that name."""


class NameTaken(InvalidInput):
    """A template, access token or target has that name. Names of revoked tokens stay taken."""


class InvalidTarget(InvalidInput):
    """A webhook target's name, URL, header or limit, or a task's own URL, is not allowed."""


class UnknownTarget(InvalidInput):
    """No webhook target has that name."""


class UnknownBulk(InvalidInput):
    """No bulk job has that name."""


class NotGranted(InvalidInput):
    """A new access token would allow more than the token that makes it."""


class InvalidSchedule(InvalidInput):
    """A schedule's name, rule or policy is out of range."""


class UnreadableSchedule(InvalidSchedule):
    """The row of a schedule is damaged, or of a later version."""


class UnknownSchedule(InvalidInput):
    """No schedule has that name."""


class ScheduleExists(InvalidInput):
    """A schedule has that name."""


class DuplicateHandler(InvalidInput):
    """A second handler for one topic."""


class InvalidHandler(InvalidInput):
    """A handler, or another function given to a center, whose parameters cannot be what it would get."""


class InvalidPayload(InvalidInput):
    """A payload that does not fit the first parameter of its topic's handler."""


class TopicDrift(InvalidInput):
    """Topics differ from what code declares (with TOC_TOPIC_DRIFT=refuse)."""


class AppNotFound(InvalidInput):
    """``--app package.module:center`` does not lead to a TimeoutCenter."""


class ConfigError(InvalidInput):
    """A setting is missing, malformed, or contradicts another."""


class NotInstalled(ConfigError):
    """A package that an extra installs is missing."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what}: pip install 'timeout-center[{extra}]'")


class DedupConflict(InvalidInput):
    """A task with another attribute or body, ``job_id``, has the dedup_key."""

    def __init__(self, message: str, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class TaskExists(DedupConflict):
    """With ``on_conflict="error"``: a task, ``job_id``, has the dedup_key."""


class RequestReused(InvalidInput):
    """Another request used this name (Idempotency-Key) within the last day."""


class InvalidLease(InvalidInput):
    """A text that is not a lease, or a lease whose time is out of range."""


class NotPulled(InvalidInput):
    """A pull names a topic whose ``delivery`` is not ``pull``."""


class WrongShardConnection(InvalidInput):
    """``session=`` or ``connection=`` does not lead to the server of the task's shard, or may not write
    there."""


class TwoPhase(InvalidInput):
    """A two-phase transaction was given: others decide whether it commits."""

    def __init__(self) -> None:
        super().__init__("a two-phase transaction cannot be joined; use toc.outbox, or a session without it")


class NoTransaction(InvalidInput):
    """``session=`` or ``connection=`` commits each statement at once: a rollback would undo nothing."""


class Serializable(InvalidInput):
    """A SERIALIZABLE transaction was given: its reads lock."""


# --- the state of the system forbids it


class UnknownTask(TocError):
    """No row has the job_id that a command names."""


class UnreadableTask(TocError):
    """The row of task ``job_id`` holds what toc never writes."""

    def __init__(self, job_id: int, what: str) -> None:
        super().__init__(f"the row of task {job_id} cannot be read ({what}); another program has changed it")
        self.job_id = job_id


class BodyGone(TocError):
    """The body of a task that was looked up is gone: it was purged or replaced since."""


class NotCommitted(TocError):
    """The outcome of a change was read that is not committed: the caller's transaction is still open, or it,
    or a savepoint in it, was rolled back."""


class UnknownHost(TocError):
    """A command names a host or worker that is not in the cluster now."""


class TooManyTopics(TocError):
    """A topic template has reached its ``most_topics``."""


class TopicInUse(TocError):
    """A topic is not paused, or has tasks that forbid the change."""


class SecretsLocked(TocError):
    """The secrets of webhook targets need TOC_SECRET_KEY, which is not set or lacks the key that encrypted
    them."""

    exit_code = 3


class SchemaBehind(TocError):
    """A shard lacks the schema that this version needs (``toc db upgrade``), or its tables were made
    for other numbers of databases and tables."""

    exit_code = 3


class UnfitServer(TocError):
    """A server must not be used as it is: too old, evicting, read-only."""

    exit_code = 3


# --- a server is out of reach


class Unavailable(TocError):
    """A server could not be reached or did not answer in time. Try again later."""

    exit_code = 4


class Busy(Unavailable):
    """This process already has too much to do. Nothing was written; try again in a moment."""


class StoreUnavailable(Unavailable):
    """MySQL (the task table) is out of reach. Nothing was acknowledged."""


class IndexUnavailable(Unavailable):
    """Redis (the index) is out of reach."""


class TokensUnavailable(StoreUnavailable):
    """The table of access tokens is out of reach, and what was last read cannot decide."""


class CoordinationUnavailable(Unavailable):
    """ZooKeeper is out of reach."""


class SubmitUnknown(Unavailable):
    """The connection broke at COMMIT: task ``job_id`` may or may not be stored.

    ``get(job_id)`` tells once the server is back. A submit with a dedup_key can simply be repeated.
    """

    def __init__(self, job_id: int) -> None:
        super().__init__(
            f"task {job_id} may or may not be stored: the connection broke at commit and the server did not "
            f"come back; look later with get({job_id}), or submit again with the same dedup_key"
        )
        self.job_id = job_id


class PartialCancel(Unavailable):
    """A cancel_by_biz has the ``outcomes`` of some tasks; others are ``unknown``.

    ``outcomes`` holds the known CancelOutcomes by job_id, ``unknown`` the other job_ids. Cancel again to
    learn the outcomes that are missing here.
    """

    def __init__(self, outcomes: dict[int, CancelOutcome], unknown: list[int]) -> None:
        what = f"the outcomes of {len(outcomes)} tasks are known, {len(unknown)} may or may not be cancelled"
        super().__init__(f"{what}; cancel again")
        self.outcomes = outcomes
        self.unknown = unknown


class PartialSubmit(Unavailable):
    """A submit_many stored some tasks: ``job_ids``, None where not, and ``unknown``.

    ``job_ids`` is in input order: the id of a stored task, None for one that is not stored. ``unknown`` holds
    the ids that may or may not be stored.
    """

    def __init__(self, job_ids: list[int | None], unknown: list[int]) -> None:
        stored = sum(1 for job_id in job_ids if job_id is not None)
        what = f"{stored} of {len(job_ids)} tasks were stored, {len(unknown)} are unknown"
        super().__init__(f"{what}; submit those without a job_id again (a dedup_key makes that safe)")
        self.job_ids = job_ids
        self.unknown = unknown
