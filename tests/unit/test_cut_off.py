"""Who is cut off: a member that does not reach what another one reaches, and only after a while."""

from __future__ import annotations

from collections.abc import Collection

from toc.coordination.assignment import Member
from toc.coordination.cut_off import APART_SECONDS, BACK_SECONDS, OUT_SECONDS, CutOff, Reach, apart

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


def test_a_worker_reports_a_server_after_a_while_and_takes_it_back_after_a_longer_one() -> None:
    time = Time()
    reach = Reach(time)
    assert reach.look({"database 0"}) == []
    time.now += OUT_SECONDS - 0.1
    assert reach.look({"database 0"}) == []
    time.now += 0.2
    assert reach.look({"database 0", "redis r:1"}) == ["database 0"]
    time.now += 3 * BACK_SECONDS
    assert reach.look({"database 0"}) == ["database 0"]
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
        time.now += OUT_SECONDS / 2 - 0.1
        assert reach.look(()) == ["database 0"]


def test_a_short_outage_of_a_server_cuts_nobody_off_though_not_all_have_noticed_it_in_time() -> None:
    """One sees it for just long enough to report it, the other notices later, and reports nothing."""
    for lasts in (OUT_SECONDS + tenth / 10 for tenth in range(30)):
        for later in (0.3, 0.7, 1.0, 1.4):
            time, cut_off = Time(), CutOff()
            cut_off._monotonic = time
            first, second = Reach(time), Reach(time)
            began = time.now
            told: dict[str, list[str]] = {"a": [], "b": []}
            for step in range(400):
                time.now = began + step / 10
                if step % 10 == 0:
                    told["a"] = first.look({"database 0"} if time.now - began <= lasts else ())
                if step % 10 == 3:
                    out = later <= time.now - began <= lasts
                    told["b"] = second.look({"database 0"} if out else ())
                assert not cut_off.look(members(**told), {"a", "b"}), (lasts, later, time.now - began)


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
    assert not cut_off.look(members(a=(), b=()), {"b"})
    assert not cut_off.look(members(a={"database 0"}, b=()), {"a", "b"}), "it begins anew"


def test_who_is_apart_and_has_no_slots_gets_none() -> None:
    """A leader that has just begun to lead does not know how long it has been so."""
    cut_off = CutOff(Time())
    assert cut_off.look(members(a={"database 0"}, b=()), {"b"}) == {"a": ["database 0"]}
    assert _due(cut_off) is None


def _due(cut_off: CutOff) -> float | None:
    """A call, since each look changes it."""
    return cut_off.due
