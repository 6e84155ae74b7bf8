"""Every error that toc raises on purpose, in one tree. Imports nothing.

A message names the value that was refused and what to do about it. Drivers' errors are translated
where they enter (``toc.store``, ``toc.index``, ``toc.coordination``) with ``from exc``; their texts are
never passed on where they could hold a password.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toc.model.task import CancelOutcome

SHOWN_CHARS = 100


def shown(value: object) -> str:
    """A value for a message: as Python writes it, cut short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, say
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


class TocError(Exception):
    """Base of all errors below. ``exit_code`` is what the command line ends with."""

    exit_code = 1


# --- what the caller said is wrong; nothing was written


class InvalidInput(TocError, ValueError):
    """A value was refused before anything was written."""

    exit_code = 2


class NaiveDatetime(InvalidInput):
    """An ``action_time`` without a time zone: the instant that it means is unknown."""


class NotInFuture(InvalidInput):
    """The ``action_time`` of a task on a timed topic is not after now."""


class InvalidDelay(InvalidInput):
    """A delay that is NaN, infinite, negative, or further ahead than ``max_delay`` allows."""


class InvalidAttribute(InvalidInput):
    """An attribute that is not a JSON object, or is longer than its column."""


class InvalidBizId(InvalidInput):
    """A biz_id that is neither an int in 0 .. 2**63-1 nor a short text."""


class InvalidKey(InvalidInput):
    """A dedup_key or slot_basis that is empty, too long, or holds control characters."""


class InvalidTopic(InvalidInput):
    """A topic name or one of a topic's policies is out of its range."""


class UnknownTopic(InvalidInput):
    """No topic of that name, or of that biz_type, is in the topic table."""


class TopicExists(InvalidInput):
    """A topic with that name or biz_type is there already."""


class DuplicateHandler(InvalidInput):
    """A second handler was registered for one topic."""


class InvalidHandler(InvalidInput):
    """What was registered as a handler cannot be called as one."""


class AppNotFound(InvalidInput):
    """``--app package.module:center`` does not lead to a TimeoutCenter."""


class ConfigError(InvalidInput):
    """A setting is missing, malformed, or contradicts another."""


class DedupConflict(InvalidInput):
    """The dedup_key is taken by a task with another attribute. ``job_id`` is that task's."""

    def __init__(self, message: str, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class WrongShardConnection(InvalidInput):
    """The connection that the caller passed does not lead to the server that holds the task's shard."""


# --- the state of the system forbids it


class UnknownTask(TocError):
    """A command asks for a job_id that no row has."""


class UnreadableTask(TocError):
    """The row of task ``job_id`` holds what no submit has written, as an attribute that is no JSON object."""

    def __init__(self, job_id: int, what: str) -> None:
        super().__init__(f"the row of task {job_id} cannot be read ({what}); somebody else has changed it")
        self.job_id = job_id


class UnknownHost(TocError):
    """A command names a host or worker that the cluster does not have now."""


class SchemaBehind(TocError):
    """At least one shard has not the schema that this code needs: run ``toc db upgrade``. Or its tables were
    made for other numbers of databases and tables than are configured."""

    exit_code = 3


class UnfitServer(TocError):
    """A server answers but must not be used as it is: too old, evicting, read-only."""

    exit_code = 3


# --- a server is out of reach


class Unavailable(TocError):
    """A server could not be reached or did not answer in time. Trying again later is right."""

    exit_code = 4


class StoreUnavailable(Unavailable):
    """MySQL (the task table) is out of reach; nothing was acknowledged."""


class IndexUnavailable(Unavailable):
    """Redis (the index) is out of reach."""


class CoordinationUnavailable(Unavailable):
    """ZooKeeper is out of reach."""


class SubmitUnknown(Unavailable):
    """The connection broke at COMMIT and stayed broken: task ``job_id`` may or may not have been stored.

    ``get(job_id)`` tells once the server is back. A submit with a dedup_key can simply be repeated.
    """

    def __init__(self, job_id: int) -> None:
        super().__init__(
            f"it is not known whether task {job_id} was stored: the connection broke at commit and the "
            f"server did not come back; get({job_id}) tells later, or submit again with the same dedup_key"
        )
        self.job_id = job_id


class PartialCancel(Unavailable):
    """Some of the tasks of one cancel_by_biz are dealt with; of the others it is not known.

    ``outcomes`` holds the CancelOutcome of each that is; ``unknown`` the other job_ids. Cancelling again is
    right: it says of each what this call has not.
    """

    def __init__(self, outcomes: dict[int, CancelOutcome], unknown: list[int]) -> None:
        super().__init__(
            f"the outcomes of {len(outcomes)} tasks are known, {len(unknown)} may or may not be cancelled; "
            f"cancel again"
        )
        self.outcomes = outcomes
        self.unknown = unknown


class PartialSubmit(Unavailable):
    """Some of the tasks of one submit_many are stored and others are not.

    ``job_ids`` is in the order of the input: the id where the task is stored, None where it is not;
    ``unknown`` holds the ids of which it is not known.
    """

    def __init__(self, job_ids: list[int | None], unknown: list[int]) -> None:
        stored = sum(1 for job_id in job_ids if job_id is not None)
        super().__init__(
            f"{stored} of {len(job_ids)} tasks were stored, {len(unknown)} are unknown; "
            f"submit those without a job_id again (a dedup_key makes that safe)"
        )
        self.job_ids = job_ids
        self.unknown = unknown
