"""What a system of a given size would do: ``python -m benchmarks.simulate --hosts 100 --fires 20000 ...``

The real assignment spreads real slots over workers. Tasks are not simulated one by one, but as counts for
each slot and 10 ms; servers and processes cost what was measured (``--measure`` measures anew). It prints
lateness, memory, connections and writes to ZooKeeper, and how far each part is from its limit: what breaks
first.

``--check`` runs toc itself at sizes that this machine can hold and compares.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from statistics import NormalDist
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import processes
from toc.coordination.assignment import TABLES, Member, Owners, Spread, assign
from toc.model.horizon import Budget, Span, pending, reach

if TYPE_CHECKING:
    from benchmarks.system import System

STEP = 0.01
"""Seconds of a step."""
PATTERNS = 64
"""Different steps of arrivals that are drawn; each step takes one, turned by a random number of slots."""
QUANTILES = 25
"""Of tasks that waited in a queue; tasks that did not are counted finer."""
FINE = 5000
NORMAL = NormalDist()
EDGES = np.logspace(-1, 7, 400)
"""Borders (ms) between which lateness is counted."""
Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What was measured, at 200 tasks a second and of 50,000 at once. ``*_round``: microseconds of processor
    time of a take of one task; ``*_task``: of each further one in the same take; ``*_submit``: of a task
    submitted with others."""

    worker_round: float = 1450
    worker_task: float = 33
    database_round: float = 730
    database_task: float = 22
    redis_round: float = 240
    redis_task: float = 7
    database_submit: float = 14
    redis_submit: float = 2
    p50_ms: float = 1.0
    """Lateness at a low rate."""
    p99_ms: float = 2.0
    redis_bytes: float = 140
    """Of an entry."""
    row_bytes: float = 250
    """Of a row without attribute, with its indexes."""
    character_bytes: float = 1.2
    """Of a character of its attribute."""
    process_mb: float = 80


def option(default: Any, meaning: str) -> Any:
    """A field of Plan: its default, and what it means."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Plan:
    """The system and what happens to it."""

    hosts: int = option(10, "worker hosts")
    processes: int = option(16, "worker processes of a host")
    cores: int = option(16, "cores of a host, and of a MySQL server")
    databases: int = option(32, "databases over all servers: a power of two")
    servers: int = option(4, "MySQL servers")
    tables: int = option(1024, "task tables over all databases, whose sweep is spread like slots")
    redis: int = option(8, "Redis nodes, each of one core, with as many slots each")
    topics: int = option(20, "topics, each with as many tasks")
    slots: int = option(512, "slots of each topic")
    fires: float = option(20_000, "tasks that come due a second")
    burst: float = option(0, "tasks that come due besides, from the 30th second on")
    burst_seconds: float = option(60, "seconds within which they come due; 0: at once")
    pending: float = option(1e8, "tasks that wait")
    horizon: int = option(86_400, "seconds, of the topics: what is due later has no entry in Redis")
    redis_gb: float = option(2.0, "maxmemory of a Redis node (GB), of which 60 % bound the horizon")
    retention_days: float = option(3, "days for which processed rows stay; a burst is taken for hourly")
    cancelled: float = option(0, "tasks submitted a second that are cancelled before they come due")
    dead: float = option(0, "dead tasks, whose rows stay")
    characters: int = option(100, "length of attribute")
    seconds: float = option(120, "seconds that are simulated")
    lose_host_every: float = option(60, "seconds; 0: no host is lost. The first after half; back after 20 s")
    server_away: float = option(0, "seconds for which one MySQL server is away, from the 10th second on")
    session_timeout: float = option(6, "seconds until the slots of a lost host go to others")
    shared: int = option(
        0, "cores that all processes and servers share, as on one machine; 0: none is shared"
    )

    @property
    def fires_a_day(self) -> float:
        return 86_400 * self.fires + 24 * self.burst

    def in_burst(self) -> Plan:
        """The same while the burst comes due."""
        return replace(self, fires=self.fires + self.burst / max(self.burst_seconds, STEP))


DEFAULT_BUDGET = Budget(60)
BACK_AFTER = 20.0
DEBOUNCE = 0.3
CLAIM = 0.2
"""Seconds from an assignment until the slots are served again."""
BURST_AT = 30.0
MAX_CONNECTIONS = 10_000
"""That a database server is given; the first, where most are idle, twice as many."""
WRITES = 5000
"""That ZooKeeper makes a second."""
SUBMITTED = 40_000
"""Tasks whose submit is measured."""
PER_SERVER = 4
"""Connections of a process to a server of its slots, as counted under a burst. Its pool has room for 8."""


def main() -> int:
    """Simulate, or check, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate")
    for each in fields(Plan):
        kind = type(each.default)
        name, text = (
            each.name.replace("_", "-"),
            f"{each.metadata['help']} ({each.default:g})".replace("%", "%%"),
        )
        parser.add_argument(f"--{name}", type=kind, default=each.default, metavar="N", help=text)
    parser.add_argument("--measure", action="store_true", help="measure the costs on this machine first")
    parser.add_argument("--check", action="store_true", help="compare with toc itself on this machine")
    parser.add_argument("--json", action="store_true")
    values = vars(parser.parse_args())
    own, check, as_json = values.pop("measure"), values.pop("check"), values.pop("json")
    costs = measured() if own or check else Costs()
    if check:
        return compare(costs)
    result = simulate(Plan(**values), costs)
    print(json.dumps(result, indent=1) if as_json else "\n".join(table(result)))
    return 0


