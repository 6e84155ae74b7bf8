"""The guard: a small measurement of toc's hot path, as ratios to the bare loop measured in the same minute.

Absolute times depend on the machine more than on toc; a ratio to a minimal loop on the same machine varies
far less. The guard fails when a path costs about twice what it did when its bound was set. ``python -m
benchmarks.guard`` prints the ratios and exits with 1 if one is out of bounds.
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
"""The most that toc may cost, as a multiple of the bare loop: about twice the measured value."""


def costs(name: str) -> dict[str, float]:
    """Return the costs of one system in its own units, as medians of ROUNDS rounds."""
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
    """Return toc's costs as multiples of the bare loop's."""
    floor, toc = costs("bare loop"), costs("toc")
    return {name: toc[name] / floor[name] for name in BOUNDS}


def exceeded(measured: Mapping[str, float], bounds: Mapping[str, float] = BOUNDS) -> list[str]:
    """Return a sentence for each ratio that is out of bounds."""
    return [
        f"{name}: {measured[name]:.1f} times the bare loop, at most {bound:g} expected"
        for name, bound in bounds.items()
        if measured[name] > bound
    ]


def _cpu(result: Mapping[str, Any]) -> float:
    """Return the processor time per task in seconds, workers and servers together."""
    return float(result["cpu_seconds"]) / float(result["tasks"])


def main() -> int:
    """Measure, print, and return the exit code."""
    print(f"load before: {os.getloadavg()[0]:.2f}")
    measured = ratios()
    for name, value in measured.items():
        print(f"{name:32} {value:6.1f}   at most {BOUNDS[name]:g}")
    for problem in exceeded(measured):
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if exceeded(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
