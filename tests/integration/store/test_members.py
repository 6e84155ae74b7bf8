"""The rows of members, and what a member did in each minute."""

from collections.abc import Mapping, Sequence

import pytest
from harness.clocks import StandingClock
from harness.rows import known
from integration.store.conftest import Place

from toc.dev.local import until
from toc.maintenance.retention import Retention
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.lateness import Cause, Episode
from toc.model.minute import KEPT, MINUTE_MS, MOST_TOPICS, OTHERS, STARTS
from toc.observe import metrics
from toc.observe.board import Key
from toc.operate.due import ALIVE_MINUTES, BOUNDS, Hour, hour, lateness_record
from toc.store.records import cluster
from toc.store.servers.server import Statement
from toc.store.store import Store
from toc.worker.daemon.minutes import Minutes

# The rows of members: what each writes and reads, who is called dead, what comes too late.


@pytest.fixture(autouse=True)
def empty(store: Store) -> None:
    for row in store.members.list():
        store.members.leave(row.name, row.host)


def test_a_member_writes_its_row_and_reads_all_that_live(store: Store) -> None:
    table = store.members
    assert table.beat("a", 1, 6000, "{}") is None, "there is no row yet"
    table.join("a", "host-a", 1, 6000, "{}")
    table.join("b", "host-b", 1, 3000, "{}")
    data = '{"workers": {"a-0": "100 % of it, \'quoted\', ü"}}'
    a, b = known(table.beat("a", 2, 6000, data))
    assert (a.name, a.host, a.beat, a.timeout, a.dead, a.data) == ("a", "host-a", 2, 6000, False, data)
    assert (b.name, b.beat, b.timeout, b.alive) == ("b", 1, 3000, True)
    assert 0 <= a.age < 60_000
    table.leave("a", "host-a")
    assert table.beat("a", 3, 6000, "{}") is None
    assert [row.name for row in table.list()] == ["b"]


def test_what_was_written_later_is_not_undone_by_what_comes_late(store: Store) -> None:
    table = store.members
    table.join("a", "h", 1, 6000, "{}")
    assert table.beat("a", 5, 6000, "new")
    assert table.beat("a", 4, 6000, "old") is None
    table.join("a", "h", 4, 6000, "older")
    assert [(row.beat, row.data) for row in table.list()] == [(5, "new")]
    assert table.beat("a", 5, 6000, "new"), "the answer was lost, and the same is sent again"


def test_a_member_that_has_not_written_since_is_called_dead_and_learns_it(store: Store) -> None:
    table = store.members
    table.join("a", "h", 1, 6000, "{}")
    table.join("b", "h", 1, 6000, "{}")
    table.beat("a", 2, 6000, "it holds much")
    table.bury("a", 1)
    assert table.beat("a", 3, 6000, "it holds much"), "it had written meanwhile"
    table.bury("a", 3)
    rows = known(table.beat("b", 2, 6000, "{}"))
    assert [row.name for row in rows] == ["b"], "the dead own nothing"
    assert table.beat("a", 4, 6000, "it holds much") is None
    (dead, _) = table.list()
    assert (dead.name, dead.host, dead.dead, dead.alive, dead.data) == ("a", "h", True, False, "{}")
    table.join("a", "h", 5, 6000, "{}")
    assert table.beat("a", 6, 6000, "{}"), "it is alive again, with nothing"


def test_the_long_dead_are_forgotten_when_one_joins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = store.members
    for name in ("gone", "silent"):
        table.join(name, "h", 1, 6000, "{}")
    table.bury("gone", 1)
    table.join("a", "h", 1, 6000, "{}")
    assert len(table.list()) == 3
    monkeypatch.setattr(cluster, "DEAD_KEPT_MS", 0)
    assert until(lambda: table.list()[1].age > 1, 60)
    table.join("b", "h", 1, 6000, "{}")
    assert [row.name for row in table.list()] == ["a", "b", "silent"], "only others may call one dead"


# What a member did in each minute is written once, kept while its table is away, and added up.

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
    assert [total[key][place] for key in ("starts", "processed", "failed", "dead")] == [8, 5, 1, 1]
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


def test_no_lateness_is_shown_that_is_later_than_the_latest_start(minutes: Store) -> None:
    minutes._shards.topic_server.run([Statement(f"DELETE FROM {minutes._shards.first['timeout_episode']}")])
    member = Member(minutes, StandingClock(NOW), "h1")
    for topic in ("a", "b", "c"):
        member.does(topic, 10, BOUNDS.index(300.0))
    pass_minutes(1, member)
    for number, (topic, began, worst) in enumerate(
        [("a", NOW, 154_000), ("a", NOW - 1, 9000), ("b", 0, 70_000)]
    ):
        one = Episode(number, topic, Cause.BACKLOG, "h1-0", began, began, began, 10, worst, 1, "")
        minutes.episodes.write(one)
    found = hour(minutes.minutes, member.clock.now)
    found.worst = minutes.episodes.worst(found.first_ms)
    assert found.worst == {"a": 154_000}
    shown = {one["topic"]: one for one in lateness_record(found, lambda _: True, whole=True)["topics"]}
    assert (shown["a"]["lateness_p50"], shown["a"]["lateness_p99"]) == (154, 154)
    assert shown["c"]["lateness_p50"] == 180, "of it nothing else is known"


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


def test_a_clock_that_is_set_back_loses_no_minute(minutes: Store) -> None:
    member = Member(minutes, StandingClock(NOW), "h1")
    member.does("a", 5)
    pass_minutes(1, member)
    member.clock.now -= 3 * MINUTE_MS // 2
    for _ in range(3):
        member.does("a", 1)
        member.minutes.run_once()
        member.clock.now += MINUTE_MS
    member.minutes.run_once()
    assert sum(starts(hour(minutes.minutes, NOW + 10 * MINUTE_MS), "a").values()) == 8


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
