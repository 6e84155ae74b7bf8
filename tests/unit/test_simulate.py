"""benchmarks.simulate: beside what was measured, and with a server that stays away."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import report
from benchmarks.simulate import Costs, Plan, simulate

MEASURED = json.loads((Path(report.__file__).parent / "results/latest.json").read_text())["runs"]["toc"]
GROUPS = {"worker": "workers", "database": "mariadb", "redis": "redis"}


def cost(group: str, workload: str, size: str) -> float:
    """Microseconds of processor time of a task."""
    of_each = (run[workload][size] for run in MEASURED)
    return median(
        float(1e6 * one["cpu_seconds"] * one["cpu"][group] / sum(one["cpu"].values()) / one["tasks"])
        for one in of_each
    )


@pytest.mark.parametrize("rate", ["1000", "3000"])
def test_lateness_is_within_a_factor_of_what_was_measured(rate: str) -> None:
    def late(name: str, rate: str) -> float:
        return median(float(run["lateness"][rate][name]) for run in MEASURED)

    costs = {f"{name}_round": cost(group, "lateness", "100") for name, group in GROUPS.items()}
    costs |= {f"{name}_task": cost(group, "burst", "100000") for name, group in GROUPS.items()}
    here = Plan(
        hosts=1, processes=2, servers=1, databases=8, tables=64, redis=1, topics=1, slots=16,
        fires=float(rate), seconds=20, lose_host_every=0, shared=2,
    )  # fmt: skip
    found = simulate(here, Costs(**costs, p50_ms=late("p50", "100"), p99_ms=late("p99", "100")))[
        "lateness_ms"
    ]
    for name in ("p50", "p99"):
        assert 0.5 < found[name] / late(name, rate) < 2, (name, found[name], late(name, rate))


def test_tasks_of_a_server_that_is_still_away_at_the_end_wait_until_it_is_back() -> None:
    plan = Plan(hosts=2, slots=32, topics=2, tables=32, lose_host_every=0, server_away=30, seconds=30)
    late = simulate(plan, Costs())["lateness_ms"]
    assert late["p99"] > 25_000
    assert late["p50"] < 10


def test_a_burst_takes_memory_of_redis_and_shortens_the_horizon_once_that_is_full() -> None:
    quiet = Plan(hosts=2, slots=32, topics=2, tables=32, redis=1, fires=1000, lose_host_every=0, seconds=1)
    found, burst = simulate(quiet, Costs()), simulate(replace(quiet, burst=1e6), Costs())
    assert found["horizon_seconds"] > burst["horizon_seconds"]
    wide, burst = (simulate(replace(quiet, redis_gb=100, burst=n, horizon=3000), Costs()) for n in (0, 1e6))
    more = 1e9 * (burst["redis_gb_per_node"] - wide["redis_gb_per_node"])
    assert more == pytest.approx(1e6 * Costs.redis_bytes, rel=0.01)


def test_disk_is_what_the_page_reckons() -> None:
    """The numbers of docs/scale.md: its table's, its example's on 8 servers, and that for 7 days."""
    small = Plan(hosts=1, slots=32, topics=1, tables=32, lose_host_every=0, seconds=1)

    def terabytes(**plan: float) -> float:
        return round(float(simulate(replace(small, **plan), Costs())["disk_gb_per_server"]) / 1000, 2)  # type: ignore[arg-type]

    assert terabytes(fires=2000, pending=1e7, servers=1) == 0.2
    assert terabytes() == 0.49
    assert terabytes(servers=8) == 0.24
    assert terabytes(servers=8, retention_days=7) == terabytes(servers=8, characters=500) == 0.56
    assert terabytes(dead=1e8) == terabytes(pending=2e8) == 0.5
    assert terabytes(cancelled=20_000) == terabytes(fires=40_000) == 0.97
