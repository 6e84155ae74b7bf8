"""Who may do what, and a process's view of the topics."""

import re
import threading
import time

import pytest
from harness.clocks import PushedClock
from hypothesis import given
from hypothesis import strategies as st

from toc.model import catalog as catalog_module
from toc.model.access import Access, Action, Role, Token, check_grant
from toc.model.catalog import NOTICED_SECONDS, OLD_PATIENCE_SECONDS, TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import InvalidInput, NotGranted, UnknownTopic
from toc.model.topic import Template, Topic, best_of, check_pattern, covers, matches

# Who may do what: patterns, roles, grants.

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


@pytest.mark.parametrize(("own", "wanted", "granted"), [
    ("*", "shop.*", True), ("shop.*", "shop.close", True), ("shop.*", "shop.a.*", True),
    ("*.close", "shop.*.close", True), ("shop.*", "*", False), ("shop.*", "sho*", False),
    ("shop.close", "shop.*", False), ("a*b*c", "a*c", False),
])  # fmt: skip
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


# A process's view of the topics, when the process was idle and when the table does not answer.


def test_a_process_that_was_idle_waits_to_learn_that_its_topic_was_deleted() -> None:
    topics = [Topic("t", 7, 4)]

    def read() -> list[Topic]:
        time.sleep(0.1)  # such as over a new connection
        return list(topics)

    clock = PushedClock()
    catalog = TopicCatalog(read, clock)
    assert catalog.get("t") == topics[0]
    topics.clear()
    clock.pushed += NOTICED_SECONDS + 0.1
    with pytest.raises(UnknownTopic):
        catalog.get("t")


def test_a_read_that_ends_late_does_not_bring_an_older_view_back() -> None:
    topics = [Topic("t", 7, 4)]
    read_old, answers = threading.Event(), threading.Event()

    def read() -> list[Topic]:
        found = list(topics)
        if len(topics) == 1:
            read_old.set()
            answers.wait(60)
        return found

    catalog = TopicCatalog(read, Clock())
    late = threading.Thread(target=catalog.refresh)
    late.start()
    assert read_old.wait(60)
    topics.append(Topic("new", 8, 4))
    assert "new" in catalog.refresh()
    answers.set()
    late.join()
    assert "new" in catalog.known()


def test_while_the_table_does_not_answer_one_caller_waits_and_the_others_use_the_old_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    answers.set()

    def read() -> list[Topic]:
        answers.wait()
        return [Topic("t", 7, 4)]

    clock = PushedClock()
    catalog = TopicCatalog(read, clock)
    catalog.get("t")
    answers.clear()
    clock.pushed += NOTICED_SECONDS + 0.1
    began = time.monotonic()
    assert catalog.get("t").biz_type == 7
    assert time.monotonic() - began >= OLD_PATIENCE_SECONDS
    monkeypatch.setattr(catalog_module, "OLD_PATIENCE_SECONDS", 3600.0)  # who waited would not come back
    for _ in range(2):
        clock.pushed += NOTICED_SECONDS + 0.1
        assert catalog.get("t").biz_type == 7
    answers.set()
