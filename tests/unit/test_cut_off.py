"""Who is cut off: a member that does not reach what another one reaches, and only after a while."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from toc.coordination.assignment import Member
from toc.coordination.cut_off import (
    APART_SECONDS,
    BACK_SECONDS,
    GAP_SECONDS,
    OUT_SECONDS,
    CutOff,
    Reach,
    apart,
)
from toc.store.health import REACHED_SECONDS

SERVERS = {"database 0", "database 1", "redis r:1"}


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def members(**out_of_reach: Collection[str]) -> list[Member]:
    """Members that reach all other servers."""
    return [
        Member(name, "h", out_of_reach=frozenset(out), reached=frozenset(SERVERS.difference(out)))
        for name, out in out_of_reach.items()
    ]


def test_a_worker_reports_a_server_after_a_while_and_takes_it_back_at_once() -> None:
    time = Time()
    reach = Reach(time)
    assert reach.look({"database 0"}) == []
    time.now += OUT_SECONDS - 0.1
    assert reach.look({"database 0"}) == []
    time.now += 0.2
    assert reach.look({"database 0", "redis r:1"}) == ["database 0"]
    time.now += 60
    assert reach.look({"database 0"}) == ["database 0"]
    assert reach.look(()) == []
    assert reach.look({"database 0"}) == [], "it begins anew"


def test_a_server_that_comes_and_goes_shortly_is_never_reported() -> None:
    time = Time()
    reach = Reach(time)
    for _ in range(20):
        assert reach.look({"database 0"}) == []
        time.now += OUT_SECONDS - 0.5
        assert reach.look({"database 0"}) == []
        time.now += 0.5
        assert reach.look(()) == []


@pytest.mark.parametrize("lasts", [*(OUT_SECONDS + tenth / 10 for tenth in range(60)), 12.0, 20.0, 60.0])
@pytest.mark.parametrize("later", [0.3, 0.7, 1.0, 1.4, 8.0, 1000.0])
def test_an_outage_of_a_server_cuts_nobody_off_whenever_each_notices(lasts: float, later: float) -> None:
    """Who has asked it just before notices first, and still says so for a moment when it is back."""
    time = Time()
    cut_off = CutOff(time)
    first, second = Reach(time), Reach(time)
    began, heard = time.now, time.now - 0.5
    told: dict[str, list[str]] = {"a": [], "b": []}
    reached = True
    for step in range(int(lasts) * 10 + 200):
        time.now = began + step / 10
        if time.now - began > lasts:
            heard = time.now
        if step % 10 == 0:
            told["a"] = first.look({"database 0"} if time.now - began <= lasts else ())
        if step % 10 == 3:
            told["b"] = second.look({"database 0"} if later <= time.now - began <= lasts else ())
            reached = time.now - heard < REACHED_SECONDS
        reports = members(**told)
        if not reached:
            reports = [one for one in reports if one.worker_id == "a"] + [Member("b", "h")]
        assert not cut_off.look(reports, {"a", "b"}), (lasts, later, time.now - began)


def test_only_who_does_not_reach_what_another_reaches_is_apart() -> None:
    assert apart([]) == {}
    assert apart(members(a={"database 0"})) == {}
    assert apart(members(a={"database 0"}, b={"database 0"})) == {}
    assert apart(members(a={"database 0"}, b=())) == {"a": ["database 0"]}
    assert apart(members(a={"database 0", "database 1"}, b={"database 0"}, c={"database 0"})) == {
        "a": ["database 1"]
    }, "and what nobody reaches is not named"
    assert apart(members(a={"database 0"}, b={"database 1"})) == {"a": ["database 0"], "b": ["database 1"]}


def test_who_has_not_reached_a_server_itself_does_not_prove_that_it_is_well() -> None:
    """It has just been started, or is of an earlier version and tells nothing."""
    assert apart([*members(a={"database 0"}), Member("b", "h")]) == {}
    assert apart([*members(a={"database 0"}), Member("b", "h", reached=frozenset({"database 1"}))]) == {}


def test_a_server_that_is_away_from_all_cuts_nobody_off_though_they_notice_one_after_the_other() -> None:
    time = Time()
    cut_off = CutOff(time)
    assert not cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
    assert _due(cut_off) == time.now + APART_SECONDS
    time.now += APART_SECONDS - 1
    assert not cut_off.look(members(a={"database 0"}, b={"database 0"}), {"a", "b"})
    assert _due(cut_off) is None
    time.now += 60
    assert not cut_off.look(members(a=(), b={"database 0"}), {"a", "b"})  # it is back, and b notices later
    time.now += APART_SECONDS - 1
    assert not cut_off.look(members(a=(), b=()), {"a", "b"})


def test_who_is_apart_for_long_enough_is_cut_off_until_it_is_not() -> None:
    time = Time()
    cut_off = CutOff(time)
    cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
    time.now += APART_SECONDS
    assert cut_off.look(members(a={"database 0"}, b=()), {"a", "b"}) == {"a": ["database 0"]}
    assert _due(cut_off) is None
    time.now += 60
    assert cut_off.look(members(a=(), b=()), {"b"}) == {"a": ["database 0"]}, "it may come and go"
    assert _due(cut_off) == time.now + BACK_SECONDS
    time.now += BACK_SECONDS - 0.1
    assert cut_off.look(members(a={"database 0"}, b=()), {"b"}) == {"a": ["database 0"]}
    assert cut_off.look(members(a=(), b=()), {"b"}) == {"a": ["database 0"]}
    time.now += BACK_SECONDS
    assert not cut_off.look(members(a=(), b=()), {"b"})
    assert not cut_off.look(members(a={"database 0"}, b=()), {"a", "b"}), "it begins anew"


def test_who_was_cut_off_for_a_short_time_waits_half_as_long() -> None:
    time = Time()
    cut_off = CutOff(time)
    cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
    time.now += APART_SECONDS
    assert cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
    assert cut_off.look(members(a=(), b=()), {"b"})
    time.now += APART_SECONDS / 2
    assert not cut_off.look(members(a=(), b=()), {"b"})


def test_who_lacks_a_server_again_and_again_is_cut_off() -> None:
    time = Time()
    cut_off = CutOff(time)
    began = time.now
    while time.now - began < APART_SECONDS:
        assert not cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
        time.now += 1.5
        assert not cut_off.look(members(a=(), b=()), {"a", "b"})
        time.now += GAP_SECONDS - 0.1
    assert cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})


def test_who_is_gone_is_forgotten() -> None:
    time = Time()
    cut_off = CutOff(time)
    cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
    time.now += APART_SECONDS
    assert cut_off.look(members(a={"database 0"}, b=()), {"a", "b"})
    assert not cut_off.look(members(b=()), {"b"})
    assert _due(cut_off) is None


def test_who_is_apart_and_has_no_slots_gets_none() -> None:
    """A leader that has just begun to lead does not know how long it has been so."""
    cut_off = CutOff(Time())
    assert cut_off.look(members(a={"database 0"}, b=()), {"b"}) == {"a": ["database 0"]}
    assert _due(cut_off) is None


def _due(cut_off: CutOff) -> float | None:
    """A call, since each look changes it."""
    return cut_off.due
