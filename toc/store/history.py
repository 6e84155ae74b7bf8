"""What a row keeps of its failed tries: a line of JSON for each, the newest last, the oldest cut off.

    {"attempt":2,"crashes":0,"version":0,"at":1700000000000,"error":"ConnectionError: refused"}

``attempt`` is the number of that try (how many were used up then), ``crashes`` how many in a row had ended
with their worker, ``at`` milliseconds. To change it: add keys, and be content with lines that lack them.
"""

from __future__ import annotations

import json
from typing import NamedTuple

LINE_CHARS = 200
"""How much of each error is kept; the last one is kept in full."""


class FailedTry(NamedTuple):
    """A try that failed, or a crash. ``at`` is in milliseconds."""

    attempt: int
    crashes: int
    version: int
    at: int
    error: str


def line(failed: FailedTry) -> str:
    """As it is appended to the row."""
    error = failed.error[:LINE_CHARS].encode(errors="replace").decode()
    return (
        json.dumps(failed._replace(error=error)._asdict(), ensure_ascii=False, separators=(",", ":")) + "\n"
    )


def parse(text: str | None) -> list[FailedTry]:
    """All that is still there, the oldest first."""
    found = []
    for each in (text or "").split("\n"):
        try:
            values = json.loads(each)
            found.append(FailedTry(*(values[name] for name in FailedTry._fields)))
        except (ValueError, KeyError, TypeError):  # the first, cut off, or what somebody else wrote
            continue
    return found
