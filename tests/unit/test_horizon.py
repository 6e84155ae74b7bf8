"""The horizon is the longest step up to which the index fits its budget; what would pile up."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from harness.rows import known
from hypothesis import given, settings
from hypothesis import strategies as st

from toc.console.pages.numbers import drain_of
from toc.model.due import FAR, HOURS, MINUTES, NEAR, Counted, Step, pile_up, spread
from toc.model.horizon import (
    AIM,
    ENTRY_BYTES,
    FEW,
    LEAST,
    NO_BOUND,
    STEPS,
    Budget,
    Choice,
    Node,
    Span,
    choose,
    pending,
    reach,
    room,
    spans,
    steps,
)

# The horizon is the longest step up to which the index fits its budget, by what is in use and is known.

DAY = 86_400
NOW = 1_800_000_000_000
MINUTE = NEAR.length


def even(per_second: float, seconds: int = 3600, own: int = DAY) -> list[Span]:
    """Spans of a minute in which as many tasks a second come due."""
    return [
        Span(NOW + n * MINUTE, NOW + (n + 1) * MINUTE, own * 1000, round(60 * per_second))
        for n in range(seconds // 60)
    ]


def node(used: float, budget: float, ahead: int, name: str = "r1") -> Node:
    return Node(name, round(used * ENTRY_BYTES), round(budget * ENTRY_BYTES), ahead)


def chosen(
    *nodes: Node, due: Sequence[Span] = (), present: int = DAY, standing: float = 0.0
) -> Choice | None:
    """The choice if ``standing`` entries a second stand in the index."""
    return choose(
        nodes, due, NOW, present=present, most=DAY,
        standing=lambda seconds: round(standing * seconds),
    )  # fmt: skip


def test_each_step_is_more_than_a_fifth_longer_than_the_one_before() -> None:
    assert all(1.2 * shorter < longer for shorter, longer in pairwise(STEPS))
    assert STEPS[0] == LEAST
    assert STEPS[-1] >= 10 * 366 * DAY
    assert steps(3600)[-2:] == [3123, 3600]
    assert steps(10) == [10]


@pytest.mark.parametrize(("text", "of_gib", "of_none"), [
    ("60%", 644_245_094, NO_BOUND * 60 // 100),
    (" 100 %", 1 << 30, NO_BOUND),
    ("512MiB", 512 << 20, 512 << 20),
    ("4GiB", 1 << 30, 4 << 30),
    ("1TiB", 1 << 30, 1 << 40),
    ("7KiB", 7 << 10, 7 << 10),
])  # fmt: skip
def test_a_budget_is_a_share_of_what_there_is_or_bytes(text: str, of_gib: int, of_none: int) -> None:
    budget = known(Budget.of(text))
    assert (budget.on(1 << 30), budget.on(0)) == (of_gib, of_none)


@pytest.mark.parametrize(
    "text", ["", "60", "0%", "101%", "0GiB", "4GB", "-5%", "1.5GiB", "60%%", "GiB", "٣%"]
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    assert Budget.of(text) is None


@pytest.mark.parametrize("rate", [0.1, 1, 10, 1000, 100_000])
def test_a_horizon_is_the_longest_step_that_fits(rate: float) -> None:
    fitting = [step for step in steps(DAY) if rate * step <= 100_000]
    assert reach(lambda seconds: rate * seconds, 100_000, DAY) == max(fitting, default=LEAST)


def test_room_is_what_is_free_beside_all_else_and_the_fullest_node_decides() -> None:
    assert room([node(1000, 5000, 400)]) == pytest.approx(4400)
    assert room([node(1000, 5000, 400)], AIM) == pytest.approx(3900)
    # Half of all entries are on each: the second one has room for 500 more, so both may have that many.
    assert room([node(1000, 5000, 400), node(4500, 5000, 400, "r2")]) == pytest.approx(1800)
    assert room([node(0, 100, 0)] * 4) == pytest.approx(400), "an empty index is taken to fill evenly"
    assert room([node(9000, 5000, 400)]) < 0


def test_without_pressure_and_without_counts_nothing_changes() -> None:
    assert chosen(node(500, 1000, 400)) is None
    assert chosen(node(1000, 1000, 900)) is None


def test_what_exceeds_the_budget_is_removed_down_to_a_tenth_below_it() -> None:
    # 10 a second stand; 11,000 entries use 11,100 of 10,000: 8,900 may stay.
    choice = chosen(node(11_100, 10_000, 11_000), standing=10, present=DAY)
    assert choice == Choice(reach(lambda s: 10 * s, 8900, DAY), "r1 uses 111 % of its budget", remove=True)
    assert choice is not None
    assert 10 * choice.seconds <= 8900


def test_if_what_is_too_much_lies_beyond_the_horizon_already_it_is_only_removed() -> None:
    choice = known(chosen(node(11_100, 10_000, 11_000), standing=10, present=60))
    assert (choice.seconds, choice.remove) == (60, True)


def test_if_nothing_fits_the_horizon_is_the_shortest() -> None:
    choice = known(chosen(node(20_000, 10_000, 10), standing=10, present=DAY))
    assert (choice.seconds, choice.remove) == (LEAST, True)
    tiny = Budget(60).on(1)
    assert choose([Node("r1", 2, tiny, 0)], [], NOW, present=LEAST, most=DAY, standing=_not_asked) == Choice(
        LEAST, "r1 uses 200 % of its budget", remove=True
    )


def _not_asked(seconds: int) -> float:
    raise AssertionError(f"nothing could be shorter: {seconds} s")


@pytest.mark.parametrize("length", [MINUTE, FAR.length])
def test_a_burst_that_the_horizon_is_about_to_reach_makes_it_shorter_before_it_is_read(length: int) -> None:
    at = NOW + 3_600_000
    burst = [Span(at, at + length, DAY * 1000, 150_000)]
    before = chosen(node(100, 10_000, 50), due=burst, present=3500)
    assert before is None, "it is not reached yet"
    choice = known(chosen(node(100, 10_000, 50), due=burst, present=3600))
    assert not choice.remove
    assert 0.75 * 3600 < choice.seconds < 3600


def test_it_grows_when_everything_up_to_there_fits_with_a_tenth_to_spare() -> None:
    due, fits = even(10), 9000 - 100
    choice = known(chosen(node(700, 10_000, 600), due=due, present=60))
    assert choice.seconds == max(s for s in STEPS if 10 * (s + 5) <= fits)


def test_it_neither_grows_nor_shrinks_as_a_steady_load_goes_from_minute_to_minute() -> None:
    """Whatever the place within the minute at which it is asked."""
    for rate in (3, 10, 40, 100):
        due = even(rate)
        first = chosen(node(100, 10_000, 50), due=due, present=LEAST)
        present = LEAST if first is None else first.seconds
        for second in range(180):
            now = NOW + second * 1000
            ahead = rate * present
            found = choose(
                [node(ahead + 50, 10_000, ahead)], due, now, present=present, most=DAY,
                standing=(1).__mul__,
            )  # fmt: skip
            assert found is None or found.seconds >= present, (rate, second, found)
            if found is not None:
                present = found.seconds


def test_it_does_not_grow_by_counts_that_know_little_of_what_the_index_holds() -> None:
    full = node(5000, 10_000, 2 * FEW)
    assert chosen(full, due=even(0.1), present=60) is None
    assert chosen(full, due=even(1), present=60) is not None


def test_a_topic_counts_up_to_its_own_horizon() -> None:
    short, long = even(10, own=60), even(1)
    assert pending(short, NOW, 3000) == pending(short, NOW, 60) == 650
    assert pending([*short, *long], NOW, 600) == pending(short, NOW, 60) + pending(long, NOW, 600)


def test_what_is_over_counts_no_more_and_what_is_left_of_a_span_in_proportion() -> None:
    assert pending(even(10), NOW + 30_000, 15) == pytest.approx(200)
    assert pending(even(10), NOW + 30_000, 75) == pytest.approx(800)
    assert pending(even(10, seconds=60), NOW + 60_000, 75) == 0


def test_spans_are_what_all_tables_count_up_to_beyond_the_last_hour() -> None:
    minute, hour = NOW // NEAR.length, NOW // FAR.length
    near = Counted(minute, {1: [9, *([6] * 90)], 2: [0, 3]})
    far = Counted(hour, {1: [70, *([360] * 169)], -1: [0, 0, 0, 0, 5]})
    found = spans({"minutes": [near, near], "hours": [far]}, {1: 60, 2: 600}, NOW)
    of_one = [span for span in found if span.own == 60_000]
    assert [span.due for span in of_one[:60]] == [12] * 60, "the overdue ones are not ahead"
    assert of_one[-1].due == 70 + 360, "what is later, and what the count of hours has in reserve"
    assert of_one[-1].begin == of_one[-2].end
    others = [span for span in found if span.own == 600_000]
    assert sorted(span.due for span in others) == [5, 6]
    assert all(a.end <= b.begin for a, b in pairwise(of_one))


# What would pile up is what a second-by-second account of the same tasks says.

ASKED_AT = 1_800_000_000_000 + 17_000
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
    edges = [ASKED_AT, *(ASKED_AT + 43 * SECOND + number * NEAR.length for number in range(len(due)))]
    steps = [
        Step(begin, end, count, others) for begin, end, count in zip(edges, edges[1:], due, strict=False)
    ]
    resumed = ASKED_AT + pause * SECOND
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
    now = ASKED_AT // FAR.length * FAR.length + offset
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


def test_the_page_says_whose_rate_it_took() -> None:
    pile = {"drained": "2026-12-01T09:00:00Z", "drain_seconds": 7.5, "rate": None, "best_minute": None}
    said = drain_of(pile)
    assert "at the rate of all workers, less other topics. Its concurrency or run time may allow" in said
    assert said.endswith("Tasks that are not submitted yet are not counted.")
    assert "may allow far less: in the last hour it has started at most 60 a minute. Tasks that" in drain_of(
        pile | {"best_minute": 60}
    )
    assert "all workers" not in drain_of(pile | {"rate": 2.7})
    assert drain_of(pile | {"drained": None}).endswith("is not known.")
