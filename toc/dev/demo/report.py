"""Compares what was observed with what was required, and gives the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toc.dev.demo.orders import Deadline
from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.task import CancelOutcome, TaskStatus

_COUNTED = (
    *("submitted", "cancelled", "fired", "early", "lost", "duplicates", "handled_after_cancel"),
    *("raced", "wrong", "driver_faults"),
)
"""What a report counts, in tasks. ``raced``: cancels that met their deadline on a slow machine and came out
the other way, as they may; even then their answer must agree with the row and the starts."""
_FAULTS = ("early", "lost", "duplicates", "handled_after_cancel", "wrong", "driver_faults")
RACE_SECONDS = 10.0
"""Within this many seconds after its deadline a task must be handled, so a later cancel cannot meet it."""


@dataclass(slots=True)
class Observed:
    """What the driver saw of one deadline. Instants are nanoseconds since 1970 UTC by the driver's clock.

    ``error`` is a submit or cancel that failed.
    """

    deadline: Deadline
    due_ms: int
    job_id: int | None = None
    cancel_issued_ns: int | None = None
    cancel_answered_ns: int | None = None
    cancel_outcome: CancelOutcome | None = None
    status: TaskStatus | None = None
    error: str | None = None


def judge(
    observed: Sequence[Observed], starts: Mapping[int, Sequence[int]], *, orders: int
) -> dict[str, Any]:
    """Compare observations with the instants (ns) at which handlers started, by job_id. Returns the report.

    It is ``right`` only if every task came out as its order requires.
    """
    count: Counter[str] = Counter()
    problems: list[str] = []
    lateness: list[float] = []
    for seen in observed:
        began = starts.get(seen.job_id, ()) if seen.job_id is not None else ()
        lateness += [(started - seen.due_ms * 1_000_000) / 1e9 for started in began[:1]]
        found = _faults(seen, began)
        count.update(kind for kind, _ in found)
        problems += [f"{seen.deadline.topic} {seen.deadline.order_id}: {text}" for _, text in found]
        count["raced"] += not found and _raced(seen)
        count["submitted"] += seen.job_id is not None
        count["cancelled"] += seen.status is TaskStatus.CANCELLED
        count["fired"] += bool(began)
    lateness.sort()
    shares = {"p50": 0.50, "p99": 0.99, "max": 1.0}
    return {
        "orders": orders,
        **{name: count[name] for name in _COUNTED},
        "lateness_seconds": {name: _quantile(lateness, share) for name, share in shares.items()},
        "problems": problems,
        "right": not any(count[name] for name in _FAULTS),
    }


def _faults(seen: Observed, began: Sequence[int]) -> list[tuple[str, str]]:
    """Return (counter, sentence) for each fault of one deadline."""
    due_ns = seen.due_ms * 1_000_000
    if seen.job_id is None or seen.error is not None:
        return [("driver_faults", seen.error or "it was never submitted")]
    fires = seen.deadline.fires
    answer = seen.cancel_outcome
    found = []
    if any(started < due_ns for started in began):
        found.append(("early", f"a handler started {(due_ns - min(began)) / 1e6:.1f} ms early"))
    found += [("duplicates", f"handled {len(began)} times")] * (len(began) - 1)
    if answer is CancelOutcome.CANCELLED and began:
        found.append(("handled_after_cancel", "handled although the cancel answered CANCELLED"))
    if not fires and (seen.cancel_issued_ns is None or seen.cancel_issued_ns >= due_ns):
        # the machine was too slow to cancel in time, so no outcome can be required
        return [*found, ("driver_faults", "the driver came too late with the cancel")]
    if seen.deadline.cancel_at is not None and answer is not _planned(seen) and not _raced(seen):
        found.append(
            (
                "wrong",
                f"the cancel answered {answer.name if answer else 'nothing'}, not {_planned(seen).name}",
            )
        )
    elif answer is not None:
        fires = answer is CancelOutcome.TOO_LATE
    final = TaskStatus.PROCESSED if fires else TaskStatus.CANCELLED
    if seen.status is None or seen.status is TaskStatus.PENDING or (fires and not began):
        found.append(("lost", f"acknowledged, but not handled; its row is {_name(seen.status)}"))
    elif seen.status is not final:
        found.append(("wrong", f"its row is {_name(seen.status)}, not {_name(final)}"))
    return found


def _planned(seen: Observed) -> CancelOutcome:
    return CancelOutcome.TOO_LATE if seen.deadline.fires else CancelOutcome.CANCELLED


def _raced(seen: Observed) -> bool:
    """Whether the cancel met its deadline, and so may have answered otherwise than planned.

    It was answered after the deadline, and issued before the task had certainly ended.
    """
    due_ns = seen.due_ms * 1_000_000
    if seen.cancel_issued_ns is None or seen.cancel_answered_ns is None:
        return False
    met = (
        seen.cancel_issued_ns < due_ns + RACE_SECONDS * 1e9
        and seen.cancel_answered_ns >= due_ns - MAX_CLOCK_SKEW_MS * 1_000_000
    )
    return met and seen.cancel_outcome not in (None, CancelOutcome.UNKNOWN, _planned(seen))


def _name(status: TaskStatus | None) -> str:
    return "missing" if status is None else status.name.lower()


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile in seconds; 0 when there are no values."""
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 6)
