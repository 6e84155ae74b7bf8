"""The faults of a chaos run, as its seed chooses them."""

from __future__ import annotations

import pytest
from fault.kit.schedule import KINDS, QUIET_AFTER, schedule


@pytest.mark.parametrize("seed", range(50))
def test_no_fault_is_cut_short_by_the_end_of_the_run(seed: int) -> None:
    """The invariants explain a second run by how long a fault lasted: one that lasts longer breaks them."""
    steps = schedule(seed, 120.0)
    assert steps == schedule(seed, 120.0), "the seed repeats them"
    for step in steps:
        assert step.lasts >= KINDS[step.kind].shortest - 0.05, step  # it is rounded to tenths
        assert step.at + step.lasts <= 120.0 - QUIET_AFTER + 0.1, step
