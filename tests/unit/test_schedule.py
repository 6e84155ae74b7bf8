"""The schedule of random faults: the seed decides all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fault.kit.schedule import KINDS, QUIET_AFTER, QUIET_BEFORE, schedule


def test_a_seed_repeats_its_schedule_and_another_one_has_another() -> None:
    assert schedule(7, 300) == schedule(7, 300)
    assert schedule(7, 300) != schedule(8, 300)


@pytest.mark.parametrize("seed", range(20))
def test_five_minutes_hold_every_kind_and_break_one_thing_of_a_part_at_a_time(seed: int) -> None:
    steps = schedule(seed, 300)
    assert {step.kind for step in steps} == set(KINDS)
    assert steps == sorted(steps, key=lambda step: step.at)
    assert steps[0].at >= QUIET_BEFORE
    assert all(step.at + step.lasts <= 300 - QUIET_AFTER + 0.1 for step in steps)
    assert any(second.at < first.at + first.lasts for first, second in pairwise(steps)), "some overlap"
    for target in {step.target for step in steps}:
        of_it = [step for step in steps if step.target == target]
        assert all(second.at >= first.at + first.lasts for first, second in pairwise(of_it))