# --- the simulation


class Simulation:
    """Counts of tasks for each slot and step, and where they wait."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.random = np.random.default_rng(7)
        self.spread = Spread(plan.databases, plan.servers)
        self.members = [
            Member(f"h{host:04}-{number:02}", f"h{host:04}")
            for host in range(plan.hosts)
            for number in range(plan.processes)
        ]
        self.rank = {member.worker_id: number for number, member in enumerate(self.members)}
        self.topics = {f"topic{number:04}": plan.slots for number in range(plan.topics)}
        self.owners = self._assign(self.members, None)
        self.assigning = [0.0]
        """Seconds of each assignment."""
        self.owner = self._numbers(self.owners)
        each = range(plan.slots)
        self.server = np.array([self.spread.server(plan.slots, n) or 0 for n in each] * plan.topics)
        per_slot = plan.fires * STEP / len(self.owner)
        self.patterns = self.random.poisson(per_slot, (PATTERNS, len(self.owner))).astype(np.float64)
        self.counted = np.zeros(len(EDGES) + 1)
        self.moved = 0
        self.burst_over = 0.0
        """When the last task of the burst had run, after the first was due (seconds)."""
        self.bursting = False

    def _assign(self, members: Sequence[Member], previous: Owners | None) -> Owners:
        topics = self.topics | {TABLES: self.plan.tables}
        return assign(members, topics, previous=previous, spread=self.spread)

    def _numbers(self, owners: Owners) -> NDArray[np.int64]:
        return np.array([self.rank.get(str(one), -1) for topic in self.topics for one in owners[topic]])

    def run(self) -> None:
        """Go through all steps."""
        plan, workers = self.plan, len(self.members)
        queue = np.zeros(workers)
        lost: dict[int, float] = {}
        """Host -> when it was lost."""
        waiting: list[tuple[float, Counts]] = []
        """Tasks of slots whose worker is gone: since when, and how many of each slot."""
        away: list[tuple[float, float]] = []
        steps = int(plan.seconds / STEP)
        capacity = self._capacity()
        served = self.owner.copy()
        next_loss = plan.lose_host_every / 2 or float("inf")
        changes: list[tuple[float, bool]] = []
        for step in range(steps):
            now = step * STEP
            if now >= next_loss:
                next_loss += plan.lose_host_every
                host = int(self.random.integers(plan.hosts))
                if host not in lost:
                    lost[host] = now
                    gone = range(host * plan.processes, (host + 1) * plan.processes)
                    served[np.isin(served, gone)] = -1
                    queue[gone.start : gone.stop] = 0  # what they had taken is late by the same time
                    changes += [
                        (now + plan.session_timeout + DEBOUNCE + CLAIM, False),
                        (now + BACK_AFTER, True),
                    ]
            for change in [one for one in changes if one[0] <= now]:
                changes.remove(change)
                if change[1]:
                    lost.pop(min(lost, key=lambda one: lost[one]))
                self._reassign(lost)
                before, served = served, self.owner.copy()
                freed = (before < 0) & (served >= 0)
                for since, tasks in waiting:
                    self._count((now - since) * 1000, float(tasks[freed].sum()))
                    tasks[freed] = 0
                waiting = [one for one in waiting if one[1].any()]
            arrived = np.roll(self.patterns[step % PATTERNS], int(self.random.integers(len(served))))
            self.bursting = bool(plan.burst) and BURST_AT <= now < BURST_AT + max(plan.burst_seconds, STEP)
            if self.bursting:
                steps_of_burst = max(plan.burst_seconds / STEP, 1)
                arrived = arrived + plan.burst / steps_of_burst / len(served)
            if plan.server_away and 10 <= now < 10 + plan.server_away:
                there = self.server != 0
                away.append((now, float(arrived[~there].sum())))
                arrived = arrived * there
            elif away:
                self._drain(away, now)
                away = []
            orphans = served < 0
            if orphans.any():
                waiting.append((now, np.where(orphans, arrived, 0.0)))
            queue += np.bincount(served[~orphans], weights=arrived[~orphans], minlength=workers)
            self._serve(queue, capacity)
            if self.bursting or (self.burst_over and queue.sum() > plan.fires * STEP):
                self.burst_over = now + STEP - BURST_AT
        self._drain(away, max(plan.seconds, 10 + plan.server_away))
        for since, tasks in waiting:
            self._count((plan.seconds - since) * 1000, float(tasks.sum()))

    def _reassign(self, lost: dict[int, float]) -> None:
        there = [one for one in self.members if int(one.host[1:]) not in lost]
        began = time.process_time()
        owners = self._assign(there, self.owners)
        self.assigning.append(time.process_time() - began)
        self.moved += sum(
            old != new
            for topic, slots in owners.items()
            for old, new in zip(self.owners[topic], slots, strict=True)
        )
        self.owners, self.owner = owners, self._numbers(owners)

    def _capacity(self) -> float:
        """Most tasks that a worker runs in a step."""
        plan, costs = self.plan, self.costs
        if plan.shared:
            each = (costs.worker_task + costs.database_task + costs.redis_task) / 1e6
            return plan.shared * STEP / each / len(self.members)
        cores = min(plan.cores / plan.processes, 1.0)
        own = cores * STEP / (costs.worker_task / 1e6)
        database = plan.servers * plan.cores * STEP / (costs.database_task / 1e6) / len(self.members)
        redis = plan.redis * STEP / (costs.redis_task / 1e6) / len(self.members)
        return min(own, database, redis)

    def _serve(self, queue: Counts, capacity: float) -> None:
        ran = np.minimum(queue, capacity)
        late = np.maximum(queue - ran, 0) / capacity * STEP * 1000
        behind = late > 0
        if behind.any():
            for wait, tasks in zip(late[behind], ran[behind], strict=True):
                self._count(float(wait), float(tasks))
        self.counted += (self._busy if self.bursting else self._quiet) * float(ran[~behind].sum())
        queue -= ran

    def _drain(self, away: list[tuple[float, float]], now: float) -> None:
        """Count what waited for a server that is back: it runs as fast as all workers and the server can."""
        plan, costs = self.plan, self.costs
        rate = (
            min(plan.cores / (costs.database_task / 1e6), self._capacity() / STEP * len(self.members))
            - plan.fires / plan.servers
        )
        done = 0.0
        for since, tasks in away:
            self._count((now - since + done / rate) * 1000, tasks)
            done += tasks

    def _count(self, wait_ms: float, tasks: float) -> None:
        """Count tasks that waited so long, beside what every task waits."""
        if tasks:
            base = self._lateness(self.plan, QUANTILES) + wait_ms
            np.add.at(self.counted, np.searchsorted(EDGES, base), tasks / QUANTILES)

    @cached_property
    def _quiet(self) -> Counts:
        return self._without_queue(self.plan)

    @cached_property
    def _busy(self) -> Counts:
        return self._without_queue(self.plan.in_burst())

    def _without_queue(self, plan: Plan) -> Counts:
        """Return how late one task is that waits in no queue, as counts between EDGES that sum up to 1."""
        places = np.searchsorted(EDGES, self._lateness(plan, FINE))
        return np.bincount(places, minlength=len(EDGES) + 1) / FINE

    def _lateness(self, plan: Plan, quantiles: int) -> Counts:
        """Quantiles of lateness (ms) without a queue: as measured, longer by the wait for busy cores."""
        costs = self.costs
        spread = (np.log(costs.p99_ms) - np.log(costs.p50_ms)) / NORMAL.inv_cdf(0.99)
        normal = np.array([NORMAL.inv_cdf((number + 0.5) / quantiles) for number in range(quantiles)])
        return np.asarray(np.exp(np.log(costs.p50_ms) + spread * normal) * slower(plan, costs))

    def percentile(self, share: float) -> float:
        """Return a percentile of lateness (ms)."""
        total = np.cumsum(self.counted)
        place = int(np.searchsorted(total, share * total[-1]))
        return float(EDGES[min(place, len(EDGES) - 1)])


def load(plan: Plan, costs: Costs) -> dict[str, float]:
    """Return the part of their processors that workers, databases and Redis need, 1 is all.

    A process takes at once what came due during its last round, whose length is its processor time.
    """
    workers = plan.hosts * plan.processes
    each = plan.fires / workers
    round_s = (costs.worker_round + costs.database_round + costs.redis_round) / 1e6
    task_s = (costs.worker_task + costs.database_task + costs.redis_task) / 1e6
    left = max(1 - each * task_s, 0)
    rounds = plan.fires * left / (left + each * round_s)
    further = max(plan.fires - rounds, 0)
    worker = (rounds * costs.worker_round + further * costs.worker_task) / 1e6
    database = (rounds * costs.database_round + further * costs.database_task) / 1e6
    redis = (rounds * costs.redis_round + further * costs.redis_task) / 1e6
    if not plan.shared:  # where toc is compared, all tasks were submitted before
        database += (plan.fires + plan.cancelled) * costs.database_submit / 1e6
        redis += (plan.fires + plan.cancelled) * costs.redis_submit / 1e6
    if plan.shared:
        return {"all on one machine": (worker + database + redis) / plan.shared}
    return {
        "workers' processors": worker / min(plan.hosts * plan.cores, workers),
        "databases' processors": database / (plan.servers * plan.cores),
        "Redis's processors": redis / plan.redis,
    }


def slower(plan: Plan, costs: Costs) -> float:
    """Return how many times as long a task takes as in a system at rest: it queues at each part, for one core
    of a process or Redis node, or any of the others' (M/M/c, exactly for one and two cores)."""
    cores = (plan.shared,) if plan.shared else (1, plan.cores, 1)
    weights = (1.0,) if plan.shared else (costs.worker_round, costs.database_round, costs.redis_round)
    parts = zip(weights, load(plan, costs).values(), cores, strict=True)
    return sum(weight / (1 - min(used, 0.95) ** count) for weight, used, count in parts) / sum(weights)


