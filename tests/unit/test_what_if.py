"""What would pile up is what a second-by-second account of the same tasks says."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from toc.model.due import FAR, HOURS, MINUTES, NEAR, Step, pile_up, spread

NOW = 1_800_000_000_000 + 17_000
"""Within a minute, of which 43 s are left, and an hour."""
SECOND = 1000

counts = st.lists(st.integers(0, 5000), min_size=1, max_size=8)
rates = st.none() | st.sampled_from([0.01, 0.5, 7.0, 100.0])


@settings(deadline=None, max_examples=300)
@given(
    due=counts, others=st.integers(0, 3000), overdue=st.integers(0, 9000), pause=st.integers(1, 600),
    rate=rates, capacity=rates,
)  # fmt: skip
def test_it_is_what_each_second_brings_and_takes(
    due: list[int], others: int, overdue: int, pause: int, rate: float | None, capacity: float | None
) -> None:
    edges = [NOW, *(NOW + 43 * SECOND + number * NEAR.length for number in range(len(due)))]
    steps = [
        Step(begin, end, count, others) for begin, end, count in zip(edges, edges[1:], due, strict=False)
    ]
    resumed = NOW + pause * SECOND
    pile = pile_up(steps, overdue, resumed, rate, capacity)

    waiting, at_end, drained = float(overdue), None, None
    for begin, end, count, other in steps:
        length = (end - begin) // SECOND
        for second in range(begin, end, SECOND):
            if second == resumed:
                at_end = waiting
            takes = 0.0
            if second >= resumed:
                takes = rate if rate is not None else max((capacity or 0.0) - other / length, 0.0)
            waiting += count / length - takes
            if second >= resumed and waiting <= 1e-6 and drained is None:
                drained = second
                break
        if drained is not None:
            break
    if at_end is None:  # the pause is longer than the steps
        at_end = overdue + sum(due[: len(steps)])
    assert abs(pile.waiting - at_end) <= 1
    assert (pile.drained is None) == (drained is None)
    if drained is not None and pile.drained is not None:
        assert drained - SECOND <= pile.drained <= drained + SECOND
    else:
        assert abs(pile.steps[-1].waiting - waiting) <= 1


@settings(deadline=None, max_examples=100)
@given(
    minutes=st.lists(st.integers(0, 50), min_size=MINUTES, max_size=MINUTES),
    more=st.lists(st.integers(0, 50), min_size=HOURS, max_size=HOURS),
    offset=st.integers(0, FAR.length - 1),
)
def test_minutes_and_hours_become_steps_without_gap_or_overlap_that_hold_all_tasks(
    minutes: list[int], more: list[int], offset: int
) -> None:
    now = NOW // FAR.length * FAR.length + offset
    hours = list(more)
    first = now // NEAR.length
    for number, count in enumerate(minutes, first):  # the same tasks, counted by hours
        hours[number * NEAR.length // FAR.length - now // FAR.length] += count
    steps = spread(now, minutes, hours)
    assert steps[0][0] == now
    assert all(end == begin for (_, end, _), (begin, _, _) in pairwise(steps))
    end = (first + MINUTES) * NEAR.length
    within = sum(more[: end // FAR.length - now // FAR.length])
    assert sum(count for _, _, count in steps) == sum(hours) - within, "but what no minute told of"


def test_nothing_is_drained_by_nobody() -> None:
    pile = pile_up([Step(NOW, NOW + NEAR.length, 10)], 5, NOW + SECOND, None, None)
    assert pile.drained is None
    assert pile.steps[0].waiting == 15
