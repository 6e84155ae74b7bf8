"""This tree beside another checkout of toc: ``python -m benchmarks.pairs OTHER_CHECKOUT``.

Both systems stand at the same time, each with servers and two worker processes of its own. Each workload runs
in one, then in the other, in an order drawn anew: a pair is seconds apart, so what else the machine does
meets both. A measure is the median of the pairs' ratios: below 1, this tree takes less. The other checkout
needs its own ``make setup``; it may be older than this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("lateness 1000", "lateness 3000", "burst 10000", "burst 100000")
MEASURES = ("p50", "p99", "last_finish", "cpu_seconds")
SECONDS = 4.0
"""How long a rate lasts in one round."""


class Side:
    """One tree's system, in a process of its own. Use as a context manager."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._process = subprocess.Popen(
            [str(tree / ".venv/bin/python"), "-P", __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()  # the end of its input ends it

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer; the first says that its workers run."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._tree}: its system ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, workload: str) -> dict[str, Any]:
        """Run one workload; return its measures."""
        assert self._process.stdin is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        return self.answer()


def serve() -> None:
    """Run the workloads that standard input names, a line each, over one system of the tree on the path."""
    from benchmarks import workloads
    from benchmarks.catalog import ENTRIES
    from benchmarks.system import System

    sizes = workloads.Sizes(lateness_seconds=SECONDS, longest=60)
    (entry,) = (entry for entry in ENTRIES if entry.name == "toc")
    with System(entry) as system:
        system.start(2)
        for count in (3000, 20_000):  # first calls fill caches
            workloads.burst(system, sizes, count)
        print("{}", flush=True)
        for line in sys.stdin:
            name, size = line.split()
            print(json.dumps(getattr(workloads, name)(system, sizes, int(size))), flush=True)


def compare(other: Path, rounds: int) -> None:
    """Print each measure of both trees and the median ratio of the pairs, after each round anew."""
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(tree)) for tree in (ROOT, other)]
        for side in sides:
            side.answer()
        for number in range(1, rounds + 1):
            for workload in WORKLOADS:
                answers = {side: side.run(workload) for side in random.sample(sides, 2)}
                for measure in MEASURES:
                    if answers[sides[0]].get(measure) and answers[sides[1]].get(measure):
                        mine, theirs = (float(answers[side][measure]) for side in sides)
                        pairs[workload, measure].append((mine, theirs))
            print(f"\n{'median of':15} {number:2} rounds  {'this tree':>9} {'other':>9}   ratio")
            for (workload, measure), values in pairs.items():
                mine, theirs = (statistics.median(column) for column in zip(*values, strict=True))
                ratio = statistics.median(a / b for a, b in values)
                print(f"{workload:15} {measure:11} {mine:8.3f} {theirs:9.3f}   {ratio:5.2f}", flush=True)


def main() -> int:
    """Compare, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("other", nargs="?", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--rounds", type=int, default=8, help="of some 40 s each (8)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve()
        return 0
    if chosen.other is None or not (chosen.other / ".venv/bin/python").exists():
        parser.error("name another checkout of toc in which `make setup` has run")
    compare(chosen.other.resolve(), chosen.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
