"""Percentiles and medians, computed alike for every peer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NS_PER_MS = 1_000_000
WRONG = ("early", "lost", "doubled")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed (nearest rank)."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def lateness(due: Mapping[int, int], starts: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """Return how late the first starts were (ms), and what went wrong. Instants are nanoseconds."""
    late = sorted((min(starts[number]) - at) / NS_PER_MS for number, at in due.items() if number in starts)
    return {
        "tasks": len(due),
        "p50": percentile(late, 0.5),
        "p99": percentile(late, 0.99),
        "p99.9": percentile(late, 0.999),
        "max": late[-1] if late else math.nan,
        "early": sum(1 for value in late if value < 0),
        "lost": len(due) - len(late),
        "doubled": sum(1 for number in due if len(starts.get(number, ())) > 1),
    }


def medians(results: Sequence[Any]) -> Any:
    """Return a result with the median of each number; other values are those of the last result.

    Errors (early, lost, doubled) are not averaged away: for them it returns the highest number.
    """
    last = results[-1]
    if isinstance(last, Mapping):
        parts = [result for result in results if isinstance(result, Mapping)]
        return {key: _together(key, [part[key] for part in parts if key in part]) for key in last}
    numbers = [result for result in results if isinstance(result, (int, float))]
    return statistics.median(numbers) if len(numbers) == len(results) else last


def _together(key: str, values: Sequence[Any]) -> Any:
    return max(values) if key in WRONG else medians(values)
