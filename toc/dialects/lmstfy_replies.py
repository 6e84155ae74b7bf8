"""lmstfy's answers, made of tasks."""

from __future__ import annotations

from collections.abc import Mapping

from toc.dialects import lmstfy_wire as wire
from toc.dialects.json_fields import to_go_json
from toc.dialects.lmstfy_tasks import NAME
from toc.dialects.lmstfy_wire import Refused
from toc.dialects.port import Reply
from toc.model.errors import (
    BodyTooLarge,
    InvalidAttribute,
    InvalidDelay,
    InvalidInput,
    TocError,
    TooManyTopics,
    TopicClosed,
    UnknownTopic,
)
from toc.model.task import TaskRow
from toc.operate.tokens import PREFIX
from toc.pull.handed_out import HandedOut


def secret_of(token: str) -> str:
    """Return the access token for a token of lmstfy: itself, or one made for an older token."""
    return token if token.startswith(PREFIX) else f"{PREFIX}{NAME}.{token}"


def reply(content: object, status: int, call: wire.Call | None = None, *, indent: bool = False) -> Reply:
    """Return an answer as the original gives it; None: without a body."""
    return Reply(
        b"" if content is None else to_go_json(content, sort_keys=True, indent=indent),
        status,
        "" if content is None else wire.MEDIA_TYPE,
        ((b"x-request-id", wire.request_id().encode()),),
        name="other" if call is None else call.name.lower(),
    )


def refusal(error: Exception) -> Reply:
    """Return the answer to a mistake or a failure."""
    if isinstance(error, Refused):
        return reply(error.content, error.status)
    for kind, status, words in (
        (BodyTooLarge, 413, "body too large"),
        (InvalidDelay, 400, "invalid delay"),
        (InvalidAttribute, 400, "attributes too large"),
        (TooManyTopics, 400, "too many queues"),
    ):
        if isinstance(error, kind):
            return reply({"error": words}, status)
    if isinstance(error, InvalidInput) and not isinstance(error, (TopicClosed, UnknownTopic)):
        return reply({"error": str(error)}, 400)
    # TocError: a queue is being deleted, or a server is away.
    return reply({"error": "internal error"}, 503 if isinstance(error, TocError) else 500)


def id_of(row: TaskRow) -> str:
    """Return the id of a job."""
    return row.biz_key or str(row.biz_id)


def attributes_of(said: Mapping[str, object]) -> Mapping[str, str] | None:
    """Return the attributes of a job, from its task's attribute."""
    found = said.get("attributes")
    return found if isinstance(found, dict) else None


def handed_job(one: HandedOut, body: bytes, namespace: str, queue: str, now: int) -> wire.Job:
    """Return a job that was handed out, as its consumer is shown it."""
    task = one.task
    job_id = str(task.biz_id)
    expires_at = 0 if task.expires_at is None else round(task.expires_at.timestamp() * 1000)
    return wire.Job(
        namespace,
        queue,
        job_id,
        body,
        wire.seconds_left(expires_at, now),
        wire.elapsed(job_id, now),
        max(0, task.tries - one.attempt),
        attributes_of(task.attribute),
    )
