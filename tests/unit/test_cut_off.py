"""Who is cut off: a member that does not reach what another one reaches, and only after a while."""

from __future__ import annotations

from toc.coordination.cut_off import APART_SECONDS, BACK_SECONDS, OUT_SECONDS, CutOff, Reach, apart


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_worker_reports_a_server_after_a_while_and_takes_it_back_after_a_longer_one() -> None:
    time = Time()
    reach = Reach(time)
    assert reach.look({"database 0"}) == []
    time.now += OUT_SECONDS - 0.1
    assert reach.look({"database 0"}) == []
    time.now += 0.2
    assert reach.look({"database 0", "redis r:1"}) == ["database 0"]
    time.now += BACK_SECONDS - 0.1
    assert reach.look(()) == ["database 0"]
    time.now += 0.2
    assert reach.look(()) == []


def test_a_server_that_comes_and_goes_shortly_is_never_reported() -> None:
    time = Time()
    reach = Reach(time)
    for _ in range(20):
        assert reach.look({"database 0"}) == []
        time.now += OUT_SECONDS - 0.5
        assert reach.look({"database 0"}) == []
        time.now += 0.5
        assert reach.look(()) == []


def test_one_that_reported_a_server_reports_it_on_while_it_comes_and_goes() -> None:
    time = Time()
    reach = Reach(time)
    reach.look({"database 0"})
    for _ in range(20):
        time.now += OUT_SECONDS
        assert reach.look({"database 0"}) == ["database 0"]
        time.now += BACK_SECONDS - 1
        assert reach.look(()) == ["database 0"]


def test_only_who_does_not_reach_what_another_reaches_is_apart() -> None:
    assert apart({}) == set()
    assert apart({"a": {"database 0"}}) == set()
    assert apart({"a": {"database 0"}, "b": {"database 0"}}) == set()
    assert apart({"a": {"database 0"}, "b": ()}) == {"a"}
    assert apart({"a": {"database 0", "database 1"}, "b": {"database 0"}, "c": {"database 0"}}) == {"a"}
    assert apart({"a": {"database 0"}, "b": {"database 1"}}) == {"a", "b"}


def test_a_server_that_is_away_from_all_cuts_nobody_off_though_they_notice_one_after_the_other() -> None:
    time = Time()
    cut_off = CutOff(time)
    assert cut_off.look({"a": {"database 0"}, "b": ()}) == frozenset()
    assert _due(cut_off) == time.now + APART_SECONDS
    time.now += APART_SECONDS - 1
    assert cut_off.look({"a": {"database 0"}, "b": {"database 0"}}) == frozenset()
    assert _due(cut_off) is None
    time.now += 60
    assert cut_off.look({"a": (), "b": {"database 0"}}) == frozenset()  # it is back, and b notices later
    time.now += APART_SECONDS - 1
    assert cut_off.look({"a": (), "b": ()}) == frozenset()


def test_who_is_apart_for_long_enough_is_cut_off_until_it_is_not() -> None:
    time = Time()
    cut_off = CutOff(time)
    cut_off.look({"a": {"database 0"}, "b": ()})
    time.now += APART_SECONDS
    assert cut_off.look({"a": {"database 0"}, "b": ()}) == {"a"}
    assert _due(cut_off) is None
    assert cut_off.look({"a": (), "b": ()}) == frozenset()
    assert cut_off.look({"a": {"database 0"}, "b": ()}) == frozenset(), "it begins anew"


def _due(cut_off: CutOff) -> float | None:
    """A call, since each look changes it."""
    return cut_off.due
