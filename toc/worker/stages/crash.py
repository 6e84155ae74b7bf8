"""What a try costs whose worker died or fell silent."""

from __future__ import annotations

from toc.model.task import TryRow
from toc.model.topic import Topic
from toc.store.batch import Failure

MAX_CRASHES = 60_000
"""What the column holds; a task that has killed its worker so often is not counted further."""
CRASHED = "the worker that ran it died or fell silent"


def crash_of(
    row: TryRow, topic: Topic, remaining: int, now: int, max_crashes: int, *, dead: bool
) -> Failure | None:
    """How the row changes because its try ended with its worker; None when it stays as it is.

    Charges a try, but never the last one: no task dies of a crash of its worker. Where the row was written
    before (more tries are used up than by the entry), a try is not charged again; but unless its worker is
    known to be dead, the crash is counted all the same: the entry may carry stale tries, whoever ran it may
    be running on, and its late failure must find another row. From ``max_crashes`` on it runs in quarantine,
    which counts its runs itself when they begin; what only waited there is not counted.
    """
    written = row.attempts > topic.retries - remaining
    if row.next_time > now or row.crashes >= max_crashes or (written and dead):  # [rule: crash-counted]
        return None
    attempts, error = row.attempts, None
    if not written:
        # max, as retries may have been lowered  [rule: never-the-last]
        attempts = max(attempts, min(attempts + 1, topic.retries - 1))
        error = CRASHED
    return Failure(
        row.job_id,
        row.version,
        row.attempts,
        row.crashes,
        attempts,
        min(row.crashes + 1, MAX_CRASHES),
        max(now, row.action_time),  # not before it, even if the clock was set back
        error,
    )