def simulate(plan: Plan, costs: Costs) -> dict[str, Any]:
    """Return what the system would do."""
    simulation = Simulation(plan, costs)
    simulation.run()
    workers = len(simulation.members)
    of_server: list[set[int]] = [set() for _ in range(plan.servers)]
    for slots in simulation.owners.values():
        for number, owner in enumerate(slots):
            server = simulation.spread.server(len(slots), number)
            for one in range(plan.servers) if server is None else (server,):
                if owner is not None:
                    of_server[one].add(simulation.rank[owner])
    connections = max(map(len, of_server)) * PER_SERVER + plan.hosts * 2
    # The records are on the first: topics, targets, who is there.
    first = len(of_server[0]) * (PER_SERVER - 1) + workers + plan.hosts * 2

    indexed = partial(pending, due_spans(plan), 0)
    fits = plan.redis * DEFAULT_BUDGET.on(int(plan.redis_gb * 1e9)) / costs.redis_bytes
    horizon = reach(indexed, fits, plan.horizon)
    rows = plan.pending + plan.dead + (plan.fires_a_day + 86_400 * plan.cancelled) * plan.retention_days
    row_bytes = costs.row_bytes + costs.character_bytes * plan.characters
    writes = 2 * simulation.moved / plan.seconds
    limits = load(plan, costs)
    if plan.burst:
        limits |= {f"{name} in the burst": part for name, part in load(plan.in_burst(), costs).items()}
    limits |= {
        "connections of a database server": connections / MAX_CONNECTIONS,
        "connections of the first": max(connections, first) / (2 * MAX_CONNECTIONS),
        "writes of ZooKeeper": writes / WRITES,
        "a pass of the leader within 2 s": max(simulation.assigning) / 2,
    }
    return {
        "plan": asdict(plan),
        "lateness_ms": {name: simulation.percentile(share) for name, share in SHARES.items()},
        "horizon_seconds": horizon,
        "redis_gb_per_node": indexed(horizon) * costs.redis_bytes / plan.redis / 1e9,
        "disk_gb_per_server": rows * row_bytes / plan.servers / 1e9,
        "memory_gb_per_host": (plan.processes + 1) * costs.process_mb / 1e3,
        "connections_per_server": connections,
        "connections_of_first_server": max(connections, first),
        "burst_over_seconds": simulation.burst_over,
        "zookeeper_writes_per_second": writes,
        "slots_moved": simulation.moved,
        "workers": workers,
        "used": dict(sorted(limits.items(), key=lambda one: -one[1])),
    }


