"""What was observed against what had to come, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toc.demo.orders import Deadline
from toc.task import CancelOutcome, TaskStatus


@dataclass(slots=True)
class Observed:
    """What the driver saw of one deadline. Instants are nanoseconds since 1970 UTC by the driver's clock.

    ``error`` is a submit or cancel that failed.
    """

    deadline: Deadline
    due_ms: int
    job_id: int | None = None
    cancel_issued_ns: int | None = None
    cancel_outcome: CancelOutcome | None = None
    status: TaskStatus | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run. ``right`` only if everything came out exactly as the orders say.

    ``run_again`` are further starts of tasks whose worker died in an earlier one; ``duplicates`` all others.
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
    wrong: int
    driver_faults: int
    stretched: int
    lateness_ms: dict[str, float]
    problems: list[str]

    @property
    def right(self) -> bool:
        """Whether the run is a success."""
        return not (self.early or self.lost or self.duplicates or self.wrong or self.driver_faults) and (
            not self.handled_after_cancel
        )

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"right": self.right}


def judge(
    observed: Sequence[Observed],
    starts: Mapping[int, Sequence[int]],
    cut_off: Mapping[int, int],
    *,
    orders: int,
    stretched: int,
) -> Report:
    """``starts`` holds the instants in nanoseconds at which handlers of each job_id began, ``cut_off`` how
    many of those were in processes that are no more.
    """
    count: Counter[str] = Counter()
    problems: list[str] = []
    lateness: list[float] = []
    for seen in observed:
        began = starts.get(seen.job_id, ()) if seen.job_id is not None else ()
        lateness += [(started - seen.due_ms * 1_000_000) / 1e6 for started in began[:1]]
        again = min(max(len(began) - 1, 0), cut_off.get(seen.job_id or 0, 0))
        count["run_again"] += again
        found = _faults(seen, began, again)
        count.update(kind for kind, _ in found)
        problems += [f"{seen.deadline.topic} {seen.deadline.order_id}: {text}" for _, text in found]
        count["submitted"] += seen.job_id is not None
        count["cancelled"] += seen.status is TaskStatus.CANCELLED
        count["fired"] += bool(began)
    lateness.sort()
    return Report(
        orders=orders,
        submitted=count["submitted"],
        cancelled=count["cancelled"],
        fired=count["fired"],
        early=count["early"],
        lost=count["lost"],
        duplicates=count["duplicates"],
        run_again=count["run_again"],
        handled_after_cancel=count["handled_after_cancel"],
        wrong=count["wrong"],
        driver_faults=count["driver_faults"],
        stretched=stretched,
        lateness_ms={
            "p50": _quantile(lateness, 0.50),
            "p99": _quantile(lateness, 0.99),
            "max": _quantile(lateness, 1.0),
        },
        problems=problems,
    )


def _faults(seen: Observed, began: Sequence[int], again: int) -> list[tuple[str, str]]:
    """(counter, sentence) for each thing that is not as it must be."""
    due_ns = seen.due_ms * 1_000_000
    if seen.job_id is None or seen.error is not None:
        return [("driver_faults", seen.error or "it was never submitted")]
    fires = seen.deadline.fires
    found = []
    if not fires and (seen.cancel_issued_ns is None or seen.cancel_issued_ns >= due_ns):
        # the machine was too slow to cancel in time: nothing can be said about toc
        return [("driver_faults", "the driver came too late with the cancel")]
    if any(started < due_ns for started in began):
        found.append(("early", f"a handler started {(due_ns - min(began)) / 1e6:.1f} ms early"))
    found += [("duplicates", f"handled {len(began)} times")] * (len(began) - 1 - again)
    if seen.cancel_outcome is CancelOutcome.CANCELLED and began:
        found.append(("handled_after_cancel", "handled although the cancel answered CANCELLED"))
    final = TaskStatus.PROCESSED if fires else TaskStatus.CANCELLED
    if seen.status is None or seen.status is TaskStatus.PENDING or (fires and not began):
        found.append(("lost", f"acknowledged, but not handled; its row is {_name(seen.status)}"))
    elif seen.status is not final:
        found.append(("wrong", f"its row is {_name(seen.status)}, not {_name(final)}"))
    elif not fires and began:
        found.append(("wrong", "handled although it was cancelled"))
    if seen.deadline.cancel_at is not None:
        right = CancelOutcome.TOO_LATE if fires else CancelOutcome.CANCELLED
        if seen.cancel_outcome is not right:
            answer = seen.cancel_outcome.name if seen.cancel_outcome else "nothing"
            found.append(("wrong", f"the cancel answered {answer}, not {right.name}"))
    return found


def _name(status: TaskStatus | None) -> str:
    return "missing" if status is None else status.name.lower()


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile in milliseconds; 0 when there is nothing."""
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)
