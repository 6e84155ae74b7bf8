"""How values look in JSON that toc prints on the command line or answers with at any door.

A job_id is a text (programs whose numbers are floating-point hold 2**53 at the most), an instant
RFC 3339 in UTC with milliseconds, a duration seconds. This does not apply to logs, where a job_id
is a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from toc.model.clock import from_ms


def instant(milliseconds: float) -> str:
    """Return an instant: ``2026-11-23T07:00:00.000Z``."""
    second, rest = divmod(int(milliseconds), 1000)
    return f"{_second(second)}.{rest:03d}Z"


@lru_cache(4096)
def _second(second: int) -> str:
    """A second without a zone. Instants that are shown together share many."""
    return from_ms(second * 1000).isoformat()[:19]


def seconds(milliseconds: float) -> float:
    """Return a duration."""
    return milliseconds / 1000


def plain(value: Any) -> Any:
    """Return a record, or records in lists, with each ``job_id`` as a text."""
    if isinstance(value, Mapping):
        return {
            key: str(each) if key == "job_id" and isinstance(each, int) else plain(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value
