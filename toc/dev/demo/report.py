"""Compares what was observed with what was required, and gives the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toc.dev.demo.orders import Deadline
from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.task import CancelOutcome, TaskStatus

_COUNTED = (
    *("submitted", "cancelled", "fired", "early", "lost", "duplicates", "run_again", "handled_after_cancel"),
    *("raced", "wrong", "driver_faults"),
)
"""The fields of a report that count tasks."""
RACE_SECONDS = 10.0
"""Within this many seconds after its deadline a task must be handled, so a later cancel cannot meet it. Hosts
of a cluster may be killed while it runs."""


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


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run. ``right`` only if every task came out as its order requires.

    ``run_again`` counts further starts of tasks whose worker died in an earlier one, ``duplicates`` all other
    further starts. ``raced`` counts cancels that met their deadline on a slow machine and came out the other
    way, as they may; even then their answer must agree with the row and the starts.
    """

    orders: int
    submitted: int
    cancelled: int
    fired: int
    early: int
    lost: int
    duplicates: int
    run_again: int
    handled_after_cancel: int
    raced: int
    wrong: int
    driver_faults: int
    lateness_seconds: dict[str, float]
    problems: list[str]

    @property
    def right(self) -> bool:
        """Whether the run is a success."""
        return not (self.early or self.lost or self.duplicates or self.wrong or self.driver_faults) and (
            not self.handled_after_cancel
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        return asdict(self) | {"right": self.right}


def judge(
    observed: Sequence[Observed],
    starts: Mapping[int, Sequence[int]],
    cut_off: Mapping[int, int],
    *,
    orders: int,
) -> Report:
    """Compare observations with starts and return the report.

    ``starts`` holds, by job_id, the instants (ns) at which handlers started; ``cut_off`` how many of those
    were in processes that have ended.
    """
    count: Counter[str] = Counter()
    problems: list[str] = []
    lateness: list[float] = []
    for seen in observed:
        began = starts.get(seen.job_id, ()) if seen.job_id is not None else ()
        lateness += [(started - seen.due_ms * 1_000_000) / 1e9 for started in began[:1]]
        again = min(max(len(began) - 1, 0), cut_off.get(seen.job_id or 0, 0))
        count["run_again"] += again
        found = _faults(seen, began, again)
        count.update(kind for kind, _ in found)
        problems += [f"{seen.deadline.topic} {seen.deadline.order_id}: {text}" for _, text in found]
        count["raced"] += not found and _raced(seen)
        count["submitted"] += seen.job_id is not None
        count["cancelled"] += seen.status is TaskStatus.CANCELLED
        count["fired"] += bool(began)
    lateness.sort()
    return Report(
        orders=orders,
        **{name: count[name] for name in _COUNTED},
        lateness_seconds={
            "p50": _quantile(lateness, 0.50),
            "p99": _quantile(lateness, 0.99),
            "max": _quantile(lateness, 1.0),
        },
        problems=problems,
    )


def _faults(seen: Observed, began: Sequence[int], again: int) -> list[tuple[str, str]]:
    """Return (counter, sentence) for each fault of one deadline."""
    due_ns = seen.due_ms * 1_000_000
    if seen.job_id is None or seen.error is not None:
        return [("driver_faults", seen.error or "it was never submitted")]
    fires = seen.deadline.fires
    answer = seen.cancel_outcome
    found = []
    if any(started < due_ns for started in began):
        found.append(("early", f"a handler started {(due_ns - min(began)) / 1e6:.1f} ms early"))
    found += [("duplicates", f"handled {len(began)} times")] * (len(began) - 1 - again)
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
