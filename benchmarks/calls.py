"""How many calls of Python a worker makes for one task: a cost that does not depend on the machine's mood.

``python -m benchmarks.calls`` runs tasks at RATE a second, so that nearly each has a round of its own, in one
worker process whose threads count their calls. It prints them by thread, and the most frequent ones with
``--functions``. Exits with 1 if a task costs more than MOST calls.

Lateness shows a few more calls for each task only as a trend over months. This count shows them at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.catalog import ENTRIES
from benchmarks.peer import NS
from benchmarks.system import System

DIRECTORY = "BENCH_CALLS"
"""The environment variable that makes a worker count, and says where it writes its counts."""
SNAPSHOT = 1 << 47
"""A task number with this bit: its handler writes the counts so far."""
RATE, SECONDS = 200, 5
THREADS = ("poll", "finish", "handler", "sweep")
"""The threads through which each task goes. Others work by the clock, not by the task."""
MOST = 900
"""Most calls of a task in THREADS together. When it was set there were 835, and 990 in the state before,
which was a tenth later at 1,000 a second."""

Calls = Counter[tuple[str, str, str]]
"""(thread, called function, calling function) -> calls. A function in C has ``C`` before its name."""

_counts: dict[int, tuple[str, Counter[tuple[str, str]]]] = {}


def install() -> None:
    """Count the calls of every thread that is started from now on."""
    threading.setprofile(_count)


def _count(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        caller = frame.f_back.f_code.co_qualname if frame.f_back else ""
        called = frame.f_code.co_qualname
    elif event == "c_call":
        caller = frame.f_code.co_qualname
        called = f"C {getattr(argument, '__qualname__', argument)}"
    else:
        return
    ident = threading.get_ident()
    if ident not in _counts:
        _counts[ident] = re.sub(r"^toc-|-\d+$", "", threading.current_thread().name), Counter()
    _counts[ident][1][called, caller] += 1


def write(number: int) -> None:
    """Write this process's counts so far to a file named after the task. For a handler."""
    rows = [
        [thread, called, caller, count]
        for thread, counts in list(_counts.values())
        for (called, caller), count in list(counts.items())
    ]
    path = Path(os.environ[DIRECTORY]) / f"{number & ~SNAPSHOT}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(rows))
    draft.rename(path)


def measure(rate: int = RATE, seconds: float = SECONDS) -> tuple[Calls, int]:
    """Run tasks in one counting process. Returns its calls meanwhile, and the number of tasks."""
    (entry,) = (entry for entry in ENTRIES if entry.name == "toc")
    with tempfile.TemporaryDirectory() as directory:
        os.environ[DIRECTORY] = directory
        try:
            with System(entry) as system:
                system.start(1)
                due = system.submit_ahead(rate, NS // rate)  # first calls fill caches
                system.await_starts(due)
                before = _snapshot(system, Path(directory))
                due = system.submit_ahead(int(rate * seconds), NS // rate)
                system.await_starts(due)
                system.await_finished()
                after = _snapshot(system, Path(directory))
        finally:
            del os.environ[DIRECTORY]
    return after - before, len(due)


def per_task(calls: Calls, tasks: int) -> dict[str, float]:
    """Return the calls of each of THREADS for one task."""
    return {
        thread: sum(count for (name, *_), count in calls.items() if name == thread) / tasks
        for thread in THREADS
    }


def _snapshot(system: System, directory: Path) -> Calls:
    number, _ = system.submit(1, time.time_ns() + NS // 2, 0, bits=SNAPSHOT)
    path = directory / f"{number & ~SNAPSHOT}.json"
    until = time.monotonic() + 20
    while not path.exists():
        if time.monotonic() > until:
            raise SystemExit("the worker has not written its counts")
        time.sleep(0.05)
    calls: Calls = Counter()
    for thread, called, caller, count in json.loads(path.read_text()):
        calls[thread, called, caller] += count
    return calls


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--functions", type=int, default=0, metavar="N", help="the N most frequent calls, too"
    )
    chosen = parser.parse_args()
    calls, tasks = measure()
    by_thread = per_task(calls, tasks)
    for thread, count in by_thread.items():
        print(f"{thread:10} {count:7.1f} calls a task")
    total = sum(by_thread.values())
    print(f"{'all':10} {total:7.1f}   at most {MOST}")
    for (thread, called, caller), count in calls.most_common(chosen.functions):
        print(f"{count / tasks:7.2f} {thread:8} {called} <- {caller}")
    if total > MOST:
        print(f"FAILED a task costs {total:.0f} calls, at most {MOST} expected", file=sys.stderr)
    return 1 if total > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