def due_spans(plan: Plan) -> list[Span]:
    """Return what waits, minute by minute as far as the horizon may reach. A burst is taken for hourly."""
    lasts, spans, left = max(plan.burst_seconds, STEP), list[Span](), plan.pending
    for minute in range(plan.horizon // 60 + 2):
        begin = 60.0 * (minute % 60) - BURST_AT
        in_burst = max(0.0, min(begin + 60, lasts) - max(begin, 0.0)) / lasts
        due = min(left, 60 * plan.fires + plan.burst * in_burst)
        spans.append(Span(60_000 * minute, 60_000 * (minute + 1), 1000 * plan.horizon, round(due)))
        left -= due
    return spans


SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "p99.99": 0.9999}


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as lines for people."""
    plan = result["plan"]
    lines = [
        f"{plan['fires']:,.0f} tasks a second, {plan['pending']:,.0f} pending, {result['workers']:,} workers",
        f"with {plan['servers']} MySQL servers, {plan['databases']} databases, {plan['redis']} Redis nodes",
        f"and {plan['topics']} topics of {plan['slots']} slots; kept for {plan['retention_days']:g} days",
        "late: " + ", ".join(f"{name} {value:,.1f} ms" for name, value in result["lateness_ms"].items()),
        f"Redis: {result['redis_gb_per_node']:,.1f} GB a node, {result['horizon_seconds']:,} s ahead",
        f"MySQL: {result['disk_gb_per_server']:,.0f} GB a server, without its binary log",
        f"MySQL: {result['connections_per_server']:,} connections a server",
        f"MySQL: {result['connections_of_first_server']:,} connections of the first server",
        f"hosts: {result['memory_gb_per_host']:.1f} GB before the application",
        f"ZooKeeper: {result['zookeeper_writes_per_second']:.0f} writes a second",
    ]
    if plan["burst"]:
        lines.append(
            f"burst: its last task had run {result['burst_over_seconds']:,.1f} s after its first was due"
        )
    lines.append("used, the first that breaks on top:")
    return lines + [f"  {100 * part:6.1f} %  {name}" for name, part in result["used"].items()]


# --- measured


def measured() -> Costs:
    """Return costs as toc has them on this machine: at 200 tasks a second, and of 50,000 at once."""
    from benchmarks.catalog import ENTRIES
    from benchmarks.system import System
    from benchmarks.workloads import HOUR, Sizes, lateness

    toc = next(entry for entry in ENTRIES if entry.name == "toc")
    with System(toc) as system:
        system.start(2)
        slow = lateness(system, Sizes(lateness_seconds=10), 200)
        fast = _burst(system)
        if why := slow.get("left_out") or fast.get("left_out"):
            sys.exit(f"this machine is too busy to measure: {why}")
        costs: dict[str, float] = {"p50_ms": slow["p50"], "p99_ms": slow["p99"]}
        assert system.servers is not None
        before = {name: processes.cpu_seconds(pids) for name, pids in system.servers.pids().items()}
        system.submit(SUBMITTED, time.time_ns() + HOUR, 0)
        for name, group in (("database", "mariadb"), ("redis", "redis")):
            used = processes.cpu_seconds(system.servers.pids()[group]) - before[group]
            costs[f"{name}_submit"] = 1e6 * used / SUBMITTED
    for name, group in (("worker", "workers"), ("database", "mariadb"), ("redis", "redis")):
        for kind, result in (("round", slow), ("task", fast)):
            seconds = result["cpu_seconds"] * result["cpu"][group] / sum(result["cpu"].values())
            costs[f"{name}_{kind}"] = 1e6 * seconds / result["tasks"]
    return replace(Costs(), **costs)


def compare(costs: Costs) -> int:
    """Run toc and the simulation at the same sizes, and print both."""
    from benchmarks.catalog import ENTRIES
    from benchmarks.system import System
    from benchmarks.workloads import HOUR, Sizes, lateness

    toc = next(entry for entry in ENTRIES if entry.name == "toc")
    print(json.dumps(asdict(costs)))
    print(f"{'':30} {'toc':>22} {'simulated':>22}")

    apart = []

    def say(what: str, real: float, simulated: float, factor: float = 1.2) -> None:
        print(f"{what:30} {real:22,.2f} {simulated:22,.2f}", flush=True)
        if not real / factor <= simulated <= real * factor:
            apart.append(what)

    here = Plan(
        hosts=1, processes=2, servers=1, databases=8, tables=64, redis=1, topics=1, slots=16,
        pending=SUBMITTED, seconds=20, lose_host_every=0, shared=2,
    )  # fmt: skip
    with System(toc) as system:
        assert system.servers is not None
        system.start(2)
        for rate in (500, 1000, 2000, 3000):
            real = lateness(system, Sizes(lateness_seconds=8), rate)
            found = simulate(replace(here, fires=rate, pending=rate * 10), costs)
            for name in ("p50", "p99"):
                say(f"{rate:,}/s, {name}, ms", real[name], found["lateness_ms"][name], 2)
        with _most_connections(system) as most:
            real = _burst(system)
        each = (costs.worker_task + costs.database_task + costs.redis_task) / 1e6
        # The costs are those of tasks to their end; the last one starts before the others have ended.
        say("50,000 at once, ended/s", real["tasks"] / real["last_finish"], 2 / each)
        say("  most connections of MySQL", most[0], found["connections_per_server"])
        found = simulate(replace(here, fires=1000), costs)
        of_processes = processes.proportional(system.worker_pids()) / 1e6
        say("memory of the processes, MB", of_processes, 1000 * found["memory_gb_per_host"])
        before = system.servers.memory()
        system.submit(SUBMITTED, time.time_ns() + HOUR, 0)
        used = (system.servers.memory() - before) / 1e6
        say(f"{SUBMITTED:,} entries in Redis, MB", used, 1000 * found["redis_gb_per_node"])
    if apart:
        print(
            f"FAILED more than a fifth, or lateness a factor of 2, apart: {', '.join(apart)}", file=sys.stderr
        )
    return 1 if apart else 0


def _burst(system: System) -> dict[str, Any]:
    """The median of three runs of 50,000 at once."""
    from benchmarks.workloads import Sizes, burst

    runs = [burst(system, Sizes(), 50_000) for _ in range(3)]
    left_out = [run for run in runs if run.get("left_out")]
    return left_out[0] if left_out else sorted(runs, key=lambda run: float(run["rate"]))[1]


@contextmanager
def _most_connections(system: System) -> Iterator[list[int]]:
    """Yield the most connections that the workers have to MariaDB at any time in the block."""
    assert system.servers is not None
    port, pids, most, over = system.servers.database_port(), system.worker_pids(), [0], Event()

    def look() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], processes.connections(pids, port))

    watcher = Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


if __name__ == "__main__":
    sys.exit(main())
