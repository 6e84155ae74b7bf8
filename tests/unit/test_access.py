"""Who may do what: patterns, roles, grants."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toc.model.access import Access, Action, Role, Token, check_grant
from toc.model.errors import InvalidInput, NotGranted, UnknownTopic
from toc.model.topic import Template, best_of, check_pattern, covers, matches

letters = st.text("ab.*", min_size=1, max_size=8)
names = st.text("ab.", min_size=1, max_size=8)


@given(letters, names)
def test_a_pattern_matches_what_its_regular_expression_does(pattern: str, name: str) -> None:
    expression = ".*".join(map(re.escape, pattern.split("*")))
    assert matches(pattern, name) is bool(re.fullmatch(expression, name))


@given(letters, letters, names)
def test_what_a_covered_pattern_matches_the_covering_one_matches(wide: str, narrow: str, name: str) -> None:
    if covers(wide, narrow) and matches(narrow, name):
        assert matches(wide, name)


def test_a_pattern_of_many_stars_takes_no_time() -> None:
    assert not matches("*a" * 64, "a" * 63 + "b" * 65)


@pytest.mark.parametrize("pattern", ["", "a b", "a?", "[a]", ".a", "*" * 129, 7, "ä"])
def test_what_is_no_pattern_is_refused(pattern: object) -> None:
    with pytest.raises(InvalidInput):
        check_pattern(pattern)


roles = st.frozensets(st.sampled_from(Role), min_size=1)
patterns = st.lists(letters.filter(lambda text: text[0] != "."), min_size=1, max_size=3).map(tuple)
tokens = st.builds(
    Token,
    st.just("t"),
    roles,
    patterns,
    st.none() | st.integers(1, 3),
    st.none() | st.sampled_from([1.0, 2.0]),
)


@given(tokens, tokens, st.sampled_from(Action), st.none() | names)
def test_nobody_grants_more_than_he_has(giver: Token, made: Token, call: Action, topic: str | None) -> None:
    try:
        check_grant(giver, made.roles, made.topics, made.expires_at, made.rate)
    except NotGranted:
        assert not giver.covers(made)
        return
    assert giver.covers(made)
    if made.may(call, topic) is Access.ALLOWED:
        assert giver.may(call, topic) is Access.ALLOWED
    assert giver.expires_at is None or (made.expires_at or 99) <= giver.expires_at
    assert giver.rate is None or (made.rate or 99) <= giver.rate


@pytest.mark.parametrize(
    ("own", "wanted", "granted"),
    [
        ("*", "shop.*", True),
        ("shop.*", "shop.close", True),
        ("shop.*", "shop.a.*", True),
        ("*.close", "shop.*.close", True),
        ("shop.*", "*", False),
        ("shop.*", "sho*", False),
        ("shop.close", "shop.*", False),
        ("a*b*c", "a*c", False),
    ],
)
def test_a_token_grants_no_wider_patterns(own: str, wanted: str, granted: bool) -> None:
    giver = Token("giver", frozenset({Role.ADMIN}), ("x", own))
    if granted:
        check_grant(giver, [Role.READ], ["x", wanted], None, None)
    else:
        with pytest.raises(NotGranted, match="topics"):
            check_grant(giver, [Role.READ], ["x", wanted], None, None)


def test_of_templates_the_longest_pattern_wins() -> None:
    made = [
        Template(pattern, {"slot_amount": 2}, 5) for pattern in ("*", "shop.*", "*.close.late", "shop.x*")
    ]
    best = {name: best_of(made, name) for name in ("other", "shop.a", "shop.xy", "shop.close.late")}
    assert {name: found and found.pattern for name, found in best.items()} == {
        "other": "*",
        "shop.a": "shop.*",
        "shop.xy": "shop.x*",
        "shop.close.late": "*.close.late",
    }
    with pytest.raises(UnknownTopic):
        best_of(made[1:], "other")
    for wrong in (
        {},
        {"slot_amount": 3},
        {"slot_amount": 2, "paused": True},
        {"slot_amount": 2, "delivery": 7},
    ):
        with pytest.raises(InvalidInput):
            Template("a", wrong, 5)


@pytest.mark.parametrize("rate", [10**400, float("nan"), float("inf"), 0, -1])
def test_a_rate_out_of_bounds_is_named(rate: float) -> None:
    with pytest.raises(InvalidInput, match="rate must be"):
        Token("n", frozenset({Role.READ}), ("*",), rate=rate)
