"""``python -m benchmarks``: measure the peers one after the other; print tables, write JSON and a plot."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import environment, kit, report, stats, workloads
from benchmarks.catalog import ENTRIES, Entry
from benchmarks.environment import CannotRun
from benchmarks.system import System, warn

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("lateness", "burst", "consume", "submit", "idle", "rerun")
KIT = "kit"
"""The workload of toc's kit for tests, which no peer has."""


def main() -> int:
    """Measure the chosen peers and report."""
    arguments = _arguments()
    if arguments.show:
        report.tables(json.loads(arguments.show.read_text()), Console())
        return 0
    only = frozenset(arguments.workloads)
    entries = [] if only == {KIT} else _chosen(arguments.peers)
    repeated = [entry for entry in _chosen(arguments.repeat_only) if entry in entries]
    sizes = workloads.QUICK if arguments.quick else workloads.Sizes()
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    runs: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in entries}
    began = time.monotonic()
    for number in range(arguments.repeat):
        if not only or only - {"rerun", KIT}:
            for entry in entries if number == 0 else repeated:
                warn(f"[{time.monotonic() - began:4.0f} s] run {number + 1}: {entry.name}")
                runs[entry.name].append(_measure(entry, sizes, only))
    if not only or "rerun" in only:
        warn(f"[{time.monotonic() - began:4.0f} s] kill -9 in a handler, all at once")
        for entry, result in zip(entries, _reruns(entries, sizes), strict=True):
            if runs[entry.name] and "cannot" in result:  # keep what was measured before
                result = {"broke_off": result["cannot"]}
            for one in runs[entry.name] or [result]:
                one.update(result)
            runs[entry.name] = runs[entry.name] or [result]
    tests = kit.measure() if not only or KIT in only else None
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began),
        "repeat": arguments.repeat,
        "load": load,
        "machine": environment.machine(),
        "sizes": vars(sizes),
        "peers": {
            entry.name: {"settings": _settings(entry), **stats.medians(_good(runs[entry.name]))}
            for entry in entries
        },
        "runs": runs,
        "kit": tests,
    }
    report.tables(result, Console())
    _write(result, arguments.output)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("peers", nargs="*", help=f"those whose name begins so, of: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, for development: not for numbers")
    parser.add_argument("--repeat", type=int, default=1, help="runs; the medians are shown")
    parser.add_argument(
        "--repeat-only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="those that run again; the others run once",
    )
    parser.add_argument("--workloads", nargs="+", default=[], choices=(*WORKLOADS, KIT))
    parser.add_argument("--output", type=Path, help="the JSON file; the plot goes beside it")
    parser.add_argument("--show", type=Path, metavar="JSON", help="only print the tables of an earlier run")
    return parser.parse_args()


def _chosen(names: list[str]) -> list[Entry]:
    """Return the entries whose names start with or equal one of ``names``; all entries without names."""
    if not names:
        return list(ENTRIES)
    exact = [entry for entry in ENTRIES if entry.name in names]
    open_names = [name.lower() for name in names if name not in {entry.name for entry in exact}]
    found = [
        entry
        for entry in ENTRIES
        if entry in exact or any(entry.name.lower().startswith(name) for name in open_names)
    ]
    if not found:
        sys.exit(f"nobody is called {', '.join(names)}")
    return found


def _settings(entry: Entry) -> str:
    plural = "es" if entry.processes > 1 else ""
    return f"{entry.settings}; {entry.processes} process{plural}"


def _measure(entry: Entry, sizes: workloads.Sizes, only: frozenset[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    try:
        with System(entry) as system:
            assert system.servers is not None
            result |= {"version": system.version, "servers": system.servers.versions()}
            workloads.run(system, sizes, only, result)
    except CannotRun as exc:
        warn(f"    {exc}")
        # keep what was measured before it failed
        result["broke_off" if set(result) & set(WORKLOADS) else "cannot"] = str(exc)
    return result


def _reruns(entries: list[Entry], sizes: workloads.Sizes) -> list[dict[str, Any]]:
    """Run all peers at once: this is waiting, not work. They begin together, once all workers run."""
    together = threading.Barrier(len(entries))

    def one(entry: Entry) -> dict[str, Any]:
        joined = False

        def ready() -> None:
            nonlocal joined
            joined = True
            together.wait()

        try:
            with System(entry) as system:
                return {"version": system.version, "rerun": workloads.rerun(system, sizes, ready)}
        except CannotRun as exc:
            return {"cannot": str(exc)}
        finally:
            if not joined:
                together.wait()

    with ThreadPoolExecutor(len(entries)) as pool:
        return list(pool.map(one, entries))


def _good(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if "cannot" not in run] or runs


def _write(result: dict[str, Any], output: Path | None) -> None:
    if output is None:
        RESULTS.mkdir(exist_ok=True)
        output = RESULTS / f"{result['at'].replace(':', '')[:17]}.json"
    output.write_text(json.dumps(result) + "\n")
    print(f"written: {output}")
    try:
        if report.plot(result, output.with_suffix(".svg")):
            print(f"plot: {output.with_suffix('.svg')}")
    except ImportError:
        print("no plot: install matplotlib (the dependency group `bench`)")


if __name__ == "__main__":
    sys.exit(main())
