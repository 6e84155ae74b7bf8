"""When schedules fire, against an oracle of minutes, and what a step or a change of one does,
policy by policy."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import islice, pairwise
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from harness.cron_oracle import oracle
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from toc.model import schedule
from toc.model.clock import from_ms, to_ms
from toc.model.documents import MAX_DEPTH
from toc.model.errors import InvalidAttribute, InvalidDocument, InvalidSchedule
from toc.model.schedule import END, Cron, Definition, Interval, Latest, preview
from toc.model.schedule_state import LEAD_MS, Planned, State, change, new_state, step
from toc.model.task import Task, TaskStatus
from toc.sdk.schedules import define

# What a step of a schedule does, policy by policy, and what a change of it does to its occurrences.

# What a step of a schedule does, policy by policy.

START = to_ms(datetime(2026, 1, 1, tzinfo=UTC))
MINUTE, HOUR = 60_000, 3_600_000


def hourly(**options: Any) -> Definition:
    return Definition("report", "report.make", every=timedelta(hours=1), **options)


def defined(name: str, **options: Any) -> Definition:
    """With durations as seconds and policies as text, as callers may give them."""
    return Definition(name, "t", **options)


class Run(NamedTuple):
    made: list[tuple[int, int]]  # (nominal, when), both since START
    state: State


def run(
    definition: Definition,
    until: int,
    *,
    down: tuple[int, int] = (0, 0),
    ended: Callable[[int, int], bool] = lambda _due, _now: True,
) -> Run:
    """Take every step that is due from START on, one after the other, except while everything is down.

    ``ended`` tells from when the last occurrence was due, and from the time (both since START), whether it
    has ended; one that is not due has not.
    """
    state, now, made, last = new_state(definition, 1, START), START, [], START
    while now <= START + until:
        taken = step(definition, state, now, ended=last <= now and ended(last - START, now - START))
        made += [(occurrence.nominal - START, occurrence.due - START) for occurrence in taken.made]
        last = taken.made[-1].due if taken.made else last
        state = taken.state
        assert state.look is not None
        assert state.look > now, "a step leads forward"
        now = state.look
        if START + down[0] <= now < START + down[1]:
            now = START + down[1]
    return Run(made, state)


def hours(found: Run) -> list[float]:
    return [nominal / HOUR for nominal, _ in found.made]


@pytest.mark.parametrize(
    ("overlap", "made", "skipped", "buffered"),
    [("skip", 1, 49, None), ("buffer_one", 1, 48, 2), ("allow", 50, 0, None)],
)
def test_after_a_stop_all_run_that_the_overlap_policy_lets_run(
    overlap: str, made: int, skipped: int, buffered: int | None
) -> None:
    definition = hourly(missed="all", overlap=overlap)
    taken = step(definition, new_state(definition, 1, START), START + 50 * HOUR, ended=True)
    assert (len(taken.made), taken.state.skipped, taken.state.missed) == (made, skipped, 0)
    assert taken.state.buffered == (buffered and START + buffered * HOUR)


@pytest.mark.parametrize("policy", ["latest", "all", "skip"])
def test_after_a_stop_within_the_window_all_run_late(policy: str) -> None:
    found = run(hourly(missed=policy, overlap="allow"), 6 * HOUR, down=(90 * MINUTE, 210 * MINUTE))
    assert hours(found) == [1, 2, 3, 4, 5, 6]
    assert [due for _, due in found.made][1:3] == [210 * MINUTE] * 2
    assert found.state.missed == 0


@pytest.mark.parametrize(
    ("policy", "made", "missed"),
    [("latest", [1, 3, 4, 5, 6], 1), ("all", [1, 2, 3, 4, 5, 6], 0), ("skip", [1, 4, 5, 6], 2)],
)
def test_a_stop_of_two_hours_is_handled_as_the_policy_says(policy: str, made: list[int], missed: int) -> None:
    definition = hourly(missed=policy, overlap="allow", window=timedelta(minutes=30))
    found = run(definition, 6 * HOUR, down=(90 * MINUTE, 210 * MINUTE))
    assert hours(found) == made
    assert found.state.missed == missed
    assert found.state.missed_at == (START + 210 * MINUTE if missed else None)


@pytest.mark.parametrize(("late", "made", "missed"), [(0, 4, 0), (1, 1, 3)])
def test_a_stop_is_as_long_as_its_first_occurrence_is_late(late: int, made: int, missed: int) -> None:
    """With a window of three hours: at its very end all run, a millisecond later the policy decides."""
    definition = hourly(overlap="allow", window=timedelta(hours=3))
    state = run(definition, 0).state
    taken = step(definition, state, START + 4 * HOUR + late, ended=True)
    assert (len(taken.made), taken.state.missed) == (made, missed)


@pytest.mark.parametrize(("count", "made", "missed"), [(1000, 1000, 0), (1001, 1, 1000)])
def test_a_stop_of_over_a_thousand_occurrences_is_the_policys(count: int, made: int, missed: int) -> None:
    definition = defined("often", every=60, overlap="allow")
    taken = step(definition, run(definition, 0).state, START + count * MINUTE, ended=True)
    assert (len(taken.made), taken.state.missed) == (made, missed)


def test_after_a_stop_the_last_occurrence_runs_although_one_made_ahead_has_not() -> None:
    """All is down from ten seconds before hour 2 on, whose task is there, until half past 4."""
    definition = hourly(window=timedelta(minutes=30))
    back = 270 * MINUTE
    found = run(
        definition, 6 * HOUR, down=(2 * HOUR - 10_000, back),
        ended=lambda due, now: due != 2 * HOUR or now >= back + 5 * MINUTE,
    )  # fmt: skip
    assert hours(found) == [1, 2, 4, 5, 6]
    assert back + 5 * MINUTE <= dict(found.made)[4 * HOUR] <= back + 6 * MINUTE, "one after the other"
    assert (found.state.missed, found.state.skipped) == (1, 0)


@pytest.mark.parametrize(("policy", "made"), [("all", [1, 2, 5, 6]), ("skip", [1, 2, 5, 6])])
def test_after_a_stop_other_policies_wait_for_nothing(policy: str, made: list[int]) -> None:
    back = 270 * MINUTE
    found = run(
        hourly(window=timedelta(minutes=30), missed=policy), 6 * HOUR, down=(2 * HOUR - 10_000, back),
        ended=lambda due, now: due != 2 * HOUR or now >= back + 5 * MINUTE,
    )  # fmt: skip
    assert hours(found) == made


def test_no_more_than_a_thousand_are_made_after_a_long_stop() -> None:
    definition = defined("often", every=60, missed="all", overlap="allow")
    found = run(definition, 0)
    late = step(definition, found.state, START + 5000 * MINUTE, ended=True)
    assert len(late.made) == 1000
    assert late.made[0].nominal == START + 4001 * MINUTE
    assert late.state.missed == 4000
    assert late.state.after == START + 5000 * MINUTE


@pytest.mark.parametrize(
    ("overlap", "made", "skipped"),
    # The task of hour 2 runs until half past 4.
    [("allow", [1, 2, 3, 4, 5, 6], 0), ("skip", [1, 2, 5, 6], 2), ("buffer_one", [1, 2, 3, 5, 6], 1)],
)
def test_overlap_is_judged_when_an_occurrence_is_due(overlap: str, made: list[int], skipped: int) -> None:
    found = run(
        hourly(overlap=overlap), 6 * HOUR, ended=lambda due, now: due != 2 * HOUR or now >= 270 * MINUTE
    )
    assert hours(found) == made
    assert found.state.skipped == skipped
    if overlap == "buffer_one":
        assert 270 * MINUTE <= dict(found.made)[3 * HOUR] <= 271 * MINUTE, "it runs once the other has ended"


def test_one_that_ends_just_before_the_next_is_due_is_not_in_its_way() -> None:
    found = run(hourly(), 6 * HOUR, ended=lambda due, now: now - due >= 3_600_000 - 50)
    assert hours(found) == [1, 2, 3, 4, 5, 6]


def test_jitter_follows_from_the_name_and_keeps_the_nominal_time() -> None:
    offsets = {defined(f"s{n}", every=3600, jitter=600).offset for n in range(200)}
    assert len(offsets) > 190
    assert 0 <= min(offsets) < 60_000 < 540_000 < max(offsets) <= 600_000
    definition = hourly(jitter=timedelta(minutes=10))
    found = run(definition, 5 * HOUR)
    assert [due - nominal for nominal, due in found.made] == [definition.offset] * len(found.made)
    fire = preview(definition, START, 1)[0]
    assert (fire.due - fire.nominal) / timedelta(milliseconds=1) == definition.offset


@settings(max_examples=150)
@given(
    every=st.integers(1, 5000),
    jitter=st.integers(0, 400),
    overlap=st.sampled_from(["allow", "skip", "buffer_one"]),
    delays=st.lists(st.integers(0, 40_000), min_size=1, max_size=30),
)
def test_each_occurrence_is_made_skipped_waiting_or_to_come(
    every: int, jitter: int, overlap: str, delays: list[int]
) -> None:
    """However late the steps come, and whatever has ended: all are accounted for, in order, none twice."""
    definition = defined("any", every=every, jitter=jitter, overlap=overlap)
    state, now, made = new_state(definition, 1, START), START, []
    for number, delay in enumerate(delays):
        taken = step(definition, state, now, ended=number % 3 != 0)
        made += taken.made
        state = taken.state
        assert state.look is not None
        now = max(state.look, now) + delay
    nominals = [occurrence.nominal for occurrence in made]
    first = next(definition.calendar.after(START - definition.offset))
    decided = 0 if state.after < first else (state.after - first) // (every * 1000) + 1
    assert len(set(nominals)) == len(nominals) == state.fired
    assert nominals == sorted(nominals)
    assert decided == state.fired + state.skipped + state.missed + (state.buffered is not None)
    assert all(occurrence.due >= occurrence.nominal + definition.offset for occurrence in made)


def test_what_is_due_within_the_lead_is_a_task_already() -> None:
    definition = hourly()
    state = run(definition, 0).state
    assert state.look == START + HOUR - LEAD_MS
    assert [made.due for made in step(definition, state, state.look, ended=True).made] == [START + HOUR]


def test_a_definition_survives_its_row() -> None:
    definition = defined(
        "n", cron="0 9 * * MON-FRI", zone="Europe/Berlin", dst="skip", missed="all", overlap="allow",
        window=7200, jitter=1.5, attribute={"a": [1, "é"]},
    )  # fmt: skip
    assert Definition.of_json("n", definition.to_json()) == definition


@pytest.mark.parametrize("depth", [63, 64])
def test_none_is_stored_that_nobody_could_read(depth: int) -> None:
    attribute = json.loads('{"a":' * depth + "1" + "}" * depth)
    definition = defined("n", every=60, attribute=attribute)
    if depth == MAX_DEPTH:
        with pytest.raises(InvalidDocument, match="nested"):
            definition.to_json()
    else:
        assert Definition.of_json("n", definition.to_json()) == definition
    changed = definition.changed(every=60)
    assert (changed.cron, changed.every) == (None, timedelta(seconds=60))
    assert changed.changed(cron="* * * * *").every is None


@pytest.mark.parametrize(
    "options",
    [{}, {"cron": "* * * * *", "every": 60}, {"every": 0.5}, {"every": 60, "overlap": "maybe"},
     {"every": 60, "window": 1}, {"every": 60, "jitter": 10**6}, {"every": "soon"}, {"every": float("nan")},
     {"every": 60, "anchor": datetime(2026, 1, 1)}, {"every": 60, "attribute": {"scheduled_for": 1}},  # noqa: DTZ001
     {"cron": 5}, {"every": True}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchedule):
        Definition("n", "t", **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cron": "0 9 * * *", "anchor": datetime(2030, 1, 1, tzinfo=UTC)}, "anchor"),
        ({"every": 60, "dst": "skip"}, "dst"),
        ({"every": 60, "zone": "Europe/Berlin"}, "zone"),
    ],
)
def test_a_caller_gives_no_option_without_effect_but_a_row_may(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        define("n", topic="t", **options)
    assert refused.value.field == field
    stored = Definition("n", "t", **options)
    assert Definition.of_json("n", stored.to_json()) == stored
    assert stored.changed(topic="u").topic == "u"
    with pytest.raises(InvalidSchedule, match=field):
        stored.changed(**{field: options[field]})


@pytest.mark.parametrize(("options", "told"), [
    ({"every": 0.0625}, "every must be 1 s to 316224000 s, not 0.062 s"),
    ({"every": timedelta(days=4000)}, "every must be 1 s to 316224000 s, not 345600000 s"),
    ({"every": 60, "window": 30}, "window must be 60 s to 316224000 s, not 30 s"),
    ({"every": 60, "jitter": -1}, "jitter must be 0 s to 86400 s, not -1 s"),
])  # fmt: skip
def test_a_duration_out_of_bounds_is_refused_with_its_bounds(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        defined("n", **options)
    assert str(refused.value) == told


def test_a_route_in_the_attribute_is_refused_with_what_a_schedule_can_do() -> None:
    with pytest.raises(InvalidSchedule) as refused:
        defined("n", every=60, attribute={"toc-webhook": {"target": "shop"}})
    assert refused.value.field == "attribute"
    assert "toc topic alter TOPIC --target NAME" in str(refused.value)
    assert "give target" not in str(refused.value), "a schedule has neither target nor url"


def test_a_period_that_was_a_cron_expression_is_shown_in_utc() -> None:
    nightly = define("n", topic="t", cron="0 2 * * *", zone="Asia/Tokyo")
    (fire,) = preview(nightly.changed(every=60), START, 1)
    assert fire.nominal.isoformat() == "2026-01-01T00:01:00+00:00"


def test_a_preview_ends_after_a_hundred_years_however_rare_the_times_are() -> None:
    """Up to the year 9000 this one would cost a quarter of a minute, which any caller may ask for."""
    rare = defined("n", cron="59 59 23 31 2 MON#5", zone="Europe/Berlin")
    years = [fire.nominal.year for fire in preview(rare, START, 1000)]
    assert years == [2044, 2072, 2112]
    assert len(preview(defined("n", cron="0 0 1 1 *"), START, 1000)) == 100


def test_names_and_attributes_are_checked() -> None:
    for name in ("", "a b", "a/b", "x" * 129, 7):
        with pytest.raises(InvalidSchedule):
            Definition(name, "t", every=60)  # type: ignore[arg-type]
    with pytest.raises(InvalidAttribute):
        defined("n", every=60, attribute={"text": "x" * 4050})  # with its nominal time, too long


def test_a_handler_is_told_the_nominal_time() -> None:
    attribute = {"scheduled_for": "2026-03-29T01:30:00.000Z"}
    task = Task(1, "t", "n", 1, TaskStatus.PENDING, datetime.now(UTC), attribute, 1, 0)
    assert task.scheduled_for == datetime(2026, 3, 29, 1, 30, tzinfo=UTC)
    assert task._replace(attribute={}).scheduled_for is None
    assert task._replace(attribute={"scheduled_for": "now"}).scheduled_for is None


@pytest.mark.parametrize("far", ["9999-12-31T23:59:59.999999+00:00", "9999-12-31T23:59:59-14:00"])
def test_an_anchor_beyond_the_year_9999_in_utc_is_refused_by_name(far: str) -> None:
    with pytest.raises(InvalidSchedule, match="anchor"):
        Definition("far", "order.close", every=timedelta(hours=1), anchor=datetime.fromisoformat(far))


@pytest.mark.parametrize("field", ["window", "jitter", "missed", "anchor"])
def test_a_change_to_nothing_of_what_must_be_something_is_named(field: str) -> None:
    with pytest.raises(InvalidSchedule):
        defined("n", every=60).changed(**{field: None})


def test_a_change_of_the_attribute_to_none_empties_it() -> None:
    assert defined("n", every=60, attribute={"a": 1}).changed(attribute=None).attribute == {}


# What a change of a schedule does to its occurrences, case by case.

NOW = to_ms(datetime(2026, 1, 1, tzinfo=UTC))
SECOND = 1000


def every(seconds: int, **options: Any) -> Definition:
    return Definition("n", "t", every=timedelta(seconds=seconds), **options)


def running(definition: Definition) -> tuple[State, list[Planned]]:
    """A schedule after its first step at NOW, and the tasks that it has ahead."""
    made, state = step(definition, new_state(definition, 1, NOW), NOW, ended=True)
    return state, [Planned(number, one.nominal) for number, one in enumerate(made, 1)]


def at(*nominals: int) -> list[float]:
    """In seconds from NOW."""
    return [(nominal - NOW) / SECOND for nominal in nominals]


@pytest.mark.parametrize(
    ("paused", "missed"), [(None, 0), (True, 3)], ids=["the policy of missed decides", "a pause counts them"]
)
def test_what_is_due_and_not_decided_is_never_lost_in_silence(paused: bool | None, missed: int) -> None:
    """As when the topic was closed meanwhile."""
    state, _ = running(every(60))
    later = NOW + 185 * SECOND  # those of 60, 120 and 180 s are due and no tasks
    changed = change(every(60), state, every(60, attribute={"a": 1}), [], later, paused=paused)
    assert changed.state.missed == missed
    assert (changed.state.after < NOW + 60 * SECOND) == (paused is None)


def test_another_rule_does_not_fire_for_times_before_it() -> None:
    state, _ = running(every(3600))
    later = NOW + 1000 * SECOND
    minutely = every(60)
    changed = change(every(3600), state, minutely, [], later, paused=None)
    made = step(minutely, changed.state, later, ended=True).made
    assert at(*(one.nominal for one in made)) == [1020]


@pytest.mark.parametrize("options", [{"paused": True}, {"overlap": "skip"}])
def test_an_occurrence_that_waits_is_dropped_and_counted_by_pause_and_skip(options: dict[str, Any]) -> None:
    buffering = every(10, overlap="buffer_one")
    state, _ = running(buffering)
    waiting = state._replace(buffered=NOW)
    paused = options.pop("paused", None)
    changed = change(buffering, waiting, buffering.changed(**options), [], NOW, paused=paused)
    assert (changed.state.buffered, changed.state.skipped) == (None, 1)


# When schedules fire: against an oracle that walks through all minutes, and case by case.

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


@pytest.mark.parametrize(("expression", "zone", "after", "fires"), [
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
])  # fmt: skip
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


def test_a_long_time_of_seconds_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of its worker wait for that; a schedule of seconds after two years has 60 million."""
    seen = 0

    def counted(*of: Any) -> Iterator[datetime]:
        nonlocal seen
        for found in matching(*of):
            seen += 1
            yield found

    matching = schedule._matching
    monkeypatch.setattr(schedule, "_matching", counted)
    found = Cron("* * * * * *").latest(0, 10**12, 1000)
    assert (len(found.last), found.last[-1], found.total) == (1000, 10**12, 10_000)
    assert seen < 12_000


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
