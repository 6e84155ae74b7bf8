"""The six workloads: what is done to each peer, in the same way, and what is recorded.

All tasks of lateness, burst and consume are stored before the first is due, so that running is measured, not
submitting. Instants are nanoseconds since 1970, by the machine's one clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import processes, stats
from benchmarks.peer import NS
from benchmarks.record import DIES
from benchmarks.system import System

HOUR = 3600 * NS
HOPELESS_MS = 900
"""A larger median lateness (ms) is no delay but a growing queue: higher rates would only take time."""
IDLE_LOOKS = 3
"""How often idle servers are measured; the median counts, because they still write what was submitted."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of all workloads: counts of tasks, and seconds."""

    rates: tuple[int, ...] = (100, 1000, 3000)
    lateness_seconds: float = 3
    bursts: tuple[int, ...] = (10_000, 100_000)
    submit_seconds: float = 1.5
    pending: int = 100_000
    fill_seconds: float = 4
    """The most time for storing the pending tasks."""
    idle_seconds: float = 3
    consume_seconds: float = 1.5
    """How long the backlog of the consume workload should last."""
    longest: float = 15
    """A workload that would take longer, judged by the one before, is left out, and the report says so."""
    rerun_seconds: float = 75


QUICK = Sizes(
    rates=(100, 1000),
    lateness_seconds=2,
    bursts=(3000,),
    submit_seconds=0.5,
    pending=5000,
    fill_seconds=2,
    idle_seconds=2,
    consume_seconds=0.5,
    longest=10,
    rerun_seconds=15,
)


def run(system: System, sizes: Sizes, only: frozenset[str], result: Result) -> None:
    """Run all workloads but ``rerun`` on one peer, or those in ``only``. Fills ``result``."""

    def wanted(name: str) -> bool:
        return not only or name in only

    system.start(system.entry.processes)
    if wanted("lateness"):
        result["lateness"] = {}
        behind = 0
        for rate in sizes.rates:
            if behind:
                result["lateness"][str(rate)] = _left_out(f"it cannot keep up with {behind} a second")
                continue
            result["lateness"][str(rate)] = lateness(system, sizes, rate)
            if result["lateness"][str(rate)].get("p50", 0) > HOPELESS_MS:
                behind = rate
    if wanted("burst") or wanted("consume"):
        result["burst"] = {}
        slow = 0.0
        for count in sizes.bursts:
            if slow and count / slow > sizes.longest:
                result["burst"][str(count)] = _left_out(f"it would take {count / slow:.0f} s")
                continue
            result["burst"][str(count)] = burst(system, sizes, count)
            slow = result["burst"][str(count)].get("rate", 0.0)
    if wanted("consume"):
        result["consume"] = {}
        for count in (1, 2, 4):
            result["consume"][str(count)] = consume(system, sizes, count, result["burst"])
    if wanted("submit") or wanted("idle"):
        if system.processes != system.entry.processes:
            system.start(system.entry.processes)
        assert system.servers is not None
        before = system.servers.memory(), system.servers.stored()
        result["submit"] = submits(system, sizes)
        if wanted("idle"):
            result["idle"] = idle(system, sizes, *before)
    system.stop()


