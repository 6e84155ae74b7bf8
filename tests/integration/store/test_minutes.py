"""What a member did in each minute is written once, kept while its table is away, and added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from harness.clocks import StandingClock
from integration.store.conftest import Place

from toc.maintenance.retention import Retention
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.minute import KEPT, MINUTE_MS, MOST_TOPICS, OTHERS, STARTS
from toc.observe import metrics
from toc.observe.board import Key
from toc.operate.lateness import ALIVE_MINUTES, BOUNDS, Hour, hour, lateness_record
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.worker.daemon.minutes import Minutes

NOW = 1_900_000_000_000 // MINUTE_MS * MINUTE_MS
LATENESS, TRIES = metrics.LATENESS.metric.name, metrics.TRIES.metric.name


class Member:
    """A member whose counters a test sets."""

    def __init__(self, store: Store, clock: StandingClock, host: str) -> None:
        self.clock = clock
        self.values: dict[Key, list[float]] = {}
        self.minutes = Minutes(store.minutes, host, self.read, clock)

    def read(self) -> Mapping[Key, Sequence[float]]:
        return {key: list(cells) for key, cells in self.values.items()}

    def does(self, topic: str, starts: int, bucket: int = 0, **outcomes: int) -> None:
        """Count so many starts in a bucket of lateness, and outcomes."""
        cells = self.values.setdefault((LATENESS, topic), [0.0] * metrics.LATENESS.metric.cells)
        cells[bucket] += starts
        for outcome, count in outcomes.items():
            self.values.setdefault((TRIES, topic, outcome), [0.0])[0] += count


@pytest.fixture
def minutes(store: Store) -> Store:
    """A store whose table of minutes is empty."""
    store._shards.topic_server.run([Statement(f"DELETE FROM {store._shards.first['timeout_minute']}")])
    return store


def pass_minutes(count: int, *members: Member) -> None:
    for _ in range(count):
        members[0].clock.now += MINUTE_MS
        for member in members:
            assert member.minutes.run_once() > 0


def starts(found: Hour, topic: str) -> dict[int, int]:
    """The starts of a topic that are not 0, by how many minutes ago they were."""
    tallies = found.topics.get(topic, [])
    return {KEPT - place: tally[STARTS] for place, tally in enumerate(tallies) if tally}


def test_the_minutes_of_all_members_are_added_up(minutes: Store) -> None:
    clock = StandingClock(NOW)
    one, two = Member(minutes, clock, "h1"), Member(minutes, clock, "h2")
    one.does("a", 3, 0, processed=2, failed=1)
    two.does("a", 4, 5, processed=3, crashed=1)
    two.does("b", 1, len(BOUNDS), dead=1)
    pass_minutes(1, one, two)
    one.does("a", 5, processed=5)
    pass_minutes(2, one, two)
    found = hour(minutes.minutes, clock.now)
    assert starts(found, "a") == {3: 7, 2: 5}
    assert found.capacity == 5 + 5, "what each has shown that it can start in a minute"
    shown = lateness_record(found, lambda _: True, whole=True)
    place = KEPT - 3
    total = shown["total"]
    assert [total[key][place] for key in ("starts", "processed", "failed", "dead")] == [8, 5, 2, 1]
    assert {bucket: count for bucket, count in enumerate(total["lateness"][place]) if count} == {
        0: 3, 5: 4, len(BOUNDS): 1,
    }  # fmt: skip
    assert [(one["topic"], one["starts"]) for one in shown["topics"]] == [("a", 12), ("b", 1)]
    assert [one["age"] for one in shown["members"]] == [0, 0]

    mine = lateness_record(found, lambda name: name == "b", whole=False)
    assert [one["topic"] for one in mine["topics"]] == ["b"]
    assert sum(mine["total"]["starts"]) == 1
    assert mine["members"] is mine["capacity"] is None

    one.does("a", 1)
    pass_minutes(ALIVE_MINUTES + 1, one)
    found = hour(minutes.minutes, clock.now)
    assert found.capacity == 5, "the other is silent"
    assert sorted(found.members.values()) == [0, (ALIVE_MINUTES + 1) * MINUTE_MS]


def test_minutes_wait_for_their_table_and_nothing_is_lost(place: Place, minutes: Store) -> None:
    member = Member(minutes, StandingClock(NOW), "h1")
    name = "timeout_minute" if place.databases == 1 else f"{place.prefix}0.timeout_minute"
    with place.without(name):
        for _ in range(3):
            member.does("a", 2)
            pass_minutes(1, member)
    assert hour(minutes.minutes, member.clock.now).topics == {}
    member.does("a", 1)
    pass_minutes(1, member)
    assert starts(hour(minutes.minutes, member.clock.now), "a") == {4: 2, 3: 2, 2: 2, 1: 1}


def test_the_last_minute_is_written_at_the_end_and_shown_when_it_is_over(minutes: Store) -> None:
    member = Member(minutes, StandingClock(NOW), "h1")
    member.does("a", 2)
    member.minutes.run_once(last=True)
    assert starts(hour(minutes.minutes, NOW), "a") == {}
    assert starts(hour(minutes.minutes, NOW + MINUTE_MS), "a") == {1: 2}
    assert starts(hour(minutes.minutes, NOW + KEPT * MINUTE_MS), "a") == {KEPT: 2}
    assert hour(minutes.minutes, NOW + (KEPT + 1) * MINUTE_MS).topics == {}


def test_of_many_topics_the_largest_are_told_apart(minutes: Store) -> None:
    member = Member(minutes, StandingClock(NOW), "h1")
    for number in range(MOST_TOPICS + 3):
        member.does(f"t{number:03d}", 1 if number in (2, 5, 7) else 2)
    pass_minutes(1, member)
    found = hour(minutes.minutes, member.clock.now)
    assert len(found.topics) == MOST_TOPICS + 1
    assert starts(found, OTHERS) == {1: 3}
    assert [one["topic"] for one in lateness_record(found, lambda _: True, whole=False)["topics"]]
    names = {one["topic"] for one in lateness_record(found, lambda _: False, whole=True)["topics"]}
    assert names == {"(others)"}


def test_a_minute_that_cannot_be_read_hides_no_other(minutes: Store) -> None:
    member = Member(minutes, StandingClock(NOW), "h1")
    member.does("a", 2)
    pass_minutes(1, member)
    server, table = minutes._shards.topic_server, minutes._shards.first["timeout_minute"]
    instant = server.instant(NOW)
    for number, text in enumerate(("[]", "{}", '{"most":1,"topics":{"a":["x"]}}', "nonsense")):
        insert = f"INSERT INTO {table} (minute,member,counts) VALUES ({instant},%s,%s)"
        server.run([Statement(insert, [f"odd{number}", text])])
    assert starts(hour(minutes.minutes, member.clock.now), "a") == {1: 2}


def test_old_minutes_are_purged(minutes: Store) -> None:
    clock = Clock()
    now, set_clock = clock.now_ms(), StandingClock(NOW)
    for ago in (3 * KEPT * MINUTE_MS, KEPT * MINUTE_MS):
        set_clock.now = now - ago
        Member(minutes, set_clock, "h1").minutes.run_once(last=True)
    assert len(minutes.minutes.since(0)) == 2
    retention = Retention(minutes, TopicCatalog(list, clock), set_clock, lambda: frozenset([0]), audit=3600)
    for _ in range(10):
        retention.run_once()
    left = [row.minute for row in minutes.minutes.since(0)]
    assert left == [(now // MINUTE_MS - KEPT) * MINUTE_MS]
