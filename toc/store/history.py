"""The failed tries kept on a row: one line of JSON each, newest last, oldest cut off.

    {"attempt":2,"crashes":0,"version":0,"at":1700000000000,"error":"ConnectionError: refused"}

``attempt`` is the number of tries used up then, ``crashes`` the consecutive tries that had ended with their
worker, ``at`` milliseconds. To change the format, add keys and accept lines without them.
"""

from __future__ import annotations

import json
from typing import NamedTuple

LINE_CHARS = 200
"""Characters kept of each error; the last error is kept in full."""


class FailedTry(NamedTuple):
    """A failed try or a crash. ``at`` is in milliseconds."""

    attempt: int
    crashes: int
    version: int
    at: int
    error: str


def line(failed: FailedTry) -> str:
    """Encode a failed try as appended to the row."""
    error = failed.error[:LINE_CHARS].encode(errors="replace").decode()
    return (
        json.dumps(failed._replace(error=error)._asdict(), ensure_ascii=False, separators=(",", ":")) + "\n"
    )


def parse(text: str | None) -> list[FailedTry]:
    """Parse what is left of the history, oldest first."""
    found = []
    for each in (text or "").split("\n"):
        try:
            values = json.loads(each)
            found.append(FailedTry(*(values[name] for name in FailedTry._fields)))
        except (ValueError, KeyError, TypeError):  # the first line, cut off, or foreign data
            continue
    return found
