"""When schedules fire: against an oracle that walks through all minutes, and case by case."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from harness.cron_oracle import oracle
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from toc.model.clock import from_ms, to_ms
from toc.model.errors import InvalidSchedule
from toc.model.schedule import END, Cron, Interval, Latest

ZONES = (  # none with a gap at midnight, nor half an hour: cronsim takes minutes of * in them for others
    "Europe/Dublin",  # winter is the exception
    "America/New_York",
    "Europe/Berlin",
    "Asia/Kolkata",
    "Pacific/Chatham",
    "Antarctica/Troll",  # two hours
    "America/St_Johns",
    "UTC",
)


@cache
def changes(zone: str) -> list[datetime]:
    """The days (UTC) from 2005 to 2035 within which the zone's offset changes; and one other."""
    days = [datetime(2005, 1, 1, tzinfo=UTC) + timedelta(days=number) for number in range(30 * 365)]
    offsets = [day.astimezone(ZoneInfo(zone)).utcoffset() for day in days]
    return [day for day, (one, other) in zip(days, pairwise(offsets), strict=False) if one != other] or days[
        :1
    ]


def field(low: int, high: int, *, often: bool) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    single = number.map(str)
    some = st.lists(number, min_size=2, max_size=4).map(lambda numbers: ",".join(map(str, numbers)))
    span = st.tuples(number, number).map(lambda two: f"{min(two)}-{max(two)}")
    steps = st.integers(2, max(high // 2, 2)).map(lambda step: f"*/{step}")
    stars = st.just("*")
    return (
        st.one_of(stars, single, some, span, steps) if often else st.one_of(stars, stars, stars, single, some)
    )


EXPRESSIONS = st.tuples(
    field(0, 59, often=True),
    # Hours around which clocks are changed, more often than not.
    st.one_of(field(0, 23, often=True), field(0, 3, often=True)),
    field(1, 31, often=False),
    field(1, 12, often=False),
    field(0, 7, often=False),
).map(" ".join)


@settings(max_examples=50)
@given(EXPRESSIONS, st.sampled_from(ZONES), st.data(), st.booleans())
def test_it_fires_when_debians_cron_does(expression: str, zone: str, data: st.DataObject, skip: bool) -> None:
    try:
        cron = Cron(expression, zone, skip)
    except InvalidSchedule:
        assume(False)
    day = data.draw(st.sampled_from(changes(zone)))
    start = day - timedelta(minutes=data.draw(st.integers(0, 1440)))
    end = start + timedelta(days=3)
    expected = oracle(expression, zone, start, end, skip=skip)
    found = []
    for at in cron.after(to_ms(start)):
        if from_ms(at) > end:
            break
        found.append(from_ms(at))
    assert found == expected
    # Wherever one begins, the rest is the same: each step of a schedule computes anew.
    for fired in found[:5] + found[-2:]:
        assert from_ms(next(cron.after(to_ms(fired) - 1))) == fired
    assert cron.latest(to_ms(start), to_ms(end), 7) == Latest(
        [to_ms(at) for at in expected[-7:]], to_ms(expected[0]) if expected else None, len(expected)
    )


@pytest.mark.parametrize(
    ("expression", "zone", "after", "fires"),
    [
        # Forward: a fixed time in the gap runs right after it; a job that runs all day just goes on.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["29T03:00+02:00", "30T02:30+02:00"]),
        ("0,30 2,3 * * *", "Europe/Berlin", "2026-03-28T12:00", ["29T03:00+02:00", "29T03:30+02:00"]),
        ("*/30 * * * *", "Europe/Berlin", "2026-03-29T01:15", ["29T01:30+01:00", "29T03:00+02:00"]),
        # Back: a fixed time that comes twice runs once, the first time.
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["25T02:30+02:00", "26T02:30+01:00"]),
        ("*/30 2 * * *", "Europe/Berlin", "2026-10-25T02:15", ["25T02:30+02:00", "25T02:00+01:00"]),
        # Half an hour.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["04T02:30+11:00", "05T02:15+11:00"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00", ["05T01:45+11:00", "06T01:45+10:30"]),
        # At midnight: the day begins at one.
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00", ["06T01:00-03:00", "07T00:00-03:00"]),
        ("*/30 0,1 * * *", "America/Santiago", "2026-09-05T12:00", ["06T01:00-03:00", "06T01:30-03:00"]),
        # A day that there was not.
        ("0 10 * * *", "Pacific/Apia", "2011-12-29T01:00", ["29T10:00-10:00", "31T00:00+14:00"]),
        # Winter is what is put on there.
        ("30 1 * * *", "Europe/Dublin", "2026-03-28T12:00", ["29T02:00+01:00", "30T01:30+01:00"]),
        ("30 1 * * *", "Europe/Dublin", "2026-10-24T12:00", ["25T01:30+01:00", "26T01:30+00:00"]),
        # Ramadan: back in February, forward in March.
        ("30 2 * * *", "Africa/Casablanca", "2026-02-14T12:00", ["15T02:30+01:00", "16T02:30+00:00"]),
        ("30 2 * * *", "Africa/Casablanca", "2026-03-21T12:00", ["22T03:00+01:00", "23T02:30+01:00"]),
    ],
)  # fmt: skip
def test_clocks_are_changed(expression: str, zone: str, after: str, fires: list[str]) -> None:
    there = ZoneInfo(zone)
    start = to_ms(datetime.fromisoformat(after).replace(tzinfo=there))
    found = [from_ms(at).astimezone(there) for at in islice(Cron(expression, zone).after(start), len(fires))]
    assert [at.isoformat(timespec="minutes")[8:] for at in found] == fires


def test_skip_leaves_out_only_what_is_in_the_gap() -> None:
    there = ZoneInfo("Europe/Berlin")
    start = to_ms(datetime(2026, 3, 28, tzinfo=there))
    cron = Cron("30 2,4 * * *", "Europe/Berlin", skip_gaps=True)
    found = [from_ms(at).astimezone(there) for at in islice(cron.after(start), 4)]
    assert [f"{at.day} {at:%H:%M}" for at in found] == ["28 02:30", "28 04:30", "29 04:30", "30 02:30"]


@pytest.mark.parametrize(
    ("expression", "same"),
    [("0 9-9/2 * * *", "0 9 * * *"), ("5-05/10,30 * * * *", "5,30 * * * *"),
     ("0 0 * * MON-1/3", "0 0 * * 1"), ("0 0 * * SUN-0/2", "0 0 * * 0"), ("0 0 1 jan-JAN/4 *", "0 0 1 1 *"),
     ("0-0/20 0 0 * * *", "0 0 0 * * *"),
     ("0 9-11/2 * * *", "0 9,11 * * *"), ("0 9/2 * * *", "0 9-23/2 * * *")],
)  # fmt: skip
def test_a_step_through_a_range_of_one_is_that_one(expression: str, same: str) -> None:
    assert list(islice(Cron(expression).after(0), 50)) == list(islice(Cron(same).after(0), 50))


@pytest.mark.parametrize(
    ("expression", "write"),
    [("@daily", "'0 0 * * *'"), ("@Weekly", "'0 0 * * 0'"), ("@every 5m", "every"),
     ("@reboot", "five fields"),
     ("CRON_TZ=Asia/Tokyo 0 9 * * *", "zone, and write '0 9 * * *'"), ("TZ=UTC 0 9 * * *", "zone"),
     ("0 9 ? * MON", "'0 9 * * MON'"), ("0 0 9 ? * MON", "'0 0 9 * * MON'"),
     ("0 9 * * * root", "seconds"), ("0 0 9 * * MON 2030", "7 fields; write minute"), ("9 * *", "3 fields"),
     ("0 0 31 2 *", "L"), ("0 0 30,31 2 *", "L"), ("0 0 31 4,6 *", "L"), ("0 9-9/0 * * *", "hour")],
)  # fmt: skip
def test_what_other_crons_take_is_refused_with_what_to_write(expression: str, write: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        Cron(expression)
    assert write in str(refused.value).partition(": ")[2]


def test_intervals_are_counted_from_their_anchor() -> None:
    every = Interval(900_000, 300_000)
    assert list(islice(every.after(0), 2)) == [300_000, 1_200_000]
    assert list(islice(every.after(300_000), 2)) == [1_200_000, 2_100_000]
    assert every.latest(0, 10**12, 2) == Latest(
        [999_999_300_000 - 900_000, 999_999_300_000], 300_000, 1_111_111
    )
    assert every.latest(300_000, 1_199_999, 5) == Latest([], None, 0)
    assert list(every.after(END - 1_000_000)) == [END - 599_000], "it ends with the calendar"


def test_a_long_time_is_counted_up_to_a_bound() -> None:
    found = Cron("* * * * *").latest(0, 10**12, 1000)
    assert (len(found.last), found.last[-1], found.first, found.total) == (
        1000,
        999_999_960_000,
        60_000,
        10_000,
    )
    rare = Cron("0 0 29 2 *").latest(0, 10**12, 1000)
    assert (len(rare.last), rare.total) == (8, 8)


@pytest.mark.parametrize(
    ("expression", "zone"),
    [("0 9 * *", "UTC"), ("61 * * * *", "UTC"), ("0 0 30 2 *", "UTC"), ("", "UTC"),
     ("0," * 500 + "0 * * * *", "UTC"), ("0 0 * * 1#" + "9" * 5000, "UTC"),
     ("0 9 * * *", "Mars/Olympus"), ("0 9 * * *", "../etc/passwd"), ("0 9 * * *", ""),
     *(("0 9 * * *", name) for name in ("localtime", "posixrules", "right/UTC", "posix/UTC", "Factory"))],
)  # fmt: skip
def test_what_is_no_cron_expression_or_zone_is_refused(expression: str, zone: str) -> None:
    with pytest.raises(InvalidSchedule):
        Cron(expression, zone)
