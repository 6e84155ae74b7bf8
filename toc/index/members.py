"""Separates the entries of a sorted set from strays: members that cannot be entries.

Another program can write anything into a queue: a member that is no job_id, a score that no task can have.
toc could never settle such a member, so no worker may get it. It is sorted out here, and its reader removes
it.
"""

from __future__ import annotations

from math import inf

from toc.model.sharding import MAX_BIZ_ID

MAX_JOB_ID = MAX_BIZ_ID
_MAX_SCORE = 2.0**53
"""Larger whole numbers are not exact in a float64, so no fencing token would match."""
_MAX_DUE_MS = 2.0**43
"""The year 2248: no task can be due this late."""
_SHOWN_CHARS = 40


def sort_out(flat: list[bytes]) -> tuple[list[tuple[int, float]], list[bytes]]:
    """Split a list of member, score, member, score, ... into entries and the members that are strays.

    A job_id has one spelling, without sign or leading zero. Scripts get the number and would not find another
    spelling.
    """
    entries, strays = [], []
    for member, text in zip(flat[::2], flat[1::2], strict=True):
        score = float(text)
        if (
            member.isdigit()  # of bytes, so it is ASCII and not empty
            and len(member) <= 19
            and member[0] != 48  # "0"
            and (job_id := int(member)) <= MAX_JOB_ID
            and 0 <= score < _MAX_SCORE
        ):
            entries.append((job_id, score))
        else:
            strays.append(member)
    return entries, strays


def first_due(score: bytes | None) -> float | None:
    """Return when a StoreQueue is next due (ms) by its first score; None if it is empty or never due.

    A time before 1970 counts as 1970.
    """
    due = inf if score is None else float(score)
    return max(due, 0.0) if due < _MAX_DUE_MS else None


def shown(member: bytes) -> str:
    """Return a member for a log line: printable, and truncated."""
    return ascii(member[:_SHOWN_CHARS].decode("ascii", "backslashreplace"))[1:-1][:_SHOWN_CHARS]
