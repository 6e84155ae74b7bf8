"""What would pile up if tasks were paused for a while, and how long it would take to start it all. Pure.

Time is cut into steps, within which tasks come due evenly: the minutes of the next hour, then hours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from toc.model.due import FAR, NEAR


class Step(NamedTuple):
    """So many tasks come due between two instants (ms); ``others`` are those of topics that are not
    paused."""

    begin: int
    end: int
    due: float
    others: float = 0.0


class Waiting(NamedTuple):
    """How many tasks come due in a step, and how many wait at its end."""

    begin: int
    due: int
    waiting: int


class Pile(NamedTuple):
    """What waits at the end of the pause; step by step until all has started; and when that is (ms), None
    if it is not within the steps."""

    waiting: int
    steps: list[Waiting]
    drained: int | None


def spread(now_ms: int, minutes: Sequence[int], hours: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the counts of the next minutes and hours, which begin with the present ones, as begin, end and
    count of steps that do not overlap."""
    first = now_ms // NEAR.length
    steps = [
        (max(now_ms, number * NEAR.length), (number + 1) * NEAR.length, count)
        for number, count in enumerate(minutes, first)
    ]
    end = (first + len(minutes)) * NEAR.length
    for number, count in enumerate(hours, now_ms // FAR.length):
        begin, over = number * FAR.length, (number + 1) * FAR.length
        if over > end:  # of the hour in which the minutes end, what is left
            told = sum(one for since, _, one in steps[: len(minutes)] if since >= begin)
            steps.append((max(begin, end), over, max(count - told, 0)))
    return steps


def pile_up(
    steps: Sequence[Step], overdue: int, resumed: int, rate: float | None, capacity: float | None
) -> Pile:
    """Return what piles up until ``resumed`` (ms), and how it is started from then on.

    ``rate`` tasks a second are started, or else what is left of the ``capacity`` (tasks a second) by the
    others; none if neither is known.
    """
    waiting, at_end, drained = float(overdue), 0.0, None
    shown = []
    for begin, end, due, others in steps:
        if drained is not None:
            break
        split = min(max(begin, resumed), end)
        comes = due / (end - begin)
        left = 0.0 if capacity is None else max(capacity / 1000 - others / (end - begin), 0.0)
        starts = left if rate is None else rate / 1000
        waiting += comes * (split - begin)
        if split <= resumed:
            at_end = waiting
        if split < end:
            after = waiting + (comes - starts) * (end - split)
            if after <= 0:
                drained = round(split + (waiting / (starts - comes) if waiting else 0.0))
            waiting = max(after, 0.0)
        shown.append(Waiting(begin, round(due), round(waiting)))
    return Pile(round(at_end), shown, drained)
