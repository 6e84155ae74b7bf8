"""Signatures of the Standard Webhooks specification.

    webhook-id         {job_id}_{n}; n counts reschedules and replaces
    webhook-timestamp  seconds since 1970, when the try began
    webhook-signature  v1,BASE64(HMAC-SHA256(key, "{id}.{timestamp}.{body}")), one for each key, with spaces

The id is the same over all tries of one deadline and over redrives: a receiver that has seen it has seen this
task. ``Task.version`` counts redrives too, so they are subtracted.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Iterable
from functools import lru_cache

from toc.model.task import Task


def webhook_id(task: Task) -> str:
    """Return the ``webhook-id`` of a task."""
    return f"{task.job_id}_{task.version - task.redrives}"


def signature(keys: Iterable[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the ``webhook-signature``: one for each key, the current key first."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join([f"v1,{b64encode(_hmac(key, signed)).decode()}" for key in keys])


def _hmac(key: bytes, signed: bytes) -> bytes:
    begun = _begun(key).copy()
    begun.update(signed)
    return begun.digest()


@lru_cache(256)
def _begun(key: bytes) -> hmac.HMAC:
    """An HMAC that has the key already, which is most of its work for a short body."""
    return hmac.new(key, digestmod=hashlib.sha256)
