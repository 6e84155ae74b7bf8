"""The orders of a run, the outcome that each of their deadlines must have, and what became of it.

"Close if unpaid" is due 30 minutes after the purchase: a payment before that cancels it, else it fires.
"Confirm receipt" is due 7 days after the delivery, and fires for every order that was delivered.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toc.model.errors import InvalidInput, shown
from toc.model.task import CancelOutcome, TaskStatus

CLOSE = "demo.order.close"
CONFIRM = "demo.order.confirm"
BIZ_TYPES = {CLOSE: 990_001, CONFIRM: 990_002}

COMPRESSED = 30.0
"""Into how many seconds 30 minutes and 7 days are both compressed, at speed 1."""
MARGIN = 0.25
"""The least distance of a payment from its deadline, in seconds of the run: real clocks race."""
EVENTS_PER_SECOND = 150
"""The highest rate of submits and cancels in a run; more orders make the run longer, not denser."""
MAX_COUNT = 100_000
"""The largest number of orders, which take half an hour."""
SPEEDS = (0.01, 60.0)


@dataclass(slots=True)
class Deadline:
    """One task of the run: seconds after the run's start, and what was seen of it.

    ``cancel_at`` is None if it must fire. ``error`` is a submit or cancel that failed.
    """

    order: str
    topic: str
    submit_at: float
    due_at: float
    cancel_at: float | None = None
    due_ms: int = 0
    job_id: int | None = None
    cancelled: CancelOutcome | None = None
    answered_ms: float = 0.0
    status: TaskStatus | None = None
    error: str = ""


def plan(count: int, seed: int, speed: float) -> tuple[list[Deadline], float]:
    """Make up orders, the same for the same seed. Returns their deadlines and the seconds of the run.

    Purchases are in the first half of the run, deliveries in the second. Raises InvalidInput.
    """
    if not 1 <= count <= MAX_COUNT:
        raise InvalidInput(f"--count must be 1 to {MAX_COUNT}, not {shown(count)}")
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise InvalidInput(f"--speed must be {SPEEDS[0]:g} to {SPEEDS[1]:g}, not {speed:g}")
    chance = random.Random(seed)  # noqa: S311 - made-up orders, nothing to guard
    length = COMPRESSED / speed
    half = max(length, 2.5 * count / EVENTS_PER_SECOND) / 2
    deadlines = []
    for number in range(count):
        order, start = f"demo-{seed}-{number:05d}", half * number / count
        paid_at = chance.uniform(0.0, length) if chance.random() < 0.75 else None
        cancel_at = None if paid_at is None else start + max(min(paid_at, length - MARGIN), 0.0)
        deadlines.append(Deadline(order, CLOSE, start, start + length, cancel_at))
        if paid_at is not None and chance.random() < 0.8:
            deadlines.append(Deadline(order, CONFIRM, half + start, half + start + length))
    return deadlines, 2 * half + length


def judge(deadlines: Sequence[Deadline], starts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Compare what was seen with the instants (ns) at which handlers started, by job_id. Returns the report.

    It is ``right`` only if every task came out as its order requires.
    """
    wrong: Counter[str] = Counter(
        early=0, lost=0, duplicates=0, handled_after_cancel=0, wrong=0, driver_faults=0
    )
    problems, late = [], []
    for one in deadlines:
        began = starts.get(one.job_id or 0, ())
        late += [started / 1e9 - one.due_ms / 1000 for started in began[:1]]
        for kind, text in _faults(one, began):
            wrong[kind] += 1
            problems.append(f"{one.topic} {one.order}: {text}")
    late.sort()
    return {
        "submitted": sum(one.job_id is not None for one in deadlines),
        "cancelled": sum(one.status is TaskStatus.CANCELLED for one in deadlines),
        "fired": len(late),
        **wrong,
        "lateness_seconds": {
            name: round(late[min(len(late) - 1, int(part * len(late)))], 6) if late else 0.0
            for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        },
        "problems": problems,
        "right": not any(wrong.values()),
    }


def _faults(one: Deadline, began: Sequence[int]) -> list[tuple[str, str]]:
    """Return (counter, sentence) for each fault of one deadline."""
    if one.error or one.job_id is None:
        return [("driver_faults", one.error or "it was never submitted")]
    due_ns = one.due_ms * 1_000_000
    found = [("duplicates", f"handled {len(began)} times")] * (len(began) - 1)
    if began and min(began) < due_ns:
        found.append(("early", f"a handler started {(due_ns - min(began)) / 1e6:.1f} ms early"))
    status = "missing" if one.status is None else one.status.name.lower()
    if one.cancel_at is None:
        if not began or one.status is not TaskStatus.PROCESSED:
            found.append(("lost", f"acknowledged, but not handled; its row is {status}"))
    elif one.cancelled is not CancelOutcome.CANCELLED:
        if one.answered_ms < one.due_ms:
            answer = one.cancelled.name if one.cancelled else "nothing"
            found.append(("wrong", f"a cancel in time answered {answer}"))
        else:  # the machine was too slow, so no outcome can be required
            found.append(("driver_faults", "the driver came too late with the cancel"))
    elif began:
        found.append(("handled_after_cancel", "handled although the cancel answered CANCELLED"))
    elif one.status is not TaskStatus.CANCELLED:
        found.append(("wrong", f"cancelled, but its row is {status}"))
    return found
