"""lmstfy's answers, made of tasks."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from toc.dialects import lmstfy_wire as wire
from toc.dialects.json_fields import to_go_json
from toc.dialects.lmstfy_tasks import NAME
from toc.dialects.lmstfy_wire import Refused
from toc.dialects.port import Reply
from toc.model.errors import (
    BodyTooLarge,
    InvalidAttribute,
    InvalidInput,
    TocError,
    TooManyTopics,
    TopicClosed,
    UnknownTopic,
)
from toc.model.pull import PullRow
from toc.model.task import TaskRow, TaskStatus, decode_attribute
from toc.operate.tokens import PREFIX


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
        (InvalidAttribute, 400, "attributes too large"),
        (TooManyTopics, 400, "too many queues"),
    ):
        if isinstance(error, kind):
            return reply({"error": words}, status)
    if isinstance(error, InvalidInput) and not isinstance(error, (TopicClosed, UnknownTopic)):
        return reply({"error": str(error)}, 400)
    # TocError: a queue is being deleted, or a server is away.
    return reply({"error": "internal error"}, 503 if isinstance(error, TocError) else 500)


def id_of(row: TaskRow | PullRow) -> str:
    """Return the id of a job."""
    return row.biz_key or str(row.biz_id)


def job_of(
    row: TaskRow | PullRow, namespace: str, queue: str, data: bytes | None, now: int
) -> dict[str, Any]:
    """Return a job as answers show it. ``data`` None: it is gone."""
    job_id, attributes = id_of(row), decode_attribute(row.attribute).get("attributes")
    gone = data is None or row.status == TaskStatus.DEAD
    return {
        "namespace": namespace,
        "queue": queue,
        "job_id": job_id,
        "data": None if data is None else b64encode(data).decode(),
        "ttl": 0 if gone else wire.seconds_left(row.expires_at, now),
        "elapsed_ms": wire.elapsed(job_id, now),
        "remain_tries": max(0, row.tries - row.attempts),
        "attributes": (isinstance(attributes, dict) and attributes) or None,
    }
