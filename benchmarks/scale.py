"""How toc itself scales: does it stay fast as it grows? ``python -m benchmarks.scale [WHAT ...]``

neighbour   lateness of one topic while 100,000 tasks of another are due at one instant
growth      lateness at 1,000 a second with few and with many tasks pending
waiting     tasks due at one instant whose handlers wait 50 ms: coroutines, then 200 threads a process
slots       processor time a task, and lateness, with 8, 128, 1,024 and 10,240 slots (in 10 topics)
daemons     tasks run a second by 1, 2 and 4 daemons of one process, and which programs use the cores
schedules   lateness of tasks of 1,000 schedules that fire at one instant, and of 1,000 submitted for one
resting     processor time at rest without schedules, and with 100,000 of which none fires
rebuild     lateness of 1,000 tasks a second while an index of 1,000,000 (--indexed) is lost and built again
edge        lateness at 500 a second while the horizon reaches 100,000 tasks more, and before, in turn
idle        processor time of a daemon that owns 1,024 slots of 20 topics and sweeps 64 or 1,024 tables
alone       without Redis, 64 tables: lateness at 1,000 a second, stored ahead and SOON; rest
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks import processes, stats
from benchmarks.catalog import ENTRIES, Entry
from benchmarks.peer import NS
from benchmarks.system import System, warn
from benchmarks.workloads import HOUR, Sizes, burst, lateness
from toc import Settings, TimeoutCenter

NEIGHBOURS, ASYNC_WAITS, THREAD_WAITS, SCHEDULED = 1 << 51, 1 << 50, 1 << 49, 1 << 48
"""What benchmarks.peers.toc does with numbers that have these bits: other topics, and schedules."""
WAIT_SECONDS = 0.05
WHAT = [
    "neighbour",
    "waiting",
    "growth",
    "slots",
    "daemons",
    "schedules",
    "resting",
    "rebuild",
    "edge",
    "idle",
    "alone",
]
SOON = NS // 5
"""How long before their times tasks are stored that no reader of tables can know a second ahead."""


def warm_up(system: System) -> None:
    """Run a thousand tasks: afterwards the rate of storing tasks is known."""
    _, due = system.submit(1000, time.time_ns() + NS, 0)
    system.await_starts(due)


def neighbour(system: System, burst: int = 100_000, rate: int = 100, seconds: int = 6) -> dict[str, Any]:
    """Measure the lateness of a second topic, from 1 s before a burst on the first until its end."""
    warm_up(system)
    at = time.time_ns() + int((2 * burst / system.rate + 3) * NS)
    _, due = system.submit(burst, at, 0)
    _, beside = system.submit(rate * seconds, at - NS, NS // rate, bits=NEIGHBOURS)
    if time.time_ns() > at - 2 * NS:
        raise RuntimeError("storing the burst took longer than expected")
    system.await_starts(beside)
    system.await_starts(due)
    last = max(min(starts) for starts in system.started(due).values())
    return {
        "burst_last_start": (last - at) / NS,
        "neighbour": stats.lateness(beside, system.started(beside)),
    }


def waiting(system: System, tasks: int, bits: int) -> dict[str, Any]:
    """Run waiting handlers, all due at one instant: seconds to the last start, and how many ran at once."""
    warm_up(system)
    result = burst(system, Sizes(), tasks, bits=bits)
    at_once = tasks * WAIT_SECONDS / (result["last_start"] - result["first_start"] + WAIT_SECONDS)
    return {"tasks": tasks, "last_start": result["last_start"], "at_once": at_once}


def growth(system: System, steps: Sequence[int]) -> dict[str, Any]:
    """Measure lateness at 1,000 a second with each number of pending tasks, fewest first."""
    found: dict[str, Any] = {}
    sizes = Sizes(lateness_seconds=10)
    for pending in steps:
        while (missing := pending - system.pending()) > 0:
            for first in range(0, missing, 20_000):
                count = min(20_000, missing - first)
                # spread over the next ten hours, like real deadlines
                system.submit(count, time.time_ns() + HOUR, 10 * HOUR // count)
                if first % 500_000 == 0:
                    warn(f"    {pending - missing + first:,} pending")
        settled = settle(system)
        found[f"{pending}"] = {"settled_after": settled, **lateness(system, sizes, 1000)}
    return found


def slots(system: System, tasks: int = 50_000) -> dict[str, Any]:
    """Run a burst, and 1,000 a second: processor time per task (workers and servers), and lateness."""
    sizes = Sizes(lateness_seconds=6)
    warm_up(system)
    found: dict[str, Any] = {}
    for name, result in (("burst", burst(system, sizes, tasks)), ("steady", lateness(system, sizes, 1000))):
        found[name] = {**result, "cpu_us_per_task": 1e6 * result["cpu_seconds"] / result["tasks"]}
    return found


def daemons(system: System, tasks: int = 100_000) -> dict[str, Any]:
    """Measure tasks run a second by 1, 2 and 4 daemons. ``cpu``: cores in use meanwhile, by group."""
    warm_up(system)
    found: dict[str, Any] = {}
    for count in (1, 2, 4):
        system.start(count)
        result = burst(system, Sizes(), tasks)
        seconds = result["last_finish"] - result["first_start"]
        found[str(count)] = {"rate": tasks / seconds, "cpu": result["cpu"]}
    return found


def schedules(system: System, count: int = 1000) -> dict[str, Any]:
    """Measure the lateness of what fires at one instant: of schedules, and of tasks."""
    warm_up(system)
    found = {}
    for name, bits, lead in (("schedules", SCHEDULED, 30 * NS), ("tasks", 0, 5 * NS)):
        _, due = system.submit(count, time.time_ns() + lead, 0, bits=bits)
        system.await_starts(due)
        found[name] = stats.lateness(due, system.started(due))
    return found


def resting(system: System, count: int = 100_000) -> dict[str, Any]:
    """Measure ``idle`` without schedules, and twice with so many that fire in ten hours or later."""
    warm_up(system)
    settle(system)
    without = idle(system)
    for first in range(0, count, 5000):
        system.submit(min(5000, count - first), time.time_ns() + 10 * HOUR, HOUR // count, bits=SCHEDULED)
        warn(f"    {first + 5000:,} schedules")
    settle(system)
    return {"without": without, "schedules": count, "with": [idle(system), idle(system)]}


def rebuild(system: System, pending: int, rate: int = 1000) -> dict[str, Any]:
    """Measure lateness at a rate, in all and by the second, while Redis loses all at the tenth second."""
    seconds = max(60, pending // 50_000)
    assert system.servers is not None
    warm_up(system)
    for first in range(0, pending, 20_000):
        # due within the topic's horizon, a day
        system.submit(min(20_000, pending - first), time.time_ns() + HOUR, 10 * HOUR // pending)
    settle(system)
    due = system.submit_ahead(rate * seconds, NS // rate)
    first_due = min(due.values())
    time.sleep(max(0, first_due + 10 * NS - time.time_ns()) / NS)
    system.servers.flush()
    system.await_starts(due)
    starts = system.started(due)
    curve = []
    for second in range(seconds):
        of_it = {n: at for n, at in due.items() if (at - first_due) // NS == second}
        curve.append(round(stats.lateness(of_it, starts)["max"]))
    return {**stats.lateness(due, starts), "most_by_second": curve}


def edge(system: System, band: int = 100_000, rate: int = 500, turns: int = 3) -> dict[str, Any]:
    """Measure lateness at a rate, then again while tasks that a longer horizon reaches are read and indexed.

    ``loaded`` of the band were, meanwhile.
    """
    assert system.servers is not None
    warm_up(system)
    told = system.servers.environment
    settings = Settings(
        database_urls=told["TOC_DATABASE_URLS"],
        databases=int(told["TOC_DATABASES"]),
        tables=int(told["TOC_TABLES"]),
        redis_url=told["TOC_REDIS_URL"],
    )
    found: list[dict[str, Any]] = []
    with TimeoutCenter(settings) as center:
        topics = center.store.topics.list()
        slots = [slot for topic in topics for slot in topic.slots()]

        def reach(hours: float) -> None:
            for topic in topics:
                center.store.topics.alter(topic.name, horizon=int(3600 * hours))

        def indexed() -> int:
            return center.queues.standing(slots, time.time_ns() // 10**6 + 3_600_000, 1 << 50)

        for first in range(0, band, 20_000):
            count = min(20_000, band - first)
            system.submit(count, time.time_ns() + 2 * HOUR, HOUR // count)
        for _ in range(turns):
            reach(1)
            time.sleep(3)  # everybody knows it
            center.queues.trim(slots, time.time_ns() // 10**6 + 3_600_000)
            settle(system)
            quiet = lateness(system, Sizes(lateness_seconds=10), rate)
            reach(4)
            while not indexed():
                time.sleep(0.2)
            before = indexed()
            loading = lateness(system, Sizes(lateness_seconds=10), rate)
            found.append({"quiet": quiet, "loading": loading, "loaded": indexed() - before})
            warn(json.dumps(found[-1]))
    ratios = sorted(one["loading"]["p99"] / one["quiet"]["p99"] for one in found)
    return {"turns": found, "p99_ratio": ratios[len(ratios) // 2]}


def alone(system: System, rate: int = 1000, seconds: int = 20) -> dict[str, Any]:
    """Measure rest, and lateness at a rate: of tasks stored long ahead, and of tasks stored SOON."""
    warm_up(system)
    settle(system)
    found: dict[str, Any] = {"rest": idle(system)}
    found["ahead"] = lateness(system, Sizes(lateness_seconds=seconds), rate)
    due: dict[int, int] = {}
    began = at = time.time_ns()
    for _ in range(20 * seconds):
        at = max(at, time.time_ns())
        due |= system.submit(rate // 20, at + SOON, NS // rate)[1]
        at += NS // 20
        time.sleep(max(0, at - time.time_ns()) / NS)
    found["rate"] = len(due) * NS / (time.time_ns() - began)
    system.await_starts(due)
    found["soon"] = stats.lateness(due, system.started(due))
    return found


def settle(system: System, most: float = 180, rest: float = 0.1) -> float:
    """Wait until the servers use less than ``rest`` of a core: they still write what was just stored.

    Returns the seconds that took; ``most`` or more if they stay busy.
    """
    assert system.servers is not None
    began = time.monotonic()
    while time.monotonic() - began < most:
        before = sum(map(processes.cpu_seconds, system.servers.pids().values()))
        time.sleep(2)
        if sum(map(processes.cpu_seconds, system.servers.pids().values())) - before < 2 * rest:
            break
    return time.monotonic() - began


def idle(system: System, seconds: float = 20) -> dict[str, Any]:
    """Return the processor time over ``seconds`` in percent of a core, by group of processes."""
    assert system.servers is not None
    time.sleep(5)
    groups = {"daemon": system.worker_pids(), **system.servers.pids()}
    before = {name: processes.cpu_seconds(pids) for name, pids in groups.items()}
    time.sleep(seconds)
    return {
        name: 100 * (processes.cpu_seconds(pids) - before[name]) / seconds for name, pids in groups.items()
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("what", nargs="*", default=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("--pending", type=int, nargs="+", default=[10_000, 5_000_000], help="of growth")
    parser.add_argument("--indexed", type=int, default=1_000_000, help="of rebuild")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - set(WHAT):
        parser.error(f"not known: {', '.join(sorted(unknown))}; there are {', '.join(WHAT)}")
    entries = {entry.name: entry for entry in ENTRIES}
    toc = entries["toc"]
    result: dict[str, Any] = {}
    for name in arguments.what:
        warn(f"{name} ...")
        wide, pending = entries["toc, 1024 tables"], sorted(arguments.pending)
        result[name] = _measure(name, toc, wide, pending, arguments.indexed)
        warn(json.dumps({name: result[name]}))
    json.dump(result, sys.stdout, indent=1)
    print()


def _measure(name: str, toc: Entry, wide: Entry, pending: Sequence[int], indexed: int) -> dict[str, Any]:
    if name == "neighbour":
        with _running(toc) as system:
            return neighbour(system)
    if name == "waiting":
        with _running(_with(toc, BENCH_THREADS=200)) as system:
            return {
                "coroutines": waiting(system, 20_000, ASYNC_WAITS),
                "threads": waiting(system, 5000, THREAD_WAITS),
            }
    if name == "schedules":
        with _running(toc) as system:
            return schedules(system)
    if name == "resting":
        with _running(toc) as system:
            return resting(system)
    if name == "rebuild":
        with _running(toc) as system:
            return rebuild(system, indexed)
    if name == "edge":
        with _running(toc) as system:
            return edge(system)
    if name == "alone":
        with _running(replace(toc, servers=("mariadb",))) as system:
            return alone(system)
    if name == "growth":
        with _running(toc) as system:
            return growth(system, pending)
    found: dict[str, Any] = {}
    if name == "slots":
        for topics, amount in ((1, 8), (1, 128), (1, 1024), (10, 1024)):
            with _running(_with(toc, BENCH_TOPICS=topics, BENCH_SLOTS=amount)) as system:
                found[str(topics * amount)] = slots(system)
    elif name == "daemons":
        with _running(_with(toc, "zookeeper", BENCH_DAEMONS=1)) as system:
            return daemons(system)
    else:
        for entry in (toc, wide):
            with _running(_with(entry, BENCH_IDLE_TOPICS=1, BENCH_SLOTS=16)) as system:
                found[entry.name] = idle(system)
    return found


@contextmanager
def _running(entry: Entry) -> Iterator[System]:
    """Run the entry's servers and two worker processes."""
    with System(entry) as system:
        system.start(2)
        yield system


def _with(entry: Entry, *servers: str, **environment: int) -> Entry:
    """Return ``entry`` with further servers and settings."""
    settings = {name: str(value) for name, value in environment.items()}
    return replace(entry, servers=(*entry.servers, *servers), environment={**entry.environment, **settings})


if __name__ == "__main__":
    main()
