"""What an answer of a receiver, or none, means for the task. Pure."""

import re
from collections.abc import Collection, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from toc.model.raised import MAX_ERROR_CHARS

NO_RETRY = "toc-no-retry"
_SECONDS = re.compile(r"[0-9]+")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Meaning(Enum):
    """What becomes of the task."""

    PROCESSED = "processed"
    RETRY = "retry"
    """It failed and is tried again, if it has tries left."""
    DEAD = "dead"
    """It can never succeed."""


class Response(NamedTuple):
    """The result of one request. ``status`` is None without an answer, ``text`` then says why.

    ``retry_after`` is what the receiver asked for, in seconds; ``ms`` how long the request took.
    """

    status: int | None
    text: str
    ms: int
    retry_after: float | None = None
    no_retry: bool = False

    @property
    def unwell(self) -> bool:
        """Whether it says that the target itself is unwell; for the breaker."""
        return self.status is None or self.status in (408, 429) or self.status >= 500


def meaning(answer: Response, dead_on: Collection[int]) -> Meaning:
    """Return what an answer means. ``dead_on``: which of 400, 404 and 422 make a task dead."""
    if answer.status is None:
        return Meaning.RETRY
    if 200 <= answer.status < 300:
        return Meaning.PROCESSED
    if answer.no_retry or answer.status == HTTPStatus.GONE or answer.status in dead_on:
        return Meaning.DEAD
    return Meaning.RETRY


def retry_after(headers: Mapping[str, str], now_ms: int) -> float | None:
    """Return how many seconds a Retry-After header asks to wait from now; this may be infinite.

    None: there is no such header, or it cannot be understood.
    """
    text = headers.get("Retry-After", "").strip()
    if not text:
        return None
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        at = parsedate_to_datetime(text)
        if at.tzinfo is None:  # an obsolete form of dates without a zone; it means UTC
            at = at.replace(tzinfo=UTC)
        return max(at.timestamp() - now_ms / 1000, 0.0)
    except (ValueError, OverflowError, TypeError):
        return None


def excerpt(status: int, body: bytes) -> str:
    """Return the text kept of an answer: the beginning of its body, else what its status means."""
    if not body:
        return _phrase(status)
    text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", body[: 4 * MAX_ERROR_CHARS].decode(errors="replace"))
    return text[:MAX_ERROR_CHARS] if text.strip() else _phrase(status)


@lru_cache(1000)
def _phrase(status: int) -> str:
    try:
        return f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"
