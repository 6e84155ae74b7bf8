"""The simulator loses no task, and what goes wrong in it shows in its lateness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulate import Costs, Plan, Simulation, load

SMALL = Plan(
    hosts=4, processes=2, cores=2, databases=8, servers=2, tables=16, redis=1, topics=2, slots=16, fires=500,
    seconds=20, lose_host_every=0,
)  # fmt: skip


def ran(plan: Plan) -> Simulation:
    simulation = Simulation(plan, Costs())
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    "plan",
    [SMALL, replace(SMALL, lose_host_every=2), replace(SMALL, server_away=5)],
    ids=["whole", "a host is lost", "a server is away"],
)
def test_each_task_that_came_due_is_counted_once(plan: Plan) -> None:
    steps = int(plan.seconds / 0.01)
    simulation = ran(plan)
    drawn = sum(float(simulation.patterns[step % len(simulation.patterns)].sum()) for step in range(steps))
    assert simulation.counted.sum() == pytest.approx(drawn, rel=0.001)


def test_a_lost_host_makes_its_tasks_late_by_the_session_timeout_and_no_others() -> None:
    whole, lost = ran(SMALL), ran(replace(SMALL, lose_host_every=10))
    assert lost.percentile(0.5) == pytest.approx(whole.percentile(0.5), rel=0.1)
    assert whole.percentile(0.9999) < 100
    assert 6000 < lost.percentile(0.9999) < 7500


def test_more_than_all_workers_can_run_is_an_ever_longer_queue() -> None:
    costs = replace(Costs(), worker_task=10_000, worker_round=10_000)
    plan = replace(SMALL, fires=2000)
    assert max(load(plan, costs).values()) > 1
    simulation = Simulation(plan, costs)
    simulation.run()
    assert simulation.percentile(0.5) > 1000
