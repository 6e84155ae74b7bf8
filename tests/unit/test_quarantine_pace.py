"""At which pace suspects are told to come for their runs alone."""

from __future__ import annotations

from toc.worker.quarantine.suspects import FIRST_GUESS_SECONDS, smoothed


def test_a_few_culprits_do_not_set_the_pace_and_many_do() -> None:
    pace, slowest = FIRST_GUESS_SECONDS, 0.0
    for run in range(400):
        pace = smoothed(pace, 8.0 if run % 40 == 0 else 0.012)
        slowest = max(slowest, pace)
    assert slowest < 0.15
    assert pace < 0.03
    for _ in range(40):
        pace = smoothed(pace, 2.0)
    assert pace > 1.5
