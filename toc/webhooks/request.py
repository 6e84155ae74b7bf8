"""The request of a task: its body, its headers, and its signatures after the Standard Webhooks specification.

    webhook-id         {job_id}_{n}; n counts reschedules and replaces
    webhook-timestamp  seconds since 1970, when the try began
    webhook-signature  v1,BASE64(HMAC-SHA256(key, "{id}.{timestamp}.{body}")), one for each key, with spaces

The id is the same over all tries of one deadline and over redrives: a receiver that has seen it has seen this
task. ``Task.version`` counts redrives too, so they are subtracted.
"""

import hmac
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from toc.model.clock import to_ms
from toc.model.documents import instant
from toc.model.target import payload_of
from toc.model.task import Task
from toc.observe.tracing import traceparent

DEFAULTS = {"User-Agent": "toc-webhooks/1", "Accept": "*/*"}
"""Headers that a target may have otherwise."""
JSON = "application/json"
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_PLAIN = re.compile(r"[\x21-\x24\x26-\x7e]+")
"""Printable ASCII without spaces and percent signs."""


def body_of(task: Task) -> tuple[bytes, str]:
    """Return what is sent and its content type: the body, else the attribute as JSON."""
    if task.body is not None:
        return task.body, task.content_type or "application/octet-stream"
    return _json(payload_of(task.attribute)).encode(errors="replace"), JSON


def named_headers(task: Task) -> dict[str, str]:
    """Return the headers that name a task."""
    return {
        "toc-topic": task.topic,
        "toc-attempt": str(task.attempt),
        "toc-action-time": instant(to_ms(task.action_time)),
        "toc-biz-id": plain(str(task.biz_id)),
        "traceparent": traceparent(task.job_id),
    }


def signed(
    named: dict[str, str], message_id: str, body: bytes, content_type: str, *, keys: Sequence[bytes],
    timestamp: int, own: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """Return all headers of a request, given those that name its task. ``own`` are the target's; without
    ``keys`` nothing is signed."""
    usual = DEFAULTS
    if own:
        theirs = set(map(str.lower, own))
        usual = {name: value for name, value in DEFAULTS.items() if name.lower() not in theirs}
    headers = {
        **usual,
        **own,
        "Content-Type": content_type,
        "Accept-Encoding": "identity",
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        **named,
    }
    if keys:
        headers["webhook-signature"] = signature(keys, message_id, timestamp, body)
    return headers


def plain(text: str) -> str:
    """Return a text as a header can carry it: percent-encoded, unless it is plain."""
    return text if _PLAIN.fullmatch(text) else quote(text.encode(errors="replace"), safe="")


def webhook_id(task: Task) -> str:
    """Return the ``webhook-id`` of a task."""
    return f"{task.job_id}_{task.version - task.redrives}"


def signature(keys: Iterable[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the ``webhook-signature``: one for each key, the current key first."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    made = (hmac.digest(key, signed, "sha256") for key in keys)
    return " ".join([f"v1,{b64encode(each).decode()}" for each in made])
