"""The request of a task: its body and its headers. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from toc.model.clock import to_ms
from toc.model.documents import instant
from toc.model.target import payload_of
from toc.model.task import Task
from toc.webhooks.signature import signature, webhook_id

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


def headers_of(
    task: Task,
    body: bytes,
    content_type: str,
    *,
    keys: Sequence[bytes],
    timestamp: int,
    traceparent: str,
    own: Mapping[str, str],
) -> dict[str, str]:
    """Return the headers of a try. ``own`` are the target's; without ``keys`` nothing is signed."""
    named = {
        "toc-topic": task.topic,
        "toc-attempt": str(task.attempt),
        "toc-action-time": instant(to_ms(task.action_time)),
        "toc-biz-id": plain(str(task.biz_id)),
        "traceparent": traceparent,
    }
    return signed(named, webhook_id(task), body, content_type, keys=keys, timestamp=timestamp, own=own)


def signed(
    named: dict[str, str],
    message_id: str,
    body: bytes,
    content_type: str,
    *,
    keys: Sequence[bytes],
    timestamp: int,
    own: Mapping[str, str],
) -> dict[str, str]:
    """Return all headers of a request, given those that name its task."""
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
