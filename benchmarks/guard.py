"""The guard: a small measurement of toc's hot path as ratios to the bare loop, measured in the same minute.

Absolute times say more about the machine than about toc; a ratio to a loop that does the least on the same
machine moves far less. It fails when a path became about twice as dear as when its bounds were written down.
``python -m benchmarks.guard`` prints the ratios and ends with 1 if one is out of bounds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import stats
from benchmarks.catalog import ENTRIES
from benchmarks.system import System
from benchmarks.workloads import Sizes, burst, lateness, submits

SIZES = Sizes(rates=(500,), lateness_seconds=3, bursts=(20_000,), submit_seconds=1, pending=50_000)
ROUNDS = 3

BOUNDS = {
    "lateness p50": 5.0,
    "CPU per task at a steady rate": 7.0,
    "CPU per task of a burst": 55.0,
    "time of a burst": 35.0,
    "time of a batched submit": 50.0,
}
"""The most that toc may cost, as a multiple of the bare loop: about twice what it was measured at."""


def costs(name: str) -> dict[str, float]:
    """The costs of one system in its own units; the medians of a few rounds."""
    (entry,) = (entry for entry in ENTRIES if entry.name == name)
    rounds: list[dict[str, float]] = []
    with System(entry) as system:
        system.start(entry.processes)
        for _ in range(ROUNDS):
            steady = lateness(system, SIZES, SIZES.rates[0])
            at_once = burst(system, SIZES, SIZES.bursts[0])
            if steady["early"] or steady["lost"] or at_once["early"] or at_once["lost"]:
                raise SystemExit(f"{name} lost tasks or ran them early: {steady} {at_once}")
            rounds.append(
                {
                    "lateness p50": steady["p50"],
                    "CPU per task at a steady rate": _cpu(steady),
                    "CPU per task of a burst": _cpu(at_once),
                    "time of a burst": at_once["last_start"],
                }
            )
        rounds[-1]["time of a batched submit"] = 1 / submits(system, SIZES)["batched"]
    result = stats.medians(rounds)
    assert isinstance(result, dict)
    return result


def ratios() -> dict[str, float]:
    """toc's costs as multiples of the bare loop's."""
    floor, toc = costs("bare loop"), costs("toc")
    return {name: toc[name] / floor[name] for name in BOUNDS}


def exceeded(measured: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS) -> list[str]:
    """What is out of bounds, said in words."""
    return [
        f"{name}: {measured[name]:.1f} times the bare loop, at most {bound:g} expected"
        for name, bound in bounds.items()
        if measured[name] > bound
    ]


def _cpu(result: Mapping[str, Any]) -> float:
    """Seconds of processor time for each task, workers and servers together."""
    return float(result["cpu_seconds"]) / float(result["tasks"])


def main() -> int:
    """Measure, print, judge."""
    print(f"load before: {os.getloadavg()[0]:.2f}")
    measured = ratios()
    for name, value in measured.items():
        print(f"{name:32} {value:6.1f}   at most {BOUNDS[name]:g}")
    for problem in exceeded(measured):
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if exceeded(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
