"""When Debian's cron runs a job: no arithmetic with offsets, only what the clock on the wall shows.

It goes through all minutes of a range, so it shares nothing with ``toc.model.schedule``.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo


def parse(text: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for term in text.split(","):
        body, _, step = term.partition("/")
        first, _, last = body.partition("-")
        numbers = (
            range(low, high + 1)
            if body == "*"
            else range(int(first), int(last or (high if step else first)) + 1)
        )
        found |= set(numbers[:: int(step or 1)])
    return found


def oracle(
    expression: str,
    zone: str,
    start: datetime,
    end: datetime,
    *,
    skip: bool = False,
    step: timedelta = timedelta(minutes=1),
) -> list[datetime]:
    """The instants in (start, end] at which Debian's cron runs a job, as its manual page says.

    ``step``: of which the job's minutes, and start, are multiples.
    """
    minute, hour, day, month, weekday = fields = expression.split()
    minutes, hours, months = parse(minute, 0, 59), parse(hour, 0, 23), parse(month, 1, 12)
    days, weekdays = parse(day, 1, 31), {number % 7 for number in parse(weekday, 0, 7)}

    def matches(local: datetime) -> bool:
        if local.minute not in minutes or local.hour not in hours or local.month not in months:
            return False
        by_day, by_weekday = local.day in days, local.isoweekday() % 7 in weekdays
        either = not day.startswith("*") and not weekday.startswith("*")
        return (by_day or by_weekday) if either else (by_day and by_weekday)

    there = ZoneInfo(zone)
    walls = [
        (at, at.astimezone(there).replace(tzinfo=None, fold=0))
        for at in between(start - timedelta(days=2), end + timedelta(days=2), step)
    ]
    if any(each.startswith("*") for each in fields[:2]):
        return [at for at, wall in walls if matches(wall) and start < at <= end]
    shown: dict[datetime, datetime] = {}
    for at, wall in walls:
        shown.setdefault(wall, at)
    found = {at for wall, at in shown.items() if matches(wall)}
    if not skip:
        for (_, before), (at, wall) in pairwise(walls):
            left_out = between(before + step, wall - step, step)
            if any(map(matches, left_out)):
                found.add(at)
    return sorted(at for at in found if start < at <= end)


def between(first: datetime, last: datetime, step: timedelta) -> Iterator[datetime]:
    while first <= last:
        yield first
        first += step
