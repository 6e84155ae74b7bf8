"""What comes due when: pending tasks by topic, for each minute of the next hour and hour of the next week.

Who sweeps a table counts its rows in two parts, NEAR and FAR. A part has spans of equal length, which begin
at whole minutes or hours of UTC, so that the counts of many tables add up whenever each was made. All
functions are pure.

``spread`` and ``pile_up`` tell what would pile up if tasks were paused for a while, and how long it would
take to start it all: time is cut into steps, within which tasks come due evenly, the minutes of the next
hour, then hours.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

from toc.model.documents import parse_object
from toc.model.errors import InvalidDocument

MINUTES, HOURS = 60, 168
"""How many spans of each part are shown."""
DAY = 24
OTHERS = -1
"""Stands for the biz_types that are not told apart."""
MOST_TOPICS = 100
"""How many topics of a table are told apart: those with the most tasks."""


class Part(NamedTuple):
    """A part of what is counted: ``spans`` of ``length`` ms, and in one more number the tasks outside.

    Outside are in NEAR those that were due when the count began, in FAR those due after the last span.
    """

    name: str
    length: int
    spans: int


NEAR = Part("minutes", 60_000, 90)
"""More minutes than are shown, as the count may be half an hour old."""
FAR = Part("hours", 3_600_000, HOURS + 1)

Spans = dict[int, list[int]]
"""By biz_type: the tasks outside, then those of each span."""


class Counted(NamedTuple):
    """A part of one table. ``first`` is the number of the first span: its beginning by the length of one."""

    first: int
    spans: Spans


def listed(part: Part, first: int, groups: Mapping[tuple[int, int], int]) -> Counted:
    """Arrange counts, given by biz_type and number of the span. All but the MOST_TOPICS largest biz_types
    become OTHERS."""
    spans: Spans = {}
    for (biz_type, span), count in groups.items():
        place = span - first + 1
        counts = spans.setdefault(biz_type, [0] * (part.spans + 1))
        counts[place if 0 < place <= part.spans else 0] += count
    ranked = sorted(spans.keys() - {OTHERS}, key=lambda biz_type: (-sum(spans[biz_type]), biz_type))
    for biz_type in ranked[MOST_TOPICS:]:
        rest, own = spans.get(OTHERS, []), spans.pop(biz_type)
        spans[OTHERS] = [a + b for a, b in zip(rest, own, strict=True)] if rest else own
    return Counted(first, spans)


def sums(part: Part, counts: list[int]) -> dict[str, int]:
    """Return the counts of one biz_type for whole times from the beginning of the first span: in NEAR what is
    overdue and due within an hour; in FAR within a day, within a week, later."""
    if part is NEAR:
        return {"overdue": counts[0], "hour": sum(counts[1 : MINUTES + 1])}
    later = counts[0] + sum(counts[HOURS + 1 :])
    return {"day": sum(counts[1 : DAY + 1]), "week": sum(counts[1 : HOURS + 1]), "later": later}


def write(counted: Counted) -> str:
    """Return it as JSON: the ``first`` span, and in ``topics`` the counts by biz_type, without zeros at the
    end."""
    topics: dict[str, list[int]] = {}
    for biz_type, counts in counted.spans.items():
        end = len(counts)
        while end > 1 and not counts[end - 1]:
            end -= 1
        topics[str(biz_type)] = counts[:end]
    return json.dumps({"first": counted.first, "topics": topics}, separators=(",", ":"))


def read(text: str) -> Counted:
    """Return what ``write`` wrote. Raises InvalidDocument."""
    found = parse_object(text)
    try:
        spans = {int(biz_type): [*counts] for biz_type, counts in found["topics"].items()}
        if not all(type(count) is int and count >= 0 for counts in spans.values() for count in counts):
            raise ValueError("a count is a whole number")  # noqa: TRY301
        return Counted(int(found["first"]), spans)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InvalidDocument(f"it is no count of due tasks ({type(exc).__name__})") from None


def total(part: Part, counts: Iterable[Counted], now_ms: int, spans: int) -> Spans:
    """Return the sums over tables for so many spans from the present one.

    Those that are over are left out. What is due after the last one counts in FAR as outside.
    """
    first = now_ms // part.length
    added: Spans = {}
    for counted in counts:
        shift = counted.first - first
        start = 1 + max(shift, 0)
        for biz_type, own in counted.spans.items():
            into = added.setdefault(biz_type, [0] * (spans + 1))
            ahead = own[1 + max(-shift, 0) :]
            shown = ahead[: max(spans + 1 - start, 0)]
            into[start : start + len(shown)] = map(add, into[start:], shown)
            into[0] += sum(own[:1]) + (sum(ahead[len(shown) :]) if part is FAR else 0)
    return added


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
