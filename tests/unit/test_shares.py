"""How the threads of a process are shared."""

from __future__ import annotations

import pytest

from toc.worker.stages.handler_threads import most_threads


@pytest.mark.parametrize(
    ("threads", "held", "free", "most"),
    [
        # a topic alone: three quarters, and of fewer than four all but one
        (16, 0, 16, 12),
        (16, 11, 5, 12),
        (16, 12, 4, 12),
        (5, 0, 5, 4),
        (4, 0, 4, 3),
        (3, 0, 3, 2),
        (2, 0, 2, 1),
        (1, 0, 1, 1),
        # beside one that holds 12 of 16, and a third beside both
        (16, 0, 4, 3),
        (16, 3, 1, 3),
        (16, 0, 1, 1),
        # who holds more than its share takes none, who holds less does
        (16, 12, 1, 10),
        (16, 2, 2, 3),
        # none free: who holds none may start one
        (16, 0, 0, 1),
        (16, 0, -3, 1),
        (16, 4, 0, 3),
        (16, 1, 0, 1),
    ],
)
def test_a_topic_may_hold_three_quarters_of_what_no_other_holds(
    threads: int, held: int, free: int, most: int
) -> None:
    assert most_threads(threads, held, free) == most


@pytest.mark.parametrize("threads", range(1, 65))
def test_a_topic_alone_gets_all_but_a_quarter_at_once_or_one_by_one(threads: int) -> None:
    held = fill(threads, [0])[0]
    assert held == max(1, threads - max(1, threads // 4))
    assert held == most_threads(threads, 0, threads)


@pytest.mark.parametrize("slow", range(1, 6))
def test_topics_that_fill_the_threads_in_turn_leave_one_in_one_and_three_times_their_number(
    slow: int,
) -> None:
    threads = 64
    left = threads - sum(fill(threads, [0] * slow))
    assert left == threads // (1 + 3 * slow)


@pytest.mark.parametrize("threads", range(1, 33))
@pytest.mark.parametrize("topics", range(2, 8))
def test_whoever_holds_none_may_start_and_few_run_beyond_the_threads(threads: int, topics: int) -> None:
    held = [0] * topics
    for number in range(topics):  # one after the other: the worst for who comes last
        assert most_threads(threads, 0, threads - sum(held)) >= 1
        held[number] = 1
        while held[number] < most_threads(threads, held[number], threads - sum(held)):
            held[number] += 1
    assert sum(held) <= threads + topics - 1


def fill(threads: int, held: list[int]) -> list[int]:
    """What topics hold that each take a thread in turn until none may take another."""
    held = [*held]
    more = True
    while more:
        more = False
        for number, mine in enumerate(held):
            if mine < most_threads(threads, mine, threads - sum(held)):
                held[number] += 1
                more = True
    return held
