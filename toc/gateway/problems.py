"""Errors as the gateway answers them: problems of RFC 9457 with a stable ``type``.

A failure of an unknown kind is answered as ``internal`` (500), without details; these are in the log. Only
what may succeed when it is repeated is 503 and has a Retry-After. Answers never
name the servers that are out of reach.
"""

from collections.abc import Mapping
from typing import Any

from toc.model import errors as e


class Kind:
    """A kind of problem, and the classes of errors that are answered so. ``retry_after``: after how many
    seconds a client may try again."""

    def __init__(
        self, name: str, status: int, title: str, *errors: type[e.TocError], retry_after: int | None = None
    ) -> None:
        self.name, self.status, self.title = name, status, title
        self.errors, self.retry_after = errors, retry_after

    @property
    def type(self) -> str:
        """The problem's ``type``: a reference to its description, relative to the gateway."""
        return f"/docs#{self.name}"


class Problem(Exception):
    """The answer to a call that fails. ``more`` are further members of it."""

    def __init__(
        self, kind: Kind, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.headers = dict(headers or {})
        self.more = more
        if kind.retry_after is not None:
            self.headers.setdefault("retry-after", str(kind.retry_after))

    def body(self) -> dict[str, Any]:
        """Return the answer's members."""
        kind = self.kind
        told = {"type": kind.type, "title": kind.title, "status": kind.status, "detail": self.detail}
        return told | self.more


SYNTAX = Kind("syntax", 400, "The request cannot be read")
UNAUTHENTICATED = Kind("unauthenticated", 401, "A valid access token is needed")
FORBIDDEN = Kind("forbidden", 403, "The access token does not allow this call", e.NotGranted)
NOT_FOUND = Kind("not-found", 404, "There is no such call")
UNKNOWN_TOPIC = Kind("unknown-topic", 404, "There is no such topic", e.UnknownTopic)
UNKNOWN_TASK = Kind("unknown-task", 404, "There is no such task", e.UnknownTask)
UNKNOWN_LEASE = Kind("unknown-lease", 404, "There is no such lease")
NO_BODY = Kind("no-body", 404, "The task has no body", e.BodyGone)
UNKNOWN = Kind(
    "unknown", 404, "There is none of that name",
    e.UnknownTemplate, e.UnknownToken, e.UnknownTarget, e.UnknownSchedule, e.UnknownBulk,
)  # fmt: skip
UNKNOWN_HOST = Kind("unknown-host", 404, "There is no such host or worker", e.UnknownHost)
METHOD = Kind("method-not-allowed", 405, "The path has no such method")
TIMEOUT = Kind("request-timeout", 408, "The request did not arrive in time")
DEDUP = Kind("dedup-conflict", 409, "The dedup_key names another task", e.DedupConflict)
TASK_EXISTS = Kind("task-exists", 409, "A task has the dedup_key", e.TaskExists)
EXISTS = Kind("exists", 409, "It exists already", e.ScheduleExists, e.TopicExists, e.NameTaken)
IN_USE = Kind(
    "in-use", 409, "Its present state forbids the change", e.TopicClosed, e.TopicInUse, e.TooManyTopics
)
LEASE_ENDED = Kind("lease-ended", 409, "The lease or its task has ended otherwise")
ALONE = Kind("no-cluster", 409, "There is no cluster", e.ConfigError)
UNREADABLE = Kind("unreadable-task", 409, "The stored task is damaged", e.UnreadableTask)
TOO_LARGE = Kind("too-large", 413, "The request is too large", e.BodyTooLarge)
MEDIA_TYPE = Kind("media-type", 415, "The content type is not accepted")
INVALID = Kind("invalid", 422, "A value is not allowed", e.InvalidInput)
REUSED = Kind(
    "idempotency-key-reused", 422, "The Idempotency-Key was used for another request", e.RequestReused
)
RATE = Kind("rate-limit", 429, "The access token has reached its limit", retry_after=1)
HEADERS = Kind("headers-too-large", 431, "The request's line and headers are too large")
CODING = Kind("transfer-coding", 501, "The Transfer-Encoding is not known")
NOT_INSTALLED = Kind("not-installed", 501, "The gateway lacks packages for the call", e.NotInstalled)
INTERNAL = Kind("internal", 500, "The gateway failed")
BUSY = Kind("busy", 503, "The gateway has too much to do", e.Busy, retry_after=1)
UNAVAILABLE = Kind("unavailable", 503, "A server is out of reach", e.Unavailable, retry_after=1)
NOT_READY = Kind(
    "not-ready", 503, "A server must be upgraded or configured first",
    e.UnreadableSchedule, e.SchemaBehind, e.UnfitServer, retry_after=30,
)  # fmt: skip
LOCKED = Kind(
    "secrets-locked", 503, "Secrets of targets cannot be read or written", e.SecretsLocked, retry_after=30
)
UNKNOWN_OUTCOME = Kind(
    "submit-unknown", 503, "The task may or may not be stored", e.SubmitUnknown, retry_after=1
)

KINDS = tuple(kind for kind in list(globals().values()) if isinstance(kind, Kind))
"""Every kind, for the documentation."""

KIND_OF: dict[type[e.TocError], Kind] = {error: kind for kind in KINDS for error in kind.errors}
"""How each class of errors is answered. The most specific class of an error counts."""

_FIELDS: dict[type[e.TocError], str] = {
    e.NaiveDatetime: "action_time",
    e.NotInFuture: "action_time",
    e.InvalidDelay: "delay",
    e.InvalidAttribute: "attribute",
    e.InvalidBizId: "biz_id",
    e.InvalidTries: "tries",
    e.InvalidExpiry: "expires_at",
    e.InvalidBody: "body",
    e.NotPulled: "topic",
    e.RequestReused: "Idempotency-Key",
}
"""The field at fault, by class as well."""

_WHERE: dict[type[e.TocError], str] = {
    e.StoreUnavailable: "the database",
    e.IndexUnavailable: "Redis",
    e.CoordinationUnavailable: "ZooKeeper",
}


def unknown_topic(name: str | None) -> Problem:
    """The answer about a topic that does not exist or that the access token may not know of."""
    return Problem(UNKNOWN_TOPIC, "there is no such topic" + ("" if name is None else f": {e.shown(name)}"))


def problem_of(error: e.TocError) -> Problem:
    """Return how an error is answered."""
    classes = type(error).__mro__
    kind = next(KIND_OF[cls] for cls in classes if cls in KIND_OF)
    field = next((_FIELDS[cls] for cls in classes if cls in _FIELDS), None)
    if isinstance(error, e.SubmitUnknown | e.DedupConflict) and error.job_id is not None:
        again = "the task may or may not be stored: repeat with the same Idempotency-Key or dedup_key"
        return Problem(kind, again if kind is UNKNOWN_OUTCOME else str(error), job_id=str(error.job_id))
    if isinstance(error, e.UnknownTopic):  # its text may name others
        return unknown_topic(error.topic)
    if kind is UNAVAILABLE:
        where = next((_WHERE[cls] for cls in classes if cls in _WHERE), "a server")
        return Problem(kind, f"{where} is out of reach; nothing was acknowledged: try again")
    if kind is NOT_READY:
        return Problem(kind, "a server lacks what this version needs; `toc doctor` tells what to do")
    if isinstance(error, e.InvalidInput) and error.field is not None:
        field = error.field
    elif isinstance(error, (e.InvalidKey, e.InvalidTarget)):  # its text begins with the field's name
        field = str(error).partition(" ")[0].removesuffix(":")
    more: dict[str, Any] = {} if field is None else {"field": field}
    return Problem(kind, str(error), **more)
