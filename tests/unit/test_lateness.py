"""Why a task is late: shares, the sentence, the line of a row. Pure."""

import pytest
from harness.rows import known
from hypothesis import given
from hypothesis import strategies as st

from toc.model.lateness import (
    CAUSES,
    MAX_LATE_CHARS,
    Cause,
    LateStart,
    Span,
    Tried,
    Why,
    explain,
    fill,
    late_starts,
)

DUE = 1_700_000_000_000
REST = Span(Cause.BACKLOG, 0, 0, "9 waited")


def at(seconds: float) -> int:
    return DUE + round(seconds * 1000)


def span(cause: Cause, since: float, until: float, evidence: str = "") -> Span:
    return Span(cause, at(since), at(until), evidence)


spans = st.lists(
    st.builds(
        lambda cause, since, length: span(cause, since, since + length),
        st.sampled_from(list(Cause)),
        st.floats(-50, 50),
        st.floats(0, 50),
    )
)


@given(spans, st.floats(0.001, 60))
def test_shares_add_up_to_how_late_it_was_each_within_that_time(found: list[Span], seconds: float) -> None:
    filled = fill(DUE, at(seconds), found, REST)
    assert sum(one.until - one.since for one in filled) == at(seconds) - DUE
    lengths = [one.until - one.since for one in filled]
    assert lengths == sorted(lengths, reverse=True)
    assert all(lengths)
    assert len({one.cause for one in filled}) == len(filled)
    assert all(DUE <= one.since < at(seconds) for one in filled)


@given(spans, st.floats(0.001, 60))
def test_where_causes_overlap_the_first_counts(found: list[Span], seconds: float) -> None:
    whole = span(Cause.PAUSED, -1, seconds + 1)
    assert fill(DUE, at(seconds), [whole, *found], REST) == [span(Cause.PAUSED, 0, seconds)]


@given(spans, st.floats(0.001, 60), st.integers(0, 9))
def test_a_row_keeps_the_largest_shares_of_a_version(found: list[Span], seconds: float, version: int) -> None:
    filled = fill(DUE, at(seconds), found, REST)
    start = LateStart(version, DUE, at(seconds), filled)
    assert late_starts(start.line(), version) == [start._replace(spans=filled[:3])]
    assert late_starts(start.line(), version + 1) == []
    assert len(start.line()) * 2 < MAX_LATE_CHARS


def test_lines_that_are_cut_off_foreign_or_of_a_later_version_are_left_out() -> None:
    line = LateStart(0, DUE, at(2), [span(Cause.REDIS, 0, 2)]).line()
    later = line.replace("redis", "solar flare")
    foreign = ["", "x", "[1]", "null", '[0,"a",1,[]]', "[0,1e300,1,[]]", "[0,1,1,[[1]]]", "[0,NaN,1,[]]"]
    text = line[9:] + later + "\n".join(foreign) + "\n" + line
    assert [one.cause for one in late_starts(text, 0)] == [Cause.REDIS]
    assert late_starts(None, 0) == []


CASES = {
    "paused": (
        [LateStart(0, DUE, at(41), [span(Cause.PAUSED, 0, 41, "by ann")])],
        "It started 41.0 s late because its topic was paused (by ann).",
    ),
    "a second cause of a quarter": (
        [LateStart(0, DUE, at(40), [span(Cause.PAUSED, 0, 30), span(Cause.BACKLOG, 30, 40)])],
        (
            "It started 40.0 s late: 30.0 s because its topic was paused, "
            "10.0 s because more was due than could "
            "start "
            "at once."
        ),
    ),
    "a second cause of less": (
        [LateStart(0, DUE, at(40), [span(Cause.PAUSED, 0, 31), span(Cause.BACKLOG, 31, 40)])],
        "It started 40.0 s late because its topic was paused.",
    ),
    "a time that nothing explains": (
        [LateStart(0, at(6), at(8), [span(Cause.REDIS, 6, 8)])],
        (
            "It started 8.0 s late: 6.0 s because of something that nobody recorded, "
            "2.0 s because Redis did "
            "not answer."
        ),
    ),
    "lines that were cut off before": (
        [LateStart(0, at(6), at(8), [span(Cause.TARGET, 6, 8, "target t: paused")])],
        "It started 8.0 s late because its target could not take it (target t: paused).",
    ),
}


@pytest.mark.parametrize(("starts", "sentence"), CASES.values(), ids=CASES.keys())
def test_the_sentence(starts: list[LateStart], sentence: str) -> None:
    found = known(explain(DUE, starts, [], at(50), at(60)))
    assert found.sentence() == sentence
    shown = found.shown()
    assert shown["cause"] == found.spans[0].cause
    assert sum(share["seconds"] for share in shown["shares"]) == pytest.approx(shown["seconds"])


def test_tries_that_failed_explain_a_later_start() -> None:
    tries = [Tried(at(1), False, "no"), Tried(at(4), False, "no again")]
    last = LateStart(0, at(9), at(9.1), [])
    found = known(explain(DUE, [last], tries, at(12), at(60)))
    assert found.sentence() == (
        "It started 9.1 s late because earlier tries had failed (2 tries, the last with no again)."
    )
    waits = known(explain(DUE, [], tries, None, at(7)))
    assert waits.sentence().startswith("It has not started, 7.0 s late so far because earlier tries had")


def test_a_crash_explains_the_time_from_the_start_that_it_ended() -> None:
    first = LateStart(0, DUE, at(2), [span(Cause.NO_OWNER, 0, 2)])
    found = known(explain(DUE, [first], [Tried(at(8), True, "it died")], at(8.2), at(60)))
    assert [(one.cause, one.until - one.since) for one in found.spans] == [
        (Cause.WORKER_KILLED, 6000),
        (Cause.NO_OWNER, 2000),
        (Cause.BACKOFF, 200),
    ]


@pytest.mark.parametrize("seconds", [0, 0.5, 1.0])
def test_what_started_within_a_second_is_not_late(seconds: float) -> None:
    assert explain(DUE, [LateStart(0, DUE, at(seconds), [])], [], at(2), at(60)) is None
    assert explain(DUE, [], [], at(2), at(60)) is None


def test_every_cause_has_words_and_a_remedy() -> None:
    assert CAUSES.keys() == set(Cause)
    for cause, about in CAUSES.items():
        why = Why(DUE, at(2), [span(cause, 0, 2)])
        assert about.words in why.sentence()
        assert about.remedy