def lateness(system: System, sizes: Sizes, rate: int) -> Result:
    """Run tasks due at even intervals, ``rate`` a second."""
    count = int(rate * sizes.lateness_seconds)
    if count / system.rate > sizes.longest:
        return _left_out(f"storing them would take {count / system.rate:.0f} s")
    due = system.submit_ahead(count, NS // rate)
    used = _Cpu(system)
    system.await_starts(due)
    result = stats.lateness(due, system.started(due))
    system.await_finished()
    return result | used.report()


def burst(system: System, sizes: Sizes, count: int, *, bits: int = 0) -> Result:
    """Run ``count`` tasks due at one instant; measure seconds to first start, last start and last finish."""
    if count / system.rate > sizes.longest:
        return _left_out(f"storing them would take {count / system.rate:.0f} s")
    due = system.submit_ahead(count, 0, bits=bits)
    at = next(iter(due.values()))
    used = _Cpu(system)
    system.await_starts(due, most=sizes.longest)
    finished = system.await_finished()
    starts = system.started(due)
    if not starts:
        return _left_out("none started")
    firsts = [min(times) for times in starts.values()]
    result: Result = {
        "tasks": count,
        "first_start": (min(firsts) - at) / NS,
        "last_start": (max(firsts) - at) / NS,
        "last_finish": None if finished is None else (finished - at) / NS,
        "lost": count - len(firsts),
        "early": sum(1 for first in firsts if first < at),
        "doubled": sum(1 for times in starts.values() if len(times) > 1),
        "rate": len(firsts) / max((max(firsts) - at) / NS, 1e-3),
        "worker_peak_bytes": processes.peak(system.worker_pids()),
    }
    return result | used.report()


def consume(system: System, sizes: Sizes, count: int, bursts: Mapping[str, Result]) -> Result:
    """Let ``count`` processes run a backlog: tasks a second from first start to last finish."""
    if count > system.entry.most_processes:
        return _left_out(f"it runs in {system.entry.most_processes} process")
    rates = [one["rate"] for one in bursts.values() if "rate" in one]
    if not rates:
        return _left_out("no burst ran")
    tasks = min(int(max(rates) * sizes.consume_seconds), max(sizes.bursts))
    system.start(count)
    result = burst(system, sizes, max(tasks, 100))
    if "last_finish" not in result or result["last_finish"] is None:
        return result if "left_out" in result else _left_out("it did not finish")
    seconds = result["last_finish"] - result["first_start"]
    rate = (result["tasks"] - result["lost"]) / max(seconds, 1e-3)
    return {"rate": rate} | {name: result[name] for name in ("tasks", "cpu", "cpu_seconds")}


def submits(system: System, sizes: Sizes) -> Result:
    """Measure tasks stored a second from one thread, singly and in the fastest way, while workers run."""
    rates = {}
    for name, batch, chunk in (("one_by_one", False, 100), ("batched", True, 5000)):
        total, seconds = 0, 0.0
        while seconds < sizes.submit_seconds and total < sizes.pending // 2:
            system.submit(chunk, time.time_ns() + HOUR, 1_000_000, batch=batch)
            total, seconds = total + chunk, seconds + system.took
        rates[name] = total / seconds
    return rates


def idle(system: System, sizes: Sizes, memory_before: int, stored_before: int) -> Result:
    """Measure rest with many tasks pending: processor time in percent of one core, and bytes per task."""
    servers = system.servers
    assert servers is not None
    missing = sizes.pending - system.pending()
    missing = min(missing, int(system.rate * sizes.fill_seconds))
    for first in range(0, missing, 10_000):
        system.submit(min(10_000, missing - first), time.time_ns() + HOUR, 1_000_000)
    time.sleep(2)  # effects of a submit: buffers written, a page split, the worker's prefetch
    tasks = system.pending()
    workers = system.worker_pids()
    everybody = {"workers": workers, **servers.pids()}
    looks = [_busy_percent(everybody, sizes.idle_seconds) for _ in range(IDLE_LOOKS)]
    busy = {name: statistics.median(look[name] for look in looks) for name in everybody}
    return {
        "tasks": tasks,
        "worker_cpu_percent": busy.pop("workers"),
        "server_cpu_percent": busy,
        "index_bytes_per_task": (servers.memory() - memory_before) / max(tasks, 1),
        "stored_bytes_per_task": servers.row_bytes() or (servers.stored() - stored_before) / max(tasks, 1),
        "worker_bytes": processes.resident(workers),
    }


def _busy_percent(pids: Mapping[str, Sequence[int]], seconds: float) -> dict[str, float]:
    """Return the processor time of these processes in the next seconds, in percent of one core."""
    before = {name: processes.cpu_seconds(some) for name, some in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return {name: 100 * (processes.cpu_seconds(some) - before[name]) / took for name, some in pids.items()}


def rerun(system: System, sizes: Sizes, ready: Callable[[], None]) -> Result:
    """Run a handler that kills its own process with -9; return the seconds until it starts again.

    Calls ``ready`` before it submits the task: peers wait there for each other.
    """
    system.start(system.entry.processes)
    ready()
    _, due = system.submit(1, time.time_ns() + NS, 0, bits=DIES)
    number = next(iter(due))
    until = time.monotonic() + sizes.rerun_seconds
    while time.monotonic() < until:
        starts = sorted(system.started(due).get(number, []))
        if len(starts) > 1:
            return {"seconds": (starts[1] - starts[0]) / NS}
        time.sleep(0.05)
    return {"seconds": None, "waited": sizes.rerun_seconds}


class _Cpu:
    """How many cores the workers and the servers use, on average since this object was made."""

    def __init__(self, system: System) -> None:
        assert system.servers is not None
        self._groups = {"workers": system.worker_pids(), **system.servers.pids()}
        self._before = {name: processes.cpu_seconds(pids) for name, pids in self._groups.items()}
        self._began = time.monotonic()

    def report(self) -> Result:
        """Return ``cpu``: cores in use, by group; and ``cpu_seconds``: of all together."""
        seconds = time.monotonic() - self._began
        used = {name: processes.cpu_seconds(pids) - self._before[name] for name, pids in self._groups.items()}
        return {
            "cpu": {name: value / seconds for name, value in used.items()},
            "cpu_seconds": sum(used.values()),
        }


def _left_out(reason: str) -> Result:
    return {"left_out": reason}
